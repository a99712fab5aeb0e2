"""Training the router, which predicts the cluster of a noisy sample: p(k | x_t, t [, text]) (Eq. 2)."""

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.cards import CONFIG, PartitionCard
from atoll.data.shards import Dataset
from atoll.data.view import AT_A_TIME, DatasetView, refuse_inside
from atoll.encoders.text import TextEncoder
from atoll.errors import InputError
from atoll.networks.centroid_router import CentroidRouter, mean_token
from atoll.networks.presets import preset
from atoll.networks.router import Router, RouterConfig
from atoll.storage import read_json
from atoll.training.checkpoint import check_folder
from atoll.training.distributed import Distributed
from atoll.training.dry_run import preview
from atoll.training.held_out import held_out_batches, means_by_bin
from atoll.training.loop import train
from atoll.training.settings import RouterSettings
from atoll.training.task import Batch, CaptionedTask, on_linear_path, seeded

EVALUATED, EVALUATED_AT_THE_END = 1024, 4096  # held-out rows
LEVELS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # edges of the bins of t in which accuracy is reported
CONFIDENCE_BINS = 15
MOST_FOR_CENTROIDS = 100_000
IMAGE_SCALES = (1.0, 0.3, 0.1, 0.03, 0.01)


class RouterTask(CaptionedTask):
    """Canonical (x_t, t) and the text -> the cluster."""

    def __init__(self, data: Dataset, settings: RouterSettings, device: torch.device) -> None:
        super().__init__(data, settings, device)
        self.seen_text = self.text if settings.text else None
        self.labels = torch.from_numpy(data.clusters())
        self.num_experts = PartitionCard.read(data.folder / "clusters").num_clusters
        channels, size, _ = self.view.shape
        width = self.text.dim if settings.text else None
        sizes = preset(
            settings.model, input_size=size, in_channels=channels, text_dim=width, num_experts=self.num_experts
        )
        with seeded("weights", settings.seed):
            self.network = Router(RouterConfig(**sizes))

    def describe(self) -> dict[str, Any]:
        return {"data": self.view.identity(), "num_experts": self.num_experts}

    def labels_of(self, indices: NDArray[np.int64]) -> Tensor:
        return self.labels[indices]

    def loss(self, network: nn.Module, batch: Batch, host: Batch) -> Tensor:
        text = () if self.seen_text is None else self.encode(batch, host)
        x = on_linear_path(batch.latents.float(), batch.eps, batch.t)
        return F.cross_entropy(network(x, batch.t, *text).float(), batch.labels, reduction="none")

    def evaluate(self, sample: bool) -> tuple[Mapping[str, Any], Image.Image | None]:
        answers = self.answers(self.network, EVALUATED)
        return {"held_out": float(F.cross_entropy(answers.logits, answers.labels)), **accuracies(answers)}, None

    @torch.no_grad()
    def answers(self, router: nn.Module, num: int) -> "Answers":
        """Returns a router's logits for held-out rows, at times spread evenly over [0, 1]."""
        parts = []
        for rows, x0, eps, t, text in held_out_batches(self.view, self.seen_text, self.device, num, self.at_a_time):
            logits = router(on_linear_path(x0, eps, t).to(self.device), t.to(self.device), *text)
            parts.append((logits.double().cpu(), self.labels[rows], t, torch.from_numpy(rows)))
        return Answers(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def finish(self, folder: Path, training: Mapping[str, Any]) -> Sequence[str]:
        """Fits the temperature, evaluates the router from centroids for comparison, and writes the router."""
        held_out = calibrated(self.answers(self.network, EVALUATED_AT_THE_END))
        _, baseline = self.from_centroids()
        compared = {key: baseline[key] for key in ("accuracy", "accuracy_by_t", "loss")}
        self.write(self.network, folder, {**held_out, "centroids": compared}, training)
        other = (
            f"for comparison, a router from centroids, which needs no training: held-out accuracy "
            f"{baseline['accuracy']:.3f}, cross-entropy {baseline['loss']:.3f}"
        )
        return [other, *report(held_out, "trained")]

    def from_centroids(self) -> tuple[CentroidRouter, dict[str, Any]]:
        """Returns the router from centroids with the best image_scale on held-out data, and its metrics."""
        routers = centroid_routers(self.view, self.labels, self.num_experts, self.seen_text, self.device)
        evaluated = [(router, calibrated(self.answers(router, EVALUATED_AT_THE_END))) for router in routers]
        return min(evaluated, key=lambda pair: pair[1]["loss"])

    def write(
        self, router: Router | CentroidRouter, folder: Path, held_out: Mapping[str, Any], training: Mapping[str, Any]
    ) -> None:
        card = self.view.data.card
        router.card = {
            "temperature": held_out["temperature"],
            "latent_space": card.latent_space.values(),
            "text_encoder": None if self.seen_text is None else card.text.values(),
            "data": self.view.describe(),
            "training": {**training, "held_out": dict(held_out)},
            "license": card.license,
        }
        router.save_pretrained(folder)


class Answers(NamedTuple):
    """A router's predictions for held-out rows."""

    logits: Tensor
    labels: Tensor
    t: Tensor
    row: Tensor


def accuracies(answers: Answers) -> dict[str, Any]:
    """Returns the accuracy, overall and per bin of t between LEVELS."""
    right = (answers.logits.argmax(1) == answers.labels).double()
    return {"accuracy": float(right.mean()), "accuracy_by_t": means_by_bin(right, answers.t, LEVELS[1:-1])}


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Returns the maximum-likelihood temperature, by golden-section search over log(1 / T)."""

    @cache
    def loss(log_inverse: float) -> float:
        return float(F.cross_entropy(logits * math.exp(log_inverse), labels))

    low, high = math.log(0.05), math.log(20)  # bounded: if all answers are right, or all wrong, there is no optimum
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    for _ in range(60):
        if loss(left) < loss(right):
            high, right = right, left
            left = high - golden * (high - low)
        else:
            low, left = left, right
            right = low + golden * (high - low)
    return math.exp(-(low + high) / 2)


def calibration_error(logits: Tensor, labels: Tensor) -> float:
    """Returns the expected calibration error: the mean gap between confidence and accuracy over confidence bins."""
    confidence, answer = torch.softmax(logits, 1).max(1)
    places = (confidence * CONFIDENCE_BINS).long().clamp(max=CONFIDENCE_BINS - 1)
    gaps = torch.bincount(places, confidence - (answer == labels).double())
    return float(gaps.abs().sum()) / len(labels)


def calibrated(answers: Answers) -> dict[str, Any]:
    """Returns accuracy, the temperature fitted on every other row, and loss and calibration error on the rest."""
    # Split by distinct row, so that repeats of a row are all in the same half.
    _, places = answers.row.unique(return_inverse=True)
    half = places % 2 == 0
    if bool(half.all()):  # there is only one distinct row
        half = torch.arange(len(half)) % 2 == 0
    temperature = fit_temperature(answers.logits[half], answers.labels[half])
    rest, labels = answers.logits[~half], answers.labels[~half]
    return {
        **accuracies(answers),
        "temperature": temperature,
        "loss": float(F.cross_entropy(rest / temperature, labels)),
        "loss_at_temperature_1": float(F.cross_entropy(rest, labels)),
        "calibration_error": calibration_error(rest / temperature, labels),
        "calibration_error_at_temperature_1": calibration_error(rest, labels),
    }


def report(held_out: Mapping[str, Any], name: str) -> Sequence[str]:
    levels = "  ".join(
        f"{low:g}-{high:g}: {share:.3f}"
        for low, high, share in zip(LEVELS[:-1], LEVELS[1:], held_out["accuracy_by_t"], strict=True)
        if share is not None
    )
    return [
        f"router, {name}: held-out accuracy {held_out['accuracy']:.3f}, cross-entropy {held_out['loss']:.3f}",
        f"  by t      {levels}",
        f"  calibration error {held_out['calibration_error']:.4f} at temperature {held_out['temperature']:.3f}, "
        f"{held_out['calibration_error_at_temperature_1']:.4f} without",
    ]


def centroid_routers(
    view: DatasetView, labels: Tensor, num: int, text: TextEncoder | None, device: torch.device
) -> list[CentroidRouter]:
    """Fits a router per image scale to the means and variances of each cluster's latents and texts, in one pass."""
    chosen = view.training_rows(MOST_FOR_CENTROIDS)
    sizes = torch.bincount(labels[view.train], minlength=num).double().clamp_min(1)  # no cluster has probability 0
    counts = torch.bincount(labels[chosen], minlength=num).double()
    total, square = torch.zeros(num, *view.shape, dtype=torch.float64), torch.zeros(num, dtype=torch.float64)
    width = 0 if text is None else text.dim
    texts, outer = torch.zeros(num, width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)
    for first in range(0, len(chosen), AT_A_TIME):
        at = chosen[first : first + AT_A_TIME]
        latents, label = view.latents(at).double(), labels[at]
        total.index_add_(0, label, latents)
        square.index_add_(0, label, (latents**2).flatten(1).mean(1))
        if text is not None:
            pooled = mean_token(*text.encode(view.tokens(at).to(device))).double().cpu()
            texts.index_add_(0, label, pooled)
            outer += pooled.T @ pooled
    divisor = counts.clamp_min(1)
    means = total / divisor[:, None, None, None]
    variances = (square / divisor - (means**2).flatten(1).mean(1)).clamp_min(0)
    text_means = None if text is None else texts / divisor[:, None]
    within = None if text_means is None else (outer - (text_means.T * counts) @ text_means) / counts.sum()
    routers = (
        CentroidRouter.fit(means, variances, sizes, text_means, within, image_scale=scale) for scale in IMAGE_SCALES
    )
    return [router.float().to(device) for router in routers]


def make_centroid_router(data: Path, settings: RouterSettings, out: Path) -> Sequence[str]:
    """Writes the router from centroids, which needs no training, to a folder like that of a trained one."""
    refuse_inside(out, data)
    task = RouterTask(Dataset.open(data), settings, settings.torch_device)
    with Distributed(settings).locked(out):
        check_folder(out, is_run=CONFIG)
        if (out / CONFIG).exists() and (model := read_json(out / CONFIG, "").get("model")) != CentroidRouter.__name__:
            raise InputError(f"{out} holds a {model}: choose another --out")
        router, held_out = task.from_centroids()
        task.write(router, out, held_out, {"method": "centroids"})
    return [f"{out}: made from centroids", *report(held_out, "from centroids")]


def train_router(
    data: Path,
    settings: RouterSettings,
    out: Path,
    progress: bool = True,
    dry_run: bool = False,
    mirror: str | None = None,
) -> Sequence[str]:
    """Trains the router of a partitioned data set; in the end the folder `out` is the router."""
    refuse_inside(out, data)
    make = partial(RouterTask, Dataset.open(data), settings)
    return preview(make, settings) if dry_run else train(make, settings, out, progress, mirror)
