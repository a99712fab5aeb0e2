"""Whether images show what was asked for: avatars their attributes, and others their labels.

Labels are read by linear discriminant analysis of features with a shrunk covariance, fitted to the reference. Its
figure for real images is beside that of models: what it cannot tell there is not to be held against them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.data.builtin.avatar_reader import read_avatars
from atoll.data.builtin.avatars import attributes_of
from atoll.errors import InputError
from atoll.metrics.frechet import check_finite

MOST = 100  # labels: beyond that they are rather names than kinds
LEAST_OF_EACH = 2
SHRINKAGE = 0.1

Array = NDArray[np.float64]


def are_right(images: NDArray[np.uint8], captions: Sequence[str]) -> list[bool]:
    """Returns whether every attribute that the caption tells is in the avatar, and no other."""
    return [seen == attributes_of(caption) for seen, caption in zip(read_avatars(images), captions, strict=True)]


@dataclass(frozen=True, eq=False)
class Reader:
    """Tells labels from features."""

    labels: tuple[str, ...]
    weights: Array  # [labels, D]
    bias: Array

    @classmethod
    def fit(cls, vectors: NDArray[np.floating], labels: Sequence[str], shrinkage: float = SHRINKAGE) -> "Reader":
        """To features [N, D] of real images; labels that hardly any of them has are left out."""
        found, kinds, counts = np.unique(np.array(labels), return_inverse=True, return_counts=True)
        if why := why_unreadable(labels):
            raise InputError(why)
        rows, dim = check_finite(vectors), vectors.shape[1]
        kept = np.flatnonzero(_usable(found, counts))
        shares = counts[kept] / counts[kept].sum()
        means = np.stack([rows[kinds == k].mean(0) for k in kept])
        within = np.zeros((dim, dim))
        for k, share, mean in zip(kept, shares, means, strict=True):
            away = rows[kinds == k] - mean
            covariance = away.T @ away / counts[k]
            own = (1 - shrinkage) * covariance + shrinkage * np.trace(covariance) / dim * np.eye(dim)
            within += share * own
        weights: Array = np.linalg.lstsq(within, means.T, rcond=None)[0].T
        bias = np.log(shares) - 0.5 * (means * weights).sum(1)
        return cls(tuple(found[kept].tolist()), weights, bias)

    def read(self, vectors: NDArray[np.floating]) -> list[str]:
        scores = check_finite(vectors) @ self.weights.T + self.bias
        return [self.labels[k] for k in scores.argmax(1)]


def why_unreadable(labels: Sequence[str]) -> str:
    """Why a classifier cannot be fitted to them, or nothing."""
    kinds, counts = np.unique(np.array(labels), return_counts=True)
    usable = int(_usable(kinds, counts).sum())
    if len(kinds) > MOST:
        return f"the images have {len(kinds)} labels, more than the {MOST} that are told apart"
    return "" if usable > 1 else "the images of the reference have no two labels that several of them share"


def _usable(kinds: NDArray[np.str_], counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """A label that several images have; without a name it is none."""
    found: NDArray[np.bool_] = (counts >= LEAST_OF_EACH) & (kinds != "")
    return found
