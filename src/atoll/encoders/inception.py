"""The Inception v3 of the Frechet inception distance, as TensorFlow's graph of 2015-12-05 computes it.

Parameter names are those of the published `pt_inception-2015-12-05-6726825d.pth`. Its pooling differs from later
Inceptions: averages exclude the padding, and the last block uses a maximum where the paper uses an average.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Kernel = int | tuple[int, int]
Layer = tuple[Any, ...]  # the channels, the kernel and perhaps the stride of a convolution
FLAT, TALL, FORK = (1, 7), (7, 1), (0, 0)  # a fork is two of them, 1 x 3 and 3 x 1, side by side


class Conv(nn.Module):
    """Convolution, batch norm, ReLU; without padding if the stride is 2."""

    def __init__(self, width: int, channels: int, kernel: Kernel, stride: int = 1, padded: bool = True) -> None:
        super().__init__()
        rows, columns = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        padding = (rows // 2, columns // 2) if padded and stride == 1 else (0, 0)
        self.conv = nn.Conv2d(width, channels, (rows, columns), stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(channels, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class Mixed(nn.Module):
    """Branches of convolutions and a pooling branch, concatenated along channels."""

    def __init__(self, width: int, pool: str, pooled: int = 0, **branches: Sequence[Layer]) -> None:
        super().__init__()
        self.pool = pool
        self.chains: list[list[list[str]]] = []  # the names of each branch's convolutions
        for name, layers in branches.items():
            chain, inner = [], width
            for i, (channels, kernel, *stride) in enumerate(layers, 1):
                own = name if len(layers) == 1 else f"{name}_{i}"
                parts: dict[str, Kernel] = {f"{own}a": (1, 3), f"{own}b": (3, 1)} if kernel == FORK else {own: kernel}
                for part, size in parts.items():
                    self.add_module(part, Conv(inner, channels, size, *stride))
                chain.append(list(parts))
                inner = channels
            self.chains.append(chain)
        self.branch_pool = Conv(width, pooled, 1) if pooled else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for chain in self.chains:
            y = x
            for names in chain:
                y = torch.cat([self.get_submodule(name)(y) for name in names], 1)
            outputs.append(y)
        if self.pool == "average":
            pooled = F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
        else:
            pooled = F.max_pool2d(x, 3, stride=1, padding=1) if self.pool == "maximum" else F.max_pool2d(x, 3, stride=2)
        return torch.cat([*outputs, self.branch_pool(pooled)], 1)


def _five(width: int, pooled: int) -> Mixed:
    five, three = [(48, 1), (64, 5)], [(64, 1), (96, 3), (96, 3)]
    return Mixed(width, "average", pooled, branch1x1=[(64, 1)], branch5x5=five, branch3x3dbl=three)


def _six(inner: int) -> Mixed:
    seven: list[Layer] = [(inner, 1), (inner, FLAT), (192, TALL)]
    twice: list[Layer] = [(inner, 1), (inner, TALL), (inner, FLAT), (inner, TALL), (192, FLAT)]
    return Mixed(768, "average", 192, branch1x1=[(192, 1)], branch7x7=seven, branch7x7dbl=twice)


def _seven(width: int, pool: str) -> Mixed:
    three: list[Layer] = [(384, 1), (384, FORK)]
    twice: list[Layer] = [(448, 1), (384, 3), (384, FORK)]
    return Mixed(width, pool, 192, branch1x1=[(320, 1)], branch3x3=three, branch3x3dbl=twice)


class InceptionV3(nn.Module):
    """Images [B, 3, 299, 299] in [-1, 1] to pooled features [B, 2048]."""

    def __init__(self) -> None:
        super().__init__()
        seven: list[Layer] = [(192, 1), (192, FLAT), (192, TALL), (192, 3, 2)]
        self.Conv2d_1a_3x3 = Conv(3, 32, 3, 2)
        self.Conv2d_2a_3x3 = Conv(32, 32, 3, padded=False)
        self.Conv2d_2b_3x3 = Conv(32, 64, 3)
        self.Conv2d_3b_1x1 = Conv(64, 80, 1)
        self.Conv2d_4a_3x3 = Conv(80, 192, 3, padded=False)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = _five(192, 32), _five(256, 64), _five(288, 64)
        self.Mixed_6a = Mixed(288, "halve", branch3x3=[(384, 3, 2)], branch3x3dbl=[(64, 1), (96, 3), (96, 3, 2)])
        self.Mixed_6b, self.Mixed_6c, self.Mixed_6d, self.Mixed_6e = _six(128), _six(160), _six(160), _six(192)
        self.Mixed_7a = Mixed(768, "halve", branch3x3=[(192, 1), (320, 3, 2)], branch7x7x3=seven)
        self.Mixed_7b, self.Mixed_7c = _seven(1280, "average"), _seven(2048, "maximum")
        self.fc = nn.Linear(2048, 1008)  # the classifier, which is in the checkpoint but unused

    def forward(self, x: Tensor) -> Tensor:
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))  # [B, 64, 147, 147]
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, 2)))  # [B, 192, 71, 71]
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(F.max_pool2d(x, 3, 2))))  # [B, 288, 35, 35]
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))  # [B, 768, 17, 17]
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))  # [B, 2048, 8, 8]
        return x.mean((2, 3))
