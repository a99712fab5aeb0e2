"""From a source of pictures to a data set: `atoll prepare`.

The source is cut into chunks of items, and a chunk becomes a shard. What a chunk becomes depends on its items, on the
settings and on the shards before it (for duplicates), never on when or by how many processes it is made. So a run that
was killed goes on after its last whole shard, and ends with the same bytes as one that was not.
"""

import hashlib
import heapq
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from atoll.config import read_json
from atoll.data.codecs import Codec, load_codec, make_codec, needs_sample
from atoll.data.duplicates import Duplicates
from atoll.data.features import Features, make_features
from atoll.data.images import Picture, Transform
from atoll.data.shards import FORMAT, HELD_OUT, TRAIN, Shard, alone, write_json, write_shard, write_whole
from atoll.data.sources import Item, Reading, Source
from atoll.data.text import TextEncoder, make_text_encoder
from atoll.data.workers import Readers, readers
from atoll.errors import InputError

CHUNK = 512  # items a shard
BATCH = 64  # pictures at a time through the codec and the features
NUM_FIT = 2048  # pictures that a codec is fitted to


@dataclass(frozen=True)
class Settings:
    """What `atoll prepare` can be told."""

    size: int = 32
    codec: str = "pca"
    text: str = "words"
    features: str = "simple"
    holdout: float = 0.05  # share of pictures kept from training
    near_duplicates: str = "auto"  # "drop", "keep", or "auto": drop, but keep those of what is built in
    min_side: int | None = None  # None: half of size
    max_aspect: float = 4.0
    license: str = "unknown"

    def __post_init__(self) -> None:
        if self.size < 8:
            raise InputError(f"size must be at least 8 pixels, but is {self.size}")
        if not 0 <= self.holdout < 1:
            raise InputError(f"holdout must be a share in [0, 1), but is {self.holdout}")
        if not self.max_aspect >= 1:
            raise InputError(f"max-aspect must be at least 1, but is {self.max_aspect}")
        if self.near_duplicates not in ("auto", "drop", "keep"):
            raise InputError(f"near-duplicates must be auto, drop or keep, but is {self.near_duplicates!r}")

    @property
    def transform(self) -> Transform:
        return Transform(self.size, self.size // 2 if self.min_side is None else self.min_side, self.max_aspect)


class Census(NamedTuple):
    """A source counted: its items, a digest of their keys, the faults of some and a fixed sample of the others."""

    num_items: int
    digest: str
    faults: Counter[str]
    sample: list[Item]


class Kept(NamedTuple):
    """An item that becomes a row."""

    reading: Reading
    picture: Picture
    split: int


@dataclass
class Totals:
    """What has become of the items so far."""

    rows: int = 0
    train: int = 0
    held_out: int = 0
    rejected: int = 0

    def add(self, shard: Shard) -> None:
        split = shard.columns["split"]
        self.rows += len(split)
        self.held_out += int((split == HELD_OUT).sum())
        self.train += int((split == TRAIN).sum())
        self.rejected += len(shard.columns["rejected.offsets"]) - 1


def prepare(
    source: Source, out: str | Path, settings: Settings, num_workers: int | None = None, progress: bool = True
) -> dict[str, Any]:
    """Make the data set, or go on making it; returns what its dataset.json says."""
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {out} ({error.strerror}): choose another --out") from error
    begun = (out / "dataset.json").exists()
    with alone(out):
        try:
            return _prepare(source, out, settings, num_workers, progress)
        except InputError:
            if not begun and (out / "dataset.json").exists() and not _shard_path(out, 0).exists():
                _forget(out)
            raise


def _prepare(source: Source, out: Path, settings: Settings, num_workers: int | None, progress: bool) -> dict[str, Any]:
    census = count(source, progress)
    about = _begin(out, source, settings, census)
    _clean(out)
    if about["complete"]:
        return about
    if num_workers is None:
        num_workers = 0 if census.num_items < CHUNK else os.cpu_count() or 1
    text, features = make_text_encoder(settings.text), make_features(settings.features)
    near = settings.near_duplicates == "drop" or (settings.near_duplicates == "auto" and source.kind != "built-in")
    duplicates, totals = Duplicates(near), Totals()
    with readers(num_workers, settings.transform) as read:
        codec = _codec(out, source, settings, census, read)
        done = _resume(out, duplicates, totals)
        bar = tqdm(total=census.num_items, initial=min(done * CHUNK, census.num_items), desc="prepare", unit=" images",
                   smoothing=0.1, disable=not progress)  # fmt: skip
        with bar:
            todo = islice(_chunks(source.items(), CHUNK), done, None)
            for number, readings in enumerate(read.read_all(todo), done):
                kept, rejected = _select(readings, duplicates, settings.holdout)
                path = _shard_path(out, number)
                columns = _encode(kept, codec, text, features, bar.update)
                columns["row"] = np.arange(totals.rows, totals.rows + len(kept), dtype=np.int64)
                _write(path, kept, rejected, columns)
                shard = Shard(path)
                duplicates.close_shard(shard.columns["thumb"])
                totals.add(shard)
                bar.update(len(rejected))
    rejected_lines = out / "rejected.jsonl"
    write_whole(rejected_lines, lambda staged: _write_rejected(staged, out))
    if totals.rows == 0:
        reasons = (json.loads(line)["reason"] for line in rejected_lines.read_text(encoding="utf-8").splitlines())
        raise _nothing_left(source, Counter(reasons))
    _save_whole(out, text)
    about |= {
        "complete": True,
        "counts": asdict(totals),
        "codec": codec.describe(),
        "latent_shape": list(codec.latent_shape(settings.size)),
        "text": text.describe(),
        "features": features.describe(),
    }
    write_json(out / "dataset.json", about)
    return about


def count(source: Source, progress: bool = True) -> Census:
    """Go through the keys of a source once."""
    digest, num, faults = hashlib.blake2b(digest_size=16), 0, Counter[str]()
    heap: list[tuple[int, int, Item]] = []  # the NUM_FIT items whose keys have the least hash
    for item in tqdm(source.items(), desc="count", unit=" images", disable=not progress, leave=False):
        name = item.key.encode("utf-8", "surrogateescape")
        digest.update(name + b"\0")
        num += 1
        if item.fault:
            faults[item.fault] += 1
        else:
            rank = -int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
            (heapq.heappush if len(heap) < NUM_FIT else heapq.heappushpop)(heap, (rank, num, item))
    if num == 0:
        raise InputError(f"there is no picture in {source.place}: images end in .jpg, .png, .webp and the like")
    return Census(num, digest.hexdigest(), faults, [item for _, _, item in sorted(heap, key=lambda entry: entry[1])])


def _begin(out: Path, source: Source, settings: Settings, census: Census) -> dict[str, Any]:
    """Start dataset.json, or make sure that the one that is there is of this very run."""
    path = out / "dataset.json"
    asked: dict[str, Any] = {
        "format": FORMAT,
        "complete": False,
        "license": settings.license,
        "source": {**source.describe(), "items": census.num_items, "keys": census.digest},
        "settings": asdict(settings),
    }
    if not path.exists():
        if any(path.name != ".dataset.json.tmp" for path in out.iterdir()):
            raise InputError(f"{out} is not empty and not a data set: choose another --out")
        write_json(path, asked)
        return asked
    stored = read_json(path, "delete the folder and prepare it again")
    for part in ("source", "settings"):
        for key, value in asked[part].items():
            before = stored.get(part, {}).get(key)
            if before != value:
                what = (
                    "its pictures have changed" if key in ("items", "keys") else f"{key} was {before!r}, now {value!r}"
                )
                raise InputError(
                    f"{out} was begun otherwise ({what}): choose another --out, or delete it to start anew"
                )
    return stored


def _codec(out: Path, source: Source, settings: Settings, census: Census, read: Readers) -> Codec:
    """The codec of the data set: the one it has, or a new one, fitted to the sample if it is of that kind."""
    if (out / "vae").exists():
        return load_codec(out)
    pictures = None
    if needs_sample(settings.codec):
        readings = read.read(census.sample)
        kept = [reading.picture for reading in readings if reading.picture is not None]
        if not kept:
            raise _nothing_left(source, census.faults + Counter(reading.fault for reading in readings))
        pictures = _tensor(kept)
    codec = make_codec(settings.codec, sample=pictures)
    codec.latent_shape(settings.size)
    _save_whole(out, codec)
    return load_codec(out)  # not the fitted one: laid out otherwise in memory, it would round otherwise, too


def _resume(out: Path, duplicates: Duplicates, totals: Totals) -> int:
    """Take note of the shards that are there; how many they are."""
    done = 0
    while _shard_path(out, done).exists():
        shard = Shard(_shard_path(out, done))
        for row in range(shard.num_rows):
            likeness, thumb = shard.columns["likeness"][row], shard.columns["thumb"][row]
            duplicates.add(shard.columns["digest"][row].tobytes(), int(likeness), thumb)
        duplicates.close_shard(shard.columns["thumb"])
        totals.add(shard)
        done += 1
    return done


def _select(readings: list[Reading], duplicates: Duplicates, holdout: float) -> tuple[list[Kept], list[str]]:
    """What of a chunk is kept, with its split, and a line of JSON for each item that is not."""
    kept, rejected = [], []
    for reading in readings:
        picture, fault = reading.picture, reading.fault
        if picture is not None:
            fault = duplicates.find(picture.digest, picture.likeness, picture.thumb)
            if not fault:
                duplicates.add(picture.digest, picture.likeness, picture.thumb)
                kept.append(Kept(reading, picture, split_of(picture.digest, holdout)))
                continue
            fault = f"{fault} duplicate"
        rejected.append(json.dumps({"key": reading.item.key, "reason": fault}, ensure_ascii=False))
    return kept, rejected


def split_of(digest: bytes, holdout: float) -> int:
    """Held out or not, by the picture's own content: it stays so whatever is added to the data."""
    return HELD_OUT if int.from_bytes(digest[8:], "big") < holdout * 2**64 else TRAIN


def _encode(
    kept: list[Kept], codec: Codec, text: TextEncoder, features: Features, on_batch: Callable[[int], object]
) -> dict[str, NDArray[Any]]:
    """The columns that models make."""
    parts: dict[str, list[Tensor]] = {"latents": [], "features": [], "tokens": []}
    for batch in _chunks(kept, BATCH):
        images = _tensor([one.picture for one in batch])
        parts["latents"].append(codec.encode(images).half())
        parts["features"].append(features.extract(images).half())
        parts["tokens"].append(text.tokenize([one.reading.caption for one in batch]).to(torch.int32))
        for name in ("latents", "features"):
            if not bool(torch.isfinite(parts[name][-1]).all()):
                key = batch[0].reading.item.key
                raise InputError(f"the {name} of {key} and after are not finite in half precision: use another model")
        on_batch(len(batch))
    return {name: torch.cat(part).numpy() for name, part in parts.items() if part}


def _write(path: Path, kept: list[Kept], rejected: list[str], columns: dict[str, NDArray[Any]]) -> None:
    columns |= {
        "split": np.array([one.split for one in kept], np.uint8),
        "digest": np.array([list(one.picture.digest) for one in kept], np.uint8).reshape(-1, 16),
        "likeness": np.array([one.picture.likeness for one in kept], np.uint64),
        "thumb": np.array([one.picture.thumb for one in kept], np.uint8).reshape(-1, 8, 8, 3),
    }
    strings = {
        "key": [one.reading.item.key for one in kept],
        "caption": [one.reading.caption for one in kept],
        "label": [one.reading.label for one in kept],
        "rejected": rejected,
    }
    write_shard(path, columns, strings)


def _tensor(pictures: list[Picture]) -> Tensor:
    """uint8 pictures as images in [-1, 1]: [B, 3, S, S]."""
    pixels = torch.from_numpy(np.stack([picture.pixels for picture in pictures]))
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


def _write_rejected(staged: Path, out: Path) -> None:
    with staged.open("w", encoding="utf-8") as file:
        for path in sorted((out / "shards").glob("*.safetensors")):
            shard = Shard(path)
            file.writelines(shard.text("rejected", i) + "\n" for i in range(len(shard.columns["rejected.offsets"]) - 1))


def _nothing_left(source: Source, faults: Counter[str]) -> InputError:
    [(fault, _)] = faults.most_common(1)
    advice = "mend them"
    if fault == "no caption":
        advice = (
            "add NAME.txt beside NAME.jpg, a metadata.jsonl, or --template 'a photo of a {label}' for class folders"
        )
    return InputError(
        f"none of the {faults.total()} pictures tried of {source.place} can be used, mostly: {fault}; {advice}"
    )


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
    """Take back what a run wrote that failed before its first shard, so that it can be corrected and run again."""
    _clean(out)
    (out / "dataset.json").unlink(missing_ok=True)
    shutil.rmtree(out / "vae", ignore_errors=True)
    for folder in (out / "shards", out):
        with suppress(OSError):
            folder.rmdir()


def _shard_path(out: Path, number: int) -> Path:
    return out / "shards" / f"{number:05d}.safetensors"


def _chunks(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(values)
    while chunk := list(islice(iterator, size)):
        yield chunk
