"""`--dry-run`: what a run would do, and the memory and time it would take."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from atoll.training.distributed import Team
from atoll.training.loop import Run, Task, made
from atoll.training.memory import Memory, Storages, in_words, largest_micro_batch, measure_base, predict
from atoll.training.settings import Settings

PROBED = 4  # steps; the first is left out, for it is slower


@dataclass(frozen=True)
class Drawing:
    """What one grid of samples takes."""

    num_bytes: int = 0  # that come and go
    seconds: float = 0.0


def preview(make_task: Callable[[torch.device], Task], settings: Settings) -> Sequence[str]:
    """The resolved settings, the number of parameters, memory, and time after a short probe."""
    team = Team(settings)
    task = made(make_task, team.device)
    config, bf16 = task.network.config, settings.uses_bf16
    around = circumstances(task, settings, team)
    memory = predict(config, settings, **around)
    free = available(team.device)
    fits = memory.total <= free
    drawing = draw(task, team) if fits else Drawing()
    if drawing.num_bytes:
        memory = predict(config, settings, **around, drawing=drawing.num_bytes)
    named = {name: value for name, value in asdict(settings).items() if value is not None}
    named["lr"] = f"{settings.lr_at(settings.steps // 2, config.hidden_size):.3g} half-way"
    named |= {"precision": "bf16" if bf16 else "fp32", "device": str(team.device), "processes": team.size}
    named |= {"pictures": task.num_rows, "epochs": f"{settings.steps * settings.batch / task.num_rows:.1f}"}
    named["parameters"] = f"{num_parameters(task) / 1e6:.2f}M"
    lines = ["settings", *(f"  {name:14} {value}" for name, value in named.items())]
    where = "GPU" if team.device.type == "cuda" else "CPU"
    lines += [f"memory on the {where}, predicted", *(f"  {line}" for line in memory.lines())]
    if not fits:
        most = largest_micro_batch(config, settings, free, **around)
        advice = f"use --micro-batch {most}" if most else "use --checkpointing, or a smaller --model"
        return [*lines, f"this is more than the {in_words(free)} there are: {advice}"]
    return [*lines, *_probe(task, settings, team, drawing)]


def circumstances(task: Task, settings: Settings, team: Team, base: int | None = None) -> dict[str, Any]:
    """What `predict` must know beside the network and its settings. `base` is measured unless it is known."""
    if base is None and team.device.type == "cpu":
        # Measured now, for libraries that only some tasks need are loaded: diffusers alone has 200 MB.
        weights = sum(p.numel() * p.element_size() for p in task.network.parameters())
        base = max(0, measure_base() - weights - task.frozen_bytes)
    return {
        "text_length": task.text_length,
        "device_type": team.device.type,
        "bf16": settings.uses_bf16,
        "base": base,
        "processes": team.size,
        "frozen": task.frozen_bytes,
    }


def num_parameters(task: Task) -> int:
    return sum(p.numel() for p in task.network.parameters())


def draw(task: Task, team: Team) -> Drawing:
    """A grid of samples as the run draws them, followed tensor by tensor; of a task that draws none, nothing."""
    task.network.to(team.device).eval()
    begun = time.perf_counter()
    with torch.no_grad(), Storages() as watch:
        drawn = task.picture()
    return Drawing() if drawn is None else Drawing(watch.peak, time.perf_counter() - begun)


def _probe(task: Task, settings: Settings, team: Team, drawing: Drawing) -> Sequence[str]:
    """The time a few steps take, nothing being written."""
    run = Run(task, settings, team)
    seconds = []
    try:
        for _ in range(PROBED):
            begun = time.perf_counter()
            run.step()
            seconds.append(time.perf_counter() - begun)
    except torch.OutOfMemoryError:
        return ["the device has too little memory for a step: halve --micro-batch, or switch --checkpointing on"]
    finally:
        run.close()
    step = min(seconds[1:])
    whole = step * settings.steps
    told = f"{whole / 3600:.1f} hours" if whole > 5400 else f"{whole / 60:.1f} minutes"
    grids = [f"  {'a sample grid':14} {drawing.seconds:.1f} s, every {settings.sample_every} steps"]
    return [
        f"time, after {PROBED} steps",
        f"  {'a step':14} {step:.3f} s, {settings.batch / step:.0f} samples/s",
        f"  {'all of them':14} {told}, without held-out figures and samples",
        *(grids if drawing.num_bytes else []),
    ]


def available(device: torch.device) -> int:
    """Bytes that are free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 2**63  # not Linux: whoever asks must know
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def total_of(memories: Sequence[Memory], at_a_time: int) -> int:
    """The most bytes that processes take together, so many at a time: the largest may meet."""
    return sum(sorted((memory.total for memory in memories), reverse=True)[:at_a_time])
