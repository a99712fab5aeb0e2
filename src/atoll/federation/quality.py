"""Measures experts in units that compare: the error of the canonical velocity at each noise level.

All experts are evaluated on the same held-out images, noise and times, so that only their predictions differ. The
baseline is what captions alone allow: the posterior mean of a Gaussian around the caption's mean latent, with the
residual variance. At pure noise that is the caption's mean, and without noise the image itself.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.cards import ExpertCard
from atoll.diffusion.solvers import uniform_times
from atoll.errors import InputError
from atoll.federation.gate import Gate
from atoll.networks.expert import Expert
from atoll.networks.text_prior import TextPrior
from atoll.sampling.assemble import router_from_cards
from atoll.sampling.ensemble import Ensemble, generate
from atoll.sampling.expert import EncodedTexts, Prompts, VelocityExpert
from atoll.training.expert import ExpertTask
from atoll.training.held_out import held_out_batches, means_by_bin
from atoll.training.task import on_linear_path

FOR_VARIANCE = 2048  # training rows
SAMPLE_STEPS = 10
Velocity = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(x, t, tokens, mask) -> dx/dt."""


@torch.no_grad()
def errors_by_level(velocities: Mapping[str, Velocity], task: ExpertTask, gate: Gate) -> dict[str, list[float]]:
    """Returns the mean squared error of each velocity in each of `gate.levels` equal intervals of t, from 0 to 1."""
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
    """Returns an expert's velocity as samplers evaluate it."""
    canonical = VelocityExpert.of(expert)
    return lambda x, t, tokens, mask: canonical.velocity(x, t, canonical.read_text(tokens, mask))


def baseline_of(task: ExpertTask) -> Velocity:
    """Returns the velocity that captions alone allow, fitted to the slot's images."""
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
    """Returns errors by level; raises QualityError if they do not pass the gate."""
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


@torch.no_grad()
def energy_score(ensemble: Ensemble, task: ExpertTask, num: int) -> float:
    """Returns E|made - real| - E|made - made'| / 2 over held-out captions: the lower, the nearer to their images.

    It is a proper score: on average nothing scores lower than the captions' own distribution of images, neither their
    mean nor a sharper one. So no guidance is used.
    """
    rows = np.resize(task.view.evaluation_rows(num), num)
    prompts = Prompts.of(EncodedTexts.of(task.text, task.view.tokens(rows, task.text)))
    times = uniform_times(SAMPLE_STEPS)
    one, other = (generate(ensemble, prompts, range(k * num, (k + 1) * num), times=times) for k in range(2))
    real = task.view.latents(rows)

    def distance(some: Tensor, others: Tensor) -> float:
        return float((some - others).double().flatten(1).norm(dim=1).mean())

    return (distance(one, real) + distance(other, real)) / 2 - distance(one, other) / 2


def check_samples(
    folder: Path, present: Path | None, others: Sequence[Path], slot: int, task: ExpertTask, gate: Gate
) -> dict[str, float]:
    """Returns the ensemble's scores with an expert and without it (or with the present one); refuses a worse one.

    The ensemble has the others' experts, routed by their cards.
    """
    by_slot = {ExpertCard.read(other).cluster: other for other in others}
    slots = {number: own for number, own in by_slot.items() if number is not None and number != slot}
    without = slots if present is None else {**slots, slot: present}
    scores = {
        name: energy_score(_ensemble_of(members), task, gate.samples)
        for name, members in (("with", {**slots, slot: folder}), ("without", without))
        if members
    }
    scores = {name: float(f"{score:.4g}") for name, score in scores.items()}
    if "without" in scores and not scores["with"] <= (1 + gate.sample_margin) * scores["without"]:
        raise InputError(
            f"samples of the slot's captions are worse with it than without: their score is {scores['with']:.4g}, "
            f"against {scores['without']:.4g}, and the gate allows {1 + gate.sample_margin:.3g} times that"
        )
    return scores


def _ensemble_of(members: Mapping[int, Path]) -> Ensemble:
    folders = [members.get(k) for k in range(max(members) + 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of slots that have no expert yet
        return Ensemble.open(folders, router_from_cards(folders))


class QualityError(InputError):
    """Raised for an expert that is not good enough, with its figures."""

    def __init__(self, message: str, errors: Mapping[str, list[float]]) -> None:
        super().__init__(message)
        self.figures = _rounded(errors)


def _rounded(errors: Mapping[str, list[float]]) -> dict[str, Any]:
    """Returns figures for JSON: rounded, and never NaN."""
    finite = {
        name: torch.tensor(own, dtype=torch.float64).nan_to_num(1e9).clamp(max=1e9) for name, own in errors.items()
    }
    return {name: [float(f"{error:.4g}") for error in own.tolist()] for name, own in finite.items()}
