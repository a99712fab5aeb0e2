"""The Frechet distance between two clouds of features, each taken for a Gaussian (FID, with any features)."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.errors import InputError

POINTS = 12  # sizes of subsets that the extrapolation is drawn through
GROUPS = 10  # parts, each left out once, from which the error is told


@dataclass(frozen=True, eq=False)
class Moments:
    """The mean and covariance of features, in float64."""

    mean: NDArray[np.float64]  # [D]
    covariance: NDArray[np.float64]  # [D, D]
    num: int

    @classmethod
    def of(cls, features: NDArray[np.floating]) -> "Moments":
        """From features[N, D]."""
        if features.ndim != 2 or len(features) < 2:
            raise InputError(f"a covariance needs features [at least 2, D], but they have {list(features.shape)}")
        found = check_finite(features)
        return cls(found.mean(0), np.atleast_2d(np.cov(found, rowvar=False)), len(found))

    @cached_property
    def root(self) -> NDArray[np.float64]:
        """The symmetric square root of the covariance."""
        values, vectors = np.linalg.eigh(self.covariance)
        return np.asarray((vectors * np.sqrt(values.clip(min=0))) @ vectors.T)


def check_finite(features: NDArray[np.floating]) -> NDArray[np.float64]:
    """Features [N, D] in float64, if none is NaN or infinite."""
    if features.ndim != 2:
        raise InputError(f"features must be [N, D], but have {list(features.shape)}")
    found = np.asarray(features, np.float64)
    if not np.isfinite(found).all():
        num = int((~np.isfinite(found).all(1)).sum())
        raise InputError(f"the features of {num} images are not finite: their network's weights are damaged")
    return found


def frechet_distance(one: Moments, other: Moments) -> float:
    """|m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)).

    The trace of (S1 S2)^(1/2) is the sum of the singular values of S1^(1/2) S2^(1/2): symmetric roots and no complex
    numbers, also where there are fewer samples than dimensions.
    """
    if one.mean.shape != other.mean.shape:
        raise InputError(f"features of {len(one.mean)} and {len(other.mean)} dimensions cannot be compared")
    shared = np.linalg.svd(one.root @ other.root, compute_uv=False).sum()
    distance = ((one.mean - other.mean) ** 2).sum() + np.trace(one.covariance) + np.trace(other.covariance) - 2 * shared
    return float(max(distance, 0.0))


def frechet_to(reference: Moments, features: NDArray[np.floating]) -> float:
    """The distance of features [N, D] to the reference.

    Where there are fewer samples than dimensions, (X - m) / sqrt(N - 1) takes the place of S2^(1/2): its product with
    S1^(1/2) has the same singular values, but for zeros, and is smaller.
    """
    num, dim = features.shape
    if not 2 <= num < dim or dim != len(reference.mean):
        return frechet_distance(reference, Moments.of(features))
    found = check_finite(features)
    mean = found.mean(0)
    factor = (found - mean) / np.sqrt(num - 1)
    shared = np.linalg.svd(factor @ reference.root, compute_uv=False).sum()
    distance = ((reference.mean - mean) ** 2).sum() + np.trace(reference.covariance) + (factor**2).sum() - 2 * shared
    return float(max(distance, 0.0))


def frechet_error(reference: Moments, features: NDArray[np.floating], num_groups: int = GROUPS) -> float:
    """The standard error of the distance of features [N, D], from leaving out a part at a time (the jackknife).

    Not the bootstrap: a sample drawn with repetition has fewer distinct images, and a larger distance for that alone.
    """
    parts = np.array_split(np.arange(len(features)), min(num_groups, max(1, len(features) // 2)))
    if len(parts) < 2:
        raise InputError(f"the error of a distance needs features of at least 4 images, but there are {len(features)}")
    found = [frechet_to(reference, np.delete(features, part, 0)) for part in parts]
    return float(np.std(found) * np.sqrt(len(parts) - 1))


class Extrapolated(NamedTuple):
    """A distance as it would be with images without number."""

    value: float
    error: float  # standard error of where the line meets the axis
    sizes: tuple[int, ...]  # of the subsets
    distances: tuple[float, ...]  # of each


def least_for_infinity(dim: int) -> int:
    """Of fewer images than this, no distance is extrapolated: the bias is no straight line in 1 / N there."""
    return 4 * dim


def frechet_infinity(
    reference: Moments, features: NDArray[np.floating], num_points: int = POINTS, seed: int = 0
) -> Extrapolated:
    """The distance without the bias of a finite number of samples (Chong and Forsyth 2020, FID infinity).

    The bias is nearly linear in 1 / N, so distances of random subsets of several sizes lie on a line, and it is read
    where it meets 1 / N = 0. What bias the reference has, from its own number of images, stays.
    """
    num, dim = features.shape
    if num < least_for_infinity(dim):
        raise InputError(
            f"{num} images are too few to extrapolate a distance in {dim} dimensions: at least "
            f"{least_for_infinity(dim)} are needed"
        )
    rng = np.random.default_rng(seed)
    sizes = np.unique(np.round(1 / np.linspace(2 / num, 1 / num, num_points)).astype(int))
    distances = [frechet_to(reference, features[rng.choice(num, size, replace=False)]) for size in sizes]
    value, error = _intercept(1 / sizes, np.array(distances))
    return Extrapolated(value, error, tuple(map(int, sizes)), tuple(distances))


def _intercept(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Where the line of least squares is at x = 0, and the standard error of that."""
    design = np.stack([np.ones_like(x), x], 1)
    found, *_ = np.linalg.lstsq(design, y, rcond=None)
    variance = ((y - design @ found) ** 2).sum() / max(len(x) - 2, 1)
    return float(found[0]), float(np.sqrt(variance * np.linalg.inv(design.T @ design)[0, 0]))
