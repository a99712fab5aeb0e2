"""Prepares a data set from a source of images: `atoll prepare`.

The source is split into chunks, and each chunk becomes a shard:

    Source.items() --readers--> (Item, CroppedImage) --Duplicates--> kept ones --Encoders--> columns --write_shard-->

A shard's content depends on its items, the settings and the shards before it (for duplicates), never on timing or the
number of processes. So a killed run resumes after its last complete shard, and its result is bit-identical to that of
an uninterrupted run.
"""

import hashlib
import heapq
import json
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain, islice, tee
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import numpy as np
from torch import Tensor
from tqdm import tqdm

from atoll.cards import DATASET, FORMAT, BegunDatasetCard, Counts, DatasetCard, PrepareCard, SourceCard, require_same
from atoll.data.duplicates import Duplicates
from atoll.data.encode import Columns, Encoded, Encoders, EncodeSamples, Map, ReadItems, Row, to_tensor
from atoll.data.images import Transform
from atoll.data.settings import PrepareSettings
from atoll.data.shards import HELD_OUT, MORE, TRAIN, Shard, write_shard, write_sums
from atoll.data.sources import DAMAGED, Item, Reader, Samples, Source, batched, readers
from atoll.encoders.codec import Codec
from atoll.encoders.codecs import load_codec, make_codec, needs_sample
from atoll.encoders.features import Features, make_features
from atoll.encoders.pretrained import public_spec
from atoll.encoders.text import TextEncoder, make_text_encoder
from atoll.encoders.vae import VAE
from atoll.errors import InputError, printable, shown
from atoll.object_store import StorePath, download, place_of, upload
from atoll.storage import create_json, digest_of, read_json, remove_tree, work_folder, write_json, write_lines
from atoll.tensors import get_device

CHUNK = 512  # items per shard; fewer for large images, to stay within 50 MB
BATCH = 64  # batch size of codec and features
SLOW_CHUNK = 32  # items per shard if each takes a second: a killed run loses the work after its last shard
NUM_FIT = 2048  # images that a codec is fitted to; fewer for large images
MAX_WORKERS = 1024


