"""A prepared data set on disk: shards of fixed-size rows in safetensors, memory-mapped.

    DATA/dataset.json              what it is: source, codec, text encoder, transform, counts
    DATA/vae/  DATA/text_encoder/  the codec and the text encoder themselves
    DATA/shards/00000.safetensors  rows, in the order of the source
    DATA/rejected.jsonl            what was left out, and why
    DATA/clusters/03/...           the same rows by cluster, once partitioned (shards/ is then gone)
    DATA/clusters/partition.json   how; centroids.safetensors beside it

A reader never loads a shard: it maps the file and touches the rows it is asked for.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tqdm import tqdm

from atoll.errors import InputError
from atoll.files import read_json, write_whole

FORMAT = 1
TRAIN, HELD_OUT = 0, 1
TEXTS = ("key", "caption", "label")
_DTYPES = {"F16": np.float16, "F32": np.float32, "I32": np.int32, "I64": np.int64, "U64": np.uint64, "U8": np.uint8}


class Shard:
    """One file of rows. It is mapped into memory when a column is asked for, and a few hundred stay mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                start = 8 + int.from_bytes(file.read(8), "little")
                end = file.seek(0, os.SEEK_END)
                file.seek(8)
                header = json.loads(file.read(min(start, end) - 8))
            header.pop("__metadata__", None)
            self._spans: dict[str, tuple[Any, list[int], int, int]] = {}
            for name, entry in header.items():
                first, last = (start + offset for offset in entry["data_offsets"])
                if last > end:
                    raise ValueError(f"{end} bytes, at least {last} expected")
                self._spans[name] = (_DTYPES[entry["dtype"]], entry["shape"], first, last)
            self.num_rows = int(self._spans["row"][1][0])
            self._version = path.stat().st_mtime_ns
        except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError, RecursionError) as error:
            raise InputError(f"{path} is truncated or not a shard ({error}): copy it again from its source") from error

    @property
    def names(self) -> list[str]:
        """The columns of fixed-size rows."""
        return [name for name in self._spans if "." not in name]

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._spans:
            raise InputError(f"{self.path} has no column {name!r}: copy it again from its source")
        dtype, shape, first, last = self._spans[name]
        return _mapped(self.path, self._version)[first:last].view(dtype).reshape(shape)

    def texts(self, column: str, rows: Iterable[int] | None = None) -> list[str]:
        """Strings of a column, all of them or some."""
        offsets, content = self[f"{column}.offsets"], self[f"{column}.bytes"]
        chosen = range(len(offsets) - 1) if rows is None else rows
        return [bytes(content[offsets[i] : offsets[i + 1]]).decode("utf-8", "replace") for i in chosen]


@lru_cache(maxsize=256)
def _mapped(path: Path, version: int) -> NDArray[np.uint8]:
    """A map holds a file open, and 11 million pictures are 20,000 files: not all can be."""
    del version  # a file that was written anew is mapped anew
    return np.memmap(path, np.uint8, "r")


class Column:
    """One column over all shards, as if it were one array; slices and index arrays read just those rows."""

    def __init__(self, shards: list[Shard], name: str, order: NDArray[np.int64] | None = None) -> None:
        self.shards, self.name, self.order = shards, name, order
        self.ends = np.cumsum([shard.num_rows for shard in shards])

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
            return self.shards[part][self.name][index - (self.ends[part - 1] if part else 0)]
        first = self.shards[0][self.name]
        out = np.empty((len(index), *first.shape[1:]), first.dtype)
        owner = np.searchsorted(self.ends, index, side="right")
        for part in np.unique(owner):
            mine = owner == part
            out[mine] = self.shards[part][self.name][index[mine] - (self.ends[part - 1] if part else 0)]
        return out


