"""What an evaluation keeps: rows in files of so many, each made once, so that the same command resumes."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tqdm import tqdm

from atoll.errors import InputError
from atoll.storage import write_json, write_whole
from atoll.tensors import TensorFile

ROWS = "rows"
AGAIN = "remove it, and give the same command again"


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


def write_text(path: Path, content: str) -> None:
    """Writes a page whole; half characters, as a name may hold them, are spelled out."""
    write_whole(path, lambda staged: staged.write_text(content, encoding="utf-8", errors="backslashreplace"))


def hash_of(value: Any) -> str:
    """SHA-256 of anything that JSON can say."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
