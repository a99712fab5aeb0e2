"""Results that experiments cache on disk, so that rerunning the command resumes."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from atoll.cards import hash_of
from atoll.storage import write_whole
from atoll.tensors import TensorFile

AGAIN = "remove it, and rerun the command"


def cached(
    folder: Path, about: Mapping[str, Any], dtype: str, shape: tuple[int, ...], make: Callable[[], NDArray[Any]]
) -> NDArray[Any]:
    """Returns an array that depends only on `about`, read from the folder or, if it is not there, made and saved."""
    name = hash_of(about)[:32]
    kept = Snapshot.read(folder, name, about)
    if kept and (array := kept.arrays.get("rows", np.zeros(()))).dtype == dtype and array.shape == shape:
        return array
    rows = np.ascontiguousarray(make())  # the layout it will be read with, since layout changes how networks round
    # Written under a name of this process, then renamed, since another process may be making the same.
    Snapshot(about, {}, {"rows": rows}).write(folder, own := f".{os.getpid()}.{name}")
    os.replace(folder / f"{own}.safetensors", folder / f"{name}.safetensors")
    return rows


class Snapshot(NamedTuple):
    """Arrays and JSON values, all of which depend only on `key`."""

    key: Mapping[str, Any]
    about: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]

    @classmethod
    def read(cls, folder: Path, name: str, key: Mapping[str, Any]) -> "Snapshot | None":
        """Returns the snapshot, or None if there is none or it has another key."""
        if os.path.lexists(path := folder / f"{name}.safetensors"):
            with TensorFile(path, AGAIN) as file, suppress(ValueError, TypeError, KeyError):
                content = json.loads(file.metadata["content"])
                if content["key"] == key:
                    arrays = {name: array.numpy() for name, array in file.read().items()}
                    return cls(key, dict(content["about"]), arrays)
        return None

    def write(self, folder: Path, name: str) -> None:
        arrays = {key: np.ascontiguousarray(array) for key, array in self.arrays.items()}
        metadata = {"content": json.dumps({"key": self.key, "about": self.about})}
        write_whole(folder / f"{name}.safetensors", lambda staged: save_file(arrays, staged, metadata))
