"""Solvers for any canonical velocity function, and native samplers for a single expert.

A solver is a pure function of a velocity, an initial x and a descending grid of times. It calls the velocity with
one 0-d time for the whole batch. The native samplers follow an expert's own schedule instead, as DDPM did.

Each solver is written as a walk, a generator that yields (x, t) and is sent the velocity there. A server can thus
advance many walks at different times by one batched evaluation.

Times stay on the host, where reading them costs nothing; the velocity gets a copy on the device of x, sent once.
"""

from collections.abc import Callable, Generator, Sequence
from functools import update_wrapper
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.diffusion.prediction import Estimate
from atoll.diffusion.schedules import Schedule, check_times
from atoll.errors import InputError, unknown
from atoll.tensors import send

Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x, t) -> dx/dt on the canonical path."""

Denoise = Callable[[Tensor, Tensor], Estimate]
"""(x, t) -> (x0, eps) on an expert's own schedule."""


class Step(NamedTuple):
    """The argument of the `on_step` callback after each step."""

    number: int  # from 0
    t: Tensor  # time of the velocity, 0-d, on the host
    x: Tensor  # the sample after the step
    x0: Tensor  # the clean sample that the velocity at t points to


OnStep = Callable[[Step], None]
Generators = torch.Generator | Sequence[torch.Generator] | None
Walk = Generator[tuple[Tensor, Tensor], Tensor, Tensor]
"""Yields (x, t), is sent the velocity there, and finally returns the sample; t is 0-d, on the device of x."""


class Solver:
    """A walk from noise to data; calling it runs the walk with one velocity function."""

    def __init__(self, walk: Callable[[Tensor, Tensor, OnStep | None], Walk]) -> None:
        self.walk = walk
        update_wrapper(self, walk)

    def __call__(self, velocity: Velocity, x: Tensor, times: Tensor, on_step: OnStep | None = None) -> Tensor:
        walk = self.walk(x, times, on_step)
        try:
            at = next(walk)
            while True:
                at = walk.send(velocity(*at))
        except StopIteration as end:
            latents: Tensor = end.value
            return latents


def uniform_times(num_steps: int) -> Tensor:
    """Returns num_steps + 1 times, evenly spaced from noise to data."""
    return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)


# --- solvers on the canonical path --------------------------------------------------------------------------------


@Solver
def euler(x: Tensor, times: Tensor, on_step: OnStep | None) -> Walk:
    """Order 1, one evaluation per step."""
    grid, sent = _grid(times, x)
    for i, (t, t_next) in enumerate(pairwise(grid)):
        u = yield x, sent[i]
        x, before = x + (t_next - t) * u, x
        _show(on_step, i, t, x, before, u)
    return x


@Solver
def heun(x: Tensor, times: Tensor, on_step: OnStep | None) -> Walk:
    """Order 2: the mean of the slopes at both ends; two evaluations per step.

    A step to t = 0 uses only the first slope, without loss of order: at t = 0 itself sigma is zero, and dividing by it
    would leave only the error of an x0-predicting expert.
    """
    grid, sent = _grid(times, x)
    for i, (t, t_next) in enumerate(pairwise(grid)):
        h = t_next - t
        u = yield x, sent[i]
        u_end = (yield x + h * u, sent[i + 1]) if t_next > 0 else u
        x, before = x + h * (u + u_end) / 2, x
        _show(on_step, i, t, x, before, u)
    return x


@Solver
def midpoint(x: Tensor, times: Tensor, on_step: OnStep | None) -> Walk:
    """Order 2: the slope at the midpoint; two evaluations per step, never at t = 0."""
    grid, sent = _grid(times, x)
    middles = sent[:-1] + sent.diff() / 2
    for i, (t, t_next) in enumerate(pairwise(grid)):
        h = t_next - t
        u = yield x, sent[i]
        u_middle = yield x + h / 2 * u, middles[i]
        x, before = x + h * u_middle, x
        _show(on_step, i, t, x, before, u)
    return x


@Solver
def multistep(x: Tensor, times: Tensor, on_step: OnStep | None) -> Walk:
    """Order 2: Adams-Bashforth from the last two slopes, for any step sizes; one evaluation per step."""
    grid, sent = _grid(times, x)
    last: tuple[Tensor, Tensor] | None = None
    for i, (t, t_next) in enumerate(pairwise(grid)):
        h = t_next - t
        u = yield x, sent[i]
        slope = u
        if last is not None:
            u_last, h_last = last
            slope = u + h / (2 * h_last) * (u - u_last)
        x, before = x + h * slope, x
        last = u, h
        _show(on_step, i, t, x, before, u)
    return x


