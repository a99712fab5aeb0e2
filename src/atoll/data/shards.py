"""A prepared data set on disk: shards of fixed-size rows in safetensors.

    DATA/dataset.json              what it is: source, codec, text encoder, transform, counts
    DATA/vae/  DATA/text_encoder/  the codec and the text encoder themselves
    DATA/shards/00000.safetensors  rows, in the order of the source
    DATA/shards/SHA256SUMS         of each shard, as `sha256sum -c` reads them
    DATA/rejected.jsonl            what was left out, and why
    DATA/clusters/03/...           the same rows by cluster, once partitioned (shards/ is then gone)
    DATA/clusters/partition.json   how; centroids.safetensors beside it

A reader never loads a whole shard, only the requested rows. Shards are not memory-mapped, since truncating a mapped
file kills the process that reads it.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tqdm import tqdm

from atoll.cards import PARTITION, DatasetCard
from atoll.errors import InputError, StoreError, shown
from atoll.object_store import StorePath, place_of
from atoll.storage import (
    MAX_JSON,
    alone,
    digest_of,
    exists,
    known_digest,
    open_regular,
    read_bytes,
    reason_of,
    remove_tree,
    write_text,
    write_whole,
)
from atoll.tensors import Entry, check_memory, read_header

TRAIN, HELD_OUT = 0, 1
STRINGS = ("key", "caption", "label")
MORE = "more_captions"  # string column for data with several captions per image: all but the first, one per line
SUMS = "SHA256SUMS"
AGAIN = "copy it again from its source"
STAGED = "clusters.tmp"
REGROUP_MEMORY = 512 << 20  # bytes of rows that are buffered while regrouping
NUM_REQUESTS = 16  # concurrent requests to an object store
_DTYPES = {"F16": np.float16, "F32": np.float32, "I32": np.int32, "I64": np.int64, "U64": np.uint64, "U8": np.uint8}


class Shard:
    """One file of rows. It is open only while rows are read, since 11 million images are 20,000 files."""

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self.path, self._root = path, root
        try:
            with open_regular(path, root) as file:
                self._entries, _ = read_header(file)
                self._version = _version(file)
            self.num_rows = _num_rows(self._entries)
        except StoreError:
            raise
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is truncated or not a shard ({reason_of(error)}): {AGAIN}") from error

    @property
    def names(self) -> list[str]:
        """Returns the names of the columns with fixed-size rows."""
        return [name for name in self._entries if "." not in name]

    @property
    def string_names(self) -> list[str]:
        """Returns the names of the string columns."""
        return [name for name in (*STRINGS, MORE) if f"{name}.offsets" in self._entries]

    def kind(self, name: str) -> tuple[Any, tuple[int, ...]]:
        """Returns the dtype of a column, and the shape of a row."""
        entry = self._entry(name)
        return _DTYPES[entry.dtype], entry.shape[1:]

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Returns a whole column."""
        entry = self._entry(name)
        check_memory(entry.end - entry.start, str(self.path))
        [content] = self._read([(entry.start, entry.end - entry.start)])
        return np.frombuffer(content, _DTYPES[entry.dtype]).reshape(entry.shape)

    def take(self, name: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Returns some rows of a column; for many rows, reads the whole column."""
        if 2 * len(rows) >= self.num_rows:
            return self[name][rows]
        entry = self._entry(name)
        size = (entry.end - entry.start) // self.num_rows
        content = b"".join(self._read((entry.start + row * size, size) for row in rows.tolist()))
        return np.frombuffer(content, _DTYPES[entry.dtype]).reshape(len(rows), *entry.shape[1:])

    def strings(self, column: str, rows: Iterable[int] | None = None) -> list[str]:
        """Returns strings of a column, all of them or some."""
        ends, entry = self[f"{column}.offsets"], self._entry(f"{column}.bytes")
        if not len(ends) or ends[0] != 0 or ends[-1] != entry.shape[0] or bool((np.diff(ends) < 0).any()):
            raise InputError(f"{self.path} has a {column} that begins where none can: {AGAIN}")
        spans = [(entry.start + start, end - start) for start, end in pairwise(ends.tolist())]
        parts = self._read(spans if rows is None else [spans[row] for row in rows])
        return [part.decode("utf-8", "replace") for part in parts]

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise InputError(f"{self.path} has no column {name!r}: {AGAIN}")
        return self._entries[name]

    def _read(self, spans: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Yields the bytes of each span (start, size) of the file."""
        try:
            with open_regular(self.path, self._root) as file:
                if _version(file) != self._version:
                    raise InputError(f"{self.path} has changed since it was opened: start again")
                for start, size in spans:
                    file.seek(start)
                    if len(content := file.read(size)) < size:
                        raise OSError("it was cut short")
                    yield content
        except OSError as error:
            raise InputError(f"{self.path} cannot be read any more ({reason_of(error)}): {AGAIN}") from error


def _num_rows(entries: Mapping[str, Entry]) -> int:
    """Returns the number of rows; raises ValueError unless it is the same in all columns."""
    if "row" not in entries or entries["row"].dtype != "I64" or len(entries["row"].shape) != 1:
        raise ValueError("it does not number its rows")
    [num] = entries["row"].shape
    for name, entry in entries.items():
        part = name.partition(".")[2]
        if part:  # concatenated strings, and their offsets
            fits = len(entry.shape) == 1 and entry.dtype == {"bytes": "U8", "offsets": "I64"}.get(part)
        else:
            fits = entry.dtype in _DTYPES and entry.shape[:1] == (num,)
        if not fits or (name.removesuffix(".offsets") in (*STRINGS, MORE) and entry.shape != (num + 1,)):
            raise ValueError(f"{shown(name)} is {entry.dtype} {shown(list(entry.shape))} in a shard of {num} rows")
    return num


def _version(file: BufferedReader) -> tuple[int | str, ...]:
    if version := getattr(file.raw, "version", None):  # of an object in a store
        return tuple(version)
    about = os.fstat(file.fileno())
    return about.st_size, about.st_mtime_ns, about.st_ino


Columns = dict[str, NDArray[Any]]
Strings = dict[str, list[str]]
Located = tuple[Shard, NDArray[np.int64], NDArray[np.int64]]
"""A shard, positions in an index of rows, and the numbers of these rows in the shard."""


@dataclass(frozen=True)
class Column:
    """One column over all shards as a single array; slices and index arrays read only the selected rows."""

    data: "Dataset"
    name: str

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        index = np.atleast_1d(np.asarray(rows, dtype=np.int64))
        dtype, shape = self.data.shards[0].kind(self.name)
        out = np.empty((len(index), *shape), dtype)

        def fill(part: Located) -> None:
            shard, places, shard_rows = part
            if shard.kind(self.name) != (dtype, shape):
                raise InputError(f"the {self.name} of {shard.path} are of another shape than before it: {AGAIN}")
            out[places] = shard.take(self.name, shard_rows)

        self.data.each(fill, index)
        return out if np.ndim(rows) else out[0]


@dataclass(frozen=True)
class Dataset:
    """A prepared data set, or one cluster of it."""

    folder: Path
    card: DatasetCard
    shards: list[Shard]
    cluster: int | None = None

    @classmethod
    def open(cls, folder: str | Path, cluster: int | None = None, partial: bool = False) -> "Dataset":
        """Opens DATA, or one cluster of it, in which case the others may be absent; `partial` opens whatever exists."""
        folder = place_of(folder)
        card = DatasetCard.read(folder)
        clusters = cluster_folders(folder)
        places = list(clusters.values()) if clusters_in(folder) else [folder / "shards"]
        if cluster is not None:
            if cluster not in clusters:
                names = ", ".join(path.name for path in clusters.values())
                raise InputError(f"{folder} has no cluster {cluster}: there are {names or 'none yet'}")
            places = [clusters[cluster]]
        data = cls(folder, card, [shard for place in places for shard in _open_shards(place, folder, partial)], cluster)
        if cluster is None and not partial and len(data) != card.counts.rows:
            raise InputError(f"{folder} has {len(data)} rows of {card.counts.rows}: some of its shards are missing")
        return data

    def __len__(self) -> int:
        return sum(shard.num_rows for shard in self.shards)

    def column(self, name: str) -> Column:
        """Returns one column, with rows in the order of the source."""
        return Column(self, name)

    def strings(self, name: str, rows: Iterable[int] | None = None) -> list[str]:
        """Returns strings of a column (key, caption or label), of all rows or some."""
        index = np.arange(len(self)) if rows is None else np.fromiter(rows, np.int64)
        strings = np.empty(len(index), object)

        def fill(part: Located) -> None:
            shard, places, shard_rows = part
            strings[places] = shard.strings(name, shard_rows)

        self.each(fill, index)
        return list(strings)

    def each(self, fill: Callable[[Located], None], index: NDArray[np.int64]) -> None:
        """Calls `fill` for each shard that has some of the rows; in an object store, for several concurrently."""
        if isinstance(self.folder, StorePath):
            with ThreadPoolExecutor(NUM_REQUESTS) as pool:
                list(pool.map(fill, self.locate(index)))
        else:
            for part in self.locate(index):
                fill(part)

    def clusters(self) -> NDArray[np.int64]:
        """Returns the cluster of each row, in the order of the source."""
        numbers = [int(shard.path.parent.name) for shard in self.shards if shard.path.parent.name.isdigit()]
        if len(numbers) != len(self.shards):
            raise InputError(f"{self.folder} has no clusters yet: run `atoll partition {self.folder} --experts K`")
        clusters = np.repeat(np.array(numbers, np.int64), [shard.num_rows for shard in self.shards])
        return clusters if self._order is None else clusters[self._order]

    def locate(self, index: NDArray[np.int64]) -> Iterator[Located]:
        """Yields each shard that has some of the rows, their positions in `index`, and their numbers in the shard."""
        at = index if self._order is None else self._order[index]
        ends = self._ends
        owner = np.searchsorted(ends, at, side="right")
        for part in np.unique(owner):
            places = np.flatnonzero(owner == part)
            yield self.shards[part], places, at[places] - (ends[part - 1] if part else 0)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum([shard.num_rows for shard in self.shards], dtype=np.int64)

    @cached_property
    def _order(self) -> NDArray[np.int64] | None:
        """Returns the stored position of each source row, if the data is partitioned into clusters."""
        rows = np.concatenate([shard["row"] for shard in self.shards] or [np.empty(0, np.int64)])
        return None if bool((np.diff(rows) > 0).all()) else np.argsort(rows, kind="stable")


def clusters_in(folder: Path) -> Path | None:
    """Returns the folder of a data set's clusters, even while a new partition is replacing an old one."""
    if isinstance(folder, StorePath):
        return folder / "clusters" if (folder / "clusters" / PARTITION).exists() else None
    return next((p for p in (folder / "clusters", folder / "clusters.old") if p.is_dir()), None)


def cluster_folders(folder: Path) -> dict[int, Path]:
    """Returns the folders of the clusters that are present, by number."""
    parent = clusters_in(folder)
    paths = sorted(parent.iterdir()) if parent is not None else []
    numbered = [path for path in paths if re.fullmatch(r"[0-9]{2,9}", path.name)]
    return {int(path.name): path for path in numbered if isinstance(path, StorePath) or path.is_dir()}


def _open_shards(place: Path, root: Path, partial: bool) -> list[Shard]:
    """Returns the non-empty shards of a folder, after verifying them.

    In an object store only names and headers are verified here; `local_copy` verifies the rest.
    """
    remote = isinstance(place, StorePath)
    with ThreadPoolExecutor(NUM_REQUESTS if remote else 1) as pool:
        shards = list(pool.map(lambda path: Shard(path, root), sorted(place.glob("*.safetensors"))))
    sums = read_sums(place, root)
    if sums is not None:
        if not partial and (missing := sums.keys() - {shard.path.name for shard in shards}):
            raise InputError(f"{place} lacks {shown(min(missing))} of its {len(sums)} shards: {AGAIN}")
        for path in (shard.path for shard in shards if not remote):
            try:
                damaged = known_digest(path, root) != sums.get(path.name)
            except OSError as error:
                raise InputError(f"{path} cannot be checked ({reason_of(error)}): {AGAIN}") from error
            if damaged:
                raise InputError(f"{path} is damaged, since its SHA-256 is not the one in {place / SUMS}: {AGAIN}")
    return [shard for shard in shards if shard.num_rows]


def read_sums(place: Path, root: Path) -> dict[str, str] | None:
    """Returns the SHA-256 of each shard that a folder should have; None for data of versions that wrote no hashes."""
    try:
        if not exists(place / SUMS):
            return None
        lines = read_bytes(place / SUMS, MAX_JSON, root).decode("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{place / SUMS} cannot be read ({reason_of(error)}): {AGAIN}") from error
    matches = [re.fullmatch(r"([0-9a-f]{64})  ([0-9]{1,9}\.safetensors)", line) for line in lines]
    return {match[2]: match[1] for match in matches if match} if all(matches) else {}


def write_sums(place: Path, sums: Mapping[str, str]) -> None:
    """Writes the SHA-256 of each shard of a folder."""
    content = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    write_text(place / SUMS, content)


def write_shard(path: Path, columns: Mapping[str, NDArray[Any]], strings: Mapping[str, Sequence[str]]) -> str:
    """Writes a shard atomically; returns its SHA-256."""
    tensors = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    for name, texts in strings.items():
        encoded = [text.encode("utf-8", "replace") for text in texts]
        tensors[f"{name}.bytes"] = np.frombuffer(b"".join(encoded), np.uint8).copy()
        tensors[f"{name}.offsets"] = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    digests: list[str] = []

    def write(staged: Path) -> None:
        save_file(tensors, staged)
        digests.append(digest_of(staged))

    write_whole(path, write)
    return digests[0]


@contextmanager
def open_to_regroup(folder: Path) -> Iterator[Dataset]:
    """Opens DATA exclusively, after finishing the last step of an interrupted partition.

    A data set in an object store is not locked: of two concurrent partitions, one fails.
    """
    DatasetCard.read(folder)  # raises InputError if it is not a data set
    if isinstance(folder, StorePath):
        if (folder / STAGED / PARTITION).exists():
            _promote(folder)
        yield Dataset.open(folder)
        return
    with alone(folder):
        if (folder / "clusters.old").exists() and not (folder / "clusters").exists():
            os.replace(folder / "clusters.old", folder / "clusters")
        yield Dataset.open(folder)


def regroup(
    data: Dataset,
    cluster_of: NDArray[np.int64],
    num_clusters: int,
    finish: Callable[[Path], None],
    progress: bool = True,
    rows_a_shard: int = 4096,
) -> None:
    """Moves the rows of a data set into clusters/NN/, so that a contributor need copy only one of them.

    The new folders are written beside the old ones, `finish` adds the files that describe them, partition.json last,
    and once complete they replace the old ones. Rows are read in order, with one pass for each group of clusters whose
    shards fit into REGROUP_MEMORY.
    """
    folder = data.folder
    staged = folder / STAGED
    remove_tree(staged)
    remove_tree(folder / "clusters.old")
    try:
        row_bytes = sum(_row_bytes(data, name) for name in data.shards[0].names)
        at_once = max(1, REGROUP_MEMORY // (2 * rows_a_shard * row_bytes))
        with tqdm(total=len(data), desc="regroup", unit=" images", disable=not progress, leave=False) as bar:
            for first in range(0, num_clusters, at_once):
                group = range(first, min(first + at_once, num_clusters))
                _regroup_some(data, cluster_of, group, staged, rows_a_shard, bar)
        finish(staged)
    except BaseException:
        remove_tree(staged)
        raise
    _promote(folder)


def _row_bytes(data: Dataset, name: str) -> int:
    dtype, shape = data.shards[0].kind(name)
    return int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))