class ShardWriter:
    """Writes the shards of a data set, continuing after those that exist already."""

    def __init__(
        self, folder: Path, encoders: Encoders, drop_near: bool, holdout: float, progress: bool = True
    ) -> None:
        self.folder, self.encoders, self.holdout = folder, encoders, holdout
        self.duplicates = Duplicates(drop_near)
        self.batch, self.max_items = (1, SLOW_CHUNK) if encoders.slow else (BATCH, CHUNK)
        self.sums: dict[str, str] = {}  # the SHA-256 of each shard
        self.counts = Counter[str]()
        with tqdm(desc="resume", unit=" shards", disable=not progress, leave=False, delay=1) as bar:
            while (path := self._next_path()).exists():
                shard = Shard(path)
                for digest, likeness, thumb in zip(shard["digest"], shard["likeness"], shard["thumb"], strict=True):
                    self.duplicates.add(digest.tobytes(), int(likeness), thumb)
                self._note(shard, digest_of(path))
                bar.update()

    @property
    def num_items(self) -> int:
        return self.counts["rows"] + self.counts["rejected"]

    def add(self, samples: Samples, on_items: Callable[[int], object]) -> None:
        """Writes one shard of some samples."""
        rejected: list[str] = []
        kept = batched(self._kept(samples, rejected, on_items), self.batch)
        self._write(((batch, self.encoders.encode(batch)) for batch in kept), rejected, on_items)

    def add_encoded(self, parts: Iterable[Encoded], on_items: Callable[[int], object]) -> None:
        """Writes one shard of samples that other processes encoded before duplicates were removed."""
        rejected: list[str] = []

        def kept() -> Iterator[tuple[list[Row], Columns]]:
            for samples, columns in parts:
                places = {id(image): i for i, image in enumerate(image for _, image in samples if image is not None)}
                rows = list(self._kept(iter(samples), rejected, on_items))
                if rows:
                    some = [places[id(image)] for _, image in rows]
                    yield rows, {name: column[some] for name, column in columns.items()}

        self._write(kept(), rejected, on_items)

    def _write(
        self, parts: Iterable[tuple[list[Row], Columns]], rejected: list[str], on_items: Callable[[int], object]
    ) -> None:
        rows: list[Row] = []
        batches: list[Columns] = []
        for batch, columns in parts:
            batches.append(columns)
            rows += batch
            on_items(len(batch))
        first, images = self.counts["rows"], [image for _, image in rows]
        columns = {name: np.concatenate([batch[name] for batch in batches]) for name in (batches[0] if batches else ())}
        columns |= {
            "row": np.arange(first, first + len(rows), dtype=np.int64),
            "split": np.array([split_of(image.origin, self.holdout) for image in images], np.uint8),
            "digest": np.array([list(image.digest) for image in images], np.uint8).reshape(-1, 16),
            "likeness": np.array([image.likeness for image in images], np.uint64),
            "thumb": np.array([image.thumb for image in images], np.uint8).reshape(-1, 8, 8, 3),
        }
        strings = {
            "key": [item.key for item, _ in rows],
            "caption": [item.caption or "" for item, _ in rows],
            "label": [item.label for item, _ in rows],
            "rejected": rejected,
        }
        if self.encoders.num_captions > 1:
            strings[MORE] = ["\n".join(item.more) for item, _ in rows]  # captions contain no line breaks
        path = self._next_path()
        digest = write_shard(path, columns, strings)
        self._note(Shard(path), digest)

    def _kept(self, samples: Samples, rejected: list[str], on_items: Callable[[int], object]) -> Iterator[Row]:
        """Yields samples that are neither faulty nor duplicates, and appends a line to `rejected` for the others."""
        for item, image in samples:
            fault = item.fault if image is None else self.duplicates.find(image.digest, image.likeness, image.thumb)
            if image is None or fault:
                entry = {"key": item.key, "reason": fault}
                line = json.dumps(entry, ensure_ascii=False)
                rejected.append(line if line.isprintable() else json.dumps(entry))  # no terminal control characters
                on_items(1)
            else:
                self.duplicates.add(image.digest, image.likeness, image.thumb)
                yield item, image

    def _next_path(self) -> Path:
        return self.folder / f"{len(self.sums):05d}.safetensors"

    def _note(self, shard: Shard, digest: str) -> None:
        """Updates hashes and counts with a finished shard."""
        self.sums[shard.path.name] = digest
        split, num_rejected = shard["split"], len(shard.strings("rejected"))
        held_out = int((split == HELD_OUT).sum())
        self.counts.update(rows=len(split), train=len(split) - held_out, held_out=held_out, rejected=num_rejected)

    def rejected(self) -> Iterator[str]:
        """Yields a line of JSON for each rejected item."""
        for name in self.sums:
            yield from Shard(self.folder / name).strings("rejected")


