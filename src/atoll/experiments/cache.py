"""What an evaluation keeps: rows in files of so many, each made once, so that the same command resumes."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tqdm import tqdm

from atoll.cards import hash_of
from atoll.errors import InputError, shown
from atoll.storage import read_json, write_json, write_whole
from atoll.tensors import TensorFile, read_tensors

ROWS = "rows"
AGAIN = "remove it, and rerun the command"


@dataclass(frozen=True)
class Store:
    """A folder of rows that depend on nothing but `about`, a file for every `size` of them."""

    folder: Path
    about: Mapping[str, Any]
    size: int

    @classmethod
    def at(cls, folder: Path, about: Mapping[str, Any], size: int) -> "Store":
        """The place in `folder` of what depends on `about`."""
        return cls(folder / hash_of({**about, "size": size})[:16], about, size)

    def rows(
        self, num: int, make: Callable[[slice], NDArray[Any]], what: str = "", progress: bool = True
    ) -> Iterator[NDArray[Any]]:
        """Rows 0 to `num`, a file at a time: read where they are, made where not."""
        spans = [slice(first, min(first + self.size, num)) for first in range(0, num, self.size)]
        missing = {span.start for span in spans if self._num_in(self.path(span)) < span.stop - span.start}
        if missing:
            self._write("about.json", lambda path: write_json(path, dict(self.about)))
        hidden = not (progress and what and missing)
        with tqdm(total=num, desc=what, unit=" images", disable=True if hidden else None, leave=False) as bar:
            for span in spans:
                if span.start in missing:
                    self._keep(self.path(span).name, make(span))
                yield self.read(span)
                bar.update(span.stop - span.start)

    def _keep(self, name: str, rows: NDArray[Any]) -> None:
        tensors = {ROWS: np.ascontiguousarray(rows)}
        self._write(name, lambda path: write_whole(path, lambda staged: save_file(tensors, staged)))

    def _write(self, name: str, write: Callable[[Path], None]) -> None:
        """Under a name of this process first: another may be making the same, and the last one stays."""
        own = self.folder / f".{os.getpid()}.{name}"
        write(own)
        os.replace(own, self.folder / name)

    def read(self, span: slice) -> NDArray[Any]:
        """Rows of one file, which is there."""
        with TensorFile(self.path(span), AGAIN) as file:
            if ROWS not in file.entries:
                raise InputError(f"{file.path} has no {ROWS}: {AGAIN}")
            rows: NDArray[Any] = file.read([ROWS])[ROWS].numpy()
        return rows[: span.stop - span.start]

    def path(self, span: slice) -> Path:
        return self.folder / f"{span.start // self.size:05d}.safetensors"

    @staticmethod
    def _num_in(path: Path) -> int:
        """How many rows a file has; 0 where there is none."""
        if not os.path.lexists(path):
            return 0
        with TensorFile(path, AGAIN) as file:
            found = file.entries.get(ROWS)
        return found.shape[0] if found is not None and found.shape else 0


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Arrays and what is known of them, made by the models of `key`."""

    key: Mapping[str, str]
    about: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]

    @classmethod
    def read(cls, folder: Path, name: str, key: Mapping[str, str]) -> "Snapshot | None":
        """Returns None where there is nothing, or what there is was made by other models."""
        path = folder / f"{name}.json"
        if not path.exists():
            return None
        again = f"remove {path}, and run the demo again"
        content = read_json(path, again)
        if content.get("key") != key:
            return None
        if not isinstance(about := content.get("about"), dict):
            raise InputError(f"{path} is damaged, its 'about' is {shown(about)}: {again}")
        tensors = read_tensors(folder / f"{name}.safetensors", again)
        return cls(key, about, {name: tensor.numpy() for name, tensor in tensors.items()})

    def write(self, folder: Path, name: str) -> None:
        """Writes the JSON file last: it says that the other is there."""
        arrays = {key: np.ascontiguousarray(array) for key, array in self.arrays.items()}
        (folder / f"{name}.json").unlink(missing_ok=True)
        write_whole(folder / f"{name}.safetensors", lambda staged: save_file(arrays, staged))
        write_json(folder / f"{name}.json", {"key": dict(self.key), "about": dict(self.about)})


def write_text(path: Path, content: str) -> None:
    """Writes a page whole; half characters, as a name may hold them, are spelled out."""
    write_whole(path, lambda staged: staged.write_text(content, encoding="utf-8", errors="backslashreplace"))
