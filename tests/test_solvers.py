"""Solvers: their order on a problem with a known solution, and agreement with diffusers' schedulers."""

import math

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from atoll.diffusion.guidance import guided
from atoll.diffusion.oracle import ClusteredGaussians
from atoll.diffusion.prediction import Estimate, Prediction, estimate
from atoll.diffusion.schedules import SCHEDULES
from atoll.diffusion.solvers import (
    EVALUATIONS,
    SOLVERS,
    ddim,
    euler,
    get_solver,
    uniform_times,
)
from atoll.errors import InputError

MEAN, STD = 0.7, 0.35  # the data of the known problem: one Gaussian


def gaussian_velocity(x: Tensor, t: Tensor) -> Tensor:
    """dx/dt for x0 ~ N(MEAN, STD^2) on the canonical path."""
    variance = ((1 - t) * STD) ** 2 + t**2
    off = x - (1 - t) * MEAN
    return t / variance * off - (MEAN + (1 - t) * STD**2 / variance * off)


SLOPE = ClusteredGaussians(  # in one dimension, lopsided, and not Gaussian
    torch.tensor([[[-0.6], [0.9]]]).double(),
    torch.tensor([[[0.3], [0.1]]]).double(),
    torch.tensor([[0.35, 0.65]]).double(),
)


def quantile_solution(noise: Tensor, t: float) -> Tensor:
    """Returns the exact solution F_t^-1(Phi(noise)) by bisection: in one dimension a flow preserves quantiles."""
    alpha, sigma = 1 - t, t
    spread = (alpha**2 * SLOPE.variances + sigma**2).sqrt().flatten()
    low, high = torch.full_like(noise, -20), torch.full_like(noise, 20)
    for _ in range(80):
        middle = (low + high) / 2
        below = torch.special.ndtr((middle[:, None] - alpha * SLOPE.means.flatten()) / spread) @ SLOPE.weights.flatten()
        low, high = (
            torch.where(below < torch.special.ndtr(noise), middle, low),
            torch.where(below < torch.special.ndtr(noise), high, middle),
        )
    return (low + high) / 2


def grid_from(num_steps: int, start: float, end: float, shift: float) -> Tensor:
    """Returns a grid from start to end, whose steps grow or shrink by `shift`."""
    t = uniform_times(num_steps)
    share = shift * t / (1 + (shift - 1) * t)
    return end + (start - end) * share


def measured_order(name: str, start: float, end: float, shift: float = 1.0) -> float:
    noise = torch.linspace(-2, 2, 21, dtype=torch.float64)
    begin = quantile_solution(noise, start)[:, None]
    steps, errors = [100, 200, 400], []
    for n in steps:
        found = SOLVERS[name](SLOPE.velocity, begin, grid_from(n, start, end, shift), None)
        errors.append(float((found[:, 0] - quantile_solution(noise, end)).abs().max()))
    return math.log(errors[0] / errors[-1]) / math.log(steps[-1] / steps[0])


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize(("start", "end"), [(1.0, 0.0), (0.95, 0.05)])
def test_order_of_convergence(name, start, end, report):
    order = measured_order(name, start, end)
    report(f"order of convergence, t from {start:4} to {end:4}, {name:9} {order:.2f}")
    least = 0.9 if name == "euler" else 1.9
    if name == "dpm2m" and start == 1:
        least = (
            1.6  # near the ends a step in its coordinate, log(alpha / sigma), does not shrink with h: h^2 log(1 / h)
        )
    assert order >= least


@pytest.mark.parametrize("name", SOLVERS)
def test_order_on_uneven_steps(name):
    assert measured_order(name, 0.95, 0.05, shift=3.0) >= (0.9 if name == "euler" else 1.9)


def test_a_sample_does_not_depend_on_its_batch():
    def seeds(*numbers: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(number) for number in numbers]

    x = torch.randn(3, 6)
    together = ddim(denoise, TABLE, x, uniform_times(5), 1.0, seeds(1, 2, 3))
    alone = ddim(denoise, TABLE, x[1:2], uniform_times(5), 1.0, seeds(2))
    torch.testing.assert_close(together[1:2], alone)


@pytest.mark.parametrize("name", SOLVERS)
def test_evaluations_and_steps_shown(name):
    calls, shown = [], []

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        calls.append(float(t))
        assert t.dim() == 0
        return gaussian_velocity(x, t)

    noise = torch.randn(4, 2, dtype=torch.float64)
    found = SOLVERS[name](velocity, noise, grid_from(7, 1.0, 0.0, 2.0), shown.append)
    assert len(calls) == 7 * EVALUATIONS[name] - (name == "heun")
    assert min(calls) > 0
    assert [step.number for step in shown] == list(range(7))
    assert shown[-1].x is found
    first = shown[0]
    torch.testing.assert_close(first.x0, torch.full_like(noise, MEAN))  # E[x0] at pure noise


def test_euler_is_that_of_diffusers(rng):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(12)
    x = theirs = torch.randn(3, 2, 4, 4, generator=rng)
    for step in scheduler.timesteps:
        theirs = scheduler.step(gaussian_velocity(theirs, step / 1000), step, theirs).prev_sample
    torch.testing.assert_close(euler(gaussian_velocity, x, scheduler.sigmas.double()), theirs, rtol=1e-4, atol=1e-5)


