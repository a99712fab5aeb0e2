"""The kernel distance (KID, with any features): the squared maximum mean discrepancy of a cubic kernel, unbiased."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.errors import InputError
from atoll.metrics.frechet import check_finite

SUBSETS, SUBSET_SIZE = 100, 1000


class KernelDistance(NamedTuple):
    """The mean over random subsets; it may fall below 0, for it has no bias."""

    value: float
    spread: float  # deviation over the subsets, which share images where these are few


def kernel_distance(
    real: NDArray[np.floating],
    made: NDArray[np.floating],
    num_subsets: int = SUBSETS,
    subset_size: int | None = None,
    seed: int = 0,
) -> KernelDistance:
    """Of features [N, D] and [M, D], over subsets of as many of each.

    A subset has 1000, or half of the images where there are fewer than 2000: larger ones would hardly differ.
    """
    real, made = check_finite(real), check_finite(made)
    fewest = min(len(real), len(made))
    size = min(SUBSET_SIZE, max(fewest // 2, 2)) if subset_size is None else subset_size
    if not 2 <= size <= fewest:
        raise InputError(f"subsets of {size} of {len(real)} real and {len(made)} images: at least 2, at most all")
    rng = np.random.default_rng(seed)
    found = [
        squared_discrepancy(
            real[rng.choice(len(real), size, replace=False)], made[rng.choice(len(made), size, replace=False)]
        )
        for _ in range(num_subsets)
    ]
    return KernelDistance(float(np.mean(found)), float(np.std(found)))


def squared_discrepancy(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """MMD^2 by its unbiased estimate (Gretton et al. 2012, Eq. 3), kernel (x . y / D + 1)^3 (Binkowski et al. 2018)."""
    if one.shape[1] != other.shape[1]:
        raise InputError(f"features of {one.shape[1]} and {other.shape[1]} dimensions cannot be compared")
    within = _among(one) + _among(other)
    return within - 2 * float(_kernel(one, other).mean())


def _among(points: NDArray[np.float64]) -> float:
    """The kernel's mean over pairs of different points."""
    num = len(points)
    values = _kernel(points, points)
    return float((values.sum() - np.trace(values)) / (num * (num - 1)))


def _kernel(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray((one @ other.T / one.shape[1] + 1) ** 3)
