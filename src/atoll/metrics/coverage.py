"""Precision, recall, density and coverage: do images lie among the real ones, and are all real ones reached.

Kynkaanniemi et al. 2019 (precision, recall) and Naeem et al. 2020 (density, coverage). A ball about each image reaches
to its k-th nearest neighbour of its own kind; the balls of the real images stand for where real images are.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.metrics.frechet import Array, check_finite

BLOCK = 1024  # rows of distances at a time: memory grows with the number of images, not with its square


class Coverage(NamedTuple):
    """Shares of images; density alone may exceed 1."""

    precision: float  # made images in some real ball
    recall: float  # real images in some ball of a made one
    density: float  # real balls that a made image is in, over k
    coverage: float  # real balls with a made image in them


def measure_coverage(real: NDArray[np.floating], made: NDArray[np.floating], k: int, block: int = BLOCK) -> Coverage:
    """Returns those of features [N, D] and [M, D], more than k of each, by balls of k neighbours."""
    real_points, made_points = check_finite(real), check_finite(made)
    centre = real_points.mean(0)  # distances are differences of squares, which lose least near the origin
    real_points, made_points = real_points - centre, made_points - centre
    reach_real, reach_made = _reach(real_points, k, block), _reach(made_points, k, block)
    balls = np.zeros(len(made), np.int64)  # real ones that each made image is in
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
    """Returns the squared distance of each point to its k-th nearest other one."""
    nearest = (np.partition(squares, k, 1)[:, k] for _, squares in _blocks(points, points, block))
    return np.concatenate(list(nearest))  # place 0 is the point itself


def _blocks(one: Array, other: Array, block: int) -> Iterator[tuple[slice, Array]]:
    """Yields squared distances of some rows of `one` to all of `other` at a time."""
    lengths = (other**2).sum(1)
    for first in range(0, len(one), block):
        rows = slice(first, first + block)
        own = (one[rows] ** 2).sum(1)[:, None]
        squares = own + lengths - 2 * one[rows] @ other.T
        squares[squares < 1e-13 * (own + lengths)] = 0  # equal images: what is left is rounding
        yield rows, squares