def _regroup_some(
    data: Dataset, cluster_of: NDArray[np.int64], group: range, staged: Path, rows_a_shard: int, bar: Any
) -> None:
    """Writes the shards of some clusters, in one pass over the rows."""
    names, string_names = data.shards[0].names, data.shards[0].string_names
    held: dict[int, list[tuple[Columns, Strings]]] = {cluster: [] for cluster in group}
    sums: dict[int, dict[str, str]] = {cluster: {} for cluster in group}

    def write(cluster: int, num: int) -> None:
        """Writes the first `num` buffered rows as a shard, and keeps the rest in the buffer."""
        columns = {name: np.concatenate([own[name] for own, _ in held[cluster]]) for name in names}
        strings = {name: [text for _, own in held[cluster] for text in own[name]] for name in string_names}
        path = staged / f"{cluster:02d}" / f"{len(sums[cluster]):05d}.safetensors"
        head = {name: column[:num] for name, column in columns.items()}
        sums[cluster][path.name] = write_shard(path, head, {name: texts[:num] for name, texts in strings.items()})
        rest = {name: column[num:].copy() for name, column in columns.items()}
        held[cluster] = [(rest, {name: texts[num:] for name, texts in strings.items()})]
        bar.update(len(head["row"]))

    def num_held(cluster: int) -> int:
        return sum(len(own["row"]) for own, _ in held[cluster])

    wanted = np.flatnonzero((cluster_of >= group.start) & (cluster_of < group.stop))
    for start in range(0, len(wanted), rows_a_shard):
        rows = wanted[start : start + rows_a_shard]
        columns = {name: data.column(name)[rows] for name in names}
        strings = {name: data.strings(name, rows) for name in string_names}
        for cluster in np.unique(cluster_of[rows]).tolist():
            own = np.flatnonzero(cluster_of[rows] == cluster)
            part = {name: column[own] for name, column in columns.items()}
            held[cluster].append((part, {name: [texts[i] for i in own] for name, texts in strings.items()}))
            if num_held(cluster) >= rows_a_shard:
                write(cluster, rows_a_shard)
    for cluster in group:
        if num_held(cluster):
            write(cluster, rows_a_shard)
        (staged / f"{cluster:02d}").mkdir(parents=True, exist_ok=True)
        write_sums(staged / f"{cluster:02d}", sums[cluster])


def _promote(folder: Path) -> None:
    """Replaces shards/ or the old clusters by the completed new clusters."""
    staged, clusters = folder / STAGED, folder / "clusters"
    if isinstance(staged, StorePath):
        # Objects cannot be renamed, so the next run finishes an interrupted one: the old partition.json is deleted
        # first, and the new one is written last.
        (clusters / PARTITION).unlink()
        remove_tree(clusters)
        for path in sorted(staged.rglob("*"), key=lambda path: path.name == PARTITION):
            clusters.joinpath(*path.relative_to(staged).parts).copy_from(path)  # type: ignore[attr-defined]
        remove_tree(folder / "shards")
        (staged / PARTITION).unlink()
        remove_tree(staged)
        return
    old = folder / "clusters.old"
    if clusters.exists():
        os.replace(clusters, old)
    os.replace(staged, clusters)
    remove_tree(old)
    remove_tree(folder / "shards")
