"""FLOPs of training and sampling, counted by torch: multiplications and additions of matrix products."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from atoll.data.shards import Dataset
from atoll.training.expert import ExpertTask
from atoll.training.router import RouterTask
from atoll.training.settings import ExpertSettings, RouterSettings
from atoll.training.task import Task


@contextmanager
def counting() -> Iterator[Callable[[], int]]:
    """The counter does not know a CPU's fused attention, so attention is done by plain matrix products meanwhile."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter.get_total_flops


@cache
def training_flops(settings: ExpertSettings | RouterSettings, data: Path, cluster: int | None = None) -> float:
    """Returns the FLOPs of a training: those of one step, the loss of a batch and its gradient, times the steps."""
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
