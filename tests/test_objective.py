"""Training objectives: targets, times and weights."""

import pytest
import torch
from scipy import stats
from torch import nn

from atoll.config import build
from atoll.diffusion.objective import OBJECTIVES, Objective, get_objective
from atoll.diffusion.oracle import ClusteredGaussians
from atoll.diffusion.prediction import Prediction
from atoll.errors import InputError


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=list(OBJECTIVES))
@pytest.mark.parametrize("weighting", ["plain", "min-snr"])
def test_the_loss_is_least_at_the_perfect_expert(objective, weighting, rng):
    """The closed-form expert beats itself with a small error added, as a minimum must."""
    data = ClusteredGaussians.random(1, 3, 6)
    objective = Objective(objective.prediction, objective.schedule, objective.time, weighting)
    perfect = data.expert(0, objective.prediction, objective.path)
    x0, _ = data.sample(4000, rng)
    eps = torch.randn(x0.shape, generator=rng, dtype=x0.dtype)
    t = objective.sample_times(4000, rng).double().clamp(0.02, 0.98)
    error = 0.3 * torch.randn(6, generator=rng, dtype=x0.dtype)
    least = objective.loss(perfect, x0, eps, t)
    assert least.shape == (4000,)
    for scale in (-1.0, 0.3, 1.0):
        off = objective.loss(lambda x, t, s=scale: perfect(x, t) + s * error, x0, eps, t)
        assert float(off.mean()) > float(least.mean())


def test_the_papers_two_losses(rng):
    """Eq. 3 and Eq. 4 written out, for a network that outputs zero."""
    x0, eps = torch.randn(2, 5, 3, generator=rng)
    t = torch.rand(5, generator=rng)
    seen = {}

    def silent(x, t):
        seen["x"] = x
        return torch.zeros_like(x)

    torch.testing.assert_close(OBJECTIVES["ddpm"].loss(silent, x0, eps, t), (eps**2).mean(1))
    angle = torch.pi / 2 * t[:, None]
    torch.testing.assert_close(seen["x"], torch.cos(angle) * x0 + torch.sin(angle) * eps)
    torch.testing.assert_close(OBJECTIVES["fm"].loss(silent, x0, eps, t), ((eps - x0) ** 2).mean(1))
    torch.testing.assert_close(seen["x"], (1 - t[:, None]) * x0 + t[:, None] * eps)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=list(OBJECTIVES))
def test_losses_are_finite_at_the_ends(objective):
    t = torch.tensor([0.0, 1.0])
    for weighting in ("plain", "min-snr"):
        loss = Objective(objective.prediction, objective.schedule, weighting=weighting).loss(
            lambda x, t: 0 * x, torch.ones(2, 3), torch.ones(2, 3), t
        )
        assert bool(torch.isfinite(loss).all())


def test_min_snr_is_the_published_weight():
    """Hang et al.: min(SNR, gamma) on x0, over SNR for noise, over SNR + 1 for v (variance preserving)."""
    t = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    at = OBJECTIVES["ddpm"].path(t)
    snr = (at.alpha / at.sigma) ** 2
    capped = snr.clamp(max=5)
    for prediction, expected in (
        (Prediction.X0, capped),
        (Prediction.EPS, capped / snr),
        (Prediction.V, capped / (snr + 1)),
    ):
        torch.testing.assert_close(Objective(prediction, "cosine", weighting="min-snr").weight(t), expected)


def test_laws_of_time(rng):
    uniform = OBJECTIVES["fm"].sample_times(20_000, rng)
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > 0.01
    skewed = Objective(Prediction.VELOCITY, "linear", time="logit-normal", time_mean=0.5, time_std=1.2)
    logits = torch.logit(skewed.sample_times(20_000, rng).double())
    assert stats.kstest(logits.numpy(), "norm", args=(0.5, 1.2)).pvalue > 0.01


@pytest.mark.slow
def test_a_network_learns_each_objective(rng):
    """A small MLP on a two-dimensional cluster gets near the loss of the perfect expert."""
    data = ClusteredGaussians.islands(1, 6)
    for name, objective in OBJECTIVES.items():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 2))

        def predict(x, t, net=net):
            time = t.expand(len(x))[:, None].to(x.dtype)
            return net(torch.cat([x, time, torch.cos(torch.pi * time)], 1))

        def losses(expert, num, dtype, objective=objective):
            x0, _ = data.sample(num, rng)
            eps = torch.randn(x0.shape, generator=rng)
            t = objective.sample_times(num, rng).clamp(0.02, 0.98)
            return objective.loss(expert, x0.to(dtype), eps.to(dtype), t.to(dtype)).mean()

        optimizer = torch.optim.Adam(net.parameters(), 3e-3)
        first = None
        for _ in range(600):
            loss = losses(predict, 256, torch.float32)
            first = first or loss.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            final = float(losses(predict, 8192, torch.float32))
            floor = float(losses(data.expert(0, objective.prediction, objective.path), 8192, torch.float64))
        assert final - floor < 0.35 * (first - floor), name


def test_bad_input():
    with pytest.raises(InputError, match=r"unknown objective 'ddmp': did you mean 'ddpm'\?"):
        get_objective("ddmp")
    with pytest.raises(InputError, match="unknown schedule"):
        Objective(Prediction.EPS, "quadratic")
    with pytest.raises(InputError, match="unknown time sampling"):
        Objective(Prediction.EPS, "cosine", time="normal")
    with pytest.raises(InputError, match="unknown weighting"):
        Objective(Prediction.EPS, "cosine", weighting="snr")
    with pytest.raises(InputError, match="time_mean must be finite"):
        Objective(Prediction.EPS, "cosine", time_mean=float("nan"))
    with pytest.raises(InputError, match="time_std must be above 0"):
        Objective(Prediction.EPS, "cosine", time_std=0)
    with pytest.raises(InputError, match=r"unknown key of an objective 'shedule': did you mean 'schedule'\?"):
        build(Objective, {"prediction": "eps", "shedule": "cosine"}, "an objective")
    assert build(Objective, {"prediction": "eps", "schedule": "cosine"}, "an objective") == OBJECTIVES["ddpm"]
