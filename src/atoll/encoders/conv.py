"""The codec `conv`: convolutional encoder and decoder, trained jointly from a lapped patch PCA."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import trange

from atoll.adam import AdamW
from atoll.encoders.codec import Codec, check_images
from atoll.encoders.pca import PatchPCA, filter_borders, from_patches, to_patches
from atoll.encoders.pretrained import one_by_one
from atoll.encoders.refiner import (
    MAX_BLOCKS,
    MAX_VISITS,
    MAX_WIDTH,
    NOISE,
    Refiner,
    cut,
    rate_at,
    residual_blocks,
    start_at_zero,
    stride_of,
)
from atoll.errors import InputError, shown
from atoll.networks.stored import Stored

MAX_PATCH = 32  # pixels per side, for which the initial PCA takes half a minute
GRID, LARGEST_DEFAULT = 8, 16  # the default patch leaves at least 8 x 8 tokens and has at most 16 pixels per side
STEPS, RATE, WARM_UP, MAX_NORM = 1800, 2e-3, 30, 0.5
LINEAR_RATE = 0.1  # times RATE, for the linear maps, which have a good initialisation
CROP = 64  # maximum crop size in pixels per side: crops of 32 were worse on images of 64
PIXELS = 2**14  # pixels per step, so that the time does not depend on the image size
UNIT_VARIANCE = 0.02  # weight of the penalty that keeps latents at unit variance, for which the noise is meant
NUM_STANDARDIZE = 1024  # images for computing shift and scale


@dataclass(frozen=True)
class ConvConfig:
    """The sizes of a conv codec."""

    patch_size: int  # p
    num_channels: int  # n
    width: int = 32  # of the encoder at half the image resolution, and of the refiner
    latent_width: int = 96  # of encoder and decoder at the latents' resolution
    num_blocks: int = 1  # at each of these resolutions, except in the refiner
    refiner_blocks: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.patch_size <= MAX_PATCH or not 1 <= self.num_channels <= 3 * self.patch_size**2:
            raise InputError(
                f"a conv codec keeps 1 to 3 x patch x patch numbers of each patch of up to {MAX_PATCH} pixels a side, "
                f"not {shown(self.num_channels)} of a patch of {shown(self.patch_size)}"
            )
        widths, blocks = (self.width, self.latent_width), (self.num_blocks, self.refiner_blocks)
        if not all(1 <= width <= MAX_WIDTH for width in widths) or not all(0 <= num <= MAX_BLOCKS for num in blocks):
            raise InputError(
                f"the networks of a conv codec have up to {MAX_BLOCKS} blocks of width 1 to {MAX_WIDTH}, not "
                f"{' and '.join(map(shown, blocks))} of widths {' and '.join(map(shown, widths))}"
            )


class Encoder(nn.Module):
    """The convolutional network whose output is added to the linear coefficients of each patch."""

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        self.stride = stride_of(config.patch_size)
        cells = config.patch_size // self.stride  # per side of a patch
        self.of_image = nn.Conv2d(3 * self.stride**2, config.width, 3, padding=1)
        self.blocks = residual_blocks(config.width, config.num_blocks)
        self.down = nn.Conv2d(config.width, config.latent_width, cells + 2, stride=cells, padding=1)
        self.latent_blocks = residual_blocks(config.latent_width, config.num_blocks)
        self.out = nn.Conv2d(config.latent_width, config.num_channels, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.of_image(F.pixel_unshuffle(images, self.stride))  # [B, width, S/2, S/2]
        for block in self.blocks:
            x = x + block(x)
        x = self.down(F.silu(x))  # [B, latent width, S/p, S/p]
        for block in self.latent_blocks:
            x = x + block(x)
        latents: Tensor = self.out(F.silu(x))
        return latents


class Context(nn.Module):
    """Computes the refiner's view of the latents: features of each patch and its neighbours."""

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        self.of_latents = nn.Conv2d(config.num_channels, config.latent_width, 3, padding=1)
        self.blocks = residual_blocks(config.latent_width, config.num_blocks)

    def forward(self, latents: Tensor) -> Tensor:
        x = self.of_latents(latents)  # [B, latent width, S/p, S/p]
        for block in self.blocks:
            x = x + block(x)
        return F.silu(x)


