"""An expert on held-out data of its cluster: its loss at each noise level, and how far its x0 can be trusted."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from atoll.data.view import AT_A_TIME, DatasetView, spread_times
from atoll.diffusion.objective import Objective
from atoll.diffusion.prediction import estimate
from atoll.diffusion.transfer import Calibration, products
from atoll.encoders.text import TextEncoder
from atoll.networks.centroid_router import mean_token
from atoll.networks.text_prior import TextPrior

EDGES = (-6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0)  # of log-SNR, the same for all objectives so that they compare
NUM_BINS = 24
MOST_FOR_PRIOR = 20_000  # captions; more say the same


@dataclass(frozen=True, eq=False)
class Judgement:
    """The same rows, noise and times for every run on a cluster."""

    loss: float
    loss_by_log_snr: list[float | None]  # between EDGES, and beyond both ends; None where no sample fell
    calibration: Calibration


def measure_prior(view: DatasetView, text: TextEncoder, device: torch.device) -> TextPrior:
    """Fits what the captions of a cluster alone say of its images."""
    chosen = view.some(MOST_FOR_PRIOR)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, len(chosen), AT_A_TIME):
            some = chosen[first : first + AT_A_TIME]
            yield mean_token(*text.encode(view.tokens(some).to(device))).cpu(), view.latents(some)

    null = mean_token(*text.encode(text.null_ids().to(device)))[0].cpu()
    return TextPrior.fit(batches(), view.mean, null)


def judge(
    network: nn.Module,
    objective: Objective,
    view: DatasetView,
    text: TextEncoder,
    device: torch.device,
    num: int,
    batch: int,
    prior: TextPrior,
) -> Judgement:
    """Denoises `num` held-out rows, at times spread evenly over the objective's own [0, 1]."""
    pool = view.judged_by(num)
    chosen = np.resize(pool, num)
    generator = torch.Generator().manual_seed(0)
    t = objective.path.inside(spread_times(num, generator))
    losses, dots, squares = [], [], []
    for first in range(0, num, batch):
        part = slice(first, first + batch)
        tokens, mask = text.encode(view.tokens(chosen[part]).to(device))
        x0 = view.latents(chosen[part])
        guess, loss = _denoise(network, objective, x0, tokens, mask, t[part], generator)
        losses.append(loss)
        guess = torch.nan_to_num(guess, 0.0, 0.0, 0.0)  # a network that has diverged is judged all the same
        dot, square = products(x0, guess, prior.of(tokens.cpu(), mask.cpu()))
        dots.append(dot)
        squares.append(square)
    loss = torch.cat(losses)
    log_snr = objective.path.log_snr(t.double())
    bins = min(NUM_BINS, max(1, num // 8))
    calibration = Calibration.from_products(torch.cat(dots), torch.cat(squares), log_snr, view.mean.float(), bins)
    places = torch.bucketize(log_snr, torch.tensor(EDGES, dtype=torch.float64))
    by_level = [loss[places == place] for place in range(len(EDGES) + 1)]
    return Judgement(float(loss.mean()), [float(part.mean()) if len(part) else None for part in by_level], calibration)


def _denoise(
    network: nn.Module,
    objective: Objective,
    x0: Tensor,
    tokens: Tensor,
    mask: Tensor,
    t: Tensor,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Returns what the network makes of x0 at t, and the objective's loss, of each sample."""
    device = tokens.device
    eps = torch.randn(x0.shape, generator=generator)
    seen: list[Tensor] = []

    def predict(x: Tensor, times: Tensor) -> Tensor:
        output = network(x, times, tokens, mask).float()
        seen.append(estimate(objective.prediction, output, x, objective.path(times)).x0)
        return output

    loss = objective.loss(predict, x0.to(device), eps.to(device), t.to(device))
    return seen[0].cpu(), loss.cpu()
