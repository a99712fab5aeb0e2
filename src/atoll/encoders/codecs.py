"""Codecs: images [B, 3, S, S] in [-1, 1] <-> float32 latents [B, C, h, w] of about unit variance."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.cards import CodecCard
from atoll.encoders.pretrained import (
    Foreign,
    Frozen,
    dtype_name,
    fill,
    fingerprint,
    load_model,
    load_saved,
    locate,
    one_by_one,
    require,
    two_numbers,
)
from atoll.encoders.refiner import BLOCKS, MAX_BLOCKS, MAX_WIDTH, NOISE, WIDTH, Refiner, fit_refiner
from atoll.errors import InputError, shown, unknown
from atoll.networks.published import read_weights
from atoll.networks.stored import Stored

FOLDER = "vae"  # the codec's place in an ensemble, as the published Paris model has it
MAX_COMPONENTS, EXPLAINED = 48, 0.99
MAX_PATCH = 256  # pixels a side; the basis of all components has 3.9e10 numbers then, and no image needs them
PCA_OPTIONS = ("lapped", "plain")  # patches that overlap; without a refiner
MAX_PATCHES = 500_000  # more than enough for 192 x 192 covariances, and seconds of work


class Codec(Frozen):
    """Images <-> latents, with fixed weights; `channels` of a pixel for each `factor` x `factor` of the image's."""

    channels: int
    factor: int
    card_class, place = CodecCard, FOLDER

    def latent_shape(self, size: int) -> tuple[int, int, int]:
        """Returns (C, h, w) of an image of `size` x `size`; sizes that cannot be encoded are errors."""
        if size < self.factor or size % self.factor:
            near = max(1, round(size / self.factor)) * self.factor
            raise InputError(
                f"images of {size} x {size} cannot be cut into patches of {self.factor}: use {near} x {near}"
            )
        return (self.channels, size // self.factor, size // self.factor)

    def encode(self, images: Tensor) -> Tensor:
        raise NotImplementedError

    def decode(self, latents: Tensor) -> Tensor:
        raise NotImplementedError

    def sizes(self) -> dict[str, Any]:
        return {"channels": self.channels, "factor": self.factor}


def make_codec(
    spec: str, *, sample: Tensor | None = None, dtype: torch.dtype = torch.float32, progress: bool = False
) -> Codec:
    """Makes one by its spec: a built-in one, pca fitted to `sample`, a VAE computed in `dtype`, or a data set's own."""
    kind, _, rest = spec.partition(":")
    if kind == "vae" and rest:
        return VAE.open(rest, dtype)
    if kind == "saved" and rest:
        return load_codec(rest)
    if kind == "pca":
        words = spec.split(":")
        options = [words.pop() for _ in range(2) if words[-1] in PCA_OPTIONS]
        example = "pca:8x40 for 8 x 8 patches as 40 numbers, or pca:8x40:lapped:plain with its options"
        patch_size, num_components = two_numbers(":".join(words), example) or (None, None)
        if sample is None:
            raise InputError("the codec pca is fitted to images: give it some, or load a fitted one")
        lapped, refine = "lapped" in options, "plain" not in options
        return PatchPCA.fit(sample, patch_size, num_components, lapped=lapped, refine=refine, progress=progress)
    if spec == "pixels":
        return Pixels(PixelsConfig()).eval()
    if spec and Path(spec).exists():
        raise InputError(f"{spec} is a path: write vae:{spec} if it holds a VAE, saved:{spec} if it is a data set")
    raise unknown(
        "codec",
        spec,
        ("pixels", "pca", "pca:PATCHxNUMBERS[:lapped][:plain]", "vae:HUB_ID_OR_FOLDER", "saved:DATA"),
    )


def needs_sample(spec: str) -> bool:
    """Returns whether `make_codec` must be given images to fit to."""
    return spec.partition(":")[0] == "pca"


def load_codec(folder: str | Path) -> Codec:
    """Returns the codec that `save` wrote to `folder`/vae, or the VAE of a published ensemble."""
    path = Path(folder) / FOLDER
    codec: Codec = load_saved(path, (Pixels, PatchPCA), lambda dtype: VAE.open(str(path), dtype))
    return codec


@dataclass(frozen=True)
class PixelsConfig:
    """Nothing to choose."""


class Pixels(Codec, Stored):
    """The images themselves."""

    config_class = PixelsConfig
    spec, channels, factor = "pixels", 3, 1

    def __init__(self, config: PixelsConfig) -> None:
        super().__init__()
        self.config = config

    def encode(self, images: Tensor) -> Tensor:
        return check_images(images).float()

    def decode(self, latents: Tensor) -> Tensor:
        return latents.float().clamp(-1, 1)

    def settings(self) -> dict[str, Any]:
        return {"codec": "pixels"}


@dataclass(frozen=True)
class PCAConfig:
    """A fitted PCA."""

    patch_size: int  # p
    num_components: int  # n
    explained_variance: float  # of the sample it was fitted to
    lapped: bool = False
    refiner_width: int = 0  # 0: it has none
    refiner_blocks: int = 0
    refiner_noise: float = 0.0  # that it was fitted to

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

    Scales are in proportion to the square root of a component's deviation. Of all scales that give latents unit
    variance overall, these turn white noise in the latents into the least noise in the pixels (Cauchy-Schwarz). Whole
    deviations (whitening) put it into the patches' means, where seams show; none at all leaves it in fine detail.

    A lapped one filters the pixels around each border between patches before it cuts them, and back after decoding:
    its patches overlap. A refiner, if there is one, removes what errors in the latents leave in the decoded images.
    """

    config: PCAConfig
    config_class = PCAConfig
    mean: Tensor
    basis: Tensor
    scale: Tensor
    lap: Tensor  # of a lapped one

    def __init__(self, config: PCAConfig) -> None:
        super().__init__()
        self.config = config
        self.channels, self.factor = config.num_components, config.patch_size
        options = ":lapped" * config.lapped + ":plain" * (config.refiner_width == 0)
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
        progress: bool = False,
    ) -> Self:
        """Fits to images[B, 3, S, S]; the same images give the same bytes. None: as many numbers as are useful."""
        images = check_images(images)
        size = images.shape[2]
        patch_size = default_patch(size) if patch_size is None else patch_size
        config = PCAConfig(patch_size, 1 if num_components is None else num_components, 0.0)
        cls(config).latent_shape(size)
        lap = lapping(patch_size)
        components = _principal_components(_filter_borders(images, lap) if lapped else images, patch_size)
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
        codec.scale.copy_((deviations.clamp(min=1e-3 * average) * average).sqrt())  # never 0, if the sample was flat
        if lapped:
            codec.lap.copy_(lap)
        if refine:
            refiner = fit_refiner(images, codec.encode(images), codec._decode, patch_size, progress=progress)
            weights = {f"refiner.{name}": tensor for name, tensor in refiner.state_dict().items()}
            weights |= codec.state_dict()
            with torch.device("meta"):
                codec = cls(replace(config, refiner_width=WIDTH, refiner_blocks=BLOCKS, refiner_noise=NOISE))
            codec.load_state_dict(weights, assign=True)
        return codec.eval()

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        self.latent_shape(check_images(images).shape[2])
        images = images.float()
        if self.config.lapped:
            images = one_by_one(lambda one: _filter_borders(one, self.lap), images)
        patches = _patches(images, self.config.patch_size) - self.mean
        latents = one_by_one(lambda one: one @ self.basis.T, patches) / self.scale  # MKL rounds by the size of a batch
        return latents.permute(0, 3, 1, 2).contiguous()  # [B, n, S/p, S/p]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        refiner = self.refiner
        if refiner is None:
            return self._decode(latents.float())
        return one_by_one(lambda one: refiner(one, self._decode(one)), latents.float()).clamp(-1, 1)

    @torch.no_grad()
    def _decode(self, latents: Tensor) -> Tensor:
        """Returns what is in the components alone."""
        patch = self.config.patch_size
        patches = latents.permute(0, 2, 3, 1) * self.scale @ self.basis + self.mean  # [B, S/p, S/p, 3pp]
        grid = patches.unflatten(3, (3, patch, patch)).permute(0, 3, 1, 4, 2, 5)  # [B, 3, S/p, p, S/p, p]
        images = grid.flatten(4).flatten(2, 3)
        return (_filter_borders(images, self.lap.T) if self.config.lapped else images).clamp(-1, 1)

    def weights(self) -> dict[str, Tensor]:
        """Returns what latents depend on: experts fit together whichever refiner decodes for them."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("refiner.")}

    def sizes(self) -> dict[str, Any]:
        sizes = {**super().sizes(), "explained_variance": self.config.explained_variance}
        return sizes if self.refiner is None else sizes | {"decoder": fingerprint(self.refiner.state_dict(), {})}

    def settings(self) -> dict[str, Any]:
        config = {key: value for key, value in asdict(self.config).items() if not key.startswith("refiner")}
        if not config["lapped"]:
            del config["lapped"]  # as before there were others, so that their fingerprints stay
        return {"codec": "pca", **config}


def default_patch(size: int) -> int:
    """Returns the largest patch up to 8 x 8 that divides the image and leaves at least 4 x 4 of them."""
    return max((p for p in range(1, 9) if size % p == 0 and size // p >= 4), default=1)


def _patches(images: Tensor, patch: int) -> Tensor:
    grid = images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # [B, 3, S/p, p, S/p, p]
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3)  # [B, S/p, S/p, 3pp]


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


def _filter_borders(images: Tensor, matrix: Tensor) -> Tensor:
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
        rows = _patches(chunk, patch).reshape(-1, width).double().cpu()
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


class VAE(Codec, Foreign):
    """diffusers' AutoencoderKL or AutoencoderTiny: the posterior's mode, shifted and scaled as its config says."""

    shift: Tensor
    scale: Tensor

    def __init__(self, model: nn.Module, spec: str) -> None:
        super().__init__(model, spec)
        self.kind, config = type(model).__name__, self.model.config
        self.channels = int(config["latent_channels"])
        stages = "encoder_block_out_channels" if self.kind == "AutoencoderTiny" else "block_out_channels"
        self.factor = 2 ** (len(config[stages]) - 1)
        # Most have one shift and one factor; a few have a mean and a deviation per channel.
        shift = torch.tensor(config.get("latents_mean") or config.get("shift_factor") or 0.0).float()
        deviation = torch.tensor(config.get("latents_std") or 1.0).float()
        self.register_buffer("shift", shift.reshape(-1, 1, 1), persistent=False)
        self.register_buffer("scale", (config["scaling_factor"] / deviation).reshape(-1, 1, 1), persistent=False)

    @classmethod
    def open(cls, where: str, dtype: torch.dtype) -> Self:
        """Opens a hub id or a folder that holds the VAE, or whose `vae` folder does, or the two files of a TAESD."""
        if not any((Path(where) / part / "config.json").exists() for part in (FOLDER, "")):
            suffixes = (".safetensors", ".pth")  # whose authors publish encoder and decoder as two files
            encoders = [path for suffix in suffixes for path in sorted(Path(where).glob(f"tae*_encoder{suffix}"))]
            pairs = [(path, path.with_name(path.name.replace("_encoder.", "_decoder."))) for path in encoders]
            pairs = [(encoder, decoder) for encoder, decoder in pairs if decoder.exists()]
            if len(pairs) > 1:
                names = ", ".join(encoder.name for encoder, _ in pairs)
                raise InputError(f"{where} holds several tiny VAEs ({names}): put the two files of one into a folder")
            if pairs:
                return cls(_open_taesd(*pairs[0], dtype), f"vae:{where}")
        place = locate(where, (FOLDER, ""), ("AutoencoderKL", "AutoencoderTiny"))
        _check_vae(place.config, where)
        return cls(load_model("diffusers", place.config["_class_name"], place, dtype), f"vae:{where}")

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        self.latent_shape(check_images(images).shape[2])
        return (self._finite(one_by_one(self._encode, images.to(self.dtype)).float()) - self.shift) * self.scale

    def _encode(self, images: Tensor) -> Tensor:
        encoded = self.model.encode(images)
        latents: Tensor = encoded.latents if self.kind == "AutoencoderTiny" else encoded.latent_dist.mode()
        return latents

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        native = latents.float() / self.scale + self.shift
        images = one_by_one(lambda x: self.model.decode(x).sample, native.to(self.dtype))
        return self._finite(images.float()).clamp(-1, 1)

    def _finite(self, values: Tensor) -> Tensor:
        if not bool(values.isfinite().all()):
            raise InputError(f"{self.spec} overflows in {dtype_name(self.dtype)}: use float32 or bfloat16")
        return values

    def sizes(self) -> dict[str, Any]:
        return {"kind": self.kind, **super().sizes(), **self._transform()}

    def _transform(self) -> dict[str, list[float]]:
        return {"shift": self.shift.flatten().tolist(), "scale": self.scale.flatten().tolist()}

    def settings(self) -> dict[str, Any]:
        # The widths and depths show in the weights; what does not is named here, for other versions add keys.
        names = ("act_fn", "norm_num_groups", "upsample_fn", "upsampling_scaling_factor")
        config = self.model.config
        return {"codec": self.kind, **{name: config[name] for name in names if name in config}, **self._transform()}


def _check_vae(config: Mapping[str, Any], where: str) -> None:
    """Refuses what weights do not show and a VAE of colour images in halves of halves cannot have."""
    channels = config.get("latent_channels", 4)
    for key, known in (("in_channels", 3), ("out_channels", 3), ("upsampling_scaling_factor", 2)):
        if config.get(key, known) != known:
            raise InputError(f"{key} in the config of {where} is {shown(config[key])}, not {known}: give another VAE")
    for key, least in (("scaling_factor", 1e-6), ("latents_std", 1e-6), ("shift_factor", 0), ("latents_mean", 0)):
        value = config.get(key)
        numbers: Any = value if isinstance(value, list) and len(value) == channels else [value]
        if value is not None and not all(
            type(number) in (int, float) and least <= abs(number) <= 1e6 for number in numbers
        ):
            raise InputError(
                f"{key} in the config of {where} is {shown(value)}, not a number for all or for each of its channels: "
                "copy it again"
            )


def _open_taesd(encoder: Path, decoder: Path, dtype: torch.dtype) -> nn.Module:
    """Returns diffusers' AutoencoderTiny with the weights of the authors' own two files.

    Both number their layers. Their decoder's first clamps its input, which diffusers does without a layer. Theirs see
    images in [0, 1]; diffusers' classes scale to and from [-1, 1].
    """
    weights = {f"encoder.layers.{name}": value for name, value in read_weights(encoder).items()}
    for name, value in read_weights(decoder).items():
        number, _, rest = name.partition(".")
        place = int(number) - 1 if number.isdecimal() and len(number) < 4 else number
        weights[f"decoder.layers.{place}.{rest}"] = value
    first = weights.get("decoder.layers.0.weight", torch.empty(0))
    channels = first.shape[1] if first.dim() == 4 else 0
    model = require("diffusers", "hf").AutoencoderTiny(latent_channels=min(max(channels, 1), 64))
    return fill(model, weights, f"{encoder} and {decoder.name} are not the two halves of a TAESD").to(dtype)


def check_images(images: Tensor) -> Tensor:
    """Returns the images, asserted to be floats [B, 3, S, S] in [-1, 1]."""
    _, channels, height, width = images.shape
    assert (channels, height) == (3, width), images.shape
    if images.device.type == "cpu":  # elsewhere the look would stall the device
        assert float(images.abs().max()) <= 1.001, "images must be in [-1, 1]"  # NaN fails too
    return images


def is_quick(codec: Codec) -> bool:
    """Returns whether hundreds of images are decoded in no time: a VAE takes a second each on a CPU."""
    return not isinstance(codec, VAE)


def device_of(codec: Codec) -> torch.device:
    tensors = (*codec.parameters(), *codec.buffers())
    return tensors[0].device if tensors else torch.device("cpu")


def to_uint8(images: Tensor) -> NDArray[np.uint8]:
    """Returns images [n, 3, S, S] in [-1, 1] as bytes [n, S, S, 3]."""
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