def test_dpm2m_is_that_of_diffusers(rng):
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=2.0, algorithm_type="dpmsolver++",
        solver_order=2, lower_order_final=True, final_sigmas_type="zero",
    )  # fmt: skip
    scheduler.set_timesteps(12)
    sigmas = scheduler.sigmas
    x = theirs = torch.randn(3, 2, 4, 4, generator=rng)
    for i, step in enumerate(scheduler.timesteps):
        theirs = scheduler.step(gaussian_velocity(theirs, sigmas[i]), step, theirs).prev_sample
    ours = get_solver("dpm2m")(gaussian_velocity, x, sigmas.double(), None)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


DATA = ClusteredGaussians.random(1, 3, 6)
TABLE = SCHEDULES["ddpm"]
STEPS = list(range(980, -1, -20))  # diffusers' "leading" steps of 50


def eps_expert(x: Tensor, t: Tensor) -> Tensor:
    return DATA.expert(0, Prediction.EPS, TABLE)(x.double(), t.double()).to(x.dtype)


def denoise(x: Tensor, t: Tensor) -> Estimate:
    return estimate(Prediction.EPS, eps_expert(x, t), x, TABLE(t))


def test_ddim_is_that_of_diffusers(rng):
    scheduler = DDIMScheduler(1000, 1e-4, 2e-2, clip_sample=False)
    scheduler.set_timesteps(50)
    assert scheduler.timesteps.tolist() == STEPS
    x = theirs = torch.randn(20, 6, generator=rng)
    grid = torch.tensor(STEPS, dtype=torch.float64) / 999
    for step in scheduler.timesteps:
        if step == 20:
            torch.testing.assert_close(ddim(denoise, TABLE, x, grid[:-1]), theirs, rtol=1e-3, atol=1e-3)
        theirs = scheduler.step(eps_expert(theirs, step / 999), step, theirs).prev_sample
    # Their 50th step starts from step 0 and leads to data. In our grid time 0 is data, so we go there from step 20.
    ours = ddim(denoise, TABLE, x, grid)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_ancestral_is_that_of_diffusers(rng):
    """In one step with known noise, mean and standard deviation are DDPM's."""
    scheduler = DDPMScheduler(1000, 1e-4, 2e-2, variance_type="fixed_small", clip_sample=False)
    x = torch.randn(7, 6, generator=rng)
    for step in (900, 500, 20):
        times = torch.tensor([step / 999, (step - 1) / 999], dtype=torch.float64)
        ours = ddim(denoise, TABLE, x, times, 1.0, torch.Generator().manual_seed(3))
        theirs = scheduler.step(
            eps_expert(x, torch.tensor(step / 999)), step, x, generator=torch.Generator().manual_seed(3)
        ).prev_sample
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_native_samplers_reach_the_data(name, eta, rng):
    """Small steps from each schedule's own noise give the Gaussian's mean and spread."""
    schedule = SCHEDULES[name]

    def perfect(x: Tensor, t: Tensor) -> Estimate:
        alpha, sigma, _, _ = schedule(t)
        variance = (alpha * STD) ** 2 + sigma**2
        off = x - alpha * MEAN
        return Estimate(MEAN + alpha * STD**2 / variance * off, sigma / variance * off)

    x0, eps = torch.randn(2, 20_000, 1, generator=rng, dtype=torch.float64)
    alpha, sigma, _, _ = schedule(torch.tensor(1.0).double())
    start = alpha * (MEAN + STD * x0) + sigma * eps  # Stable Diffusion's table ends well short of pure noise
    found = ddim(perfect, schedule, start, uniform_times(200), eta, rng)
    assert float(found.mean()) == pytest.approx(MEAN, abs=0.02)
    assert float(found.std()) == pytest.approx(STD, abs=0.02)


def test_time_grids():
    torch.testing.assert_close(uniform_times(4), torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]).double())


class TestGuidance:
    """Tests with a network that returns its text: 2, and 1 for the null text."""

    @staticmethod
    def velocity(x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        return text[:, None].expand_as(x)

    def test_scale(self):
        x = torch.zeros(2, 3)
        texts = {False: torch.tensor([2.0, 2.0]), True: torch.tensor([2.0, 2.0, 1.0, 1.0])}
        guide = guided(self.velocity, 4.0, texts.__getitem__)
        assert torch.all(guide(x, torch.tensor(0.5)) == 5.0)  # 1 + 4 (2 - 1)
        assert torch.all(guide(x, torch.tensor([0.5, 0.1])) == 5.0)

    def test_no_work_where_there_is_no_guidance(self):
        guide = guided(lambda x, t, text: text + x, 1.0, {False: 7.0}.__getitem__)
        assert guide(torch.zeros(1, 1), torch.tensor(0.5)) == 7.0


def test_bad_input():
    x = torch.zeros(1, 2)
    with pytest.raises(InputError, match="unknown solver 'eular': did you mean 'euler'"):
        get_solver("eular")
    with pytest.raises(InputError, match="each below the one before"):
        euler(gaussian_velocity, x, torch.tensor([0.0, 1.0]))
    with pytest.raises(InputError, match="each below the one before"):
        euler(gaussian_velocity, x, torch.tensor([1.0, 0.5, 0.5 - 1e-12, 0.0], dtype=torch.float64))
    with pytest.raises(InputError, match=r"t must lie in \[0, 1\]"):
        euler(gaussian_velocity, x, torch.tensor([999.0, 500.0, 0.0]))
