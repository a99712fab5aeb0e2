"""Classifier-free guidance as a closure over a velocity function."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from atoll.diffusion.solvers import Velocity

Text = TypeVar("Text")


def guided(
    predict: Callable[[Tensor, Tensor, Text], Tensor], scale: float, text_of: Callable[[bool], Text]
) -> Velocity:
    """Returns predict(x, t, text) guided away from null texts, uncond + scale (cond - uncond), both as one batch.

    `text_of(False)` is the texts of the samples of x, `text_of(True)` these and then their null texts.
    """

    def guided_velocity(x: Tensor, t: Tensor) -> Tensor:
        if scale == 1:
            return predict(x, t, text_of(False))
        twice = t if t.dim() == 0 else torch.cat([t, t])
        cond, uncond = predict(torch.cat([x, x]), twice, text_of(True)).chunk(2)
        return torch.lerp(uncond, cond, scale)

    return guided_velocity