class ConvCodec(Codec, Stored):
    """Encodes overlapping patches by a linear map plus a network, and decodes likewise: latents [B, n, S/p, S/p].

    The maps start as those of the lapped PCA and the networks at zero, that is, as `pca:lapped:plain`. All are trained
    jointly to restore images from noisy latents, so that the encoder too becomes robust to errors in latents.
    """

    config: ConvConfig
    config_class = ConvConfig
    lap: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        self.config = config
        self.channels, self.factor = config.num_channels, config.patch_size
        self.spec = f"conv:{self.factor}x{self.channels}"
        self.analysis = nn.Linear(3 * self.factor**2, self.channels)
        self.encoder = Encoder(config)
        self.context = Context(config)
        self.synthesis = nn.Linear(self.channels, 3 * self.factor**2)
        self.refiner = Refiner(config.latent_width, self.factor, config.width, config.refiner_blocks)
        self.register_buffer("lap", torch.eye(self.factor))
        self.register_buffer("shift", torch.zeros(self.channels, 1, 1))
        self.register_buffer("scale", torch.ones(()))
        self.requires_grad_(False)

    @classmethod
    def fit(
        cls,
        images: Tensor,
        patch_size: int | None = None,
        num_channels: int | None = None,
        *,
        seed: int = 0,
        progress: bool = False,
    ) -> Self:
        """Fits to images[B, 3, S, S]; the same images and `seed` give the same bytes."""
        images = check_images(images)
        patch_size = default_patch(images.shape[2]) if patch_size is None else patch_size
        num_channels = default_channels(patch_size) if num_channels is None else num_channels
        config = ConvConfig(patch_size, num_channels)
        pca = PatchPCA.fit(images, patch_size, num_channels, lapped=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            codec = cls(config)
        codec._start_as(pca)
        codec.requires_grad_(True)
        codec._train(images, seed, progress)
        codec.requires_grad_(False)
        codec._standardize(images)
        return codec.eval()

    @torch.no_grad()
    def _start_as(self, pca: PatchPCA) -> None:
        self.lap.copy_(pca.lap)
        self.analysis.weight.copy_(pca.basis / pca.scale[:, None])
        self.analysis.bias.copy_(-pca.basis @ pca.mean / pca.scale)
        self.synthesis.weight.copy_((pca.basis * pca.scale[:, None]).T)
        self.synthesis.bias.copy_(pca.mean)
        start_at_zero(self.encoder.out)
        start_at_zero(self.refiner.out)

    def _train(self, images: Tensor, seed: int, progress: bool) -> None:
        """Trains to restore crops from their noisy latents, by the squared error."""
        patch, grid = self.factor, images.shape[2] // self.factor
        crop = min(grid, CROP // patch)  # patches per side
        batch = max(1, PIXELS // (crop * patch) ** 2)
        steps = min(STEPS, math.ceil(MAX_VISITS * len(images) * (grid / crop) ** 2 / batch))
        networks = [*self.encoder.parameters(), *self.context.parameters(), *self.refiner.parameters()]
        linear = [*self.analysis.parameters(), *self.synthesis.parameters()]
        optimizers = AdamW(networks, (0.9, 0.99)), AdamW(linear, (0.9, 0.99))
        rng = torch.Generator().manual_seed(seed)
        filtered = filter_borders(images, self.lap)  # before cropping, since crops lack the neighbouring pixels
        for step in trange(steps, desc="fit codec", unit=" steps", disable=not progress, leave=False):
            rows = torch.randint(len(images), (batch,), generator=rng)
            (top, above, below), (left, before, after) = (cut(grid, crop, patch, rng) for _ in range(2))
            window = (..., slice(top * patch, (top + crop) * patch), slice(left * patch, (left + crop) * patch))
            counted = (..., slice(above, below), slice(before, after))
            crops = images[rows][window]
            latents = self._encode(crops, filtered[rows][window])
            level = NOISE * torch.rand(batch, 1, 1, 1, generator=rng)
            decoded = self._decode(latents + level * torch.randn(latents.shape, generator=rng))
            loss = F.mse_loss(decoded[counted], crops[counted])
            variance = latents.square().mean().clamp(min=1e-4)  # flat crops may have none
            loss = loss + UNIT_VARIANCE * variance.log().square()
            loss.backward()
            nn.utils.clip_grad_norm_([*networks, *linear], MAX_NORM)
            rate = rate_at(step, steps, RATE, WARM_UP)
            for optimizer, factor in zip(optimizers, (1.0, LINEAR_RATE), strict=True):
                optimizer.step(factor * rate)
                optimizer.clear_gradients()

    def _standardize(self, images: Tensor) -> None:
        """Sets shift and scale such that latents have mean 0 in every channel, and unit variance overall."""
        latents = self.encode(images[:: math.ceil(len(images) / NUM_STANDARDIZE)]).double()
        mean = latents.mean((0, 2, 3))[:, None, None]
        self.shift.copy_(mean)
        self.scale.copy_((latents - mean).square().mean().sqrt())

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        self.latent_shape(check_images(images).shape[2])
        latents = one_by_one(lambda one: self._encode(one, filter_borders(one, self.lap)), images.float())
        return (latents - self.shift) / self.scale

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        return one_by_one(self._decode, latents.float() * self.scale + self.shift).clamp(-1, 1)

    def _encode(self, images: Tensor, filtered: Tensor) -> Tensor:
        """Returns latents before shift and scale; `filtered` are the images after `filter_borders`."""
        linear = self.analysis(to_patches(filtered, self.factor)).permute(0, 3, 1, 2)  # [B, n, S/p, S/p]
        return linear.contiguous() + self.encoder(images)

    def _decode(self, latents: Tensor) -> Tensor:
        patches = self.synthesis(latents.permute(0, 2, 3, 1))  # [B, S/p, S/p, 3pp]
        linear = filter_borders(from_patches(patches, self.factor), self.lap.T)  # [B, 3, S, S]
        images: Tensor = self.refiner(self.context(latents), linear)
        return images

    def settings(self) -> dict[str, Any]:
        return {"codec": "conv", **asdict(self.config)}


def default_patch(size: int) -> int:
    """Returns the largest patch that divides the image and leaves 8 x 8 of them: 4, 8 and 16 for 32, 64 and 128."""
    return max((p for p in range(1, LARGEST_DEFAULT + 1) if size % p == 0 and size // p >= GRID), default=1)


def default_channels(patch: int) -> int:
    """Returns 24, 48 and 96 for patches of 4, 8 and 16 pixels.

    Among 16, 24, 32 and 48 channels for patches of 8, more were better at restoring photographs at each noise level.
    """
    return min(3 * patch**2, 6 * patch)
