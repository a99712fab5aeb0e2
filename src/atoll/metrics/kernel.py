"""The kernel distance (KID, with any features): the squared maximum mean discrepancy of a cubic kernel, unbiased."""

import numpy as np
from numpy.typing import NDArray

from atoll.metrics.frechet import Array, check_finite

SUBSETS, SUBSET_SIZE = 100, 1000


def kernel_distance(
    real: NDArray[np.floating], made: NDArray[np.floating], num_subsets: int = SUBSETS, subset_size: int | None = None
) -> tuple[float, float]:
    """Returns the mean and standard deviation over random subsets, of equal size, of features [N, D] and [M, D].

    A subset has 1000 images, or half of them if there are fewer than 2000: larger subsets would hardly differ from each
    other. The estimate is unbiased, so the mean may be negative.
    """
    real, made = check_finite(real), check_finite(made)
    size = subset_size or min(SUBSET_SIZE, max(min(len(real), len(made)) // 2, 2))
    rng = np.random.default_rng(0)
    distances = [
        squared_discrepancy(*(cloud[rng.choice(len(cloud), size, replace=False)] for cloud in (real, made)))
        for _ in range(num_subsets)
    ]
    return float(np.mean(distances)), float(np.std(distances))


def squared_discrepancy(one: Array, other: Array) -> float:
    """Returns the unbiased MMD^2 (Gretton et al. 2012, Eq. 3), kernel (x . y / D + 1)^3 (Binkowski et al. 2018)."""
    return _among(one) + _among(other) - 2 * float(_kernel(one, other).mean())


def _among(points: Array) -> float:
    """Returns the mean of the kernel over all pairs of different points."""
    num, values = len(points), _kernel(points, points)
    return float((values.sum() - np.trace(values)) / (num * (num - 1)))


def _kernel(one: Array, other: Array) -> Array:
    return np.asarray((one @ other.T / one.shape[1] + 1) ** 3)
