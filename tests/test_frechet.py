"""The Frechet distance against scipy's matrix square root and against closed forms."""

import numpy as np
import pytest

from atoll.errors import InputError
from atoll.evaluation.frechet import Moments, frechet_distance

linalg = pytest.importorskip("scipy.linalg")


def cloud(num, dim, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(num, dim)) @ rng.normal(size=(dim, dim)) + rng.normal(size=dim)


@pytest.mark.parametrize("dim", [1, 5, 40])
def test_against_scipy(dim):
    one, other = Moments.of(cloud(300, dim, 0)), Moments.of(cloud(200, dim, 1))
    root = linalg.sqrtm(one.covariance @ other.covariance).real
    expected = ((one.mean - other.mean) ** 2).sum() + np.trace(one.covariance + other.covariance - 2 * root)
    assert frechet_distance(one, other) == pytest.approx(expected, rel=1e-8)
    assert frechet_distance(one, other) == pytest.approx(frechet_distance(other, one), rel=1e-10)


def test_closed_forms():
    same = Moments.of(cloud(100, 8, 0))
    assert frechet_distance(same, same) == pytest.approx(0, abs=1e-9)
    moved = Moments(same.mean + 3, same.covariance, 100)
    assert frechet_distance(same, moved) == pytest.approx(8 * 9)
    wide, narrow = Moments(np.zeros(4), np.diag([4.0] * 4), 9), Moments(np.zeros(4), np.diag([1.0] * 4), 9)
    assert frechet_distance(wide, narrow) == pytest.approx(4 * (2 - 1) ** 2)


def test_fewer_samples_than_dimensions():
    one, other = Moments.of(cloud(10, 50, 0)), Moments.of(cloud(12, 50, 1))
    assert np.isfinite(frechet_distance(one, other))


def test_refused():
    with pytest.raises(InputError, match="at least 2"):
        Moments.of(np.zeros((1, 3)))
    with pytest.raises(InputError, match="features of 1 images are not finite"):
        Moments.of(np.array([[0.0, np.nan], [1, 2], [3, 4]]))
    with pytest.raises(InputError, match="cannot be compared"):
        frechet_distance(Moments.of(cloud(9, 2, 0)), Moments.of(cloud(9, 3, 0)))
