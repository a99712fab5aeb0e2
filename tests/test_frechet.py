"""The Frechet distance against scipy's matrix square root, torchmetrics and closed forms."""

import numpy as np
import pytest
import torch

from atoll.errors import InputError
from atoll.metrics.frechet import Moments, frechet_distance, frechet_error, frechet_infinity

linalg = pytest.importorskip("scipy.linalg")


def cloud(num, dim, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(num, dim)) @ rng.normal(size=(dim, dim)) + rng.normal(size=dim)


def covariance(of: Moments) -> np.ndarray:
    return of.factor.T @ of.factor


def by_scipy(one: np.ndarray, other: np.ndarray) -> float:
    means, (s1, s2) = (one.mean(0), other.mean(0)), (np.atleast_2d(np.cov(x, rowvar=False)) for x in (one, other))
    return ((means[0] - means[1]) ** 2).sum() + np.trace(s1 + s2 - 2 * linalg.sqrtm(s1 @ s2).real)


@pytest.mark.parametrize("dim", [1, 5, 40])
def test_against_scipy(dim):
    one, other = cloud(300, dim, 0), cloud(200, dim, 1)
    distance = frechet_distance(Moments.of(one), Moments.of(other))
    assert distance == pytest.approx(by_scipy(one, other), rel=1e-8)
    assert distance == pytest.approx(frechet_distance(Moments.of(other), Moments.of(one)), rel=1e-10)


def test_against_torchmetrics():
    fid = pytest.importorskip("torchmetrics.image.fid")

    class Flat(torch.nn.Module):
        num_features = 12

        def forward(self, x):
            return x.flatten(1)

    real, made = (torch.from_numpy(cloud(500, 12, seed)).reshape(-1, 3, 2, 2) for seed in (0, 1))
    theirs = fid.FrechetInceptionDistance(feature=Flat(), input_img_size=(3, 2, 2)).set_dtype(torch.float64)
    theirs.update(real, real=True)
    theirs.update(made, real=False)
    ours = frechet_distance(Moments.of(real.flatten(1).numpy()), Moments.of(made.flatten(1).numpy()))
    assert ours == pytest.approx(float(theirs.compute()), rel=1e-4)


def test_closed_forms():
    same = Moments.of(cloud(100, 8, 0))
    assert frechet_distance(same, same) == pytest.approx(0, abs=1e-9)
    moved = Moments(same.mean + 3, same.factor)
    assert frechet_distance(same, moved) == pytest.approx(8 * 9)
    wide, narrow = Moments(np.zeros(4), 2 * np.eye(4)), Moments(np.zeros(4), np.eye(4))
    assert frechet_distance(wide, narrow) == pytest.approx(4 * (2 - 1) ** 2)


@pytest.mark.parametrize("num", [2, 12, 49, 50])
def test_fewer_samples_than_dimensions(num):
    """scipy's root of a singular product is inexact itself, so the tolerance is larger."""
    one, other = cloud(40, 50, 0), cloud(num, 50, 1)
    assert frechet_distance(Moments.of(one), Moments.of(other)) == pytest.approx(by_scipy(one, other), rel=1e-4)


def test_identical_images():
    """Without any spread, what is left is the one image's distance from the mean, and the others' spread."""
    point, others = Moments.of(np.tile([[1.0, 2.0, 3.0]], (20, 1))), Moments.of(cloud(50, 3, 0))
    expected = ((point.mean - others.mean) ** 2).sum() + np.trace(covariance(others))
    assert frechet_distance(point, others) == pytest.approx(expected)
    assert frechet_distance(point, point) == 0


def test_far_from_the_origin():
    """Sums of squares would lose all digits of the variance here."""
    features = np.random.default_rng(0).normal(size=(4000, 3)) + 1e8
    np.testing.assert_allclose(covariance(Moments.of(features)), np.cov(features - 1e8, rowvar=False), atol=1e-6)
    lost = (features**2).sum(0) / 4000 - features.mean(0) ** 2
    assert np.abs(lost - 1).min() > 0.5


class TestInfinity:
    """Samples of a Gaussian whose distance to another is known."""

    reference = Moments(np.zeros(20), np.eye(20))

    def sample(self, num, seed):
        return 1.2 * np.random.default_rng(seed).normal(size=(num, 20)) + 0.1

    truth = 20 * 0.1**2 + 20 * 0.2**2

    def test_the_bias_is_gone(self, report):
        raw, found = [], []
        for seed in range(8):
            features = self.sample(400, seed)
            raw.append(frechet_distance(self.reference, Moments.of(features)))
            found.append(frechet_infinity(self.reference, features)[0])
        bias = np.mean(raw) - self.truth
        report(
            f"Frechet distance of 400 samples in 20 dimensions, truth {self.truth:.2f}: {np.mean(raw):.2f}, "
            f"extrapolated {np.mean(found):.2f}"
        )
        assert abs(np.mean(found) - self.truth) < 0.25 * bias

    def test_errors_are_of_the_size_of_what_they_tell(self):
        found = [frechet_infinity(self.reference, self.sample(400, seed)) for seed in range(12)]
        spread = np.std([value for value, _ in found])
        assert 0.3 * spread < np.mean([error for _, error in found]) < 3 * spread
        raw = [frechet_distance(self.reference, Moments.of(self.sample(400, seed))) for seed in range(12)]
        error = np.mean([frechet_error(self.reference, self.sample(400, seed)) for seed in range(12)])
        assert 0.5 * np.std(raw) < error < 2.5 * np.std(raw)


def test_refused():
    with pytest.raises(InputError, match="features of 1 images are not finite"):
        Moments.of(np.array([[0.0, np.nan], [1, 2], [3, 4]]))
