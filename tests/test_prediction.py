"""The four predictions and the conversions among them."""

import pytest
import torch
from diffusers import DDPMScheduler
from hypothesis import given
from hypothesis import strategies as st

from atoll.diffusion.prediction import Prediction, estimate, output_for, x0_weight
from atoll.diffusion.schedules import SCHEDULES
from atoll.errors import InputError

numbers = st.floats(-100, 100)
names = st.sampled_from(sorted(SCHEDULES))
kinds = st.sampled_from(Prediction)


@given(schedule=names, source=kinds, target=kinds, t=st.floats(0.01, 0.99), x0=numbers, eps=numbers)
def test_conversions_round_trip(schedule, source, target, t, x0, eps):
    at = SCHEDULES[schedule](torch.tensor(t, dtype=torch.float64))
    x0, eps = torch.tensor([[x0]], dtype=torch.float64), torch.tensor([[eps]], dtype=torch.float64)
    x = at.alpha * x0 + at.sigma * eps
    output = output_for(source, x0, eps, at)
    there = output_for(target, *estimate(source, output, x, at), at)
    scale = float(x0.abs() + eps.abs()) * float(at.d_sigma.abs() + at.d_alpha.abs() + 1)
    torch.testing.assert_close(there, output_for(target, x0, eps, at), rtol=0, atol=1e-9 * scale + 1e-12)
    back = output_for(source, *estimate(target, there, x, at), at)
    torch.testing.assert_close(back, output, rtol=0, atol=1e-9 * scale + 1e-12)


@given(schedule=names, kind=kinds, t=st.floats(0.01, 0.99), output=numbers, x=numbers)
def test_every_estimate_makes_up_x(schedule, kind, t, output, x):
    at = SCHEDULES[schedule](torch.tensor(t, dtype=torch.float64))
    output, x = torch.tensor([[output]], dtype=torch.float64), torch.tensor([[x]], dtype=torch.float64)
    x0, eps = estimate(kind, output, x, at)
    torch.testing.assert_close(at.alpha * x0 + at.sigma * eps, x, rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize("kind", Prediction)
@pytest.mark.parametrize("name", SCHEDULES)
def test_proposition_1(kind, name, rng):
    """The squared error of a prediction is w(t) times that of the x0 it implies, whatever the error."""
    t = torch.rand(50, generator=rng, dtype=torch.float64) * 0.98 + 0.01
    at = SCHEDULES[name](t)
    x0, eps, error = torch.randn(3, 50, 7, generator=rng, dtype=torch.float64)
    alpha, sigma, _, _ = at.broadcast(x0)
    target = output_for(kind, x0, eps, at)
    x0_hat, _ = estimate(kind, target + error, alpha * x0 + sigma * eps, at)
    torch.testing.assert_close((error**2).sum(1), x0_weight(kind, at) * ((x0_hat - x0) ** 2).sum(1))


def test_the_papers_weights():
    t = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    for name in ("cosine", "ddpm"):  # variance preserving
        at = SCHEDULES[name](t)
        torch.testing.assert_close(x0_weight(Prediction.EPS, at), at.alpha**2 / at.sigma**2)  # Eq. 9
        torch.testing.assert_close(x0_weight(Prediction.V, at), 1 / at.sigma**2)  # Eq. 10
        ratio = x0_weight(Prediction.V, at) / x0_weight(Prediction.EPS, at)
        torch.testing.assert_close(ratio, 1 / at.alpha**2)  # Eq. 11
    at = SCHEDULES["linear"](t)
    ratio = x0_weight(Prediction.VELOCITY, at) / x0_weight(Prediction.EPS, at)
    torch.testing.assert_close(ratio, 1 / (1 - t) ** 2)  # the Remark


def test_v_is_that_of_diffusers(rng):
    theirs = DDPMScheduler(num_train_timesteps=1000, beta_start=1e-4, beta_end=2e-2)
    x0, eps = torch.randn(2, 8, 3, 4, 4, generator=rng)
    steps = torch.randint(0, 1000, (8,), generator=rng)
    at = SCHEDULES["ddpm"](steps / 999)
    torch.testing.assert_close(
        output_for(Prediction.V, x0, eps, at), theirs.get_velocity(x0, eps, steps), rtol=1e-4, atol=1e-4
    )


def test_bad_input():
    with pytest.raises(InputError, match=r"unknown prediction 'epsilon': .*accepted are eps, v, velocity, x0"):
        Prediction("epsilon")
