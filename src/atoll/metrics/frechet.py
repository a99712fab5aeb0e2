"""The Frechet distance between two sets of features, each approximated by a Gaussian (FID, with any features)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.errors import InputError

POINTS = 12  # number of subset sizes that the extrapolation is fitted to
GROUPS = 10  # groups of the jackknife, each left out once

Array = NDArray[np.float64]


class Moments(NamedTuple):
    """The mean and covariance of features, in float64."""

    mean: Array  # [D]
    factor: Array  # [at most D, D]; the covariance is factor^T factor

    @classmethod
    def of(cls, features: NDArray[np.floating]) -> "Moments":
        """Returns the moments of features [N, D], N at least 2."""
        points = check_finite(features)
        mean = points.mean(0)
        return cls(mean, np.asarray(np.linalg.qr((points - mean) / np.sqrt(len(points) - 1), mode="r")))


def check_finite(features: NDArray[np.floating]) -> Array:
    """Returns features [N, D] in float64; raises an InputError if any is NaN or infinite."""
    points = np.asarray(features, np.float64)
    if num := int((~np.isfinite(points).all(1)).sum()):
        raise InputError(f"the features of {num} images are not finite: their network's weights are damaged")
    return points


def frechet_distance(one: Moments, other: Moments) -> float:
    """Returns |m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)).

    With S = F^T F, the trace of (S1 S2)^(1/2) is the sum of the singular values of F1 F2^T: this needs no matrix root
    and no complex numbers, even with fewer samples than dimensions.
    """
    shared = np.linalg.svd(one.factor @ other.factor.T, compute_uv=False).sum()
    variances = (one.factor**2).sum() + (other.factor**2).sum()
    return float(max(((one.mean - other.mean) ** 2).sum() + variances - 2 * shared, 0.0))


def frechet_error(reference: Moments, features: NDArray[np.floating]) -> float:
    """Returns the standard error of the distance of features [N, D], N at least 4, by the jackknife.

    The bootstrap would be biased: a resample has fewer distinct images, and a larger distance for that alone.
    """
    parts = np.array_split(np.arange(len(features)), min(GROUPS, len(features) // 2))
    distances = [frechet_distance(reference, Moments.of(np.delete(features, part, 0))) for part in parts]
    return float(np.std(distances) * np.sqrt(len(parts) - 1))


def least_for_infinity(dim: int) -> int:
    """Returns how many images an extrapolation needs: with fewer, the bias is not linear in 1 / N."""
    return 4 * dim


def frechet_infinity(reference: Moments, features: NDArray[np.floating], seed: int = 0) -> tuple[float, float]:
    """Returns the distance extrapolated to infinitely many samples, and its error (Chong and Forsyth 2020).

    The bias is nearly linear in 1 / N, so a line is fitted to the distances of random subsets of several sizes, and
    evaluated at 1 / N = 0. The bias due to the finite size of the reference remains.
    """
    num, rng = len(features), np.random.default_rng(seed)
    sizes = np.unique(np.round(1 / np.linspace(2 / num, 1 / num, POINTS)).astype(int))
    subsets = (features[rng.choice(num, size, replace=False)] for size in sizes)
    distances = np.array([frechet_distance(reference, Moments.of(subset)) for subset in subsets])
    design = np.stack([np.ones(len(sizes)), 1 / sizes], 1)
    line, *_ = np.linalg.lstsq(design, distances, rcond=None)
    variance = ((distances - design @ line) ** 2).sum() / max(len(sizes) - 2, 1)
    return float(line[0]), float(np.sqrt(variance * np.linalg.inv(design.T @ design)[0, 0]))
