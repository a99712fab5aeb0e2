"""The metrics log of a run: metrics.jsonl, and TensorBoard if it is installed."""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from atoll.errors import InputError
from atoll.storage import open_regular, parse_json, read_bytes, reason_of, write_text

NAME = "metrics.jsonl"
MAX_METRICS = 1 << 28  # bytes; a million lines have 200 MB


def read_metrics(folder: Path, tail: int | None = None) -> list[dict[str, Any]]:
    """Returns the lines of a run, or those in the last `tail` bytes; incomplete lines, as of a crash, are left out."""
    path = folder / NAME
    try:
        content = read_bytes(path, MAX_METRICS) if tail is None else read_tail(path, tail)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"cannot read {path} ({reason_of(error)}): remove it, or choose another --out") from error
    lines = []
    for line in content.split(b"\n")[:-1]:
        with suppress(ValueError):
            lines.append(parse_json(line))
    return [values for values in lines if isinstance(values, dict) and type(values.get("step")) is int]


def read_tail(path: Path, size: int, start: int = 0) -> bytes:
    """Returns the last `size` bytes of a file, but none before byte `start`."""
    with open_regular(path) as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - size))
        return file.read(size)


class MetricsLog:
    """Appends whole lines to metrics.jsonl. Processes that write no files have a log that is not enabled."""

    def __init__(self, folder: Path, step: int, enabled: bool = True) -> None:
        self.folder, self.enabled, self.path = folder, enabled, folder / NAME
        self.board: Any = None
        if enabled:
            self.rewind(step)

    def rewind(self, step: int) -> None:
        """Removes the lines after `step`, since those steps will be trained again."""
        self.close()
        lines = "".join(_line(values) for values in read_metrics(self.folder) if values["step"] <= step)
        write_text(self.path, lines)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self.board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1)

    def write(self, values: Mapping[str, Any]) -> None:
        if not self.enabled:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(values))
        except OSError as error:
            raise InputError(
                f"cannot write {self.path} ({reason_of(error)}): free the disk, then rerun the same command to resume"
            ) from error
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and name != "step":
                    self.board.add_scalar(name, value, values["step"])

    def show(self, name: str, image: Image.Image, step: int) -> None:
        """Adds an image to TensorBoard."""
        if self.board is not None:
            self.board.add_image(name, np.asarray(image), step, dataformats="HWC")

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps({name: _finite(value) for name, value in values.items()}, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """Returns the value with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
