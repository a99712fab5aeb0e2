"""Encodes images and captions as the columns of a shard (codec, text encoder, features), here or in other processes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.images import CroppedImage, Transform
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Item, Sample, read_items
from atoll.encoders.codec import Codec
from atoll.encoders.codecs import load_codec
from atoll.encoders.features import Features, Simple, make_features
from atoll.encoders.text import TextEncoder, make_text_encoder
from atoll.encoders.vae import VAE
from atoll.errors import InputError, shown
from atoll.object_store import is_url
from atoll.storage import exists
from atoll.tensors import get_device

Row = tuple[Item, CroppedImage]
Columns = dict[str, NDArray[Any]]
Encoded = tuple[list[Sample], Columns]
"""The samples of some items, with the pixels removed, and the columns of those that have an image."""


class Map(Protocol):
    """Yields function(value) for each value in order, computed in other processes, possibly on other machines.

    `then` is called with the function's result, possibly on another machine that has a GPU.
    """

    def __call__(
        self,
        function: "ReadItems",
        values: Iterator[list[Item]],
        /,
        then: "EncodeSamples | None" = None,
    ) -> Iterator[Any]: ...


class Encoders(NamedTuple):
    """The frozen networks that encode images and captions."""

    codec: Codec
    text: TextEncoder
    features: Features
    device: torch.device
    num_captions: int = 1  # maximum per image
    flip: bool = False

    @property
    def slow(self) -> bool:
        """Returns whether an image takes about a second: networks on a CPU, which process images one by one anyway."""
        return self.device.type == "cpu" and (isinstance(self.codec, VAE) or not isinstance(self.features, Simple))

    def encode(self, rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
        pixels = to_tensor([image.pixels for _, image in rows]).to(self.device)
        large = [image.large for _, image in rows if image.large is not None]
        columns = {
            "latents": self.codec.encode(pixels).half(),
            "features": self.features.extract(to_tensor(large).to(self.device) if large else pixels).half(),
            "tokens": self.text.tokenize([item.caption or "" for item, _ in rows]).to(torch.int32),
        }
        if self.num_captions > 1:
            columns |= self._more_captions([item.more for item, _ in rows])
        if self.flip:
            flipped, latents = self.codec.encode(pixels.flip(3)).half(), columns["latents"]
            sided = torch.tensor([_tells_left_from_right(item) for item, _ in rows], device=flipped.device)
            columns["flipped"] = torch.where(sided[:, None, None, None], latents, flipped)
        for name in (name for name in ("latents", "flipped", "features") if name in columns):
            if not bool(torch.isfinite(columns[name]).all()):
                key = shown(rows[0][0].key)
                raise InputError(f"the {name} of {key} and after are not finite in half precision: use another model")
        return {name: column.cpu().numpy() for name, column in columns.items()}

    def _more_captions(self, captions: Sequence[Sequence[str]]) -> dict[str, Tensor]:
        """Returns each image's number of captions, and the tokens of all but the first: [B, num_captions - 1, L]."""
        tokens = torch.zeros(len(captions), self.num_captions - 1, self.text.max_length, dtype=torch.int32)
        present = torch.tensor([[i < len(more) for i in range(self.num_captions - 1)] for more in captions])
        tokens[present] = self.text.tokenize([caption for more in captions for caption in more]).to(torch.int32)
        return {"num_captions": (1 + present.sum(1)).to(torch.uint8), "more_tokens": tokens}


@dataclass(frozen=True)
class ReadItems:
    """Reads the images of items, in any process that can access them."""

    transform: Transform

    def __call__(self, items: list[Item]) -> list[Sample]:
        for place in {item.where[1] for item in items if item.where and item.where[0] in ("file", "span", "row")}:
            if not is_url(place) and not exists(Path(place)):
                raise InputError(
                    f"a worker of the cluster does not see {place}: put the images into an object store, "
                    "or into a folder that all machines share"
                )
        return read_items(items, self.transform)


@dataclass(frozen=True)
class EncodeSamples:
    """Encodes images in any process, which keeps the loaded networks for further calls.

    It carries the codec's files, since another machine may not have them: as arrays, which Ray shares between
    processes without a copy.
    """

    settings: PrepareSettings
    num_captions: int
    device: str
    files: Mapping[str, NDArray[np.uint8]]  # of the codec
    key: str  # identifies this run

    @classmethod
    def of(cls, folder: Path, **values: Any) -> "EncodeSamples":
        """Returns an instance with the codec in a folder."""
        paths = [path for path in sorted((folder / "vae").rglob("*")) if path.is_file()]
        return cls(files={str(path.relative_to(folder)): np.fromfile(path, np.uint8) for path in paths}, **values)

    def __call__(self, samples: list[Sample]) -> Encoded:
        rows = [(item, image) for item, image in samples if image is not None]
        columns = self._encoders().encode(rows) if rows else {}
        nothing = np.empty(0, np.uint8)
        heads = [(item, image and image._replace(pixels=nothing, large=None)) for item, image in samples]
        return heads, columns

    def _encoders(self) -> Encoders:
        if self.key not in _loaded:
            _loaded.clear()
            place = get_device(self.device)
            with TemporaryDirectory(prefix="atoll-") as folder:
                for name, content in self.files.items():
                    path = Path(folder) / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    content.tofile(path)
                codec = load_codec(folder).to(place)
            text, features = make_text_encoder(self.settings.text), make_features(self.settings.features).to(place)
            _loaded[self.key] = Encoders(codec, text, features, place, self.num_captions, self.settings.flip)
        return _loaded[self.key]


_loaded: dict[str, Encoders] = {}  # of this process's most recent run


def _tells_left_from_right(item: Item) -> bool:
    """Returns whether a caption would be wrong for the mirrored image."""
    return any(re.search(r"\b(left|right)\b", text, re.IGNORECASE) for text in (item.caption or "", *item.more))


def to_tensor(pixels: Sequence[NDArray[np.uint8]]) -> Tensor:
    """Returns uint8 pixels as images in [-1, 1]: [B, 3, S, S]."""
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 127.5 - 1
