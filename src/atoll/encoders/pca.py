"""The codec `pca`: principal components of patches, which may overlap, followed by a refiner when decoding."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from atoll.encoders.codec import Codec, check_images
from atoll.encoders.pretrained import fingerprint, one_by_one
from atoll.encoders.refiner import BLOCKS, MAX_BLOCKS, MAX_WIDTH, NOISE, WIDTH, Refiner, fit_refiner
from atoll.errors import InputError, shown
from atoll.networks.stored import Stored

MAX_COMPONENTS, EXPLAINED = 48, 0.99
MAX_PATCH = 256  # pixels per side, for which the full basis has 3.9e10 elements
OPTIONS = ("lapped", "plain", "long")  # overlapping patches; no refiner; a refiner trained for longer
MAX_PATCHES = 500_000  # more than enough for 192 x 192 covariances, and takes seconds


@dataclass(frozen=True)
class PCAConfig:
    """A fitted PCA."""

    patch_size: int  # p
    num_components: int  # n
    explained_variance: float  # of the sample it was fitted to
    lapped: bool = False
    refiner_width: int = 0  # 0: no refiner
    refiner_blocks: int = 0
    refiner_noise: float = 0.0  # maximum noise level it was trained with
    refiner_long: bool = False  # trained for longer than by default

    def __post_init__(self) -> None:
        if not 1 <= self.patch_size <= MAX_PATCH or not 1 <= self.num_components <= 3 * self.patch_size**2:
            raise InputError(
                f"a pca codec keeps 1 to 3 x patch x patch numbers of each patch of up to {MAX_PATCH} pixels a side, "
                f"not {shown(self.num_components)} of a patch of {shown(self.patch_size)}"
            )
        if not 0 <= self.refiner_width <= MAX_WIDTH or not 0 <= self.refiner_blocks <= MAX_BLOCKS:
            raise InputError(
                f"the refiner of a pca codec has up to {MAX_BLOCKS} blocks of width up to {MAX_WIDTH}, not "
                f"{shown(self.refiner_blocks)} of width {shown(self.refiner_width)}"
            )


class PatchPCA(Codec, Stored):
    """The n first principal components of each p x p patch, each divided by its scale: [B, n, S/p, S/p].

    Scales are proportional to the square root of a component's standard deviation. Of all scales that give latents unit
    variance overall, these turn white noise in the latents into the least noise in the pixels (Cauchy-Schwarz). Scaling
    by the standard deviation itself (whitening) puts the noise into the patches' means, which shows as seams; no
    scaling leaves it in fine detail.

    With `lapped`, the pixels around each border between patches are filtered before encoding and unfiltered after
    decoding, so that patches overlap. The optional refiner removes artefacts that errors in latents cause.
    """

    config: PCAConfig
    config_class = PCAConfig
    mean: Tensor
    basis: Tensor
    scale: Tensor
    lap: Tensor  # if lapped

    def __init__(self, config: PCAConfig) -> None:
        super().__init__()
        self.config = config
        self.channels, self.factor = config.num_components, config.patch_size
        options = ":lapped" * config.lapped + ":plain" * (config.refiner_width == 0) + ":long" * config.refiner_long
        self.spec = f"pca:{self.factor}x{self.channels}{options}"
        width = 3 * config.patch_size**2
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("basis", torch.zeros(config.num_components, width))
        self.register_buffer("scale", torch.ones(config.num_components))
        if config.lapped:
            self.register_buffer("lap", torch.eye(config.patch_size))
        self.refiner: Refiner | None = None
        if config.refiner_width:
            self.refiner = Refiner(self.channels, self.factor, config.refiner_width, config.refiner_blocks)
            self.refiner.requires_grad_(False)

    @classmethod
    def fit(
        cls,
        images: Tensor,
        patch_size: int | None = None,
        num_components: int | None = None,
        *,
        lapped: bool = False,
        refine: bool = False,
        long: bool = False,
        progress: bool = False,
    ) -> Self:
        """Fits to images[B, 3, S, S], deterministically to the bit; sizes that are None get useful defaults."""
        images = check_images(images)
        size = images.shape[2]
        patch_size = default_patch(size) if patch_size is None else patch_size
        config = PCAConfig(patch_size, 1 if num_components is None else num_components, 0.0)
        cls(config).latent_shape(size)
        lap = lapping(patch_size)
        components = _principal_components(filter_borders(images, lap) if lapped else images, patch_size)
        explained = components.variances.cumsum(0) / components.variances.sum()
        if num_components is None:
            num_components = min(int((explained < EXPLAINED).sum()) + 1, MAX_COMPONENTS)
        share = round(float(explained[num_components - 1]), 6)
        config = replace(config, num_components=num_components, explained_variance=share, lapped=lapped)
        codec = cls(config)
        codec.mean.copy_(components.mean)
        codec.basis.copy_(components.basis[:num_components])
        deviations = components.variances[:num_components].sqrt()
        average = deviations.mean()
        codec.scale.copy_((deviations.clamp(min=1e-3 * average) * average).sqrt())  # never 0, even for a flat sample
        if lapped:
            codec.lap.copy_(lap)
        if refine:
            latents = codec.encode(images)
            refiner = fit_refiner(images, latents, codec._decode, patch_size, long, lapped, progress=progress)
            weights = {f"refiner.{name}": tensor for name, tensor in refiner.state_dict().items()}
            weights |= codec.state_dict()
            config = replace(config, refiner_width=WIDTH, refiner_blocks=BLOCKS, refiner_noise=NOISE, refiner_long=long)
            with torch.device("meta"):
                codec = cls(config)
            codec.load_state_dict(weights, assign=True)
        return codec.eval()

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        self.latent_shape(check_images(images).shape[2])
        images = images.float()
        if self.config.lapped:
            images = one_by_one(lambda one: filter_borders(one, self.lap), images)
        patches = to_patches(images, self.config.patch_size) - self.mean
        latents = one_by_one(lambda one: one @ self.basis.T, patches) / self.scale  # MKL rounds by batch size
        return latents.permute(0, 3, 1, 2).contiguous()  # [B, n, S/p, S/p]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        refiner = self.refiner
        if refiner is None:
            return self._decode(latents.float())
        return one_by_one(lambda one: refiner(one, self._decode(one)), latents.float()).clamp(-1, 1)

    @torch.no_grad()
    def _decode(self, latents: Tensor) -> Tensor:
        """Decodes the components, without the refiner."""
        patches = latents.permute(0, 2, 3, 1) * self.scale @ self.basis + self.mean  # [B, S/p, S/p, 3pp]
        images = from_patches(patches, self.config.patch_size)
        return (filter_borders(images, self.lap.T) if self.config.lapped else images).clamp(-1, 1)

    def weights(self) -> dict[str, Tensor]:
        """Returns the weights that latents depend on; the refiner does not affect whether experts are compatible."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("refiner.")}

    def sizes(self) -> dict[str, Any]:
        sizes = {**super().sizes(), "explained_variance": self.config.explained_variance}
        return sizes if self.refiner is None else sizes | {"decoder": fingerprint(self.refiner.state_dict(), {})}

    def settings(self) -> dict[str, Any]:
        config = {key: value for key, value in asdict(self.config).items() if not key.startswith("refiner")}
        if not config["lapped"]:
            del config["lapped"]  # keeps the fingerprints of earlier versions, which had no such option
        return {"codec": "pca", **config}


