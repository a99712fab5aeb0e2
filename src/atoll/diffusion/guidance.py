"""Classifier-free guidance as a closure over a velocity function."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from atoll.diffusion.schedules import broadcast
from atoll.diffusion.solvers import Velocity
from atoll.tensors import send

Text = TypeVar("Text")


def guided(
    predict: Callable[[Tensor, Tensor, Text], Tensor], scale: float, text_of: Callable[[bool], Text]
) -> Velocity:
    """Returns predict with classifier-free guidance, uncond + scale (cond - uncond), evaluating both in one batch.

    `text_of(False)` returns the texts of the samples of x, `text_of(True)` these followed by their null texts.
    """

    def guided_velocity(x: Tensor, t: Tensor) -> Tensor:
        if scale == 1:
            return predict(x, t, text_of(False))
        twice = t if t.dim() == 0 else torch.cat([t, t])
        cond, uncond = predict(torch.cat([x, x]), twice, text_of(True)).chunk(2)
        return torch.lerp(uncond, cond, scale)

    return guided_velocity


def guided_each(
    predict: Callable[[Tensor, Tensor, Text], Tensor],
    scales: Sequence[float],
    text_of: Callable[[Sequence[int]], Text],
) -> Velocity:
    """Returns the same with a scale per sample.

    `text_of(rows)` returns all texts followed by the null texts of the samples `rows`. Samples with scale 1 need no
    null text, and cost half.
    """
    rows = [row for row, scale in enumerate(scales) if scale != 1]

    def guided_velocity(x: Tensor, t: Tensor) -> Tensor:
        places = send(torch.tensor(rows), x.device)
        more = t if t.dim() == 0 else torch.cat([t, t[places]])
        cond, uncond = predict(torch.cat([x, x[places]]), more, text_of(rows)).split([len(x), len(rows)])
        scale = send(torch.tensor([scales[row] for row in rows], dtype=x.dtype), x.device)
        return cond.index_copy(0, places, torch.lerp(uncond, cond[places], broadcast(scale, x)))

    return guided_velocity
