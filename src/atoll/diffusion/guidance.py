"""Classifier-free guidance as a closure over a velocity function."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from atoll.diffusion.schedules import over
from atoll.diffusion.solvers import Velocity
from atoll.errors import InputError

Text = TypeVar("Text")


def guided(
    velocity: Callable[[Tensor, Tensor, Text], Tensor],
    text: Text,
    null_text: Text,
    scale: float,
    interval: tuple[float, float] = (0.0, 1.0),
) -> Velocity:
    """uncond + scale (cond - uncond) for t inside the interval; outside it, and at scale 1, cond alone."""
    if not math.isfinite(scale):
        raise InputError(f"the guidance scale must be a finite number, but is {scale}")
    low, high = interval
    if not 0 <= low <= high <= 1:
        raise InputError(f"the guidance interval must be (low, high) within [0, 1], but is {interval}")

    def guided_velocity(x: Tensor, t: Tensor) -> Tensor:
        cond = velocity(x, t, text)
        inside = (t >= low) & (t <= high)
        if scale == 1 or not bool(inside.any()):
            return cond
        uncond = velocity(x, t, null_text)
        return torch.lerp(uncond, cond, 1 + (scale - 1) * over(inside, x))

    return guided_velocity
