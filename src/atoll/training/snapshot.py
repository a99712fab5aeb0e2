"""Writes checkpoints of a run as experts, to measure quality over the course of training."""

from dataclasses import asdict, replace
from pathlib import Path

import torch

from atoll.config import build
from atoll.data.shards import Dataset
from atoll.errors import InputError
from atoll.storage import read_json
from atoll.tensors import TensorFile
from atoll.training.checkpoint import path_of
from atoll.training.expert import ExpertTask
from atoll.training.settings import ExpertSettings, Settings
from atoll.training.task import CaptionedTask


def take_snapshots(runs: list[Path], step: int, data: Path, out: Path) -> list[Path]:
    """Writes the experts of these runs at a step, for `atoll assemble`; returns their folders."""
    folders = []
    for number, run in enumerate(runs):
        about = read_json(run / "run.json", "give the folder of an expert that was trained here")
        settings = replace(
            build(ExpertSettings, about.get("settings"), f"the settings in {run / 'run.json'}"), steps=step
        )
        cluster = about.get("data", {}).get("cluster")
        first = None if about.get("init") is None else run  # with --init, the architecture is that of the init weights
        task = ExpertTask(Dataset.open(data, cluster), replace(settings, sample_every=0), torch.device("cpu"), first)
        task.init = about.get("init")
        write_snapshot(task, path_of(run / "state", step), settings, out / f"expert_{number}")
        folders.append(out / f"expert_{number}")
    return folders


def write_snapshot(task: CaptionedTask, checkpoint: Path, settings: Settings, out: Path) -> None:
    """Writes what the run would have written, had it ended at this checkpoint: EMA weights with held-out metrics."""
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
