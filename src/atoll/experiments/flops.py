"""Counts the FLOPs of training and sampling with torch: multiplications and additions of matrix products."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from atoll.data.shards import Dataset
from atoll.engines.train_all import Part
from atoll.experiments.graph import ModelNode
from atoll.experiments.tables import PARAMETERS, TRAINING_FLOPS
from atoll.networks.stored import WEIGHTS
from atoll.tensors import TensorFile
from atoll.training.expert import ExpertTask
from atoll.training.router import RouterTask
from atoll.training.settings import DistillSettings, ExpertSettings, RouterSettings
from atoll.training.task import Task


@contextmanager
def counting() -> Iterator[Callable[[], int]]:
    """Counts FLOPs in a context, with attention as plain products: the counter lacks the CPU's fused attention."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter.get_total_flops


def training_figures(model: ModelNode) -> dict[str, dict[str, Any]]:
    """Returns the training FLOPs of all parts of a model, and the number of parameters of its largest expert."""
    flops = sum(training_flops(replace(p.settings, seed=0), p.data, p.cluster) for p in model.parts)
    experts = [part for part in model.parts if not isinstance(part.settings, RouterSettings)]
    values = {TRAINING_FLOPS: flops, PARAMETERS: float(max(map(_num_parameters, experts)))}
    return {key: {"value": value, "error": None, "error_from": None} for key, value in values.items()}


def _num_parameters(part: Part) -> int:
    with TensorFile(part.folder / WEIGHTS, "train it again") as file:
        return sum(math.prod(entry.shape) for entry in file.entries.values())


@cache
def training_flops(
    settings: ExpertSettings | RouterSettings | DistillSettings, data: Path, cluster: int | None = None
) -> float:
    """Returns the FLOPs of a training run: those of a batch's loss and gradient, times the steps.

    A student's teacher is not counted.
    """
    dataset, cpu = Dataset.open(data, cluster), torch.device("cpu")
    task: Task
    if isinstance(settings, RouterSettings):
        task = RouterTask(dataset, settings, cpu)
    else:
        task = ExpertTask(dataset, settings, cpu)
    rows = np.arange(settings.batch) % task.num_rows
    drawn = task.draw(settings.batch, torch.Generator().manual_seed(0))
    batch = task.read(rows, drawn)
    with counting() as total:
        task.loss(task.network, batch, batch).sum().backward()
        return float(total()) * settings.steps
