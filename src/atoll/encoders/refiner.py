"""The refiner: a small residual network after a linear decoder, which expects errors in latents.

A model's latents are never quite right, and a linear decoder turns their errors into grain and into seams between
patches. The refiner is fitted to images decoded from latents with noise, of any level up to `NOISE`, so it learns what
noise in latents does to images, and what images of the data look like without it. Whatever is not noise stays.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import trange

# The largest deviation of the noise, in latents of unit variance. The demo's latents are changed as much as real ones
# with noise of 0.2 to 0.3. With 0.7, samples of photographs were further from the data by `simple` features.
NOISE = 0.5
WIDTH, BLOCKS = 32, 3
FINE = 12, 16  # channels at full resolution, before and after the convolution that sees the image again
STEPS, LONG_STEPS = 900, 3200
BATCH, RATE, WARM_UP = 16, 3e-3, 20
MAX_VISITS = 16  # of each pixel of the sample, on average; so few images take few steps
CELLS = 16  # a side, that a step computes of each image at most: time does not grow with images
MAX_WIDTH, MAX_BLOCKS = 256, 32


class Refiner(nn.Module):
    """Residual blocks at half of the resolution, where they see twice as far at a quarter of the cost, then two layers.

    They see the decoded image, and the latents too, or features of these: they tell where in a patch a pixel is.
    """

    def __init__(self, channels: int, patch: int, width: int, num_blocks: int) -> None:
        super().__init__()
        self.stride = stride = stride_of(patch)
        narrow, fine = FINE
        self.of_image = nn.Conv2d(3 * stride**2, width, 3, padding=1)
        self.of_latents = nn.Conv2d(channels, width * (patch // stride) ** 2, 1)
        self.blocks = residual_blocks(width, num_blocks)
        self.up = nn.Conv2d(width, narrow * stride**2, 1)
        self.mix = nn.Conv2d(narrow + 3, fine, 3, padding=1)
        self.out = nn.Conv2d(fine, 3, 3, padding=1)
        self.patch = patch

    def forward(self, latents: Tensor, images: Tensor) -> Tensor:
        """Returns latents[B, n, S/p, S/p], decoded to images[B, 3, S, S], as better ones."""
        x = self.of_image(F.pixel_unshuffle(images, self.stride))  # [B, width, S/2, S/2]
        x = x + F.pixel_shuffle(self.of_latents(latents), self.patch // self.stride)
        for block in self.blocks:
            x = x + block(x)
        fine = F.pixel_shuffle(self.up(F.silu(x)), self.stride)  # [B, 12, S, S]
        return images + self.out(F.silu(self.mix(torch.cat([fine, images], 1))))


def residual_blocks(width: int, num: int) -> nn.ModuleList:
    """Returns blocks whose output is added to their input."""
    return nn.ModuleList(
        nn.Sequential(
            nn.SiLU(), nn.Conv2d(width, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)
        )
        for _ in range(num)
    )


def start_at_zero(layer: nn.Conv2d) -> None:
    """Makes a network that ends in this layer, and is added to something, change nothing at first."""
    nn.init.zeros_(layer.weight)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)


def rate_at(step: int, steps: int, rate: float, warm_up: int) -> float:
    """Returns the learning rate of a step: linear warm-up, cosine decay."""
    return rate * min(1, (step + 1) / warm_up) * (0.5 * (1 + math.cos(math.pi * step / steps)))


def stride_of(patch: int) -> int:
    """Returns the pixels a side of a cell: two where they divide a patch."""
    return 2 if patch % 2 == 0 else 1


def fit_refiner(
    images: Tensor, latents: Tensor, decode: Callable[[Tensor], Tensor], patch: int, long: bool = False,
    seed: int = 0, progress: bool = False,
) -> Refiner:  # fmt: skip
    """Fits to images[N, 3, S, S] and their latents, by the squared error; the same ones and `seed` give the same bytes.

    Sees crops of whole patches. The pixels next to a cut are not counted: a decoder may need the patch beyond.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Refiner(latents.shape[1], patch, WIDTH, BLOCKS)
    start_at_zero(network.out)
    rng = torch.Generator().manual_seed(seed)
    grid = latents.shape[2]
    most = max(2, CELLS * network.stride // patch)  # patches a side of a crop
    crop = min(grid, most)
    steps = min(LONG_STEPS if long else STEPS, math.ceil(MAX_VISITS * len(images) * (grid / crop) ** 2 / BATCH))
    optimizer = torch.optim.Adam(network.parameters(), RATE, betas=(0.9, 0.99))
    for step in trange(steps, desc="fit decoder", unit=" steps", disable=not progress, leave=False):
        optimizer.param_groups[0]["lr"] = rate_at(step, steps, RATE, WARM_UP)
        rows = torch.randint(len(images), (BATCH,), generator=rng)
        (top, above, below), (left, before, after) = (cut(grid, crop, patch, rng) for _ in range(2))
        some = latents[rows, :, top : top + crop, left : left + crop]
        level = NOISE * torch.rand(BATCH, 1, 1, 1, generator=rng)
        some = some + level * torch.randn(some.shape, generator=rng)
        refined = network(some, decode(some))
        counted = images[
            rows, :, top * patch + above : top * patch + below, left * patch + before : left * patch + after
        ]
        loss = F.mse_loss(refined[:, :, above:below, before:after], counted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval().requires_grad_(False)


def cut(grid: int, crop: int, patch: int, rng: torch.Generator) -> tuple[int, int, int]:
    """Returns the first patch of a random crop, and its first and last pixel that count."""
    first = int(torch.randint(grid - crop + 1, (), generator=rng))
    margin = patch // 2
    return first, margin * (first > 0), crop * patch - margin * (first + crop < grid)
