"""Proves that mixed objectives combine: perfect experts of every kind give the one true velocity field."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from atoll.diffusion.oracle import ClusteredGaussians
from atoll.diffusion.prediction import Prediction
from atoll.diffusion.schedules import LINEAR, SCHEDULES
from atoll.diffusion.solvers import euler, heun, uniform_times
from atoll.diffusion.transfer import Conversion, Safeguards, Transfer

TIMES = torch.cat([torch.tensor([0.001, 0.003]), torch.linspace(0.01, 0.99, 25), torch.tensor([0.997, 0.999])]).double()


def transfer(
    prediction: Prediction,
    schedule: str,
    conversion: Conversion = Conversion.EXACT,
    safeguards: Safeguards = Safeguards(),  # noqa: B008
) -> Transfer:
    """Returns a transfer; a closed-form expert knows every noise level, also those outside a table."""
    everywhere = (-math.inf, math.inf)
    return Transfer(prediction, SCHEDULES[schedule], conversion, safeguards=safeguards, log_snr_range=everywhere)


def points(data: ClusteredGaussians, t: Tensor, num: int = 64) -> Tensor:
    g = torch.Generator().manual_seed(7)
    x0, _ = data.sample(num, g)
    return (1 - t) * x0 + t * torch.randn(x0.shape, generator=g, dtype=x0.dtype)


def worst_error(data: ClusteredGaussians, transfers: list[Transfer], times: Tensor = TIMES) -> float:
    """Returns the largest relative error of the ensemble's velocity over points and times."""
    worst = 0.0
    for t in times:
        x = points(data, t)
        true = data.velocity(x, t)
        error = (data.ensemble_velocity(transfers, x, t) - true).norm(dim=1) / true.norm(dim=1)
        worst = max(worst, float(error.max()))
    return worst


@pytest.mark.parametrize("dim", [2, 64])
def test_the_oracle_itself(dim, rng):
    """Against torch's own mixture: density by torch.distributions, score by autograd, sampling by moments."""
    data = ClusteredGaussians.random(4, 3, dim)
    for t in (0.02, 0.5, 0.95):
        at = LINEAR(torch.tensor(t, dtype=torch.float64))
        normals = Normal(at.alpha * data.means, (at.alpha**2 * data.variances + at.sigma**2).sqrt())
        x = points(data, at.sigma).requires_grad_()
        whole = MixtureSameFamily(
            Categorical(data.weights.flatten()),
            Independent(Normal(normals.loc.flatten(0, 1), normals.scale.flatten(0, 1)), 1),
        )
        (score,) = torch.autograd.grad(whole.log_prob(x).sum(), x)
        x0, eps = data.estimate(x.detach(), at)
        torch.testing.assert_close(eps, -at.sigma * score, rtol=1e-8, atol=1e-10)  # Tweedie
        torch.testing.assert_close(at.alpha * x0 + at.sigma * eps, x.detach(), rtol=1e-9, atol=1e-10)

        clusters = MixtureSameFamily(
            Categorical(data.weights), Independent(normals, 1)
        )  # a batch of K mixtures, one per cluster
        joint = clusters.log_prob(x.detach()[:, None]) + data.weights.sum(1).log()
        torch.testing.assert_close(data.posterior(x.detach(), at), torch.softmax(joint, 1))

    x, label = data.sample(20_000, rng)
    for k in range(4):
        share = data.weights[k] / data.weights[k].sum()
        mean = (share[:, None] * data.means[k]).sum(0)
        torch.testing.assert_close(x[label == k].mean(0), mean, atol=0.06, rtol=0)


@pytest.mark.parametrize("dim", [2, 64])
@pytest.mark.parametrize("prediction", Prediction)
@pytest.mark.parametrize("name", SCHEDULES)
def test_exact_transfer_is_exact(name, prediction, dim, report):
    data = ClusteredGaussians.random(4, 3, dim)
    errors = {
        label: worst_error(data, [transfer(prediction, name, conversion, guard)] * 4)
        for label, conversion, guard in (
            ("exact", Conversion.EXACT, Safeguards()),
            ("paper, Eq. 7", Conversion.PAPER, Safeguards(equation=7)),
            ("paper, Eq. 8", Conversion.PAPER, Safeguards(equation=8)),
        )
    }
    figures = "   ".join(f"{label} {error:7.1e}" for label, error in errors.items())
    report(f"worst relative velocity error, {dim:2}-d, {name:11} {prediction:8}   {figures}")
    assert errors["exact"] < 1e-9
    if name in ("cosine", "ddpm"):  # the paper's formulas are off by more than a tenth even for perfect experts
        assert min(errors["paper, Eq. 7"], errors["paper, Eq. 8"]) > 0.1


@pytest.mark.parametrize("dim", [2, 64])
def test_all_kinds_mixed(dim):
    """Four experts of four predictions on four schedules, in every rotation of the pairing."""
    data = ClusteredGaussians.random(4, 3, dim)
    for shift in range(4):
        pairs = zip(Prediction, itertools.islice(itertools.cycle(SCHEDULES), shift, None), strict=False)
        assert worst_error(data, [transfer(prediction, schedule) for prediction, schedule in pairs]) < 1e-9


@pytest.mark.parametrize("dim", [2, 64])
@pytest.mark.parametrize("solver", [euler, heun])
def test_mixed_trajectories_are_those_of_velocity_experts(dim, solver, rng):
    """From t = 1 to t = 0, the ends included, where alpha or sigma is zero."""
    data = ClusteredGaussians.random(len(SCHEDULES), 3, dim)
    noise = torch.randn(200, dim, generator=rng, dtype=torch.float64)
    velocities = [Transfer(Prediction.VELOCITY, LINEAR)] * len(SCHEDULES)
    mixed = [transfer(p, s) for p, s in zip(itertools.cycle(Prediction), reversed(SCHEDULES), strict=False)]
    paths: list[list[Tensor]] = []
    for transfers in (velocities, mixed):
        path: list[Tensor] = []
        solver(
            lambda x, t, transfers=transfers: data.ensemble_velocity(transfers, x, t),
            noise,
            uniform_times(50),
            lambda step, path=path: path.append(step.x),
        )
        paths.append(path)
    difference = (torch.stack(paths[0]) - torch.stack(paths[1])).abs().max()
    assert float(difference) < 1e-6


def test_single_precision_is_enough_for_sampling(rng):
    """Except within 0.001 of either end, float32 costs an exact expert almost no accuracy."""
    data = ClusteredGaussians.random(4, 3, 8)
    single = ClusteredGaussians(data.means.float(), data.variances.float(), data.weights.float())
    for name, prediction in itertools.product(SCHEDULES, Prediction):
        assert worst_error(single, [transfer(prediction, name)] * 4, TIMES[2:-2].float()) < 2e-3


def test_islands():
    data = ClusteredGaussians.islands()
    x, label = data.sample(500, torch.Generator().manual_seed(0))
    assert x.shape == (500, 2)
    assert set(label.tolist()) == {0, 1, 2, 3}
    assert float(x.norm(dim=1).min()) > 1.4