@Solver
def dpm2m(x: Tensor, times: Tensor, on_step: OnStep | None) -> Walk:
    """Order 2: DPM-Solver++(2M), which extrapolates x0 along log(alpha / sigma); one evaluation per step.

    At t = 1 and t = 0 that coordinate is infinite, so steps from or to an end are of order 1; a step to t = 0 returns
    the last x0.
    """
    grid, sent = _grid(times, x)
    last: tuple[Tensor, Tensor] | None = None
    for i, (t, t_next) in enumerate(pairwise(grid)):
        u = yield x, sent[i]
        x0 = x - t * u
        h = torch.logit(1 - t_next) - torch.logit(1 - t)  # in log((1 - t) / t)
        ahead = x0
        if last is not None and torch.isfinite(h):
            x0_last, h_last = last  # after the step from t = 1, h_last is infinite and the correction zero
            ahead = x0 + h / (2 * h_last) * (x0 - x0_last)
        # sigma' / sigma x - alpha' (exp(-h) - 1) x0, where exp(-h) = t' (1 - t) / (t (1 - t')).
        x, before = t_next / t * x + (1 - t_next / t) * ahead, x
        last = x0, h
        _show(on_step, i, t, x, before, u)
    return x


SOLVERS = {"euler": euler, "heun": heun, "midpoint": midpoint, "multistep": multistep, "dpm2m": dpm2m}

EVALUATIONS = {"euler": 1, "heun": 2, "midpoint": 2, "multistep": 1, "dpm2m": 1}
"""Velocity evaluations per step; heun saves one in total if it ends at t = 0."""


def get_solver(name: str) -> Solver:
    if name not in SOLVERS:
        raise unknown("solver", name, SOLVERS)
    return SOLVERS[name]


# --- native samplers on an expert's own schedule ------------------------------------------------------------------


def ddim(
    denoise: Denoise,
    schedule: Schedule,
    x: Tensor,
    times: Tensor,
    eta: float = 0.0,
    generator: Generators = None,
) -> Tensor:
    """Samples by DDIM on the expert's own schedule; eta scales the fresh noise of each step, 0 is deterministic.

    Time 0 in the grid means clean data, even for a table, whose own step 0 still has some noise. With a list of
    generators, one per sample, a sample does not depend on its batch.
    """
    grid, sent = _grid(times, x)
    for i, (t_grid, t_next) in enumerate(pairwise(grid)):
        t = schedule.inside(t_grid)
        x0, eps = denoise(x, schedule.inside(sent[i]))
        alpha, sigma, _, _ = schedule(t)
        after = t_next if t_next > 0 else torch.full_like(t_next, schedule.data_time)
        alpha_next, sigma_next, _, _ = schedule.coefficients(after)
        # The variance that a forward Markov step from t_next to t adds; `fresh` is DDPM's posterior variance.
        added = sigma**2 - (alpha / alpha_next * sigma_next) ** 2
        fresh = eta * sigma_next / sigma * added.clamp_min(0).sqrt()
        x = alpha_next * x0 + (sigma_next**2 - fresh**2).clamp_min(0).sqrt() * eps
        if eta > 0:
            x = x + fresh * _noise_like(x, generator)
    return x


def table_times(num_steps: int, num_train: int = 1000) -> Tensor:
    """Returns `num_steps` steps of a table as times ("trailing" spacing), starting at the last, then 0 for clean data.

    Step 0 itself, which still has noise, is shifted by a ten-thousandth of a step, to differ from clean data.
    """
    steps = torch.arange(num_train, 0, -num_train / num_steps, dtype=torch.float64)[:num_steps].round() - 1
    return torch.cat([steps.clamp_min(1e-4) / (num_train - 1), torch.zeros(1, dtype=torch.float64)])


def bounded_x0(x0: Tensor, bound: Tensor, dynamic: bool = False, ratio: float = 0.995) -> Tensor:
    """Returns x0 clipped to the bound. With dynamic thresholding (Saharia et al. 2022), if its `ratio`-quantile exceeds
    the bound, it is clipped to the quantile and then scaled to the bound."""
    relative = x0 / bound
    if not dynamic:
        return relative.clamp(-1, 1) * bound
    most = relative.abs().flatten(1).quantile(ratio, 1).clamp_min(1).view(-1, *[1] * (x0.dim() - 1))
    return torch.maximum(-most, torch.minimum(most, relative)) / most * bound


# ------------------------------------------------------------------------------------------------------------------


def _noise_like(x: Tensor, generator: Generators) -> Tensor:
    """Returns noise of the shape of x, drawn on the generators' device."""
    if isinstance(generator, Sequence):
        return torch.cat([_noise_like(one, g) for one, g in zip(x.split(1), generator, strict=True)])
    device = x.device if generator is None else generator.device
    return send(torch.randn(x.shape, generator=generator, device=device, dtype=x.dtype), x.device)


def _grid(times: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the checked grid in the precision of x (at least single), on the host and on the device of x."""
    grid = times.to("cpu", torch.float64 if x.dtype == torch.float64 else torch.float32)
    if grid.dim() != 1 or len(grid) < 2 or not bool((grid.diff() < 0).all()):
        raise InputError("a time grid is at least two times, each below the one before")
    check_times(grid)
    return grid, send(grid, x.device)


def _show(on_step: OnStep | None, number: int, t: Tensor, x: Tensor, before: Tensor, u: Tensor) -> None:
    if on_step is not None:
        on_step(Step(number, t, x, before - t * u))
