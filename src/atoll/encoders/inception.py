"""The Inception v3 of the Frechet inception distance, as TensorFlow's graph of 2015-12-05 computes it.

Names are those of the published `pt_inception-2015-12-05-6726825d.pth`. It differs from later Inceptions in its pools:
averages leave out the padding, and the last block takes a maximum where the paper takes an average.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Size = tuple[int, int]


class Layer(NamedTuple):
    """A convolution to so many channels; `forks` are two of them, 1 x 3 and 3 x 1, side by side."""

    channels: int
    kernel: Size = (1, 1)
    stride: int = 1  # a stride of 2 goes without padding
    forks: bool = False


class Conv(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, width: int, layer: Layer, padded: bool = True) -> None:
        super().__init__()
        rows, columns = layer.kernel
        padding = (rows // 2, columns // 2) if padded and layer.stride == 1 else (0, 0)
        self.conv = nn.Conv2d(width, layer.channels, layer.kernel, layer.stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(layer.channels, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class Mixed(nn.Module):
    """Branches of convolutions beside a pool, all of their channels together."""

    def __init__(self, width: int, branches: Mapping[str, Sequence[Layer]], pool: str, pooled: int = 0) -> None:
        super().__init__()
        self.pool = pool
        self.chains = [self._chain(name, width, layers) for name, layers in branches.items()]
        self.branch_pool = Conv(width, Layer(pooled)) if pooled else nn.Identity()
        last = [layers[-1] for layers in branches.values()]
        self.width = (pooled or width) + sum(layer.channels * (1 + layer.forks) for layer in last)

    def _chain(self, name: str, width: int, layers: Sequence[Layer]) -> list[list[str]]:
        """The names of a branch's convolutions, those side by side in one list."""
        chain = []
        for i, layer in enumerate(layers, 1):
            own = name if len(layers) == 1 else f"{name}_{i}"
            kernels = {"a": (1, 3), "b": (3, 1)} if layer.forks else {"": layer.kernel}
            for suffix, kernel in kernels.items():
                self.add_module(own + suffix, Conv(width, layer._replace(kernel=kernel)))
            chain.append([own + suffix for suffix in kernels])
            width = layer.channels
        return chain

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for chain in self.chains:
            y = x
            for names in chain:
                y = torch.cat([self.get_submodule(name)(y) for name in names], 1)
            parts.append(y)
        return torch.cat([*parts, self.branch_pool(self._pooled(x))], 1)

    def _pooled(self, x: Tensor) -> Tensor:
        if self.pool == "average":
            return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
        return F.max_pool2d(x, 3, stride=1, padding=1) if self.pool == "maximum" else F.max_pool2d(x, 3, stride=2)


def _five(width: int, pooled: int) -> Mixed:
    twice = [Layer(64), Layer(96, (3, 3)), Layer(96, (3, 3))]
    branches = {"branch1x1": [Layer(64)], "branch5x5": [Layer(48), Layer(64, (5, 5))], "branch3x3dbl": twice}
    return Mixed(width, branches, "average", pooled)


def _six(inner: int) -> Mixed:
    flat, tall = (1, 7), (7, 1)
    branches = {
        "branch1x1": [Layer(192)],
        "branch7x7": [Layer(inner), Layer(inner, flat), Layer(192, tall)],
        "branch7x7dbl": [Layer(inner), *(Layer(inner, kernel) for kernel in (tall, flat, tall)), Layer(192, flat)],
    }
    return Mixed(768, branches, "average", 192)


def _seven(width: int, pool: str) -> Mixed:
    branches = {
        "branch1x1": [Layer(320)],
        "branch3x3": [Layer(384), Layer(384, forks=True)],
        "branch3x3dbl": [Layer(448), Layer(384, (3, 3)), Layer(384, forks=True)],
    }
    return Mixed(width, branches, pool, 192)


class InceptionV3(nn.Module):
    """Images [B, 3, 299, 299] in [-1, 1] to pooled features [B, 2048]."""

    def __init__(self) -> None:
        super().__init__()
        half = {
            "branch3x3": [Layer(384, (3, 3), 2)],
            "branch3x3dbl": [Layer(64), Layer(96, (3, 3)), Layer(96, (3, 3), 2)],
        }
        half_again = {
            "branch3x3": [Layer(192), Layer(320, (3, 3), 2)],
            "branch7x7x3": [Layer(192), Layer(192, (1, 7)), Layer(192, (7, 1)), Layer(192, (3, 3), 2)],
        }
        self.Conv2d_1a_3x3 = Conv(3, Layer(32, (3, 3), 2))
        self.Conv2d_2a_3x3 = Conv(32, Layer(32, (3, 3)), padded=False)
        self.Conv2d_2b_3x3 = Conv(32, Layer(64, (3, 3)))
        self.Conv2d_3b_1x1 = Conv(64, Layer(80))
        self.Conv2d_4a_3x3 = Conv(80, Layer(192, (3, 3)), padded=False)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = _five(192, 32), _five(256, 64), _five(288, 64)
        self.Mixed_6a = Mixed(288, half, "halve")
        self.Mixed_6b, self.Mixed_6c, self.Mixed_6d, self.Mixed_6e = _six(128), _six(160), _six(160), _six(192)
        self.Mixed_7a = Mixed(768, half_again, "halve")
        self.Mixed_7b, self.Mixed_7c = _seven(1280, "average"), _seven(2048, "maximum")
        self.fc = nn.Linear(2048, 1008)  # its classifier: among the weights, but no feature comes from it

    def forward(self, x: Tensor) -> Tensor:
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))  # [B, 64, 147, 147]
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, 2)))  # [B, 192, 71, 71]
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(F.max_pool2d(x, 3, 2))))  # [B, 288, 35, 35]
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))  # [B, 768, 17, 17]
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))  # [B, 2048, 8, 8]
        return x.mean((2, 3))
