"""The rows of a data set that one run trains and is evaluated on."""

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.shards import HELD_OUT, TRAIN, Column, Dataset
from atoll.encoders.codec import Codec, device_of, to_uint8
from atoll.encoders.codecs import load_codec
from atoll.encoders.text import TextEncoder
from atoll.errors import InputError
from atoll.storage import resolved

MOST_FOR_MOMENTS = 50_000  # rows: gives the mean to within half a percent of a standard deviation
AT_A_TIME = 256  # rows summed at once in float64, few enough for memory to be negligible beside a training step
LARGEST = 1e3  # latents have about unit variance; a row beyond this is damaged


class DatasetView:
    """Latents and token ids of a data set or one of its clusters, checked as they are read."""

    def __init__(self, data: Dataset) -> None:
        self.data = data
        name = f"{data.folder}" if data.cluster is None else f"cluster {data.cluster} of {data.folder}"
        split = data.column("split")[:] if len(data) else np.empty(0)
        self.train, self.held_out = np.flatnonzero(split == TRAIN), np.flatnonzero(split == HELD_OUT)
        if len(self.train) == 0:
            raise InputError(f"{name} has no images to train on ({len(self.held_out)} are held out): prepare more")
        self.name = name
        channels, side, _ = data.card.latent_shape
        self.shape = (channels, side, side)
        self._latents, self._tokens = data.column("latents"), data.column("tokens")
        self._flipped, self.has_flipped = data.column("flipped"), data.card.settings.flip
        self._more, self._nums = data.column("more_tokens"), data.column("num_captions")
        self.num_captions, length = data.card.source.captions, data.card.text.max_length
        shapes: list[tuple[Column, tuple[int, ...]]] = [(self._latents, self.shape), (self._tokens, (length,))]
        if self.has_flipped:
            shapes += [(self._flipped, self.shape)]
        if self.num_captions > 1:
            shapes += [(self._more, (self.num_captions - 1, length)), (self._nums, ())]
        self.measured_on = "held-out rows" if len(self.held_out) else "training rows, for none are held out"
        for column, shape in shapes:
            if (actual := column[:1].shape[1:]) != shape:
                raise InputError(f"{column.name} of {name} are {list(actual)}, but its dataset.json says {list(shape)}")

    def evaluation_rows(self, most: int) -> NDArray[np.int64]:
        """Returns up to `most` held-out rows, or training rows if none were held out."""
        return _some_of(self.held_out if len(self.held_out) else self.train, most)

    def training_rows(self, most: int) -> NDArray[np.int64]:
        """Returns up to `most` rows to train on."""
        return _some_of(self.train, most)

    def latents(self, rows: NDArray[np.int64]) -> Tensor:
        """Returns float32 [n, C, S, S]."""
        return self.stored_latents(rows).float()

    def stored_latents(self, rows: NDArray[np.int64], flipped: Tensor | None = None) -> Tensor:
        """Returns [n, C, S, S] in the precision of the shards (float16), which halves the transfer to a device.

        `flipped`, bool [n], selects the rows to take from the mirrored images.
        """
        latents = torch.from_numpy(self._latents[rows])
        if flipped is not None:
            at = np.flatnonzero(flipped.numpy())
            latents[at] = torch.from_numpy(self._flipped[rows[at]])
        bad = ~(latents.flatten(1).abs().amax(1) <= LARGEST)  # NaN fails too
        if bool(bad.any()):
            row = int(rows[int(bad.nonzero()[0])])
            raise InputError(
                f"row {row} of {self.name} ({self.data.strings('key', [row])[0]}) holds latents that are not finite or "
                f"beyond {LARGEST:g}: its shard is damaged, copy it again from its source"
            )
        return latents

    def tokens(self, rows: NDArray[np.int64], text: TextEncoder | None = None, choice: Tensor | None = None) -> Tensor:
        """Returns token ids [n, L], checked against the text encoder if it is given.

        They are of the first caption, or of the caption selected by `choice`, [n] in [0, 1).
        """
        ids = torch.from_numpy(self._tokens[rows])
        if choice is not None:
            nums = self._nums[rows].astype(np.int64).clip(1, self.num_captions)
            which = (choice.double().numpy() * nums).astype(np.int64)
            at = np.flatnonzero(which)
            ids[at] = torch.from_numpy(self._more[rows[at]][np.arange(len(at)), which[at] - 1])
        try:
            return ids if text is None else text.checked(ids)
        except InputError as error:
            raise InputError(
                f"a caption among rows {rows.min()} to {rows.max()} of {self.name} is damaged: {error}"
            ) from error

    def longest_text(self, text: TextEncoder) -> int:
        """Returns the largest number of tokens among the captions of 64 images."""
        ids = self.tokens(rows := self.train[:64])
        if self.num_captions > 1:
            more = torch.from_numpy(self._more[rows]).flatten(0, 1)
            ids = torch.cat([ids, more[more.any(1)]])  # missing captions are all zeros
        _, mask = text.encode(ids)
        return int(mask.sum(1).max())

    @cached_property
    def fingerprint(self) -> str:
        """Returns a hash of the images' content and split, independent of shards and folder."""
        digest = hashlib.sha256()
        for name in ("digest", "split"):
            column = self.data.column(name)
            for first in range(0, len(column), 65536):
                digest.update(np.ascontiguousarray(column[first : first + 65536]).tobytes())
        return digest.hexdigest()

    @property
    def mean(self) -> Tensor:
        """Returns the mean latent of the training rows, in float64."""
        return self._moments[0]

    @property
    def variance(self) -> float:
        """Returns the variance about that mean, averaged over the elements of a latent."""
        return self._moments[1]

    @cached_property
    def bound(self) -> Tensor:
        """Returns the largest absolute value per channel over the training rows: [C, 1, 1]."""
        rows = self.training_rows(MOST_FOR_MOMENTS)
        parts = (rows[first : first + AT_A_TIME] for first in range(0, len(rows), AT_A_TIME))
        return torch.stack([self.latents(part).abs().amax((0, 2, 3)) for part in parts]).amax(0)[:, None, None]

    @cached_property
    def _moments(self) -> tuple[Tensor, float]:
        total, square = torch.zeros(self.shape, dtype=torch.float64), 0.0
        rows = self.training_rows(MOST_FOR_MOMENTS)
        for first in range(0, len(rows), AT_A_TIME):
            part = self.latents(rows[first : first + AT_A_TIME]).double()
            total += part.sum(0)
            square += float((part**2).sum())
        mean = total / len(rows)
        return mean, square / len(rows) / mean.numel() - float((mean**2).mean())

    def identity(self) -> dict[str, Any]:
        """Returns the values that must be unchanged for a run to be resumed."""
        card = self.data.card
        return {
            "name": card.source.name,
            "fingerprint": self.fingerprint,
            "cluster": self.data.cluster,
            "pictures": len(self.train),
            "held_out": len(self.held_out),
            "codec": card.codec.fingerprint,
            "text": card.text.fingerprint,
            **({"captions": self.num_captions} if self.num_captions > 1 else {}),
            **({"flip": True} if self.has_flipped else {}),
        }

    def describe(self) -> dict[str, Any]:
        """Returns the data entry of an expert's card."""
        own = {key: value for key, value in self.identity().items() if key not in ("codec", "text", "captions", "flip")}
        return {**own, "variance": self.variance, "license": self.data.card.license}


