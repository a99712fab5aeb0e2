"""Checkpoints on the way as parts of their own, so that quality can be judged against training."""

from dataclasses import asdict
from pathlib import Path

import torch

from atoll.errors import InputError
from atoll.tensors import TensorFile
from atoll.training.settings import Settings
from atoll.training.task import CaptionedTask


def write_snapshot(task: CaptionedTask, checkpoint: Path, settings: Settings, out: Path) -> None:
    """Writes what training would have, had it ended at a checkpoint: its EMA weights, measured on held-out data."""
    if not checkpoint.exists():
        raise InputError(f"there is no checkpoint {checkpoint}: train with a --keep-every that divides its step")
    names = [name for name, p in task.network.named_parameters() if p.requires_grad]
    with TensorFile(checkpoint, "train it again") as file:
        ema = file.read([f"averaged.{name}" for name in names])
    task.network.load_state_dict({name: ema[f"averaged.{name}"] for name in names}, strict=False)
    task.network.eval()
    steps = int(checkpoint.stem)
    training = {"settings": asdict(settings), "steps": steps, "samples": steps * settings.batch}
    with torch.no_grad():
        task.finish(out, training)
