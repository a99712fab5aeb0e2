"""Creates codecs from their specs, and loads saved ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.encoders.codec import FOLDER, Codec, check_images
from atoll.encoders.conv import ConvCodec
from atoll.encoders.pca import OPTIONS, PatchPCA
from atoll.encoders.pretrained import load_saved, two_numbers
from atoll.encoders.vae import VAE
from atoll.errors import InputError, unknown
from atoll.networks.stored import Stored

FITTED = ("pca", "conv")  # to images of the data
SPECS = (
    "pixels", "pca", "pca:PATCHxNUMBERS[:lapped][:plain or :long]", "conv", "conv:PATCHxCHANNELS",
    "vae:HUB_ID_OR_FOLDER", "saved:DATA",
)  # fmt: skip


def make_codec(
    spec: str, *, sample: Tensor | None = None, dtype: torch.dtype = torch.float32, progress: bool = False
) -> Codec:
    """Creates a codec from its spec: pixels, one fitted to `sample`, a VAE in `dtype`, or that of a data set."""
    kind, _, rest = spec.partition(":")
    if kind == "vae" and rest:
        return VAE.open(rest, dtype)
    if kind == "saved" and rest:
        return load_codec(rest)
    if kind in FITTED:
        if sample is None:
            raise InputError(f"the codec {kind} is fitted to images: give it some, or load a fitted one")
        return _fit_codec(spec, sample, progress)
    if spec == "pixels":
        return Pixels(PixelsConfig()).eval()
    if spec and Path(spec).exists():
        raise InputError(f"{spec} is a path: write vae:{spec} if it holds a VAE, saved:{spec} if it is a data set")
    raise unknown("codec", spec, SPECS)


def _fit_codec(spec: str, sample: Tensor, progress: bool) -> Codec:
    words = spec.split(":")
    if words[0] == "conv":
        patch_size, num = two_numbers(spec, "conv:8x24 for 8 x 8 patches as 24 numbers") or (None, None)
        return ConvCodec.fit(sample, patch_size, num, progress=progress)
    options = [words.pop() for _ in range(2) if words[-1] in OPTIONS]
    example = "pca:8x40 for 8 x 8 patches as 40 numbers, or pca:8x40:lapped:plain with its options"
    patch_size, num = two_numbers(":".join(words), example) or (None, None)
    if {"plain", "long"} <= set(options):
        raise InputError(f"{spec} has no refiner that could be fitted for longer: leave :plain or :long out")
    lapped, refine, long = "lapped" in options, "plain" not in options, "long" in options
    return PatchPCA.fit(sample, patch_size, num, lapped=lapped, refine=refine, long=long, progress=progress)


def needs_sample(spec: str) -> bool:
    """Returns whether `make_codec` needs images to fit the codec to."""
    return spec.partition(":")[0] in FITTED


def load_codec(folder: str | Path) -> Codec:
    """Returns the codec that `save` wrote to `folder`/vae, or the VAE of a published ensemble."""
    path = Path(folder) / FOLDER
    codec: Codec = load_saved(path, (Pixels, PatchPCA, ConvCodec), lambda dtype: VAE.open(str(path), dtype))
    return codec


def is_quick(codec: Codec) -> bool:
    """Returns whether hundreds of images decode quickly; a VAE takes a second per image on a CPU."""
    return not isinstance(codec, VAE)


@dataclass(frozen=True)
class PixelsConfig:
    """Has no options."""


class Pixels(Codec, Stored):
    """The identity: latents are the images themselves."""

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
