"""What a run trains: the protocol between the loop and an expert, a router or a student, and what these share.

Which rows and random numbers a step trains on are functions of (seed, step), so that runs resume exactly. All that can
be decided on the CPU is decided there, by a thread that reads ahead: a GPU never has to be asked, nor waited for.
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
LENGTHS = 16  # texts are cut to a multiple of so many tokens, so that shapes repeat; kernels like multiples of 8


class Batch(NamedTuple):
    """What one update learns from, an entry per sample."""

    latents: Tensor  # [B, C, S, S], in the precision of the shards
    ids: Tensor  # [B, L] tokens of captions, those of the null text where one is dropped, cut to the longest
    t: Tensor  # [B] in [0, 1]
    eps: Tensor  # [B, C, S, S], noise
    labels: Tensor  # [B], the cluster or teacher, where a task needs it

    def part(self, rows: slice) -> "Batch":
        return Batch(*(tensor[rows] for tensor in self))


class Task(Protocol):
    """A network, data to train it on, and a loss."""

    num_rows: int  # to train on
    network: Trunk

    def describe(self) -> dict[str, Any]:
        """Returns what makes it this run and no other, beside the settings: the data above all."""

    def begin(self, folder: Path, share: slice, progress: bool) -> None:
        """Makes what it learns from, if that has to be made: `share` of its parts are for this process."""
        return

    def ready(self, folder: Path) -> None:
        """Reads what all processes have made."""
        return

    def draw(self, num: int, generator: torch.Generator) -> Tensors:
        """Draws the random numbers of `num` samples."""

    def read(self, rows: NDArray[np.int64], drawn: Tensors) -> Batch:
        """Reads rows of the training data, and joins them with the random numbers drawn for them."""

    def loss(self, network: nn.Module, batch: Batch, host: Batch) -> Tensor:
        """Returns the loss of each sample, [B], without a look at the device; `host` is the batch on the CPU."""

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

    def preparation(self) -> Sequence[str]:
        """Returns what a dry run says of the time that `begin` will take."""
        return []

    def cut(self, ids: Tensor) -> Tensor:
        """Returns tokens without the padding that none of the texts needs."""
        return ids[:, : -(-max(self.text.lengths(ids)) // LENGTHS) * LENGTHS]

    def draw(self, num: int, generator: torch.Generator) -> Tensors:
        """Returns times, noise, and whose caption is dropped.

        Where an image has several captions or is mirrored too, numbers that choose follow: data without draw none.
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
        """Returns what `loss` is to know of each row beside its image and caption; nothing by default."""
        return torch.zeros(len(indices), dtype=torch.long)

    def encode(self, batch: Batch, host: Batch) -> tuple[Tensor, Tensor | None]:
        """Encodes captions in float32, also within autocast: that is how they are encoded to sample.

        The mask is None where no text is shorter than another.
        """
        with torch.autocast(batch.ids.device.type, enabled=False):
            tokens, mask = self.text.encode(batch.ids)
        return tokens, None if bool(self.text.mask(host.ids).all()) else mask


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
    """The batch of each step, or this process's slice of it, read and sent while earlier ones are trained on.

    A thread reads two steps ahead, into pinned memory if a GPU will copy it. The copy of the next batch is queued on a
    stream of its own: it runs beside the kernels of the current one, and only what uses the batch waits for it.
    """

    def __init__(self, task: Task, batch: int, seed: int, share: slice, device: torch.device) -> None:
        self.task, self.batch, self.seed, self.share, self.device = task, batch, seed, share, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._reader = ThreadPoolExecutor(1, "batches")
        self._ahead: dict[tuple[int, int], Future[Batch]] = {}
        self._sent: dict[tuple[int, int], tuple[Batch, Batch, Any]] = {}  # also on the host, and the copy's event

    def get(self, step: int, rollbacks: int = 0) -> tuple[Batch, Batch]:
        """Returns the batch on the device and on the host; after a rollback, another than before it."""
        keys = [(step + more, rollbacks) for more in range(3)]
        self._ahead = {key: self._ahead.get(key) or self._reader.submit(self._read, *key) for key in keys}
        batch, host, copied = self._sent.get(keys[0]) or self._send(self._ahead[keys[0]].result())
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for tensor in batch:
                tensor.record_stream(current)  # its memory is not for other copies before this stream is done with it
            coming = self._ahead[keys[1]]
            is_read = coming.done() and coming.exception() is None  # what cannot be read is for its own step to say
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
