"""The files of a run: run.json, which identifies it, and checkpoints from which rerunning the command resumes it.

A checkpoint is one safetensors file, so that it is written whole or not at all: weights, EMA weights and both moments
of AdamW are tensors, all else (`Progress`) is JSON in the file's metadata.
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.cards import hash_of
from atoll.config import build
from atoll.encoders.pretrained import fingerprint
from atoll.errors import InputError, printable, shown
from atoll.storage import open_regular, parse_json, read_json, real_path, reason_of, write_json, write_whole
from atoll.tensors import DTYPES, TensorFile
from atoll.training.settings import Settings, refuse_another
from atoll.training.sharding import Shard, whole

FORMAT = 1
PARTS = ("weights", "averaged", "moment1", "moment2")  # prefixes of tensor names; "averaged" are the EMA weights


@dataclass
class Progress:
    """The step a run has reached, and its sums since the last line of metrics."""

    step: int = 0
    updates: int = 0  # steps that were not skipped
    skipped: int = 0
    bad_in_a_row: int = 0
    rollbacks: int = 0
    first_loss: float | None = None
    loss_sum: float = 0.0
    norm_sum: float = 0.0
    num_summed: int = 0
    seconds_summed: float = 0.0  # of the steps alone
    seconds: float = 0.0  # of everything
    cpu_seconds: float = 0.0  # of all threads of the main process

    def summary(self, batch: int, lr: float) -> dict[str, Any]:
        """Returns a line of metrics over the updates since the last one, and resets the sums."""
        line = {
            "step": self.step,
            "loss": self.loss_sum / self.num_summed,
            "grad_norm": self.norm_sum / self.num_summed,
            "lr": lr,
            "skipped": self.skipped,
            "samples_per_second": round(self.num_summed * batch / max(self.seconds_summed, 1e-9), 2),
            "seconds": round(self.seconds, 3),
            "cpu_seconds": round(self.cpu_seconds, 3),
        }
        self.loss_sum = self.norm_sum = self.seconds_summed = 0.0
        self.num_summed = 0
        return line


# --- the folder of a run ------------------------------------------------------------------------------------------


def check_folder(folder: Path, is_run: str = "run.json") -> None:
    """Raises an InputError if the folder holds anything other than a run, or links or FIFOs that someone put there."""
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(where, name)
            try:
                if not real_path(path, folder).is_dir():
                    open_regular(path, folder).close()
            except OSError as error:
                raise InputError(
                    f"{path} is not one of a run's own files ({reason_of(error)}): remove it, or choose another --out"
                ) from error
    if not (folder / is_run).exists():
        for path in sorted(folder.iterdir()):
            if path.name != "log.txt" and not path.name.startswith("."):
                raise InputError(f"{folder} holds {path.name} and is not a run of atoll: choose another --out")


def read_run(folder: Path, about: Mapping[str, Any], settings: Settings) -> Mapping[str, Any]:
    """Returns the content of run.json, or {} if there is none; raises an InputError if it contradicts `about`."""
    if not (folder / "run.json").exists():
        return {}
    before = read_json(folder / "run.json", "remove the folder, or choose another --out")
    expected = before.pop("sha256", None)  # None: written by an earlier version, without a hash
    if expected is not None and hash_of(before) != expected:
        raise InputError(f"{folder}/run.json was altered (its hash is another): restore it, or choose another --out")
    refuse_another(folder, before.get("settings"), settings)
    for name in about.keys() - {"settings"}:
        if before.get(name) != about[name]:
            raise InputError(f"{folder} was begun with another {name.replace('_', ' ')}: choose another --out")
    return before


def write_run(folder: Path, about: Mapping[str, Any]) -> None:
    write_json(folder / "run.json", {**about, "sha256": hash_of(about)})


# --- checkpoints --------------------------------------------------------------------------------------------------


def path_of(folder: Path, step: int) -> Path:
    return folder / f"{step:09d}.safetensors"


def saved(folder: Path) -> list[Path]:
    """Returns the paths of all checkpoints, the latest last."""
    return sorted(path for path in folder.glob("*.safetensors") if re.fullmatch("[0-9]{9,12}", path.stem))


def save(
    folder: Path, tensors: Mapping[str, Tensor | Shard], progress: Progress, settings: Settings, writes: bool = True
) -> None:
    """Writes a checkpoint; removes old ones and the temporary files of processes killed while writing.

    Tensors pass through memory one at a time. Of several processes only one `writes`; with sharded tensors all of
    them must call this together.
    """
    if not writes:
        for name in sorted(tensors):
            whole(tensors[name])
        return
    write_whole(path_of(folder, progress.step), lambda staged: _write(staged, tensors, asdict(progress)))
    every, paths = settings.keep_every, saved(folder)[: -settings.keep_last]
    old = [path for path in paths if every is None or int(path.stem) % every]
    for path in (*old, *folder.glob(".*.safetensors.tmp")):
        with suppress(OSError):
            path.unlink()


def _write(staged: Path, tensors: Mapping[str, Tensor | Shard], values: Mapping[str, Any]) -> None:
    """Writes a safetensors file whose header holds the hash of its tensors and values."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries, end = dict[str, Any](), 0
    for name in sorted(tensors):
        start, tensor = end, tensors[name]
        end += math.prod(tensor.shape) * tensor.dtype.itemsize
        entries[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}

    def header(sha256: str) -> bytes:
        metadata = {"format": str(FORMAT), "progress": json.dumps(values), "sha256": sha256}
        content = json.dumps({"__metadata__": metadata, **entries}).encode()
        content += b" " * (-len(content) % 8)
        return len(content).to_bytes(8, "little") + content

    with staged.open("xb") as file:

        def write(name: str) -> Tensor:
            tensor = whole(tensors[name]).cpu().contiguous()
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            return tensor

        file.write(header("0" * 64))
        sha256 = fingerprint(_Passing(tensors, write), values)
        file.seek(0)
        file.write(header(sha256))


