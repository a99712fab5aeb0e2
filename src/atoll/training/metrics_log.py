"""The metrics log of a run: metrics.jsonl always, TensorBoard where it is installed."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from atoll.errors import InputError
from atoll.storage import parse_json, read_bytes, reason_of, write_whole

NAME = "metrics.jsonl"
MAX_METRICS = 1 << 28  # bytes; a million lines have 200 MB


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run, without one that is cut short."""
    try:
        lines = read_bytes(folder / NAME, MAX_METRICS).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(
            f"cannot read {folder / NAME} ({reason_of(error)}): remove it, or choose another --out"
        ) from error
    metrics = []
    for line in lines:
        try:
            values = parse_json(line)
        except ValueError:
            break
        if not isinstance(values, dict) or type(values.get("step")) is not int:
            break
        metrics.append(values)
    return metrics


class MetricsLog:
    """Appends to metrics.jsonl, each line whole. Processes that write no files have one that is not enabled."""

    def __init__(self, folder: Path, step: int, enabled: bool = True) -> None:
        self.folder, self.enabled = folder, enabled
        self.path = folder / NAME
        self.board: Any = None
        if enabled:
            self.rewind(step)

    def rewind(self, step: int) -> None:
        """Forgets lines beyond a step, which will be trained again."""
        self.close()
        content = "".join(_line(line) for line in read_metrics(self.folder) if line["step"] <= step).encode()
        if not self.path.exists() or read_bytes(self.path, MAX_METRICS) != content:
            write_whole(self.path, lambda staged: staged.write_bytes(content))
        self.board = _tensorboard(self.folder, step)

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

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps({name: _finite(value) for name, value in values.items()}, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN: what is not finite is null."""
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