def _some_of(pool: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Returns a fixed random choice of at most `most` values."""
    if len(pool) <= most:
        return pool
    return np.sort(np.random.default_rng(0).choice(pool, most, replace=False))


def spread_times(num: int, generator: torch.Generator) -> Tensor:
    """Returns stratified times: one at random in each of `num` equal parts of [0, 1], in random order."""
    t = (torch.arange(num) + torch.rand(num, generator=generator)) / num
    return t[torch.randperm(num, generator=generator)]


def refuse_inside(out: Path, data: Path) -> None:
    """Raises InputError if a run's folder would lie inside its own data."""
    if resolved(out).is_relative_to(resolved(data)):
        raise InputError(f"{out} lies within {data}: choose an --out outside of the data")


def decode_rows(
    data: Dataset, rows: NDArray[np.int64], codec: Codec | None = None, side: int = 256
) -> NDArray[np.uint8]:
    """Returns the images decoded from some rows' latents, at most `side` pixels wide: [n, S, S, 3]."""
    codec = codec or load_codec(data.folder)
    parts = []
    for some in np.array_split(rows, max(1, len(rows) // 32)):
        latents = torch.from_numpy(data.column("latents")[some]).float()
        images = codec.decode(latents.to(device_of(codec))).clamp(-1, 1)
        if images.shape[2] > side:
            images = torch.nn.functional.interpolate(images, (side, side), mode="bilinear", antialias=True)
        parts.append(to_uint8(images))
    return np.concatenate(parts)
