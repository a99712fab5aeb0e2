"""Schedules: derivatives, log-SNR and its inverse, the ends, and the published tables."""

import math

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.functional import jacobian

from atoll.diffusion.schedules import LINEAR, SCHEDULES, Cosine, DDPMTable, get_schedule
from atoll.errors import InputError

schedules = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=list(SCHEDULES))


@schedules
def test_derivatives_equal_autograd(schedule):
    t = torch.linspace(0.0005, 0.9995, 501, dtype=torch.float64)
    at = schedule(t)
    for value, derivative in ((0, at.d_alpha), (1, at.d_sigma)):
        automatic = jacobian(lambda s, i=value: schedule(s)[i], t).diagonal()
        torch.testing.assert_close(derivative, automatic, rtol=1e-10, atol=1e-12)


@schedules
def test_derivatives_equal_finite_differences(schedule):
    """Autograd would only differentiate our code; finite differences check its values."""
    h = 1e-7
    t = torch.linspace(0.01, 0.99, 97, dtype=torch.float64) + 1e-4 / math.pi  # off the knots of the tables
    at, up, down = schedule(t), schedule(t + h), schedule(t - h)
    torch.testing.assert_close(at.d_alpha, (up.alpha - down.alpha) / (2 * h), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(at.d_sigma, (up.sigma - down.sigma) / (2 * h), rtol=1e-6, atol=1e-6)


@schedules
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-4)])
def test_log_snr_and_its_inverse(schedule, dtype, tolerance):
    ends = torch.logspace(-6, -1.01, 40), 1 - torch.logspace(-1.01, -3.5, 40)
    t = torch.cat([ends[0], torch.linspace(0.1, 0.9, 40), ends[1]]).to(dtype)
    log_snr = schedule.log_snr(t)
    assert bool((log_snr.diff() < 0).all())
    torch.testing.assert_close(schedule.time_of(log_snr), t, rtol=tolerance, atol=tolerance * 1e-3)
    alpha, sigma, _, _ = schedule(t)
    torch.testing.assert_close(log_snr, 2 * torch.log(alpha / sigma), rtol=tolerance, atol=tolerance)


@schedules
@given(log_snr=st.floats(-30, 30))
def test_time_of_is_right_at_any_level(schedule, log_snr):
    t = schedule.time_of(torch.tensor(log_snr, dtype=torch.float64))
    assert float(schedule.log_snr(t)) == pytest.approx(log_snr, abs=1e-3 if log_snr > 25 else 1e-6)


@pytest.mark.parametrize("schedule", [LINEAR, Cosine()], ids=["linear", "cosine"])
def test_the_ends(schedule):
    at = schedule(torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(at.alpha, torch.tensor([1.0, 0.0]), atol=0, rtol=0)
    torch.testing.assert_close(at.sigma, torch.tensor([0.0, 1.0]), atol=0, rtol=0)
    assert schedule.log_snr_range == (-math.inf, math.inf)
    torch.testing.assert_close(schedule.time_of(torch.tensor([math.inf, -math.inf])), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("schedule", [LINEAR, Cosine()], ids=["linear", "cosine"])
def test_single_precision_keeps_its_digits_at_the_ends(schedule):
    """alpha near t = 1 and sigma near t = 0 are small divisors."""
    distance = torch.logspace(-7, -1, 50)
    for t in (distance, 1 - distance):
        single, double = schedule(t), schedule(t.double())
        for rough, exact in zip(single, double, strict=True):
            torch.testing.assert_close(rough.double(), exact, rtol=4e-7, atol=0)


@pytest.mark.parametrize(("name", "kind"), [("ddpm", "linear"), ("ddpm-scaled", "scaled_linear")])
def test_tables_equal_diffusers(name, kind):
    schedule = SCHEDULES[name]
    assert isinstance(schedule, DDPMTable)
    theirs = DDPMScheduler(
        num_train_timesteps=1000, beta_start=schedule.beta_start, beta_end=schedule.beta_end, beta_schedule=kind
    ).alphas_cumprod
    at = schedule(torch.arange(1000, dtype=torch.float64) / 999)
    torch.testing.assert_close(at.alpha**2, theirs.double(), rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(at.sigma**2, 1 - theirs.double(), rtol=1e-3, atol=1e-6)


def test_the_table_equals_its_definition():
    alpha2 = np.cumprod(1 - np.linspace(1e-4, 2e-2, 1000))
    ours = SCHEDULES["ddpm"](torch.arange(1000, dtype=torch.float64) / 999).alpha ** 2
    np.testing.assert_allclose(ours.numpy(), alpha2, rtol=1e-12)


def test_a_table_goes_on_beyond_its_ends():
    schedule = SCHEDULES["ddpm"]
    data = schedule.coefficients(torch.tensor([schedule.data_time]))
    assert float(data.alpha) == pytest.approx(1)
    assert float(data.sigma) == pytest.approx(0, abs=1e-6)
    assert -11 < schedule.log_snr_range[0] < -10
    assert 9 < schedule.log_snr_range[1] < 10
    assert float(schedule.time_of(torch.tensor(-20.0))) > 1


@pytest.mark.parametrize("t", [-0.01, 1.5, 500.0, math.nan, math.inf])
@schedules
def test_times_outside_are_refused(schedule, t):
    with pytest.raises(InputError, match=r"t must lie in \[0, 1\] but is .*: times are fractions"):
        schedule(torch.tensor(t))


def test_step_numbers_are_refused():
    with pytest.raises(InputError, match="not step numbers"):
        LINEAR(torch.tensor([0, 999]))


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(InputError, match=r"unknown schedule 'cosin': did you mean 'cosine'\?"):
        get_schedule("cosin")
