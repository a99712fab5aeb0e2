"""Whether images show what their prompts ask for: the attributes of avatars, or the labels of other images.

Labels are predicted by linear discriminant analysis of features with a shrunk covariance, fitted to the reference.
Compare a model's accuracy with that of real images, which is reported beside it: the classifier errs on those too.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.data.builtin.avatars import attributes_of, read_avatars
from atoll.metrics.frechet import Array, check_finite

MOST = 100  # labels; with more, they are names rather than classes
LEAST_OF_EACH = 2
SHRINKAGE = 0.1


def are_right(images: NDArray[np.uint8], captions: Sequence[str]) -> list[bool]:
    """Returns, for each avatar, whether it has exactly the attributes in its caption."""
    return [seen == attributes_of(caption) for seen, caption in zip(read_avatars(images), captions, strict=True)]


class Reader(NamedTuple):
    """Predicts labels from features."""

    labels: list[str]
    weights: Array  # [labels, D]
    bias: Array

    @classmethod
    def fit(cls, vectors: NDArray[np.floating], labels: Sequence[str], shrinkage: float = SHRINKAGE) -> "Reader":
        """Fits a reader to features [N, D] of real images, without labels that fewer than two of them have."""
        points, dim = check_finite(vectors), vectors.shape[1]
        usable, of_label = _usable(labels), np.array(labels)
        clouds = [points[of_label == label] for label in usable]
        shares = np.array([len(cloud) for cloud in clouds]) / sum(map(len, clouds))
        means = np.stack([cloud.mean(0) for cloud in clouds])
        within = np.zeros((dim, dim))
        for cloud, share, mean in zip(clouds, shares, means, strict=True):
            covariance = (cloud - mean).T @ (cloud - mean) / len(cloud)
            shrunk = (1 - shrinkage) * covariance + shrinkage * np.trace(covariance) / dim * np.eye(dim)
            within += share * shrunk
        weights: Array = np.linalg.lstsq(within, means.T, rcond=None)[0].T
        return cls(usable, weights, np.log(shares) - 0.5 * (means * weights).sum(1))

    def read(self, vectors: NDArray[np.floating]) -> list[str]:
        scores = check_finite(vectors) @ self.weights.T + self.bias
        return [self.labels[k] for k in scores.argmax(1)]


def why_unreadable(labels: Sequence[str]) -> str:
    """Returns why a classifier cannot be fitted to these labels, or an empty string."""
    if (num := len(set(labels))) > MOST:
        return f"the images have {num} labels, more than the {MOST} that are told apart"
    return (
        "" if len(_usable(labels)) > 1 else "the images of the reference have no two labels that several of them share"
    )


def _usable(labels: Sequence[str]) -> list[str]:
    """Returns the non-empty labels that several images have."""
    return sorted(label for label, num in Counter(labels).items() if num >= LEAST_OF_EACH and label)
