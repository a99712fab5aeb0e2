"""The state of a run on disk, from which the same command resumes it: one safetensors file per saved step.

Weights, averaged weights and both moments of AdamW are tensors, all else (`Progress`) is JSON in the file's
metadata: a state is one file, so it is there whole or not at all.
"""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from atoll.config import build
from atoll.errors import InputError, shown
from atoll.storage import parse_json, reason_of, write_whole
from atoll.tensors import DTYPES, TensorFile

FORMAT = 1
ADVICE = "the run cannot be resumed from it"


@dataclass
class Progress:
    """Where a run is, and what it has counted since it last wrote a line of metrics."""

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

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not 0 <= value < math.inf:
                raise InputError(f"{name} must not be negative, but is {shown(value)}")


def path_of(folder: Path, step: int) -> Path:
    return folder / f"{step:09d}.safetensors"


def saved(folder: Path) -> list[Path]:
    """The states there are, the latest last."""
    return sorted(path for path in folder.glob("*.safetensors") if re.fullmatch("[0-9]{9,12}", path.stem))


def save(folder: Path, tensors: Mapping[str, Tensor], progress: Progress) -> Path:
    about = {"format": str(FORMAT), "progress": json.dumps(asdict(progress), allow_nan=False)}
    path = path_of(folder, progress.step)
    write_whole(path, lambda staged: save_file(dict(tensors), staged, about))
    return path


def prune(folder: Path, keep_last: int, keep_every: int | None) -> None:
    """Remove what need not be kept; never the latest."""
    for path in saved(folder)[:-keep_last]:
        if keep_every is None or int(path.stem) % keep_every:
            with suppress(OSError):
                path.unlink()


def tidy(folder: Path) -> None:
    """Remove what a process that was killed while it wrote has left."""
    for path in folder.glob(".*.safetensors.tmp"):
        with suppress(OSError):
            path.unlink()


def was_good(path: Path) -> bool:
    """Whether a state was saved while all went well."""
    try:
        with TensorFile(path, ADVICE) as file:
            return progress_in(file).bad_in_a_row == 0
    except InputError:
        return False


def progress_in(file: TensorFile) -> Progress:
    found = file.metadata.get("format")
    if found != str(FORMAT):
        raise InputError(f"{file.path} has format {shown(found)}, and this version of atoll reads {FORMAT}")
    try:
        values = parse_json(file.metadata.get("progress", "").encode())
    except ValueError as error:
        raise InputError(f"the state {file.path} is damaged ({reason_of(error)})") from error
    progress = build(Progress, values, f"the progress in {file.path}")
    if path_of(file.path.parent, progress.step) != file.path:
        raise InputError(f"the state {file.path} is damaged (it is of step {progress.step})")
    return progress


def load(path: Path, into: Mapping[str, Tensor]) -> Progress:
    """Copies a state's tensors, one at a time, into those of a run, which keep their places in memory."""
    with TensorFile(path, ADVICE) as file:
        progress = progress_in(file)
        for name in sorted(file.entries.keys() ^ into.keys()):
            fault = "has" if name in file.entries else "lacks"
            raise InputError(f"{path} {fault} {shown(name)}: it is of another network")
        for name, tensor in into.items():
            entry = file.entries[name]
            if entry.shape != tensor.shape or DTYPES[entry.dtype] != tensor.dtype:
                raise InputError(
                    f"{name} in {path} is {entry.dtype} {list(entry.shape)}, not {tensor.dtype} {list(tensor.shape)}"
                )
        for name, tensor in into.items():
            tensor.copy_(file.read([name])[name])
    return progress
