"""FLOPs of training and sampling, counted by torch: multiplications and additions of matrix products."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from atoll.training.task import Task


@contextmanager
def counting() -> Iterator[Callable[[], int]]:
    """The counter does not know a CPU's fused attention, so attention is done by plain matrix products meanwhile."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter.get_total_flops


def flops_of_step(task: Task, batch: int) -> float:
    """Returns the FLOPs of one update: the loss of a batch and its gradient."""
    rows = np.arange(batch) % task.num_rows
    drawn = task.draw(batch, torch.Generator().manual_seed(0))
    with counting() as total:
        task.loss(task.network, task.read(rows), drawn).sum().backward()
        return float(total())
