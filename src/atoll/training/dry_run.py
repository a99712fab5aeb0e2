"""`--dry-run`: reports what a run would do, and the memory and time it would take."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial

import torch

from atoll.training.distributed import Distributed
from atoll.training.loop import Learner, build_task
from atoll.training.memory import Memory, Storages, available, in_words, largest_micro_batch, measure_base, predict
from atoll.training.settings import Settings
from atoll.training.task import Batches, CaptionedTask, bytes_of

PROBED = 4  # steps; the first, slower one is not counted


def preview(make_task: Callable[[torch.device], CaptionedTask], settings: Settings) -> Sequence[str]:
    """Returns lines with the resolved settings, number of parameters, predicted memory, and time from a short probe."""
    distributed = Distributed(settings)
    device, processes = distributed.device, distributed.size
    task = build_task(make_task, device)
    predicted, grid_seconds = forecast(task, settings, distributed)
    memory = predicted(settings)
    named = {name: value for name, value in asdict(settings).items() if value is not None} | {
        "lr": f"{settings.lr_at(settings.steps // 2, task.network.config.hidden_size):.3g} half-way",
        "precision": "bf16" if settings.uses_bf16 else "fp32",
        "device": device,
        "processes": processes,
        "images": task.num_rows,
        "epochs": f"{settings.steps * settings.batch / task.num_rows:.1f}",
        "parameters": f"{sum(p.numel() for p in task.network.parameters()) / 1e6:.2f}M",
    }
    lines = ["settings", *(f"  {name:14} {value}" for name, value in named.items())]
    lines += [f"memory on the {'GPU' if device.type == 'cuda' else 'CPU'}, predicted", *memory.lines()]
    free = available(device)
    if memory.total <= free:
        return [*lines, *_probe(task, settings, distributed, grid_seconds)]
    most = largest_micro_batch(predicted, settings, free, processes)
    advice = f"use --micro-batch {most}" if most else "use --checkpointing, or a smaller --model"
    return [*lines, f"this is more than the {in_words(free)} there are: {advice}"]


def forecast(
    task: CaptionedTask, settings: Settings, distributed: Distributed
) -> tuple[Callable[[Settings], Memory], float]:
    """Returns a function that predicts a task's memory from its settings, and the seconds per sample grid, 0 if none.

    The grid's memory is measured by sampling one as the run does and tracking its tensors.
    """
    network, device, base = task.network, distributed.device, None
    if device.type == "cpu":
        # Measured after the task was built, since some tasks load more libraries: diffusers alone takes 200 MB.
        base = max(0, measure_base(settings.checkpointing) - bytes_of(network) - task.frozen_bytes)
    predicted = partial(
        predict,
        network.config,
        text_length=task.view.longest_text(task.text),
        device_type=device.type,
        bf16=settings.uses_bf16,
        base=base,
        processes=distributed.size,
        frozen=task.frozen_bytes,
    )
    if predicted(settings).total > available(device):
        return predicted, 0.0
    network.to(device).eval()
    start = time.perf_counter()
    with torch.no_grad(), Storages() as watch:
        grid = task.sample_grid()
    return partial(predicted, drawing=watch.peak), 0.0 if grid is None else time.perf_counter() - start


def _probe(task: CaptionedTask, settings: Settings, distributed: Distributed, grid_seconds: float) -> Sequence[str]:
    """Times a few training steps; writes nothing."""
    learner, seconds, preparation = Learner(task, settings, distributed), [], task.preparation()
    try:
        with closing(Batches(task, settings.batch, settings.seed, distributed.share, distributed.device)) as batches:
            for step in range(PROBED):
                start = time.perf_counter()
                learner.backward(*batches.get(step)).tolist()
                learner.update(settings.lr_at(step, task.network.config.hidden_size), settings.ema_at(step))
                seconds.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        return ["the device has too little memory for a step: halve --micro-batch, or switch --checkpointing on"]
    per_step = min(seconds[1:])
    total = per_step * settings.steps
    duration = f"{total / 3600:.1f} hours" if total > 5400 else f"{total / 60:.1f} minutes"
    lines = [
        f"time, after {PROBED} steps",
        *preparation,
        f"  {'a step':14} {per_step:.3f} s, {settings.batch / per_step:.0f} samples/s",
        f"  {'all of them':14} {duration}, without held-out figures and samples",
    ]
    if grid_seconds:
        lines.append(f"  {'a sample grid':14} {grid_seconds:.1f} s, every {settings.sample_every} steps")
    return lines