def prepare(
    source: Source,
    out: str | Path,
    settings: PrepareSettings,
    num_workers: int | None = None,
    progress: bool = True,
    device: str = "auto",
    run_elsewhere: Map | None = None,
) -> DatasetCard:
    """Prepares the data set, or resumes doing so, and returns its card. Codec and features run on `device`.

    With `run_elsewhere`, from an engine, images are read and encoded by other processes, and shards are written here,
    in order and once each even if work is repeated.
    """
    if num_workers is not None and not 0 <= num_workers <= MAX_WORKERS:
        raise InputError(f"workers must be from 0 to {MAX_WORKERS}, but are {num_workers}")
    place, out = get_device(device), place_of(out)
    with work_folder(out), _codec_folder(out) as local:
        text, features = make_text_encoder(settings.text), make_features(settings.features).to(place)
        listed, sample = count(source, min(NUM_FIT, max(64, (1 << 23) // settings.size**2)), progress)
        begun = _begin(out, listed, settings, text, features)
        if isinstance(begun, DatasetCard):
            return begun
        if num_workers is None:
            num_workers = 0 if listed.items < CHUNK else os.cpu_count() or 1
        chunk = min(CHUNK, max(64, (1 << 24) // max(settings.size, features.size) ** 2))
        transform = transform_of(settings, features.size)
        with _readers(num_workers, transform, chunk, run_elsewhere) as read:
            if not (local / "vae").exists():
                images = _read_sample(source, sample, read, progress) if needs_sample(settings.codec) else None
                codec = make_codec(settings.codec, sample=images, progress=progress)
                codec.latent_shape(settings.size)
                create_json(out / DATASET, begun.values())
                _begin(out, listed, settings, text, features)  # raises if a different run began there at the same time
                _save_whole(local, codec)
                if local != out:
                    upload(local / "vae", out / "vae", last="config.json")
            codec = load_codec(local).to(place)  # not the fitted one, whose memory layout and so rounding differ
            drop_near = {"drop": True, "keep": False, "auto": source.kind != "built-in"}[settings.near_duplicates]
            encoders = Encoders(codec, text, features, place, listed.captions, settings.flip)
            writer = ShardWriter(out / "shards", encoders, drop_near, settings.holdout, progress)
            with tqdm(total=listed.items, initial=writer.num_items, desc="prepare", unit=" images", smoothing=0.1,
                      disable=not progress) as bar:  # fmt: skip
                items, num = islice(source.items(), writer.num_items, None), min(chunk, writer.max_items)
                if run_elsewhere is None:
                    samples = read(items)
                    for first in samples:
                        writer.add(chain([first], islice(samples, num - 1)), bar.update)
                else:
                    about = {"num_captions": listed.captions, "device": device, "key": uuid4().hex}
                    then = EncodeSamples.of(local, settings=settings, **about)
                    for parts in _encode_elsewhere(items, num, partial(run_elsewhere, ReadItems(transform), then=then)):
                        writer.add_encoded(parts, bar.update)
        if not writer.counts["rows"]:
            faults = Counter(json.loads(line)["reason"] for line in writer.rejected())
            _begin_anew(out)
            raise _nothing_left(source, faults)
        for entry in (json.loads(line) for line in writer.rejected() if DAMAGED in line):
            warnings.warn(f"{entry['key']}: {entry['reason']}", stacklevel=2)
        write_lines(out / "rejected.jsonl", writer.rejected())
        _save_text(local, out, text)
        write_sums(out / "shards", writer.sums)
        codec_card, shape = codec.describe(), list(codec.latent_shape(settings.size))
        if isinstance(codec, VAE):  # record the spec from the settings, not the path of the copy
            codec_card = codec_card.model_copy(update={"spec": public_spec(settings.codec)})
        values = dict(begun) | {"complete": True}
        card = DatasetCard(**values, counts=Counts(**writer.counts), codec=codec_card, latent_shape=shape)
        write_json(out / DATASET, card.values())
        return card


def _begin_anew(out: Path) -> None:
    """Removes all output, so that the user can fix the cause of the failure and rerun the command."""
    for folder in ("vae", "shards"):
        remove_tree(out / folder)
    (out / DATASET).unlink()


@contextmanager
def _readers(
    num_workers: int, transform: Transform, num_ahead: int, run_elsewhere: Map | None
) -> Iterator[Callable[[Iterable[Item]], Samples]]:
    """Yields a function that reads items in order, using processes on this machine or elsewhere."""
    if run_elsewhere is None:
        with readers(num_workers, transform, num_ahead) as read:
            yield read
    else:
        elsewhere = partial(run_elsewhere, ReadItems(transform))
        yield lambda items: chain.from_iterable(elsewhere(batched(items, BATCH)))


def _encode_elsewhere(
    items: Iterator[Item], num: int, encode: Callable[[Iterator[list[Item]]], Iterator[Encoded]]
) -> Iterator[Iterator[Encoded]]:
    """Yields an iterator over encoded parts for each shard of `num` items; consume it before advancing to the next."""
    size = max(1, min(BATCH, num // 4))
    ahead, behind = tee(list(batched(some, size)) for some in batched(items, num))
    encoded = encode(chain.from_iterable(ahead))
    return (islice(encoded, len(parts)) for parts in behind)


def transform_of(settings: PrepareSettings, feature_size: int) -> Transform:
    min_side = settings.size // 2 if settings.min_side is None else settings.min_side
    return Transform(
        settings.size, min_side, settings.max_aspect, feature_size=feature_size, smart_crop=settings.crop == "smart"
    )


def count(source: Source, num_sample: int = NUM_FIT, progress: bool = True) -> tuple[SourceCard, list[Item]]:
    """Returns the source's card and a fixed random sample of its valid items, without reading any image."""
    digest, num, num_captions = hashlib.blake2b(digest_size=16), 0, 1
    heap: list[tuple[int, int, Item]] = []  # the items with the smallest key hashes
    for num, item in enumerate(tqdm(source.items(), "count", unit=" images", disable=not progress, leave=False), 1):
        name = item.key.encode("utf-8", "surrogateescape")
        digest.update(name + repr((item.caption, item.fault, item.where[:1], item.where[2:])).encode(errors="replace"))
        if item.more:
            digest.update(repr(item.more).encode(errors="replace"))
            num_captions = max(num_captions, 1 + len(item.more))
        if not item.fault:
            rank = -int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
            (heapq.heappush if len(heap) < num_sample else heapq.heappushpop)(heap, (rank, num, item))
    if num == 0:
        raise InputError(f"there is no image in {source.place}: images end in .jpg, .png, .webp and the like")
    several = {"captions": num_captions} if num_captions > 1 else {}
    card = SourceCard(**source.describe() | several, items=num, keys=digest.hexdigest())
    return card, [item for _, _, item in sorted(heap, key=lambda entry: entry[1])]


LATER = {"flip": False, "crop": "centre"}  # defaults of settings that are missing from cards of earlier versions


def _begin(
    out: Path, source: SourceCard, settings: PrepareSettings, text: TextEncoder, features: Features
) -> BegunDatasetCard:
    """Returns the card of this run as far as it is known; refuses a folder that holds the card of a different run."""
    path = out / DATASET
    # With their default values, these settings are omitted, so that the card equals that of earlier versions.
    told = {name: value for name, value in asdict(settings).items() if name not in LATER or value != LATER[name]}
    specs = {part: public_spec(getattr(settings, part)) for part in ("codec", "text", "features")}
    current = BegunDatasetCard(
        format=FORMAT,
        complete=False,
        license=settings.license,
        source=source,
        settings=PrepareCard(**told | specs),
        text=text.describe(),
        features=features.describe(),
    )
    if not path.exists():
        if any(other.name != f".{DATASET}.tmp" for other in out.iterdir()):
            raise InputError(f"{out} is not empty and not a data set: choose another --out")
        return current
    values = read_json(path, "delete the folder and prepare it again")
    begun = (DatasetCard if values.get("complete") else BegunDatasetCard).parse(values, str(path))
    now, before = (vars(card.settings) | vars(card.source) for card in (current, begun))
    for key, value in now.items():
        if before[key] != value:
            change = f"{key} was {shown(before[key])}, now {shown(value)}"
            change = "its images or captions have changed" if key in ("items", "keys", "captions") else change
            raise InputError(f"{out} was begun otherwise ({change}): choose another --out, or delete it to start anew")
    require_same(begun.text, current.text, "text encoder", out, "this run")
    require_same(begun.features, current.features, "features", out, "this run")
    return begun


def _read_sample(source: Source, sample: list[Item], read: Reader, progress: bool) -> Tensor:
    """Returns the images for fitting the codec."""
    faults, pixels = Counter[str](), []
    for item, image in tqdm(read(sample), "fit codec", len(sample), unit=" images", disable=not progress, leave=False):
        if image is None:
            faults[item.fault] += 1
        else:
            pixels.append(image.pixels)
    if not pixels:
        faults.update(item.fault for item in source.items() if item.fault)
        raise _nothing_left(source, faults)
    return to_tensor(pixels)


def split_of(origin: bytes, holdout: float) -> int:
    """Returns the split (held out or not) from a hash of the image's content, so that neither more data nor another
    size changes it."""
    return HELD_OUT if int.from_bytes(origin[8:], "big") < holdout * 2**64 else TRAIN


def _nothing_left(source: Source, faults: Counter[str]) -> InputError:
    [(fault, _)] = faults.most_common(1)
    captions = (
        "add NAME.txt beside NAME.jpg, a metadata.jsonl, or --template 'a photo of a {label}' for class folders, "
        "or name the key of captions with --caption-column"
    )
    return InputError(
        f"none of the {faults.total()} images tried of {source.place} can be used, mostly: {printable(fault, 200)}; "
        + (captions if fault == "no caption" else "fix them")
    )


@contextmanager
def _codec_folder(out: Path) -> Iterator[Path]:
    """Yields the local folder with the codec: `out`, or a temporary copy if `out` is in an object store."""
    if not isinstance(out, StorePath):
        yield out
        return
    with TemporaryDirectory(prefix="atoll-") as folder:
        if (out / "vae" / "config.json").exists():  # written last
            download(out / "vae", Path(folder) / "vae")
        yield Path(folder)


def _save_text(local: Path, out: Path, text: TextEncoder) -> None:
    _save_whole(local, text)
    for folder in local.iterdir() if local != out else ():
        if folder.name != "vae":
            upload(folder, out / folder.name)


def _save_whole(out: Path, part: Codec | TextEncoder) -> None:
    """Saves a codec or text encoder atomically: each of its folders is complete or absent."""
    staged = out / ".part.tmp"
    shutil.rmtree(staged, ignore_errors=True)
    part.save(staged)
    for folder in sorted(staged.iterdir()):
        shutil.rmtree(out / folder.name, ignore_errors=True)
        os.replace(folder, out / folder.name)
    staged.rmdir()