class _Passing(Mapping[str, Tensor]):
    """Tensors by name, each fetched on access and not kept, so that only one is in memory."""

    def __init__(self, names: Iterable[str], get: Callable[[str], Tensor]) -> None:
        self.names, self.get_tensor = list(names), get

    def __getitem__(self, name: str) -> Tensor:
        return self.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def resume(folder: Path, into: Mapping[str, Tensor | Shard]) -> Progress | None:
    """Loads the latest readable checkpoint into the tensors of `into`; returns None if there are no checkpoints."""
    paths = saved(folder)
    for path in reversed(paths):
        try:
            return load(path, into)
        except InputError as error:
            if path == paths[0]:
                raise InputError(f"{error}, and there is no other: remove {folder} to begin again") from error
            print(printable(f"atoll: {error}, so the one before it is taken"), file=sys.stderr)
    return None


def load(path: Path, into: Mapping[str, Tensor | Shard]) -> Progress:
    """Copies a checkpoint's tensors, one at a time, into those of a run, in place."""
    with TensorFile(path, "the run cannot be resumed from it") as file:
        metadata = file.metadata
        try:
            if metadata["format"] != str(FORMAT):
                raise ValueError(f"its format is {shown(metadata['format'])}, not {FORMAT}")
            progress = build(Progress, parse_json(metadata["progress"].encode()), "its progress")
            if path_of(path.parent, progress.step) != path:
                raise ValueError(f"it is of step {progress.step}")
            theirs = {name: (DTYPES[entry.dtype], entry.shape) for name, entry in file.entries.items()}
            if theirs != {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in into.items()}:
                raise ValueError("it is of another network")

            def read(name: str) -> Tensor:
                tensor = file.read([name])[name]
                into[name].copy_(tensor)
                return tensor

            # Checkpoints of earlier versions have no hash.
            sha256 = fingerprint(_Passing(into, read), asdict(progress))
            if metadata.get("sha256", "") not in ("", sha256):
                raise ValueError("its hash is another")
        except (KeyError, ValueError) as error:
            raise InputError(f"the checkpoint {path} cannot be resumed from ({reason_of(error)})") from error
    return progress
