"""What a run trains: the protocol between the loop and an expert, a router or a student, and what these share.

Which rows and random numbers a step trains on are functions of (seed, step), so that runs resume exactly.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from atoll.cards import DATASET, require_same
from atoll.data.shards import Dataset
from atoll.data.view import DatasetView
from atoll.diffusion.schedules import LINEAR
from atoll.encoders.text import FOLDER as TEXT
from atoll.encoders.text import load_text_encoder
from atoll.networks.dit import Trunk
from atoll.training.settings import Settings

Tensors = tuple[Tensor, ...]


class Task(Protocol):
    """A network, data to train it on, and a loss."""

    num_rows: int  # to train on
    network: Trunk

    def describe(self) -> dict[str, Any]:
        """Returns what makes it this run and no other, beside the settings: the data above all."""

    def read(self, rows: NDArray[np.int64]) -> Tensors:
        """Reads rows of the training data: tensors with one entry per row."""

    def draw(self, num: int, generator: torch.Generator) -> Tensors:
        """Draws the random numbers of `num` samples."""

    def loss(self, network: nn.Module, batch: Tensors, drawn: Tensors) -> Tensor:
        """Returns the loss of each sample: [B]."""

    def evaluate(self, sample: bool) -> tuple[Mapping[str, Any], Image.Image | None]:
        """Returns metrics of the EMA weights on held-out data, and if `sample`, a grid of samples."""

    def finish(self, folder: Path, training: Mapping[str, Any]) -> Sequence[str]:
        """Writes the result with the EMA weights; returns lines for the user."""


class CaptionedTask(Task):
    """What all tasks of atoll share: latents with captions, some of which are dropped, and their text encoder."""

    def __init__(self, data: Dataset, settings: Settings, device: torch.device) -> None:
        self.text_dropout, self.device = settings.text_dropout, device
        self.objective = settings.resolved_objective
        self.at_a_time = settings.micro_batch or settings.batch
        self.view = DatasetView(data)
        self.num_rows = len(self.view.train)
        self.text = load_text_encoder(data.folder)
        if isinstance(self.text, nn.Module):
            self.text.to(device)
        self.null_ids = self.text.null_ids()
        require_same(self.text.describe(), data.card.text, "text encoder", data.folder / TEXT, DATASET)

    @property
    def frozen_bytes(self) -> int:
        """The size of what never learns: the text encoder, the codec of sample grids, a teacher."""
        return bytes_of(self.text)

    def sample_grid(self) -> Image.Image | None:
        """Returns what the network generates from held-out captions, if it generates images."""
        return None

    def read(self, rows: NDArray[np.int64]) -> Tensors:
        """Returns indices into the data, latents and token ids."""
        indices = self.view.train[rows]
        return torch.from_numpy(indices), self.view.latents(indices), self.view.tokens(indices)

    def draw(self, num: int, generator: torch.Generator) -> Tensors:
        """Returns times, noise, and whose caption is dropped."""
        t = self.objective.sample_times(num, generator)
        eps = torch.randn(num, *self.view.shape, generator=generator)
        return t, eps, torch.rand(num, generator=generator) < self.text_dropout

    def encode(self, ids: Tensor, dropped: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes captions as a network sees them, the null text in place of those that are dropped."""
        kept = torch.where(dropped[:, None], self.null_ids.to(ids.device), ids)
        return self.view.encode(self.text, kept, indices)


def on_linear_path(x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
    """Returns x_t = (1 - t) x0 + t eps, which routers and students see."""
    alpha, sigma, _, _ = LINEAR(t).broadcast(x0)
    return alpha * x0 + sigma * eps


def bytes_of(module: object) -> int:
    """Returns the size of weights and buffers, if it is a network."""
    tensors = (*module.parameters(), *module.buffers()) if isinstance(module, nn.Module) else ()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


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
