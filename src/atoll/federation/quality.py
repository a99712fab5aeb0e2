"""How good an expert is, in units in which all compare: the error of the canonical velocity at each noise level.

Every expert is asked at the same held-out images, noise and times, so that two of them differ by what they answer. The
baseline is what captions alone allow: the posterior mean of a Gaussian around the caption's mean latent, of the
variance that is left around it. That is the caption's mean at pure noise, and the plain image where there is none.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from atoll.errors import InputError
from atoll.federation.gate import Gate
from atoll.networks.expert import Expert
from atoll.networks.text_prior import TextPrior
from atoll.sampling.expert import VelocityExpert
from atoll.training.expert import ExpertTask
from atoll.training.held_out import held_out_batches, means_by_bin
from atoll.training.task import on_linear_path

FOR_VARIANCE = 2048  # rows of training
Velocity = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(x, t, tokens, mask) -> dx/dt."""


@torch.no_grad()
def errors_by_level(velocities: Mapping[str, Velocity], task: ExpertTask, gate: Gate) -> dict[str, list[float]]:
    """Returns the mean squared error of each velocity at each of `gate.levels` equal parts of t, from 0 to 1."""
    found: dict[str, list[Tensor]] = {name: [] for name in velocities}
    times = []
    for _, x0, eps, t, (tokens, mask) in held_out_batches(
        task.view, task.text, task.device, gate.held_out, task.at_a_time
    ):
        x, target = on_linear_path(x0, eps, t), eps - x0
        times.append(t)
        for name, velocity in velocities.items():
            found[name].append((velocity(x, t, tokens, mask) - target).square().flatten(1).double().mean(1))
    edges = [level / gate.levels for level in range(1, gate.levels)]
    t = torch.cat(times)
    return {name: [mean or 0.0 for mean in means_by_bin(torch.cat(errors), t, edges)] for name, errors in found.items()}


def velocity_of(expert: Expert) -> Velocity:
    """Returns an expert as samplers ask it."""
    canonical = VelocityExpert.of(expert)
    return lambda x, t, tokens, mask: canonical.velocity(x, t, canonical.read_text(tokens, mask))


def baseline_of(task: ExpertTask) -> Velocity:
    """Returns what captions alone allow, fitted to the slot's images."""
    prior = task.prior
    variance = left_variance(task, prior)

    def velocity(x: Tensor, t: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        mean, sigma = prior.of(tokens, mask), t.view(-1, 1, 1, 1)
        alpha = 1 - sigma
        x0 = mean + variance * alpha / (alpha**2 * variance + sigma**2) * (x - alpha * mean)
        return (x - x0) / sigma  # = eps - x0, for x = alpha x0 + sigma eps

    return velocity


@torch.no_grad()
def left_variance(task: ExpertTask, prior: TextPrior) -> float:
    """Returns the variance of images around the means of their captions."""
    rows, total, num = task.view.training_rows(FOR_VARIANCE), 0.0, 0
    for first in range(0, len(rows), task.at_a_time):
        part = rows[first : first + task.at_a_time]
        encoded = task.text.encode(task.view.tokens(part, task.text))
        off = (task.view.latents(part) - prior.of(*encoded)).double()
        total, num = total + float(off.square().sum()), num + off.numel()
    return max(total / num, 1e-6)


def check_quality(expert: Expert, present: Expert | None, task: ExpertTask, gate: Gate) -> dict[str, Any]:
    """Returns errors by level, if they pass the gate."""
    velocities = {"expert": velocity_of(expert), "baseline": baseline_of(task)}
    if present is not None:
        velocities["present"] = velocity_of(present)
    errors = errors_by_level(velocities, task, gate)
    limits = {"baseline": ("what captions alone allow", gate.baseline_margin)}
    if present is not None:
        limits["present"] = ("that of the present expert", gate.present_margin)
    for name, (what, margin) in limits.items():
        ratios = [own / max(other, 1e-12) for own, other in zip(errors["expert"], errors[name], strict=True)]
        level = max(range(len(ratios)), key=lambda k: ratios[k])
        if not ratios[level] <= 1 + margin:  # NaN fails too
            times = f"{level / gate.levels:.2f} to {(level + 1) / gate.levels:.2f}"
            raise QualityError(
                f"its error on held-out images at noise times {times} is {ratios[level]:.3g} times {what}, and the "
                f"gate allows {1 + margin:.3g}",
                errors,
            )
    return _rounded(errors)


class QualityError(InputError):
    """An expert that is not good enough, with its figures."""

    def __init__(self, message: str, errors: Mapping[str, list[float]]) -> None:
        super().__init__(message)
        self.figures = _rounded(errors)


def _rounded(errors: Mapping[str, list[float]]) -> dict[str, Any]:
    """Returns figures as JSON has them: no number is NaN."""
    finite = {
        name: torch.tensor(own, dtype=torch.float64).nan_to_num(1e9).clamp(max=1e9) for name, own in errors.items()
    }
    return {name: [float(f"{error:.4g}") for error in own.tolist()] for name, own in finite.items()}
