"""A prepared data set on disk: shards of fixed-size rows in safetensors, memory-mapped.

    DATA/dataset.json              what it is: source, codec, text encoder, transform, counts
    DATA/codec/  DATA/text/        the codec and the text encoder themselves
    DATA/shards/00000.safetensors  rows, in the order of the source
    DATA/rejected.jsonl            what was left out, and why
    DATA/clusters/03/...           the same rows by cluster, once partitioned (shards/ is then gone)
    DATA/clusters/partition.json   how; centroids.safetensors beside it

A reader never loads a shard: it maps the file and touches the rows it is asked for.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tqdm import tqdm

from atoll.config import read_json
from atoll.errors import InputError

FORMAT = 1
TRAIN, HELD_OUT = 0, 1
TEXTS = ("key", "caption", "label")
_DTYPES = {"F16": np.float16, "F32": np.float32, "I32": np.int32, "I64": np.int64, "U64": np.uint64, "U8": np.uint8}


class Shard:
    """One file of rows, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            raw = np.memmap(path, np.uint8, "r")
            start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
            header = json.loads(raw[8:start].tobytes())
            header.pop("__metadata__", None)
            self.columns: dict[str, NDArray[Any]] = {}
            for name, entry in header.items():
                first, last = (start + offset for offset in entry["data_offsets"])
                if last > len(raw):
                    raise ValueError(f"{len(raw)} bytes, at least {last} expected")
                self.columns[name] = raw[first:last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
            self.num_rows = len(self.columns["row"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
            raise InputError(f"{path} is truncated or not a shard ({error}): copy it again from its source") from error

    def text(self, column: str, row: int) -> str:
        first, last = self.columns[f"{column}.offsets"][row : row + 2]
        return bytes(self.columns[f"{column}.bytes"][first:last]).decode("utf-8", "replace")


class Column:
    """One column over all shards, as if it were one array; slices and index arrays read just those rows."""

    def __init__(self, shards: list[Shard], name: str, order: NDArray[np.int64] | None = None) -> None:
        self.parts = [shard.columns[name] for shard in shards]
        self.ends = np.cumsum([len(part) for part in self.parts])
        self.order = order

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        index = np.asarray(rows, dtype=np.int64)
        if self.order is not None:
            index = self.order[index]
        if index.ndim == 0:
            part = int(np.searchsorted(self.ends, index, side="right"))
            return self.parts[part][index - (self.ends[part - 1] if part else 0)]
        out = np.empty((len(index), *self.parts[0].shape[1:]), self.parts[0].dtype)
        owner = np.searchsorted(self.ends, index, side="right")
        for part in np.unique(owner):
            mine = owner == part
            out[mine] = self.parts[part][index[mine] - (self.ends[part - 1] if part else 0)]
        return out


@dataclass(frozen=True)
class Dataset:
    """A prepared data set, or one cluster of it."""

    folder: Path
    about: dict[str, Any]
    shards: list[Shard]
    cluster: int | None = None

    @classmethod
    def open(cls, folder: str | Path, cluster: int | None = None) -> "Dataset":
        """Open DATA, or only the files of one cluster of it; all others may be absent."""
        folder = Path(folder)
        if (folder / "clusters.old").is_dir() and not (folder / "clusters").exists():
            os.replace(folder / "clusters.old", folder / "clusters")  # a partition was cut short between two renames
        about = read_json(folder / "dataset.json", "give a folder that `atoll prepare` has made")
        if about.get("format") != FORMAT:
            raise InputError(f"{folder} has format {about.get('format')!r}, and this version of atoll reads {FORMAT}")
        if not about.get("complete"):
            raise InputError(f"{folder} is not finished: run the same `atoll prepare` command again to go on")
        if cluster is None:
            places = [folder / "shards"]
            if (folder / "clusters").is_dir():
                places = sorted(p for p in (folder / "clusters").iterdir() if p.is_dir())
        else:
            places = [folder / "clusters" / f"{cluster:02d}"]
            if not places[0].is_dir():
                here = sorted(p.name for p in (folder / "clusters").glob("[0-9]*"))
                raise InputError(f"{folder} has no cluster {cluster}: there are {', '.join(here) or 'none yet'}")
        paths = [path for place in places for path in sorted(place.glob("*.safetensors"))]
        shards = [shard for shard in map(Shard, paths) if shard.num_rows]
        data = cls(folder, about, shards, cluster)
        expected = about["counts"]["rows"]
        if cluster is None and len(data) != expected:
            raise InputError(f"{folder} has {len(data)} rows of {expected}: some of its shards are missing")
        return data

    def __len__(self) -> int:
        return sum(shard.num_rows for shard in self.shards)

    def column(self, name: str) -> Column:
        """The rows of one column, in the order of the source."""
        return Column(self.shards, name, self._order)

    @cached_property
    def _order(self) -> NDArray[np.int64] | None:
        """Where each row of the source lies, if clusters have scattered them."""
        rows = np.concatenate([shard.columns["row"] for shard in self.shards] or [np.empty(0, np.int64)])
        return None if bool((np.diff(rows) > 0).all()) else np.argsort(rows, kind="stable")

    def texts(self, name: str, rows: Iterable[int] | None = None) -> list[str]:
        """Strings of a column: key, caption or label."""
        ends = np.cumsum([shard.num_rows for shard in self.shards])
        found = []
        for row in range(len(self)) if rows is None else rows:
            at = int(row if self._order is None else self._order[row])
            part = int(np.searchsorted(ends, at, side="right"))
            found.append(self.shards[part].text(name, at - (int(ends[part - 1]) if part else 0)))
        return found

    def size_on_disk(self) -> int:
        return sum(shard.path.stat().st_size for shard in self.shards)


def write_shard(path: Path, columns: Mapping[str, NDArray[Any]], texts: Mapping[str, Sequence[str]]) -> None:
    """Write a shard so that it is there whole or not at all."""
    tensors = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    for name, strings in texts.items():
        encoded = [text.encode("utf-8", "replace") for text in strings]
        tensors[f"{name}.bytes"] = np.frombuffer(b"".join(encoded), np.uint8).copy()
        tensors[f"{name}.offsets"] = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    write_whole(path, lambda staged: save_file(tensors, staged))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call write(staged path), make sure of the bytes, then give the file its name."""
    staged = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(staged)
        with staged.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(staged, path)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise InputError(f"cannot write {path} ({error.strerror or error}): free the disk or choose another") from error


def write_json(path: Path, values: Any) -> None:
    content = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    write_whole(path, lambda staged: staged.write_text(content, encoding="utf-8"))


def regroup(
    data: Dataset,
    cluster_of: NDArray[np.int64],
    num_clusters: int,
    finish: Callable[[Path], None],
    progress: bool = True,
    rows_a_shard: int = 4096,
) -> None:
    """Move the rows of a data set into clusters/NN/, so that a contributor need copy only one of them.

    The new folders are written beside the old ones, `finish` adds to them what describes them, and they take the old
    ones' place when they are whole.
    """
    folder = data.folder
    staged, old = folder / "clusters.tmp", folder / "clusters.old"
    for leftover in (staged, old):
        shutil.rmtree(leftover, ignore_errors=True)
    names = [name for name in data.shards[0].columns if "." not in name]
    columns = {name: data.column(name) for name in names}
    bar = tqdm(total=len(data), desc="regroup", unit=" images", disable=not progress, leave=False)
    for cluster in range(num_clusters):
        mine = np.flatnonzero(cluster_of == cluster)
        (staged / f"{cluster:02d}").mkdir(parents=True)
        for number, start in enumerate(range(0, len(mine), rows_a_shard)):
            rows = mine[start : start + rows_a_shard]
            write_shard(
                staged / f"{cluster:02d}" / f"{number:05d}.safetensors",
                {name: column[rows] for name, column in columns.items()},
                {name: data.texts(name, rows) for name in TEXTS},
            )
            bar.update(len(rows))
    bar.close()
    finish(staged)
    if (folder / "clusters").exists():
        os.replace(folder / "clusters", old)
    os.replace(staged, folder / "clusters")
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(folder / "shards", ignore_errors=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the hold ends with the process, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another process is at work on {folder}: wait for it, or choose another folder"
            ) from error
        yield
    finally:
        os.close(handle)
