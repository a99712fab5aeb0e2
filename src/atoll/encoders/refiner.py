"""The refiner: a small residual network after a linear decoder, robust to errors in latents.

A model's latents are never exact, and a linear decoder turns their errors into grain and into seams between patches.
The refiner is trained to restore images decoded from latents with noise of any level up to `NOISE`, so it learns what
noise in latents does to images of this data, and removes it.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import trange

from atoll.adam import AdamW

# The largest standard deviation of the noise, for latents of unit variance. Latents sampled in the demo are changed as
# much as real ones with noise of 0.2 to 0.3. With 0.7, samples of photographs were further from the data by `simple`
# features.
NOISE = 0.5
WIDTH, BLOCKS = 32, 3
FINE = 12, 16  # channels at full resolution, before and after the convolution that takes the image as a second input
STEPS, LONG_STEPS = 900, 3200
BATCH, RATE, WARM_UP = 16, 3e-3, 20
PARTS = 2  # of a batch, one thread each; fixed, so that results do not depend on the number of cores
SEAM = 0.02  # weight of the squared excess of the seam ratio; 0.3 costs a third of a decibel, this nothing
MAX_VISITS = 16  # mean visits per pixel of the sample, so that few images take few steps
CELLS = 16  # maximum crop size in cells per side, so that the time does not depend on the image size
MAX_WIDTH, MAX_BLOCKS = 256, 32


class Refiner(nn.Module):
    """Residual blocks at half resolution (twice the receptive field at a quarter of the cost), then two layers at full.

    Inputs are the decoded image and the latents, or features of these, which tell where in a patch a pixel is.
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
        """Returns refined images, given latents[B, n, S/p, S/p] and the images[B, 3, S, S] decoded from them."""
        x = self.of_image(F.pixel_unshuffle(images, self.stride))  # [B, width, S/2, S/2]
        x = x + F.pixel_shuffle(self.of_latents(latents), self.patch // self.stride)
        for block in self.blocks:
            x = x + block(x)
        fine = F.pixel_shuffle(self.up(F.silu(x)), self.stride)  # [B, 12, S, S]
        return images + self.out(F.silu(self.mix(torch.cat([fine, images], 1))))


def residual_blocks(width: int, num: int) -> nn.ModuleList:
    """Returns blocks whose output the caller adds to their input."""
    return nn.ModuleList(
        nn.Sequential(
            nn.SiLU(), nn.Conv2d(width, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)
        )
        for _ in range(num)
    )


def start_at_zero(layer: nn.Conv2d) -> None:
    """Zeroes a residual branch's last layer, so that the branch initially changes nothing."""
    nn.init.zeros_(layer.weight)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)


def rate_at(step: int, steps: int, rate: float, warm_up: int) -> float:
    """Returns the learning rate of a step: linear warm-up, cosine decay."""
    return rate * min(1, (step + 1) / warm_up) * (0.5 * (1 + math.cos(math.pi * step / steps)))


def stride_of(patch: int) -> int:
    """Returns the pixels per side of a cell: 2 if that divides the patch, otherwise 1."""
    return 2 if patch % 2 == 0 else 1


def fit_refiner(
    images: Tensor, latents: Tensor, decode: Callable[[Tensor], Tensor], patch: int, long: bool = False,
    seamless: bool = False, seed: int = 0, progress: bool = False,
) -> Refiner:  # fmt: skip
    """Trains on images[N, 3, S, S] and their latents by the squared error; bit-reproducible for the same `seed`.

    Trains on crops of whole patches. Pixels next to a cut are left out of the loss, since a decoder may need the patch
    beyond. The squared error alone leaves seams, since errors of neighbouring patches differ; `seamless` penalises
    seams stronger than in the images.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Refiner(latents.shape[1], patch, WIDTH, BLOCKS)
    start_at_zero(network.out)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # 25% faster on CPUs
    rng = torch.Generator().manual_seed(seed)
    grid = latents.shape[2]
    most = max(2, CELLS * network.stride // patch)  # patches per side of a crop
    crop = min(grid, most)
    steps = min(LONG_STEPS if long else STEPS, math.ceil(MAX_VISITS * len(images) * (grid / crop) ** 2 / BATCH))
    weights = list(network.parameters())
    optimizer = AdamW(weights, (0.9, 0.99))

    def gradients(some: Tensor, counted: Tensor, inside: tuple[slice, slice]) -> tuple[Tensor, ...]:
        refined = network(some, decode(some))[:, :, *inside]
        loss = F.mse_loss(refined, counted)
        if seamless and patch > 1 and crop > 1:
            above, before = (pixels.start for pixels in inside)
            ratios = [seam_ratio(part, patch, above, before) for part in (refined, counted)]
            loss = loss + SEAM * F.relu(ratios[0] - ratios[1]).square()
        return torch.autograd.grad(loss / PARTS, weights)

    with _single_threads(PARTS) as threads:
        for step in trange(steps, desc="fit decoder", unit=" steps", disable=not progress, leave=False):
            rows = torch.randint(len(images), (BATCH,), generator=rng)
            (top, above, below), (left, before, after) = (cut(grid, crop, patch, rng) for _ in range(2))
            some = latents[rows, :, top : top + crop, left : left + crop]
            level = NOISE * torch.rand(BATCH, 1, 1, 1, generator=rng)
            some = some + level * torch.randn(some.shape, generator=rng)
            counted = images[
                rows, :, top * patch + above : top * patch + below, left * patch + before : left * patch + after
            ]
            inside = slice(above, below), slice(before, after)
            parts = threads.map(gradients, some.chunk(PARTS), counted.chunk(PARTS), PARTS * [inside])
            for weight, *of_parts in zip(weights, *parts, strict=True):
                weight.grad = torch.stack(of_parts).sum(0)
            optimizer.step(rate_at(step, steps, RATE, WARM_UP))
            optimizer.clear_gradients()
    network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return network.eval().requires_grad_(False)


@contextmanager
def _single_threads(num: int) -> Iterator[Executor]:
    """Yields an executor; meanwhile torch uses one thread in each of its threads and here, to avoid contention."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num, initializer=torch.set_num_threads, initargs=(1,)) as threads:
            yield threads
    finally:
        torch.set_num_threads(before)


def seam_ratio(images: Tensor, patch: int, top: int = 0, left: int = 0) -> Tensor:
    """Returns the mean absolute difference of neighbouring pixels across patch borders, relative to that elsewhere.

    Images are [B, 3, H, W]; `top` and `left` are the pixels missing from the first patches.
    """
    at_border, elsewhere = images.new_zeros(()), images.new_zeros(())
    for dim, first in ((2, top), (3, left)):
        steps = images.diff(dim=dim).abs().mean((0, 1, 5 - dim))
        is_border = (torch.arange(1, len(steps) + 1) + first) % patch == 0
        at_border, elsewhere = at_border + steps[is_border].mean(), elsewhere + steps[~is_border].mean()
    return at_border / elsewhere.clamp(min=1e-6)  # flat images have no seams


def cut(grid: int, crop: int, patch: int, rng: torch.Generator) -> tuple[int, int, int]:
    """Returns the first patch of a random crop, and the range of its pixels that count in the loss."""
    first = int(torch.randint(grid - crop + 1, (), generator=rng))
    margin = patch // 2
    return first, margin * (first > 0), crop * patch - margin * (first + crop < grid)
