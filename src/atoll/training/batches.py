"""Which rows and random numbers each step trains on: functions of (seed, step), so that runs resume exactly."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache

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


def rows_of_step(num_rows: int, batch: int, seed: str, step: int) -> NDArray[np.int64]:
    """Returns which rows a step trains on: every epoch has a new permutation, a function of (seed, epoch)."""
    epochs, places = np.divmod(np.arange(step * batch, (step + 1) * batch), num_rows)
    return np.concatenate(
        [_permutation(num_rows, seed, epoch)[places[epochs == epoch]] for epoch in range(epochs[0], epochs[-1] + 1)]
    )


@lru_cache(2)  # 11 million rows are 88 MB
def _permutation(num_rows: int, seed: str, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng(mixed_seed("order", seed, epoch)).permutation(num_rows)


class Batches:
    """Reads the batch of a step, this process's slice of it, while the step before is trained on."""

    def __init__(self, task: Task, batch: int, seed: int, share: slice) -> None:
        self.task, self.batch, self.seed, self.share = task, batch, seed, share
        self._reader = ThreadPoolExecutor(1, "batches")
        self._ahead: dict[tuple[int, int], Future[tuple[Tensors, Tensors]]] = {}

    def get(self, step: int, rollbacks: int = 0) -> tuple[Tensors, Tensors]:
        """Returns rows of the data and random numbers; after a rollback, others than before it."""
        current = self._ahead.get((step, rollbacks)) or self._reader.submit(self._read, step, rollbacks)
        batch = current.result()
        self._ahead = {(step + 1, rollbacks): self._reader.submit(self._read, step + 1, rollbacks)}
        return batch

    def _read(self, step: int, rollbacks: int) -> tuple[Tensors, Tensors]:
        seed = f"{self.seed}.{rollbacks}"
        rows = rows_of_step(self.task.num_rows, self.batch, seed, step)
        generator = torch.Generator().manual_seed(mixed_seed("step", seed, step))
        drawn = self.task.draw(len(rows), generator)
        return self.task.read(rows[self.share]), tuple(tensor[self.share] for tensor in drawn)

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)
