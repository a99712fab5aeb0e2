"""The state of a run on disk, from which the same command goes on: one safetensors file a saved step.

Weights, averaged weights and both moments of AdamW are tensors, all else (`Progress`) is JSON in the file's
metadata: a state is one file, so it is there whole or not at all.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from atoll.config import build
from atoll.errors import InputError
from atoll.files import reason_of, write_whole

FORMAT = 1


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


def path_of(folder: Path, step: int) -> Path:
    return folder / f"{step:09d}.safetensors"


def saved(folder: Path) -> list[Path]:
    """The states there are, the latest last."""
    return sorted(path for path in folder.glob("*.safetensors") if re.fullmatch(r"\d{9,}", path.stem))


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
        with safe_open(path, "pt") as file:
            return bool(json.loads((file.metadata() or {})["progress"])["bad_in_a_row"] == 0)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return False


def load(path: Path, into: Mapping[str, Tensor]) -> Progress:
    """Copy a state's tensors into those of a run. They keep their places in memory: kernels may round by alignment."""
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("format") != str(FORMAT):
                raise InputError(f"{path} has format {about.get('format')}, and this version of atoll reads {FORMAT}")
            progress = build(Progress, json.loads(about["progress"]), f"the progress in {path}")
            names = set(file.keys())
            for name in sorted(names ^ into.keys()):
                raise InputError(f"{path} {'has' if name in names else 'lacks'} {name}: it is of another network")
            for name, tensor in into.items():
                found = file.get_tensor(name)
                if found.shape != tensor.shape:
                    raise InputError(f"{name} in {path} is {list(found.shape)}, not {list(tensor.shape)}")
                tensor.copy_(found)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the state {path} is damaged ({reason_of(error)})") from error
    return progress
