"""Evaluation on held-out data, at the same noise and times for every run: an expert's loss and its x0's calibration."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.view import DatasetView, spread_times
from atoll.diffusion.objective import Objective
from atoll.diffusion.prediction import estimate
from atoll.diffusion.transfer import Calibration, products
from atoll.encoders.text import TextEncoder
from atoll.networks.text_prior import TextPrior

EDGES = (-6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0)  # bins of log-SNR, the same for all objectives to compare them
NUM_BINS = 24


def held_out_batches(
    view: DatasetView,
    text: TextEncoder | None,
    device: torch.device,
    num: int,
    batch: int,
    sort_by: Tensor | None = None,
) -> Iterator[tuple[NDArray[np.int64], Tensor, Tensor, Tensor, tuple[Tensor, ...]]]:
    """Yields batches of `num` held-out rows, repeated if there are fewer, at times spread evenly over [0, 1].

    A batch is rows, x0, noise and times on the CPU, and the text's tokens and mask, if any, on the device.
    """
    rows = np.resize(view.evaluation_rows(num), num)
    if sort_by is not None:
        rows = rows[np.argsort(sort_by[rows].numpy(), kind="stable")]
    generator = torch.Generator().manual_seed(0)
    t = spread_times(num, generator)
    for first in range(0, num, batch):
        part = slice(first, first + batch)
        x0 = view.latents(rows[part])
        encoded = () if text is None else text.encode(view.tokens(rows[part], text).to(device))
        yield rows[part], x0, torch.randn(x0.shape, generator=generator), t[part], encoded


def means_by_bin(values: Tensor, keys: Tensor, edges: Sequence[float]) -> list[float | None]:
    """Returns the mean value of each bin of keys between `edges` and beyond both ends; None for empty bins."""
    places = torch.bucketize(keys.double(), torch.tensor(edges, dtype=torch.float64))
    parts = [values[places == place] for place in range(len(edges) + 1)]
    return [float(part.mean()) if len(part) else None for part in parts]


@dataclass(frozen=True, eq=False)
class Evaluated:
    """An expert's results on held-out data."""

    loss: float
    loss_by_log_snr: list[float | None]  # per bin between EDGES, and beyond both ends; None for empty bins
    calibration: Calibration


def evaluate_expert(
    network: Callable[..., Tensor],
    objective: Objective,
    view: DatasetView,
    text: TextEncoder,
    device: torch.device,
    num: int,
    batch: int,
    prior: TextPrior,
) -> Evaluated:
    """Denoises `num` held-out rows, at times spread evenly over the objective's own [0, 1]."""
    parts: list[tuple[Tensor, ...]] = []
    for _, x0, eps, times, (tokens, mask) in held_out_batches(view, text, device, num, batch):
        t = objective.path.inside(times)
        guess, loss = _denoise(network, objective, x0.to(device), eps.to(device), t.to(device), tokens, mask)
        guess = torch.nan_to_num(guess.cpu(), 0.0, 0.0, 0.0)  # a diverged network must not stop the evaluation
        parts.append((t, loss.cpu(), *products(x0, guess, prior.of(tokens.cpu(), mask.cpu()))))
    t, loss, dots, squares = (torch.cat(column) for column in zip(*parts, strict=True))
    log_snr = objective.path.log_snr(t.double())
    bins = min(NUM_BINS, max(1, num // 8))
    calibration = Calibration.fit(dots, squares, log_snr, view.mean.float(), bins)
    return Evaluated(float(loss.mean()), means_by_bin(loss, log_snr, EDGES), calibration)


def _denoise(
    network: Callable[..., Tensor], objective: Objective, x0: Tensor, eps: Tensor, t: Tensor, *text: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the network's estimate of x0 at t and the objective's loss, per sample."""
    coefficients = objective.path(t)
    alpha, sigma, _, _ = coefficients.broadcast(x0)
    x = alpha * x0 + sigma * eps
    output = network(x, t, *text).float()
    guess = estimate(objective.prediction, output, x, coefficients).x0
    return guess, objective.loss(lambda *_: output, x0, eps, t)