@dataclass(frozen=True)
class Dataset:
    """A prepared data set, or one cluster of it."""

    folder: Path
    about: dict[str, Any]
    shards: list[Shard]
    cluster: int | None = None

    @classmethod
    def open(cls, folder: str | Path, cluster: int | None = None, partial: bool = False) -> "Dataset":
        """Open DATA, or one cluster of it, for which all others may be absent; `partial`: whatever is there."""
        folder = Path(folder)
        about = read_json(folder / "dataset.json", "give a folder that `atoll prepare` has made")
        if about.get("format") != FORMAT:
            raise InputError(f"{folder} has format {about.get('format')!r}, and this version of atoll reads {FORMAT}")
        _check_described(folder, about)
        if not about.get("complete"):
            raise InputError(f"{folder} is not finished: run the same `atoll prepare` command again to go on")
        if cluster is None:
            places = [folder / "shards"]
            if (found := clusters_in(folder)) is not None:
                places = sorted(p for p in found.iterdir() if p.is_dir())
        else:
            found = clusters_in(folder) or folder / "clusters"
            places = [found / f"{cluster:02d}"]
            if not places[0].is_dir():
                here = sorted(p.name for p in found.glob("[0-9]*"))
                raise InputError(f"{folder} has no cluster {cluster}: there are {', '.join(here) or 'none yet'}")
        paths = [path for place in places for path in sorted(place.glob("*.safetensors"))]
        shards = [shard for shard in map(Shard, paths) if shard.num_rows]
        data = cls(folder, about, shards, cluster)
        expected = about["counts"]["rows"]
        if cluster is None and not partial and len(data) != expected:
            raise InputError(f"{folder} has {len(data)} rows of {expected}: some of its shards are missing")
        return data

    def __len__(self) -> int:
        return sum(shard.num_rows for shard in self.shards)

    def column(self, name: str) -> Column:
        """The rows of one column, in the order of the source."""
        return Column(self.shards, name, self._order)

    def clusters(self) -> NDArray[np.int64]:
        """The cluster of each row, in the order of the source."""
        numbers = [int(shard.path.parent.name) for shard in self.shards if shard.path.parent.name.isdigit()]
        if len(numbers) != len(self.shards):
            raise InputError(f"{self.folder} has no clusters yet: run `atoll partition {self.folder} --experts K`")
        found = np.repeat(np.array(numbers, np.int64), [shard.num_rows for shard in self.shards])
        return found if self._order is None else found[self._order]

    @cached_property
    def _order(self) -> NDArray[np.int64] | None:
        """Where each row of the source lies, if clusters have scattered them."""
        rows = np.concatenate([np.array(shard["row"]) for shard in self.shards] or [np.empty(0, np.int64)])
        return None if bool((np.diff(rows) > 0).all()) else np.argsort(rows, kind="stable")

    def texts(self, name: str, rows: Iterable[int] | None = None) -> list[str]:
        """Strings of a column: key, caption or label."""
        index = np.arange(len(self)) if rows is None else np.fromiter(rows, np.int64)
        at = index if self._order is None else self._order[index]
        ends = np.cumsum([shard.num_rows for shard in self.shards])
        owner = np.searchsorted(ends, at, side="right")
        found = np.empty(len(at), object)
        for part in np.unique(owner):
            mine = np.flatnonzero(owner == part)
            found[mine] = self.shards[part].texts(name, at[mine] - (ends[part - 1] if part else 0))
        return list(found)

    def size_on_disk(self) -> int:
        return sum(shard.path.stat().st_size for shard in self.shards)


def _check_described(folder: Path, about: Mapping[str, Any]) -> None:
    """Whether a dataset.json says what all that reads it must know."""
    needed = {"counts": dict, "source": dict, "settings": dict, "codec": dict, "text": dict, "features": dict}
    for name, kind in {**needed, "latent_shape": list, "license": str}.items():
        if not isinstance(about.get(name), kind):
            raise InputError(f"{folder}/dataset.json has no {name!r} that can be read: copy it again from its source")
    for part in ("codec", "text", "features"):
        if not isinstance(about[part].get("fingerprint"), str):
            raise InputError(f"{folder}/dataset.json does not say which {part} it is of: copy it again from its source")


def clusters_in(folder: Path) -> Path | None:
    """The clusters of a data set, also while a new partition takes the place of an old one."""
    return next((p for p in (folder / "clusters", folder / "clusters.old") if p.is_dir()), None)


def write_shard(path: Path, columns: Mapping[str, NDArray[Any]], texts: Mapping[str, Sequence[str]]) -> None:
    """Write a shard so that it is there whole or not at all."""
    tensors = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    for name, strings in texts.items():
        encoded = [text.encode("utf-8", "replace") for text in strings]
        tensors[f"{name}.bytes"] = np.frombuffer(b"".join(encoded), np.uint8).copy()
        tensors[f"{name}.offsets"] = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    write_whole(path, lambda staged: save_file(tensors, staged))


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
    if old.exists() and not (folder / "clusters").exists():
        os.replace(old, folder / "clusters")  # a partition was cut short between its two renames
    for leftover in (staged, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        _write_clusters(data, cluster_of, num_clusters, staged, progress, rows_a_shard)
        finish(staged)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    if (folder / "clusters").exists():
        os.replace(folder / "clusters", old)
    os.replace(staged, folder / "clusters")
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(folder / "shards", ignore_errors=True)


def _write_clusters(
    data: Dataset, cluster_of: NDArray[np.int64], num_clusters: int, staged: Path, progress: bool, rows_a_shard: int
) -> None:
    columns = {name: data.column(name) for name in data.shards[0].names}
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
