"""`--dry-run`: what a run would do, and the memory and time it would take."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image

from atoll.data.view import DatasetView
from atoll.encoders.text import TextEncoder
from atoll.training.batches import Batches
from atoll.training.distributed import Distributed
from atoll.training.loop import Learner, build_task
from atoll.training.memory import Memory, Storages, in_words, largest_micro_batch, measure_base, predict
from atoll.training.settings import Settings
from atoll.training.task import Task

PROBED = 4  # steps; the first is left out, for it is slower


class PreviewedTask(Task, Protocol):
    """A task, and what the memory that it takes depends on."""

    text: TextEncoder
    view: DatasetView

    @property
    def frozen_bytes(self) -> int: ...

    def sample_grid(self) -> Image.Image | None: ...


@dataclass(frozen=True)
class Grid:
    """What one grid of samples takes."""

    num_bytes: int = 0  # that come and go
    seconds: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """The memory of a run, all else that `predict` was told, and what a grid of samples takes."""

    memory: Memory
    circumstances: dict[str, Any]
    grid: Grid
    num_parameters: int


def preview(make_task: Callable[[torch.device], PreviewedTask], settings: Settings) -> Sequence[str]:
    """Returns the resolved settings, the number of parameters, memory, and time after a short probe."""
    distributed = Distributed(settings)
    task = build_task(make_task, distributed.device)
    config, device = task.network.config, distributed.device
    prediction = predict_task(task, settings, distributed)
    named = {name: value for name, value in asdict(settings).items() if value is not None}
    named["lr"] = f"{settings.lr_at(settings.steps // 2, config.hidden_size):.3g} half-way"
    named |= {"precision": "bf16" if settings.uses_bf16 else "fp32", "device": str(device)}
    named |= {"processes": distributed.size, "images": task.num_rows}
    named["epochs"] = f"{settings.steps * settings.batch / task.num_rows:.1f}"
    named["parameters"] = f"{prediction.num_parameters / 1e6:.2f}M"
    lines = ["settings", *(f"  {name:14} {value}" for name, value in named.items())]
    lines += [f"memory on the {'GPU' if device.type == 'cuda' else 'CPU'}, predicted"]
    lines += [f"  {line}" for line in prediction.memory.lines()]
    free = available(device)
    if prediction.memory.total <= free:
        return [*lines, *_probe(task, settings, distributed, prediction.grid)]
    most = largest_micro_batch(config, settings, free, **prediction.circumstances)
    advice = f"use --micro-batch {most}" if most else "use --checkpointing, or a smaller --model"
    return [*lines, f"this is more than the {in_words(free)} there are: {advice}"]


def predict_task(
    task: PreviewedTask,
    settings: Settings,
    distributed: Distributed,
    base: int | None = None,
    grids: dict[Any, Grid] | None = None,
) -> Prediction:
    """Predicts the memory of a task; `base` and the grids of networks of the same config are measured unless known."""
    network, device = task.network, distributed.device
    grids = {} if grids is None else grids
    if base is None and device.type == "cpu":
        # Measured now, for libraries that only some tasks need are loaded: diffusers alone has 200 MB.
        weights = sum(p.numel() * p.element_size() for p in network.parameters())
        base = max(0, measure_base() - weights - task.frozen_bytes)
    circumstances: dict[str, Any] = {
        "text_length": task.view.longest_text(task.text),
        "device_type": device.type,
        "bf16": settings.uses_bf16,
        "base": base,
        "processes": distributed.size,
        "frozen": task.frozen_bytes,
    }
    memory = predict(network.config, settings, **circumstances)
    if network.config not in grids and memory.total <= available(device):
        grids[network.config] = _measure_grid(task, device)
    grid = grids.get(network.config, Grid())
    if grid.num_bytes:
        memory = predict(network.config, settings, **circumstances, drawing=grid.num_bytes)
    return Prediction(memory, circumstances, grid, sum(p.numel() for p in network.parameters()))


def _measure_grid(task: PreviewedTask, device: torch.device) -> Grid:
    """Draws a grid of samples as the run does, followed tensor by tensor; for a task that draws none, returns zeros."""
    task.network.to(device).eval()
    start = time.perf_counter()
    with torch.no_grad(), Storages() as watch:
        image = task.sample_grid()
    return Grid() if image is None else Grid(watch.peak, time.perf_counter() - start)


def _probe(task: PreviewedTask, settings: Settings, distributed: Distributed, grid: Grid) -> Sequence[str]:
    """Measures the time that a few steps take; nothing is written."""
    learner, seconds = Learner(task, settings, distributed), []
    width = task.network.config.hidden_size
    try:
        with Batches(task, settings.batch, settings.seed, distributed.share) as batches:
            for step in range(PROBED):
                start = time.perf_counter()
                learner.backward(*batches.get(step)).tolist()
                learner.update(settings.lr_at(step, width), settings.ema_at(step))
                seconds.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        return ["the device has too little memory for a step: halve --micro-batch, or switch --checkpointing on"]
    per_step = min(seconds[1:])
    total = per_step * settings.steps
    duration = f"{total / 3600:.1f} hours" if total > 5400 else f"{total / 60:.1f} minutes"
    lines = [
        f"time, after {PROBED} steps",
        f"  {'a step':14} {per_step:.3f} s, {settings.batch / per_step:.0f} samples/s",
        f"  {'all of them':14} {duration}, without held-out figures and samples",
    ]
    if grid.num_bytes:
        lines.append(f"  {'a sample grid':14} {grid.seconds:.1f} s, every {settings.sample_every} steps")
    return lines


def available(device: torch.device) -> int:
    """Returns how many bytes are free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 2**63  # not Linux: whoever asks must know
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