def default_patch(size: int) -> int:
    """Returns the largest patch size up to 8 that divides the image and leaves at least 4 x 4 patches."""
    return max((p for p in range(1, 9) if size % p == 0 and size // p >= 4), default=1)


def to_patches(images: Tensor, patch: int) -> Tensor:
    grid = images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # [B, 3, S/p, p, S/p, p]
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3)  # [B, S/p, S/p, 3pp]


def from_patches(patches: Tensor, patch: int) -> Tensor:
    grid = patches.unflatten(3, (3, patch, patch)).permute(0, 3, 1, 4, 2, 5)  # [B, 3, S/p, p, S/p, p]
    return grid.flatten(4).flatten(2, 3)  # [B, 3, S, S]


def lapping(patch: int) -> Tensor:
    """Returns the orthogonal filter [p, p] of the p/2 + p/2 pixels around a border (Malvar's lapped transform).

    P = W diag(I, V) W with W = [[I, J], [J, -I]] / sqrt 2, J the reversal, V = J C2^T C4 J, and C2 and C4 the
    orthonormal DCT-II and DCT-IV. The middle pixel of an odd patch is left as it is.
    """
    half = patch // 2
    n = torch.arange(half, dtype=torch.float64)
    dct2 = torch.cos(math.pi / max(half, 1) * n[:, None] * (n + 0.5)) * math.sqrt(2 / max(half, 1))
    dct2[:1] /= math.sqrt(2)
    dct4 = torch.cos(math.pi / max(half, 1) * (n[:, None] + 0.5) * (n + 0.5)) * math.sqrt(2 / max(half, 1))
    one = torch.eye(half, dtype=torch.float64)
    reversal = one.flip(0)
    butterfly = torch.cat([torch.cat([one, reversal], 1), torch.cat([reversal, -one], 1)]) / math.sqrt(2)
    rotated = torch.block_diag(one, reversal @ dct2.T @ dct4 @ reversal)
    middle = torch.eye(patch - 2 * half, dtype=torch.float64)
    return torch.block_diag(butterfly @ rotated @ butterfly, middle).float()


def filter_borders(images: Tensor, matrix: Tensor) -> Tensor:
    """Applies a matrix [p, p] to the pixels around each border between patches, along rows and along columns."""
    patch = len(matrix)
    first, num = patch - patch // 2, images.shape[2] // patch - 1
    for _ in range(2):
        images = images.clone()
        around = images[..., first : first + num * patch]
        around.copy_((around.unflatten(3, (num, patch)) @ matrix.T).flatten(3))
        images = images.transpose(2, 3)
    return images


class _Components(NamedTuple):
    variances: Tensor  # [3pp] from the largest
    basis: Tensor  # [3pp, 3pp], their directions as rows
    mean: Tensor  # [3pp], the mean patch


def _principal_components(images: Tensor, patch: int) -> _Components:
    """Returns the principal components of all patches, in float64."""
    patches_each = (images.shape[2] // patch) ** 2
    every = -(-len(images) * patches_each // MAX_PATCHES)
    images = images[::every]
    width = 3 * patch**2
    total, moment = torch.zeros(width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)
    for chunk in images.split(max(1, 16_384 // patches_each)):
        rows = to_patches(chunk, patch).reshape(-1, width).double().cpu()
        total += rows.sum(0)
        moment += rows.T @ rows
    count = len(images) * patches_each
    mean = total / count
    variances, directions = torch.linalg.eigh(moment / count - torch.outer(mean, mean))
    variances, basis = variances.flip(0).clamp(min=0), directions.flip(1).T
    if variances[0] < 1e-9:
        raise InputError("every image of the sample is the same flat colour: give the codec images that differ")
    largest = basis.gather(1, basis.abs().argmax(1, keepdim=True))  # an eigenvector's sign is arbitrary: fix it
    return _Components(variances, basis * largest.sign(), mean)
