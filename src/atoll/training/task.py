"""The protocol between the training loop and an expert, a router or a student, and the code that these share.

The rows and random numbers of a step are functions of (seed, step), so that runs resume exactly. All that can be
decided on the CPU is decided there, by a thread that reads ahead, so that the host never waits for a GPU.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

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
LENGTHS = 16  # texts are cut to a multiple of this many tokens, so that shapes repeat; kernels like multiples of 8


class Batch(NamedTuple):
    """The training data of one update, an entry per sample."""

    latents: Tensor  # [B, C, S, S], in the precision of the shards
    ids: Tensor  # [B, L] tokens of captions, those of the null text where one is dropped, cut to the longest
    t: Tensor  # [B] in [0, 1]
    eps: Tensor  # [B, C, S, S], noise
    labels: Tensor  # [B], the cluster or teacher, if the task needs it

    def part(self, rows: slice) -> "Batch":
        return Batch(*(tensor[rows] for tensor in self))


class Task(Protocol):
    """A network, data to train it on, and a loss."""

    num_rows: int  # of training data
    network: Trunk

    def describe(self) -> dict[str, Any]:
        """Returns what identifies the run besides its settings, above all the data."""

    def begin(self, folder: Path, share: slice, progress: bool) -> None:
        """Generates training data, if the task has to; this process generates the `share` of its parts."""
        return

    def ready(self, folder: Path) -> None:
        """Reads the training data that all processes have generated."""
        return

    def draw(self, num: int, generator: torch.Generator) -> Tensors:
        """Draws the random numbers for `num` samples."""

    def read(self, rows: NDArray[np.int64], drawn: Tensors) -> Batch:
        """Reads rows of the training data and combines them with the random numbers drawn for them."""

    def loss(self, network: nn.Module, batch: Batch, host: Batch) -> Tensor:
        """Returns the loss of each sample, [B], without waiting for the device; `host` is the batch on the CPU."""

    def evaluate(self, sample: bool) -> tuple[Mapping[str, Any], Image.Image | None]:
        """Returns metrics of the EMA weights on held-out data, and if `sample`, a grid of samples."""

    def finish(self, folder: Path, training: Mapping[str, Any]) -> Sequence[str]:
        """Writes the result with the EMA weights; returns lines for the user."""


class CaptionedTask(Task):
    """The base of all tasks: latents with captions, some of which are dropped, and their text encoder."""

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
        """Returns the size of the frozen networks: the text encoder, the codec for sample grids, a teacher."""
        return bytes_of(self.text)

    def sample_grid(self) -> Image.Image | None:
        """Returns samples from held-out captions, if the network generates images."""
        return None

    def preparation(self) -> Sequence[str]:
        """Returns a dry run's lines on the time that `begin` will take."""
        return []

    def cut(self, ids: Tensor) -> Tensor:
        """Returns the tokens without padding that all texts have in common."""
        return ids[:, : -(-max(self.text.lengths(ids)) // LENGTHS) * LENGTHS]

    def draw(self, num: int, generator: torch.Generator) -> Tensors:
        """Returns times, noise, and which captions are dropped.

        If the data have several captions per image, or mirrored images, random numbers that choose one follow.
        """
        t = self.objective.sample_times(num, generator)
        eps = torch.randn(num, *self.view.shape, generator=generator)
        dropped = torch.rand(num, generator=generator) < self.text_dropout
        several, flips = self.view.num_captions > 1, self.view.has_flipped
        return t, eps, dropped, *(torch.rand(num, generator=generator) for _ in range(several + flips))

    def read(self, rows: NDArray[np.int64], drawn: Tensors) -> Batch:
        indices, (t, eps, dropped, *choices) = self.view.train[rows], drawn
        choice = choices.pop(0) if self.view.num_captions > 1 else None
        flipped = choices.pop(0) < 0.5 if self.view.has_flipped else None
        ids = torch.where(dropped[:, None], self.null_ids, self.view.tokens(indices, self.text, choice))
        return Batch(self.view.stored_latents(indices, flipped), self.cut(ids), t, eps, self.labels_of(indices))

    def labels_of(self, indices: NDArray[np.int64]) -> Tensor:
        """Returns a label for each row, if `loss` needs one besides image and caption; zeros by default."""
        return torch.zeros(len(indices), dtype=torch.long)

    def encode(self, batch: Batch, host: Batch) -> tuple[Tensor, Tensor | None]:
        """Encodes captions in float32, also within autocast, as sampling does.

        The mask is None if no text has padding.
        """
        with torch.autocast(batch.ids.device.type, enabled=False):
            tokens, mask = self.text.encode(batch.ids)
        return tokens, None if bool(self.text.mask(host.ids).all()) else mask


def on_linear_path(x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
    """Returns x_t = (1 - t) x0 + t eps, the input of routers and students."""
    alpha, sigma, _, _ = LINEAR(t).broadcast(x0)
    return alpha * x0 + sigma * eps


def bytes_of(module: object) -> int:
    """Returns the size of a network's weights and buffers; 0 for anything else."""
    tensors = (*module.parameters(), *module.buffers()) if isinstance(module, nn.Module) else ()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def mixed_seed(*parts: object) -> int:
    """Returns a seed that is a hash of several numbers or names."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(*parts: object) -> Iterator[None]:
    """Seeds torch's global random number generator, and restores its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mixed_seed(*parts))
        yield


def rows_of_step(num_rows: int, batch: int, seed: str, step: int) -> NDArray[np.int64]:
    """Returns the rows that a step trains on: every epoch has its own permutation, a function of (seed, epoch)."""
    epochs, places = np.divmod(np.arange(step * batch, (step + 1) * batch), num_rows)
    return np.concatenate(
        [_permutation(num_rows, seed, epoch)[places[epochs == epoch]] for epoch in range(epochs[0], epochs[-1] + 1)]
    )


@lru_cache(2)  # 11 million rows are 88 MB
def _permutation(num_rows: int, seed: str, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng(mixed_seed("order", seed, epoch)).permutation(num_rows)


class Batches:
    """Reads the batch of each step, or this process's slice of it, and copies it to the device during earlier steps.

    A thread reads two steps ahead, into pinned memory for a GPU. The copy of the next batch is queued on its own
    stream, so that it overlaps with the kernels of the current step, and only kernels that use the batch wait for it.
    """

    def __init__(self, task: Task, batch: int, seed: int, share: slice, device: torch.device) -> None:
        self.task, self.batch, self.seed, self.share, self.device = task, batch, seed, share, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._reader = ThreadPoolExecutor(1, "batches")
        self._ahead: dict[tuple[int, int], Future[Batch]] = {}
        self._sent: dict[tuple[int, int], tuple[Batch, Batch, Any]] = {}  # on device, on host, and the copy's event

    def get(self, step: int, rollbacks: int = 0) -> tuple[Batch, Batch]:
        """Returns the batch on the device and on the host; after a rollback, batches differ from those before it."""
        keys = [(step + more, rollbacks) for more in range(3)]
        self._ahead = {key: self._ahead.get(key) or self._reader.submit(self._read, *key) for key in keys}
        batch, host, copied = self._sent.get(keys[0]) or self._send(self._ahead[keys[0]].result())
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for tensor in batch:
                tensor.record_stream(current)  # its memory must not be reused before this stream is done with it
            coming = self._ahead[keys[1]]
            is_read = coming.done() and coming.exception() is None  # errors are raised in the step that needs the batch
            self._sent = {keys[1]: self._send(coming.result())} if is_read else {}
        return batch, host

    def _send(self, host: Batch) -> tuple[Batch, Batch, Any]:
        if self._stream is None:
            return host, host, None
        with torch.cuda.stream(self._stream):
            batch = Batch(*(tensor.to(self.device, non_blocking=True) for tensor in host))
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return batch, host, copied

    def _read(self, step: int, rollbacks: int) -> Batch:
        seed = f"{self.seed}.{rollbacks}"
        rows = rows_of_step(self.task.num_rows, self.batch, seed, step)
        generator = torch.Generator().manual_seed(mixed_seed("step", seed, step))
        drawn = self.task.draw(len(rows), generator)
        batch = self.task.read(rows[self.share], tuple(tensor[self.share] for tensor in drawn))
        return batch if self._stream is None else Batch(*(tensor.pin_memory() for tensor in batch))

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)
