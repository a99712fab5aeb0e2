"""From a source of images to a data set: `atoll prepare`.

The source is cut into chunks of items, and a chunk becomes a shard. What a chunk becomes depends on its items, on the
settings and on the shards before it (for duplicates), never on when or by how many processes it is made. So a run that
was killed resumes after its last whole shard, and ends with the same bytes as one that was not. Where a shard takes
long, what a slow codec has made of its first images is saved meanwhile, beside the shard that they will be part of.
"""

import hashlib
import heapq
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from atoll.cards import DATASET, FORMAT, BegunDatasetCard, DatasetCard
from atoll.data.duplicates import Duplicates
from atoll.data.images import CroppedImage, Transform
from atoll.data.shards import HELD_OUT, TRAIN, Shard, write_shard, write_sums
from atoll.data.sources import DAMAGED, Item, Samples, Source, readers
from atoll.encoders.codecs import VAE, Codec, load_codec, make_codec, needs_sample
from atoll.encoders.features import Features, Simple, make_features
from atoll.encoders.pretrained import check_same, public_spec
from atoll.encoders.text import TextEncoder, make_text_encoder
from atoll.errors import InputError, printable, shown
from atoll.storage import alone, digest_of, make_folder, open_regular, read_json, write_json, write_whole
from atoll.tensors import read_tensors

Row = tuple[Item, CroppedImage]

CHUNK = 512  # items a shard; fewer where they are so large that more would not fit into 50 MB
BATCH = 64  # images at a time through the codec and the features
SLOW_BATCH = 1  # where each takes long
SAVE_EVERY = 30.0  # seconds after which the part of a shard that is done is saved
MAX_WORKERS = 1024
MAX_SIZE = 4096  # pixels of a side
NUM_FIT = 2048  # images that a codec is fitted to; fewer in the same way


@dataclass(frozen=True)
class Settings:
    """What `atoll prepare` can be told."""

    size: int = 32
    codec: str = "pca"
    text: str = "words"
    features: str = "simple"
    holdout: float = 0.05  # share of images kept from training
    near_duplicates: str = "auto"  # "drop", "keep", or "auto": drop, but keep those of what is built in
    min_side: int | None = None  # None: half of size
    max_aspect: float = 4.0
    license: str = "unknown"

    def __post_init__(self) -> None:
        if not 8 <= self.size <= MAX_SIZE:
            raise InputError(f"size must be from 8 to {MAX_SIZE} pixels, but is {self.size}")
        if not 0 <= self.holdout < 1:
            raise InputError(f"holdout must be a share in [0, 1), but is {self.holdout}")
        if not 1 <= self.max_aspect <= 1e6:
            raise InputError(f"max-aspect must lie between 1 and 1e6, but is {self.max_aspect}")
        if self.min_side is not None and self.min_side < 1:
            raise InputError(f"min-side must be at least 1 pixel, but is {self.min_side}")
        if self.near_duplicates not in ("auto", "drop", "keep"):
            raise InputError(f"near-duplicates must be auto, drop or keep, but is {self.near_duplicates!r}")

    def transform(self, feature_size: int) -> Transform:
        min_side = self.size // 2 if self.min_side is None else self.min_side
        return Transform(self.size, min_side, self.max_aspect, feature_size=feature_size)

    def describe(self) -> dict[str, Any]:
        """For dataset.json, without paths of this machine."""
        return {**asdict(self), **{part: public_spec(getattr(self, part)) for part in ("codec", "text", "features")}}


class Census(NamedTuple):
    """A source counted: its items, a digest of their keys, the faults of some and a fixed sample of the others."""

    num_items: int
    digest: str
    faults: Counter[str]
    sample: list[Item]


def prepare(
    source: Source,
    out: str | Path,
    settings: Settings,
    num_workers: int | None = None,
    progress: bool = True,
    device: str = "auto",
) -> DatasetCard:
    """Makes the data set, or resumes making it, and returns its card. `device` is that of codec and features."""
    if num_workers is not None and not 0 <= num_workers <= MAX_WORKERS:
        raise InputError(f"workers must be from 0 to {MAX_WORKERS}, but are {num_workers}")
    out = Path(out)
    make_folder(out)
    begun = (out / DATASET).exists()
    with alone(out):
        try:
            return _prepare(source, out, settings, num_workers, progress, _device(device))
        except InputError:
            if not begun and (out / DATASET).exists() and not any((out / "shards").glob("*[0-9].*")):
                _forget(out)
            with suppress(OSError):
                out.rmdir()  # if it is empty
            raise


