"""The four prediction types of networks, and conversions among them.

All four are equivalent: at a known x = alpha x0 + sigma eps, any one of them determines the pair (x0, eps), and
the pair determines all others.
"""

from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

from atoll.diffusion.schedules import Coefficients
from atoll.errors import unknown


class Prediction(StrEnum):
    EPS = "eps"  # the noise
    X0 = "x0"  # the clean sample
    V = "v"  # alpha eps - sigma x0 (Salimans and Ho)
    VELOCITY = "velocity"  # dx/dt = d_alpha x0 + d_sigma eps, along the network's own schedule

    @classmethod
    def _missing_(cls, value: object) -> "Prediction":
        raise unknown("prediction", value, [p.value for p in cls])


class Estimate(NamedTuple):
    """A clean sample and the noise that combine to x."""

    x0: Tensor
    eps: Tensor


def estimate(prediction: Prediction, output: Tensor, x: Tensor, at: Coefficients) -> Estimate:
    """Returns the (x0, eps) that a network's output at x implies (EPS: Eq. 5).

    Where alpha (for EPS) or sigma (for X0) is zero this is 0/0, which `Transfer` avoids.
    """
    assert output.shape == x.shape
    alpha, sigma, d_alpha, d_sigma = at.broadcast(x)
    match prediction:
        case Prediction.EPS:
            return Estimate((x - sigma * output) / alpha, output)
        case Prediction.X0:
            return Estimate(output, (x - alpha * output) / sigma)
        case Prediction.V:
            norm = alpha**2 + sigma**2
            return Estimate((alpha * x - sigma * output) / norm, (sigma * x + alpha * output) / norm)
        case Prediction.VELOCITY:
            det = alpha * d_sigma - sigma * d_alpha
            return Estimate((d_sigma * x - sigma * output) / det, (alpha * output - d_alpha * x) / det)


def output_for(prediction: Prediction, x0: Tensor, eps: Tensor, at: Coefficients) -> Tensor:
    """Returns the training target, that is, the output of a perfect network; the inverse of `estimate`."""
    alpha, sigma, d_alpha, d_sigma = at.broadcast(x0)
    match prediction:
        case Prediction.EPS:
            return eps
        case Prediction.X0:
            return x0
        case Prediction.V:
            return alpha * eps - sigma * x0
        case Prediction.VELOCITY:
            return d_alpha * x0 + d_sigma * eps


def x0_weight(prediction: Prediction, at: Coefficients) -> Tensor:
    """Returns w(t) such that the squared error of this prediction is w(t) |x0_hat - x0|^2 (Proposition 1).

    EPS is Eq. 9. V is Eq. 10, and on a variance-preserving schedule 1 / sigma^2. On the linear path VELOCITY
    has 1 / t^2, so that its ratio to EPS is 1 / alpha^2 there too (Eq. 11 and the Remark).
    """
    alpha, sigma, d_alpha, d_sigma = at
    match prediction:
        case Prediction.EPS:
            return (alpha / sigma) ** 2
        case Prediction.X0:
            return alpha**0
        case Prediction.V:
            return ((alpha**2 + sigma**2) / sigma) ** 2
        case Prediction.VELOCITY:
            return ((alpha * d_sigma - sigma * d_alpha) / sigma) ** 2
