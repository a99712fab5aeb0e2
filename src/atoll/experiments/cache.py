"""What experiments keep on disk, so that the same command resumes."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from atoll.cards import hash_of
from atoll.errors import InputError, shown
from atoll.storage import read_json, write_json, write_whole
from atoll.tensors import read_tensors


def cached(
    folder: Path, about: Mapping[str, Any], dtype: str, shape: tuple[int, ...], make: Callable[[], NDArray[Any]]
) -> NDArray[Any]:
    """Returns rows that depend on nothing but `about`: read if they are in the folder, made and kept there if not."""
    path = folder / f"{hash_of(about)[:32]}.safetensors"
    if os.path.lexists(path):
        kept = read_tensors(path, "remove it, and rerun the command").get("rows")
        if kept is not None and (rows := kept.numpy()).dtype == dtype and rows.shape == shape:
            return rows
    made = {"rows": np.ascontiguousarray(make())}
    # Under a name of this process first: another may be making the same, and the last one stays.
    own = folder / f".{os.getpid()}.{path.name}"
    write_whole(own, lambda staged: save_file(made, staged, {"about": json.dumps(about)}))
    os.replace(own, path)
    return made["rows"]


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
