"""From noise to data: solvers over any canonical velocity function, and native samplers of one expert.

A solver is a pure function of a velocity, a start and a descending grid of times. It hands the velocity one
0-d time for the whole batch. The native samplers walk an expert's own schedule instead, as DDPM did.

Each solver is written as a walk, a generator that yields where it needs the velocity and is sent it there. So whoever
has many walks at different times can advance all of them by one evaluation with one batch.

Times stay on the host, where a look at them costs nothing; the velocity gets those of a copy, sent once, where x is.
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
    """What a solver shows to whoever watches it, after each step."""

    number: int  # from 0
    t: Tensor  # where the velocity was taken, 0-d, on the host
    x: Tensor  # where it led
    x0: Tensor  # the clean sample that the velocity at t points to


OnStep = Callable[[Step], None]
Generators = torch.Generator | Sequence[torch.Generator] | None
Walk = Generator[tuple[Tensor, Tensor], Tensor, Tensor]
"""Yields (x, t) where it needs the velocity, is sent that, and returns where it has led; t is 0-d, where x is."""


class Solver:
    """A walk from noise to data, and the function that takes it with one velocity."""

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
    """num_steps + 1 times, evenly spaced from noise to data."""
    return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)


# --- solvers on the canonical path --------------------------------------------------------------------------------


@Solver
def euler(x: Tensor, times: Tensor, on_step: OnStep | None) -> Walk:
    """Order 1, one evaluation a step."""
    grid, sent = _grid(times, x)
    for i, (t, t_next) in enumerate(pairwise(grid)):
        u = yield x, sent[i]
        x, before = x + (t_next - t) * u, x
        _show(on_step, i, t, x, before, u)
    return x


@Solver
def heun(x: Tensor, times: Tensor, on_step: OnStep | None) -> Walk:
    """Order 2: the mean of the slopes at both ends; two evaluations a step.

    A step to t = 0 takes the first slope alone, which costs no order: at t = 0 itself the noise in a sample is zero,
    and an x0-predicting expert's error divided by it would be all there is.
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
    """Order 2: the slope at the middle; two evaluations a step, never one at t = 0."""
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
    """Order 2: Adams-Bashforth from the last two slopes, for any step sizes; one evaluation a step."""
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
    """Order 2: DPM-Solver++(2M), which extrapolates x0 along log(alpha / sigma); one evaluation a step.

    At t = 1 and t = 0 that coordinate is infinite. The steps that touch an end are of order 1 there, which at
    t = 0 means: the sample is the last x0.
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
"""Calls of the velocity a step; one less in all for heun to t = 0."""


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
    """DDIM on the expert's own schedule; eta scales the fresh noise of each step, 0 is deterministic.

    Time 0 in the grid stands for clean data, also on a table, whose own step 0 still has some noise. With a list of
    generators, one per sample, a sample does not depend on the batch it is in.
    """
    grid, sent = _grid(times, x)
    for i, (t_grid, t_next) in enumerate(pairwise(grid)):
        t = schedule.inside(t_grid)
        x0, eps = denoise(x, schedule.inside(sent[i]))
        alpha, sigma, _, _ = schedule(t)
        after = t_next if t_next > 0 else torch.full_like(t_next, schedule.data_time)
        alpha_next, sigma_next, _, _ = schedule.coefficients(after)
        # The variance that a Markov step from t_next to t adds, seen back from t (DDPM's posterior variance).
        added = sigma**2 - (alpha / alpha_next * sigma_next) ** 2
        fresh = eta * sigma_next / sigma * added.clamp_min(0).sqrt()
        x = alpha_next * x0 + (sigma_next**2 - fresh**2).clamp_min(0).sqrt() * eps
        if eta > 0:
            x = x + fresh * _noise_like(x, generator)
    return x


def table_times(num_steps: int, num_train: int = 1000) -> Tensor:
    """Returns so many steps of a table as times, the last of them first ("trailing"), and then 0 for clean data.

    Step 0 itself, which still has noise, is a ten-thousandth of a step later, to be another time than clean data's.
    """
    steps = torch.arange(num_train, 0, -num_train / num_steps, dtype=torch.float64)[:num_steps].round() - 1
    return torch.cat([steps.clamp_min(1e-4) / (num_train - 1), torch.zeros(1, dtype=torch.float64)])


def bounded_x0(x0: Tensor, bound: Tensor, dynamic: bool = False, ratio: float = 0.995) -> Tensor:
    """Returns x0 clipped to the bound, or with dynamic thresholding (Saharia et al. 2022): where its quantile of that
    ratio lies beyond, clipped to the quantile and then shrunk to the bound."""
    relative = x0 / bound
    if not dynamic:
        return relative.clamp(-1, 1) * bound
    most = relative.abs().flatten(1).quantile(ratio, 1).clamp_min(1).view(-1, *[1] * (x0.dim() - 1))
    return torch.maximum(-most, torch.minimum(most, relative)) / most * bound


# ------------------------------------------------------------------------------------------------------------------


def _noise_like(x: Tensor, generator: Generators) -> Tensor:
    """Noise of the shape of x, drawn where the generators are."""
    if isinstance(generator, Sequence):
        return torch.cat([_noise_like(one, g) for one, g in zip(x.split(1), generator, strict=True)])
    device = x.device if generator is None else generator.device
    return send(torch.randn(x.shape, generator=generator, device=device, dtype=x.dtype), x.device)


def _grid(times: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The grid checked, in the precision of x (at least single): on the host, and where x is."""
    grid = times.to("cpu", torch.float64 if x.dtype == torch.float64 else torch.float32)
    if grid.dim() != 1 or len(grid) < 2 or not bool((grid.diff() < 0).all()):
        raise InputError("a time grid is at least two times, each below the one before")
    check_times(grid)
    return grid, send(grid, x.device)


def _show(on_step: OnStep | None, number: int, t: Tensor, x: Tensor, before: Tensor, u: Tensor) -> None:
    if on_step is not None:
        on_step(Step(number, t, x, before - t * u))
