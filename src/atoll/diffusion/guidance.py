"""Classifier-free guidance: what it does to a pair of velocities, and as a closure over a velocity function."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from atoll.diffusion.schedules import broadcast
from atoll.diffusion.solvers import Velocity
from atoll.errors import InputError

Text = TypeVar("Text")


@dataclass(frozen=True)
class Guidance:
    """uncond + scale (cond - uncond) for t inside the interval; outside it, and at scale 1, cond alone."""

    scale: float = 1.0
    interval: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise InputError(f"the guidance scale must be a finite number, but is {self.scale}")
        low, high = self.interval
        if not 0 <= low <= high <= 1:
            raise InputError(f"the guidance interval must be (low, high) within [0, 1], but is {self.interval}")

    def inside(self, t: Tensor) -> Tensor:
        """Where guidance is on, of the shape of t."""
        low, high = self.interval
        return (t >= low) & (t <= high) & (self.scale != 1)

    def mixed(self, cond: Tensor, uncond: Tensor, t: Tensor) -> Tensor:
        """One velocity of the two, at t."""
        return torch.lerp(uncond, cond, 1 + (self.scale - 1) * broadcast(self.inside(t), cond))


def guided(
    predict: Callable[[Tensor, Tensor, Text], Tensor], guidance: Guidance, text_of: Callable[[bool], Text]
) -> Velocity:
    """Returns predict(x, t, text) guided away from null texts, both halves as one batch.

    `text_of(False)` is the texts of the samples of x, `text_of(True)` these and then their null texts.
    """

    def guided_velocity(x: Tensor, t: Tensor) -> Tensor:
        if not bool(guidance.inside(t).any()):
            return predict(x, t, text_of(False))
        twice = t if t.dim() == 0 else torch.cat([t, t])
        cond, uncond = predict(torch.cat([x, x]), twice, text_of(True)).chunk(2)
        return guidance.mixed(cond, uncond, t)

    return guided_velocity
