"""Precision, recall, density and coverage: whether samples lie among the real images, and cover all of them.

Kynkaanniemi et al. 2019 (precision, recall) and Naeem et al. 2020 (density, coverage). The ball of each image reaches
to its k-th nearest neighbour of its own set; the union of the balls estimates the support of the set.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.metrics.frechet import Array, check_finite

BLOCK = 1024  # rows of distances per block, so that memory grows linearly with the number of images


class Coverage(NamedTuple):
    """Four shares; only density may exceed 1."""

    precision: float  # of samples in the ball of some real image
    recall: float  # of real images in the ball of some sample
    density: float  # mean number of real balls that a sample is in, divided by k
    coverage: float  # of real balls that contain a sample


def measure_coverage(real: NDArray[np.floating], made: NDArray[np.floating], k: int, block: int = BLOCK) -> Coverage:
    """Computes all four from features [N, D] and [M, D], more than k of each, with balls of k neighbours."""
    real_points, made_points = check_finite(real), check_finite(made)
    centre = real_points.mean(0)  # squared distances are computed as differences, most accurate near the origin
    real_points, made_points = real_points - centre, made_points - centre
    reach_real, reach_made = _reach(real_points, k, block), _reach(made_points, k, block)
    balls = np.zeros(len(made), np.int64)  # number of real balls that each sample is in
    recalled = covered = 0
    for rows, squares in _blocks(real_points, made_points, block):
        inside = squares < reach_real[rows, None]
        balls += inside.sum(0)
        covered += int(inside.any(1).sum())
        recalled += int((squares < reach_made).any(1).sum())
    return Coverage(
        precision=float((balls > 0).mean()),
        recall=recalled / len(real),
        density=float(balls.mean()) / k,
        coverage=covered / len(real),
    )


def _reach(points: Array, k: int, block: int) -> Array:
    """Returns the squared distance of each point to its k-th nearest neighbour."""
    nearest = (np.partition(squares, k, 1)[:, k] for _, squares in _blocks(points, points, block))
    return np.concatenate(list(nearest))  # place 0 is the point itself


def _blocks(one: Array, other: Array, block: int) -> Iterator[tuple[slice, Array]]:
    """Yields the squared distances of blocks of rows of `one` to all of `other`."""
    lengths = (other**2).sum(1)
    for first in range(0, len(one), block):
        rows = slice(first, first + block)
        own = (one[rows] ** 2).sum(1)[:, None]
        squares = own + lengths - 2 * one[rows] @ other.T
        squares[squares < 1e-13 * (own + lengths)] = 0  # equal images, but for rounding
        yield rows, squares
