"""Runs to submit, and the ways in which cheats would alter them."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll.cards import hash_of
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.shards import Dataset
from atoll.data.sources import Source
from atoll.federation.gate import Gate
from atoll.federation.replay import read_progress
from atoll.partition.partition import partition
from atoll.tensors import read_tensors
from atoll.training import checkpoint
from atoll.training import expert as expert_module
from atoll.training.expert import ExpertTask, train_expert
from atoll.training.settings import ExpertSettings

SETTINGS = ExpertSettings(
    "xs/1", objective="ddpm-min-snr", steps=120, batch=16, lr=4e-3, save_every=20, keep_every=20, eval_every=1000,
    sample_every=0,
)  # fmt: skip
GATE = Gate(held_out=384, levels=6, baseline_margin=0.3, samples=0, segments=1, segment_steps=20)
EVALUATED = 256
FILES = ("config.json", "model.safetensors", "calibration.safetensors", "run.json")


@cache
def runs(root: Path) -> Path:
    """Returns a data set of two clusters and an expert of each."""
    data = root / "submitted" / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_module, "EVALUATED_AT_THE_END", EVALUATED)
        return _runs(data)


def _runs(data: Path) -> Path:
    prepare(Source("avatars", num=240, size=32), data, PrepareSettings(size=32, codec="pca:8x12", holdout=0.2), 0,
            progress=False)  # fmt: skip
    partition(data, 2, cap=1.3, progress=False)
    for k in range(2):
        train_expert(data, k, SETTINGS, data.with_name(f"run_{k}"), progress=False)
    return data


def submit(run: Path, out: Path) -> Path:
    """Makes the folder that a contributor uploads."""
    out.mkdir(parents=True)
    for name in FILES:
        shutil.copy(run / name, out / name)
    shutil.copytree(run / "state", out / "checkpoints")
    return out


@pytest.fixture(autouse=True)
def evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputes cards with as few held-out rows as they were made with."""
    monkeypatch.setattr(expert_module, "EVALUATED_AT_THE_END", EVALUATED)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs(tmp_path_factory.getbasetemp())


@pytest.fixture
def submission(data: Path, tmp_path: Path) -> Path:
    """Returns a copy to tamper with."""
    return submit(data.with_name("run_0"), tmp_path / "submission")


def seal(folder: Path) -> None:
    """Updates the hashes in config.json, as any cheat would."""
    about = json.loads((folder / "config.json").read_text())
    for name in about["sha256"]:
        about["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "config.json").write_text(json.dumps(about))


def edit_json(path: Path, change: Callable[[dict], None]) -> None:
    about = json.loads(path.read_text())
    change(about)
    if path.name == "run.json":
        about.pop("sha256")
        about["sha256"] = hash_of(about)
    path.write_text(json.dumps(about))


def edit_weights(folder: Path, change: Callable[[Tensor], Tensor], name: str = "model.safetensors") -> None:
    tensors = {key: change(tensor).contiguous() for key, tensor in load_file(folder / name).items()}
    save_file(tensors, folder / name)
    seal(folder)


def edit_checkpoint(path: Path, tensors: Mapping[str, Tensor], **progress: int) -> None:
    """Writes other tensors into a checkpoint, with the matching hash."""
    values = {**asdict(read_progress(path)), **progress}
    whole = {**read_tensors(path, ""), **tensors}
    path.unlink()
    checkpoint._write(path, whole, values)


def relabel(folder: Path, data: Path, cluster: int) -> None:
    """Relabels a stolen run as one of another cluster, with figures that are true of that cluster."""
    task = ExpertTask(Dataset.open(data, cluster), SETTINGS, torch.device("cpu"))
    task.network.load_state_dict(load_file(folder / "model.safetensors"))
    task.network.eval()
    training = json.loads((folder / "config.json").read_text())["training"]
    with torch.no_grad():
        task.finish(folder, training)
    edit_json(folder / "run.json", lambda about: about.update(data=task.view.identity()))
