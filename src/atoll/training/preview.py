"""`--dry-run`: what a run would do, and the memory and time it would take."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from atoll.training.loop import Run, Task, made
from atoll.training.memory import in_words, largest_micro_batch, measure_base, predict
from atoll.training.settings import Settings
from atoll.training.team import Team

PROBED = 4  # steps; the first is left out, for it is slower


def preview(make_task: Callable[[torch.device], Task], settings: Settings) -> Sequence[str]:
    """The resolved settings, the number of parameters, memory, and time after a short probe."""
    team = Team(settings)
    on_gpu = team.device.type == "cuda"
    base = None if on_gpu else measure_base()
    task = made(make_task, team.device)
    config = task.network.config
    bf16 = settings.uses_bf16
    circumstances: dict[str, Any] = {
        "text_length": task.text_length,
        "device_type": team.device.type,
        "bf16": bf16,
        "base": base,
        "processes": team.size,
        "extra": task.frozen_bytes,
    }
    memory = predict(config, settings, **circumstances)
    named = {name: value for name, value in asdict(settings).items() if value is not None}
    named["lr"] = f"{settings.lr_at(settings.steps // 2, config.hidden_size):.3g} half-way"
    named |= {"precision": "bf16" if bf16 else "fp32", "device": str(team.device), "processes": team.size}
    named |= {"pictures": task.num_rows, "epochs": f"{settings.steps * settings.batch / task.num_rows:.1f}"}
    named["parameters"] = f"{sum(p.numel() for p in task.network.parameters()) / 1e6:.2f}M"
    lines = ["settings", *(f"  {name:14} {value}" for name, value in named.items())]
    lines += [f"memory on the {'GPU' if on_gpu else 'CPU'}, predicted", *(f"  {line}" for line in memory.lines())]
    free = available(team.device)
    if memory.total > free:
        most = largest_micro_batch(config, settings, free, **circumstances)
        advice = f"use --micro-batch {most}" if most else "use --checkpointing, or a smaller --model"
        return [*lines, f"this is more than the {in_words(free)} there are: {advice}"]
    return [*lines, *_probe(task, settings, team)]


def _probe(task: Task, settings: Settings, team: Team) -> Sequence[str]:
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
    return [
        f"time, after {PROBED} steps",
        f"  {'a step':14} {step:.3f} s, {settings.batch / step:.0f} samples/s",
        f"  {'all of it':14} {told}, without held-out figures and samples",
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
