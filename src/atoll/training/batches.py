"""Which rows and random numbers each step trains on: functions of (seed, step), so that runs resume exactly."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.training.task import Task, Tensors


def mixed_seed(*parts: object) -> int:
    """Returns a seed from several numbers or names, all of which matter."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(*parts: object) -> Iterator[None]:
    """Seeds torch's own random numbers, and afterwards leaves them as they were before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mixed_seed(*parts))
        yield


class Order:
    """Which rows each step trains on: every epoch a new permutation, a function of (seed, epoch)."""

    def __init__(self, num_rows: int, batch: int) -> None:
        self.num_rows, self.batch = num_rows, batch
        self._epochs: dict[tuple[str, int], NDArray[np.int64]] = {}

    def rows(self, seed: str, step: int) -> NDArray[np.int64]:
        positions = np.arange(step * self.batch, (step + 1) * self.batch)
        epochs = positions // self.num_rows
        rows = np.empty(self.batch, np.int64)
        for epoch in range(epochs[0], epochs[-1] + 1):
            rows[epochs == epoch] = self._epoch(seed, epoch)[positions[epochs == epoch] % self.num_rows]
        return rows

    def _epoch(self, seed: str, epoch: int) -> NDArray[np.int64]:
        if (seed, epoch) not in self._epochs:
            while len(self._epochs) > 1:  # 11 million rows are 88 MB
                self._epochs.pop(next(iter(self._epochs)))
            rng = np.random.default_rng(mixed_seed("order", seed, epoch))
            self._epochs[seed, epoch] = rng.permutation(self.num_rows)
        return self._epochs[seed, epoch]


class Batches:
    """Reads the batch of a step, this process's slice of it, while the step before is trained on."""

    def __init__(self, task: Task, batch: int, seed: int, share: slice) -> None:
        self.task, self.seed, self.share = task, seed, share
        self.order = Order(task.num_rows, batch)
        self._reader = ThreadPoolExecutor(1, "batches")
        self._next: tuple[tuple[int, int], Future[tuple[Tensors, Tensors]]] | None = None

    def get(self, step: int, rollbacks: int = 0) -> tuple[Tensors, Tensors]:
        """Returns rows of the data and random numbers; after a rollback, others than before it."""
        if self._next is None or self._next[0] != (step, rollbacks):
            self._next = self._submit(step, rollbacks)
        batch = self._next[1].result()
        self._next = self._submit(step + 1, rollbacks)
        return batch

    def _submit(self, step: int, rollbacks: int) -> tuple[tuple[int, int], Future[tuple[Tensors, Tensors]]]:
        return (step, rollbacks), self._reader.submit(self._read, step, f"{self.seed}.{rollbacks}")

    def _read(self, step: int, seed: str) -> tuple[Tensors, Tensors]:
        rows = self.order.rows(seed, step)
        generator = torch.Generator().manual_seed(mixed_seed("step", seed, step))
        drawn = self.task.draw(len(rows), generator)
        return self.task.read(rows[self.share]), tuple(tensor[self.share] for tensor in drawn)

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_: Any) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)