def _prepare(
    source: Source, out: Path, settings: Settings, num_workers: int | None, progress: bool, device: torch.device
) -> DatasetCard:
    text, features = make_text_encoder(settings.text), make_features(settings.features)
    _move(features, device)
    side = max(settings.size, features.size)
    chunk = min(CHUNK, max(64, (1 << 24) // side**2))
    census = count(source, min(NUM_FIT, max(64, (1 << 23) // settings.size**2)), progress)
    begun = _begin(out, source, settings, census, text, features)
    _clean(out)
    if isinstance(begun, DatasetCard):
        return begun
    if num_workers is None:
        num_workers = 0 if census.num_items < CHUNK else os.cpu_count() or 1
    near = settings.near_duplicates == "drop" or (settings.near_duplicates == "auto" and source.kind != "built-in")
    duplicates, counts = Duplicates(near), dict.fromkeys(("rows", "train", "held_out", "rejected"), 0)
    with readers(num_workers, settings.transform(features.size), chunk) as read:
        codec = _codec(out, source, settings, census, read, progress)
        _move(codec, device)
        models = Models(codec, text, features, device)
        sums = _resume(out, duplicates, counts)
        done = len(sums) * chunk
        bar = tqdm(total=census.num_items, initial=min(done, census.num_items), desc="prepare", unit=" images",
                   smoothing=0.1, disable=not progress)  # fmt: skip
        with bar:
            samples = read(islice(source.items(), done, None))
            for first in samples:
                path = _shard_path(out, len(sums))
                writer = ShardWriter(models, path, bar.update)
                for item, image in chain([first], islice(samples, chunk - 1)):
                    fault = item.fault if image is None else duplicates.add_new(image)
                    if image is None or fault:
                        writer.reject(item.key, fault)
                    else:
                        writer.add((item, image))
                sums[path.name] = writer.finish(counts["rows"], settings.holdout)
                _note(Shard(path), duplicates, counts)
    if counts["rows"] == 0:
        faults = Counter(json.loads(line)["reason"] for line in _rejected(out))
        _forget(out)
        raise _nothing_left(source, faults)
    write_whole(out / "rejected.jsonl", lambda staged: _write_lines(staged, _rejected(out)))
    _save_whole(out, text)
    for leftover in (out / "shards").glob(".*.part"):
        leftover.unlink()
    write_sums(out / "shards", sums)
    values = codec.describe()
    if isinstance(codec, VAE):  # by the name it was asked for, not by that of its copy in the data set
        values["spec"] = public_spec(settings.codec)
    card = DatasetCard.parse(
        begun.values()
        | {
            "complete": True,
            "counts": counts,
            "codec": values,
            "latent_shape": list(codec.latent_shape(settings.size)),
        },
        str(out),
    )
    write_json(out / DATASET, card.values())
    return card


def _device(name: str) -> torch.device:
    try:
        return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise InputError(f"unknown device {name!r}: use auto, cpu or cuda") from error


def _move(model: Codec | Features, device: torch.device) -> None:
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"the device {device} cannot be used ({str(error).splitlines()[0]}): use --device cpu"
        ) from error


def count(source: Source, num_sample: int = NUM_FIT, progress: bool = True) -> Census:
    """Goes through the items of a source once, without a look at any image."""
    digest, num, faults = hashlib.blake2b(digest_size=16), 0, Counter[str]()
    heap: list[tuple[int, int, Item]] = []  # those whose keys have the least hash
    for item in tqdm(source.items(), desc="count", unit=" images", disable=not progress, leave=False):
        name = item.key.encode("utf-8", "surrogateescape")
        digest.update(name + repr((item.caption, item.fault, item.where[:1], item.where[2:])).encode(errors="replace"))
        num += 1
        if item.fault:
            faults[item.fault] += 1
        else:
            rank = -int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
            (heapq.heappush if len(heap) < num_sample else heapq.heappushpop)(heap, (rank, num, item))
    if num == 0:
        raise InputError(f"there is no image in {source.place}: images end in .jpg, .png, .webp and the like")
    return Census(num, digest.hexdigest(), faults, [item for _, _, item in sorted(heap, key=lambda entry: entry[1])])


def _begin(
    out: Path, source: Source, settings: Settings, census: Census, text: TextEncoder, features: Features
) -> BegunDatasetCard:
    """Starts dataset.json, or makes sure that the one that is there is of this very run."""
    path = out / DATASET
    current = BegunDatasetCard.parse(
        {
            "format": FORMAT,
            "complete": False,
            "license": settings.license,
            "source": {**source.describe(), "items": census.num_items, "keys": census.digest},
            "settings": settings.describe(),
            "text": text.describe(),
            "features": features.describe(),
        },
        str(path),
    )
    if not path.exists():
        if any(other.name != f".{DATASET}.tmp" for other in out.iterdir()):
            raise InputError(f"{out} is not empty and not a data set: choose another --out")
        write_json(path, current.values())
        return current
    values = read_json(path, "delete the folder and prepare it again")
    begun = (DatasetCard if values.get("complete") else BegunDatasetCard).parse(values, str(path))
    for now, before in ((current.settings, begun.settings), (current.source, begun.source)):
        for key, value in now:
            if (old := getattr(before, key)) != value:
                what = (
                    "its images or captions have changed"
                    if key in ("items", "keys")
                    else f"{key} was {shown(old)}, now {shown(value)}"
                )
                raise InputError(
                    f"{out} was begun otherwise ({what}): choose another --out, or delete it to start anew"
                )
    check_same(begun.text.values(), current.text.values(), "text encoder")
    check_same(begun.features.values(), current.features.values(), "features")
    return begun


def _codec(
    out: Path,
    source: Source,
    settings: Settings,
    census: Census,
    read: Callable[[Iterable[Item]], Samples],
    progress: bool,
) -> Codec:
    """Returns the codec of the data set: the one it has, or a new one, fitted to the sample if it is of that kind."""
    if (out / "vae").exists():
        return load_codec(out)
    sample = None
    if needs_sample(settings.codec):
        bar = tqdm(read(census.sample), "fit codec", len(census.sample), unit=" images", disable=not progress,
                   leave=False)  # fmt: skip
        faults, pixels = census.faults.copy(), []
        for item, image in bar:
            if image is None:
                faults[item.fault] += 1
            else:
                pixels.append(image.pixels)
        if not pixels:
            raise _nothing_left(source, faults)
        sample = _tensor(pixels)
    codec = make_codec(settings.codec, sample=sample)
    codec.latent_shape(settings.size)
    _save_whole(out, codec)
    return load_codec(out)  # not the fitted one: laid out otherwise in memory, it would round otherwise, too


def _resume(out: Path, duplicates: Duplicates, counts: dict[str, int]) -> dict[str, str]:
    """Takes note of the shards that are there; returns the SHA-256 of each."""
    sums: dict[str, str] = {}
    while (path := _shard_path(out, len(sums))).exists():
        shard = Shard(path)
        for digest, likeness, thumb in zip(shard["digest"], shard["likeness"], shard["thumb"], strict=True):
            duplicates.add(digest.tobytes(), int(likeness), thumb)
        _note(shard, duplicates, counts)
        sums[path.name] = digest_of(path)
    return sums


def _note(shard: Shard, duplicates: Duplicates, counts: dict[str, int]) -> None:
    """Counts a finished shard."""
    duplicates.close_shard(shard)
    split = shard["split"]
    counts["rows"] += len(split)
    counts["train"] += int((split == TRAIN).sum())
    counts["held_out"] += int((split == HELD_OUT).sum())
    counts["rejected"] += len(shard["rejected.offsets"]) - 1


def split_of(origin: bytes, holdout: float) -> int:
    """Held out or not, by the image's own content: it stays so whatever is added, and at whatever size."""
    return HELD_OUT if int.from_bytes(origin[8:], "big") < holdout * 2**64 else TRAIN


class Models(NamedTuple):
    """What makes numbers of images and captions."""

    codec: Codec
    text: TextEncoder
    features: Features
    device: torch.device

    @property
    def batch(self) -> int:
        """How many images go through at once; on a CPU, networks take them one by one in any case."""
        slow = isinstance(self.codec, VAE) or not isinstance(self.features, Simple)
        return SLOW_BATCH if slow and self.device.type == "cpu" else BATCH

    def encode(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        pixels = _tensor([image.pixels for _, image in rows]).to(self.device)
        large = [image.large for _, image in rows if image.large is not None]
        columns = {
            "latents": self.codec.encode(pixels).half().cpu(),
            "features": self.features.extract(_tensor(large).to(self.device) if large else pixels).half().cpu(),
            "tokens": self.text.tokenize([item.caption or "" for item, _ in rows]).to(torch.int32),
        }
        for name in ("latents", "features"):
            if not bool(torch.isfinite(columns[name]).all()):
                key = shown(rows[0][0].key)
                raise InputError(f"the {name} of {key} and after are not finite in half precision: use another model")
        return columns


class ShardWriter:
    """A shard in the making: its rows are encoded as they come, and what is done is saved every now and then.

    A run that resumes finds it in `part`, and encodes only what comes after.
    """

    def __init__(self, models: Models, path: Path, on_items: Callable[[int], object]) -> None:
        self.models, self.path, self.on_items = models, path, on_items
        self.part = path.with_name(f".{path.stem}.part")
        self._rows: list[Row] = []
        self._rejected: list[str] = []
        self._batches: list[dict[str, Tensor]] = []
        self._num_encoded, self._saved = 0, time.monotonic()
        self._stored: dict[str, Tensor] = {}
        if self.part.exists():
            with suppress(InputError):  # damaged: made anew
                stored = read_tensors(self.part, "delete it")
                self._stored = stored if stored.keys() == {"latents", "features", "tokens", "digest"} else {}

    def reject(self, key: str, reason: str) -> None:
        about = {"key": key, "reason": reason}
        line = json.dumps(about, ensure_ascii=False)
        self._rejected.append(line if line.isprintable() else json.dumps(about))  # nothing moves a terminal's cursor
        self.on_items(1)

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) - self._num_encoded == self.models.batch:
            self._encode()

    def finish(self, first_row: int, holdout: float) -> str:
        """Writes the shard and returns its SHA-256."""
        if len(self._rows) > self._num_encoded:
            self._encode()
        items, images = [item for item, _ in self._rows], [image for _, image in self._rows]
        columns = {name: tensor.numpy() for name, tensor in self._columns().items() if name != "digest"}
        columns |= {
            "row": np.arange(first_row, first_row + len(items), dtype=np.int64),
            "split": np.array([split_of(image.origin, holdout) for image in images], np.uint8),
            "digest": np.array([list(image.digest) for image in images], np.uint8).reshape(-1, 16),
            "likeness": np.array([image.likeness for image in images], np.uint64),
            "thumb": np.array([image.thumb for image in images], np.uint8).reshape(-1, 8, 8, 3),
        }
        strings = {
            "key": [item.key for item in items],
            "caption": [item.caption or "" for item in items],
            "label": [item.label for item in items],
            "rejected": self._rejected,
        }
        digest = write_shard(self.path, columns, strings)
        self.part.unlink(missing_ok=True)
        return digest

    def _columns(self) -> dict[str, Tensor]:
        names = self._batches[0] if self._batches else ()
        return {name: torch.cat([batch[name] for batch in self._batches]).contiguous() for name in names}

    def _encode(self) -> None:
        start, end = self._num_encoded, len(self._rows)
        rows = self._rows[start:end]
        digest = torch.tensor([list(image.digest) for _, image in rows], dtype=torch.uint8)
        stored = {name: column[start:end] for name, column in self._stored.items()}
        if stored and torch.equal(stored["digest"], digest):
            self._batches.append(stored)
        else:
            self._batches.append({**self.models.encode(rows), "digest": digest})
            if time.monotonic() - self._saved > SAVE_EVERY:
                columns = self._columns()
                write_whole(self.part, lambda staged: save_file(columns, staged))
                self._saved = time.monotonic()
        self._num_encoded = end
        self.on_items(end - start)


def _tensor(pixels: Sequence[NDArray[np.uint8]]) -> Tensor:
    """uint8 pixels as images in [-1, 1]: [B, 3, S, S]."""
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 127.5 - 1


def _rejected(out: Path) -> Iterator[str]:
    """A line of JSON for each item that was left out, from all shards."""
    for path in sorted((out / "shards").glob("*.safetensors")):
        yield from Shard(path).texts("rejected")


def damage_in(out: Path) -> Iterator[str]:
    """What a finished data set lacks, since an archive or a table of its source is damaged."""
    with open_regular(out / "rejected.jsonl") as file:
        for line in file:
            if DAMAGED.encode() in line:
                about = json.loads(line)
                yield f"{about['key']}: {about['reason']}"


def _write_lines(staged: Path, lines: Iterable[str]) -> None:
    with staged.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)


def _nothing_left(source: Source, faults: Counter[str]) -> InputError:
    [(fault, _)] = faults.most_common(1)
    advice = "fix them"
    if fault == "no caption":
        advice = (
            "add NAME.txt beside NAME.jpg, a metadata.jsonl, or --template 'a photo of a {label}' for class folders"
        )
    tried = f"none of the {faults.total()} images tried of {source.place} can be used"
    return InputError(f"{tried}, mostly: {printable(fault, 200)}; {advice}")


def _save_whole(out: Path, part: Codec | TextEncoder) -> None:
    """Save a codec or a text encoder so that each of its folders is there whole or not at all."""
    staged = out / ".part.tmp"
    part.save(staged)
    for folder in sorted(staged.iterdir()):
        shutil.rmtree(out / folder.name, ignore_errors=True)
        os.replace(folder, out / folder.name)
    staged.rmdir()


def _clean(out: Path) -> None:
    """Remove what a killed run left half written."""
    for leftover in (*out.glob(".*.tmp"), *(out / "shards").glob(".*.tmp")):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def _forget(out: Path) -> None:
    """Take back what a run wrote that has no row to show, so that it can be corrected and run again."""
    _clean(out)
    (out / DATASET).unlink(missing_ok=True)
    for folder in ("vae", "shards"):
        shutil.rmtree(out / folder, ignore_errors=True)
    with suppress(OSError):
        out.rmdir()


def _shard_path(out: Path, number: int) -> Path:
    return out / "shards" / f"{number:05d}.safetensors"
