"""`--dry-run`: what a run would do, and the memory and time it would take."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from atoll.training.loop import Run, Task
from atoll.training.settings import Settings
from atoll.training.team import Team

PROBED = 3  # steps; the first is left out, for it is slower


def preview(make_task: Callable[[torch.device], Task], settings: Settings) -> Sequence[str]:
    """The resolved settings, the number of parameters, memory, and time after a short probe."""
    team = Team(settings)
    task = make_task(team.device)
    run = Run(task, settings, team)
    lines = [f"  {name:14} {value}" for name, value in asdict(settings).items() if value is not None]
    lines.append(f"  {'lr':14} {settings.lr_at(settings.steps // 2, run.width):.3g} (half-way)")
    lines.append(f"  {'parameters':14} {sum(p.numel() for p in run.weights) / 1e6:.2f}M")
    seconds = []
    for _ in range(PROBED):
        begun = time.perf_counter()
        run.step()
        seconds.append(time.perf_counter() - begun)
    run.close()
    step = min(seconds[1:])
    lines.append(f"  {'time':14} {step:.3f} s a step, {settings.batch / step:.0f} samples/s")
    return lines
