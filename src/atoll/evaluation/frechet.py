"""The Frechet distance between two clouds of features, each taken for a Gaussian (FID, with any features)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.errors import InputError


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
        found = np.asarray(features, np.float64)
        if not np.isfinite(found).all():
            raise InputError(f"the features of {int((~np.isfinite(found).all(1)).sum())} images are not finite")
        return cls(found.mean(0), np.atleast_2d(np.cov(found, rowvar=False)), len(found))


def frechet_distance(one: Moments, other: Moments) -> float:
    """|m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)).

    The trace of (S1 S2)^(1/2) is the sum of the singular values of S1^(1/2) S2^(1/2): symmetric roots and no complex
    numbers, also where there are fewer samples than dimensions.
    """
    if one.mean.shape != other.mean.shape:
        raise InputError(f"features of {len(one.mean)} and {len(other.mean)} dimensions cannot be compared")
    product = _root(one.covariance) @ _root(other.covariance)
    shared = np.linalg.svd(product, compute_uv=False).sum()
    distance = ((one.mean - other.mean) ** 2).sum() + np.trace(one.covariance) + np.trace(other.covariance) - 2 * shared
    return float(max(distance, 0.0))


def _root(covariance: NDArray[np.float64]) -> NDArray[np.float64]:
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray((vectors * np.sqrt(values.clip(min=0))) @ vectors.T)
