"""How far from the published update is an honest replay, and how far is a forged update?

    python benchmarks/replay.py --out replay [--plot docs/figures/replay.png] [--runs hot_add/run/* --data hot_add/data]

Small experts of avatars are trained with several seeds, objectives and optimisers. Honest replays: each segment of 25
steps between two checkpoints, and each whole run as one segment, is repeated by other processes with other instruction
sets or micro-batches. Forgeries are what a cheat could publish as the end of a segment; they are compared with the
replay on this machine. The report is the relative error of the update, the largest of weights, EMA weights and moments;
`--runs` adds existing runs that kept all their checkpoints.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.config import build
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.shards import Dataset
from atoll.data.sources import Source
from atoll.federation.gate import Gate
from atoll.federation.replay import Replay, Segment, compare, for_replay, tensors_of
from atoll.partition.partition import partition
from atoll.storage import read_json, write_json
from atoll.training import checkpoint
from atoll.training.checkpoint import PARTS
from atoll.training.expert import ExpertTask, train_expert
from atoll.training.settings import ExpertSettings

STEPS, EVERY = 100, 25
BASE = ExpertSettings("64x3", steps=STEPS, batch=32, lr=2e-3, save_every=EVERY, keep_every=EVERY, eval_every=1000,
                      sample_every=0)  # fmt: skip
RUNS = {
    **{f"fm, seed {seed}": replace(BASE, seed=seed) for seed in range(3)},
    **{f"ddpm, seed {seed}": replace(BASE, objective="ddpm-min-snr", seed=seed) for seed in range(2)},
    **{f"muon, seed {seed}": replace(BASE, optimizer="muon", seed=seed) for seed in range(2)},
}
SSE = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
ELSEWHERE: dict[str, tuple[dict[str, str], dict[str, Any]]] = {  # environment and settings
    "same": ({}, {}),
    "SSE4": (SSE, {}),
    "SSE4, MKL compatible": ({**SSE, "MKL_CBWR": "COMPATIBLE"}, {}),
    "AVX2, MKL AVX": ({"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX"}, {}),
    "micro-batches of 8": ({}, {"micro_batch": 8}),
}
LEAST, MOST = 1e-6, 10.0  # range of the plot
FORGED = (
    "random direction", "straight line", "half the steps, doubled", "other seed", "other data", "no step",
    "another expert", "another, with noise", "its own, 5% noise",
)  # fmt: skip


def open_run(run: Path, data: Path, **changes: Any) -> Replay:
    about = read_json(run / "run.json", "train it again")
    settings = build(ExpertSettings, about["settings"], f"the settings of {run}")
    settings = replace(settings, warmup=about["warmup_steps"], **changes)
    task = ExpertTask(Dataset.open(data, about["data"]["cluster"]), for_replay(settings), torch.device("cpu"))
    return Replay(task, for_replay(settings))


def segments_of(run: Path, most: int | None = None) -> list[Segment]:
    """Returns all segments between consecutive checkpoints and the whole run, or `most` segments spread over it."""
    paths = checkpoint.saved(run / "state")
    parts = [Segment(a, b) for a, b in pairwise(paths)]
    if most is None:
        return [*parts, Segment(paths[0], paths[-1])]
    return [parts[int(k)] for k in np.linspace(0, len(parts) - 1, most)]


def redo(runs: list[Path], data: Path, changes: dict[str, Any], most: int | None) -> list[dict[str, Any]]:
    found = []
    for run in runs:
        replay = open_run(run, data, **changes)
        for segment in segments_of(run, most):
            first, last = segment.steps
            found.append({"run": run.name, "from": first, "to": last, **replay.redo(segment)})
    return found


def redo_elsewhere(runs: list[Path], data: Path, out: Path, most: int | None = None) -> dict[str, list[dict[str, Any]]]:
    """Replays all runs in a process per instruction set, except those whose results exist."""
    found = {}
    for name, (environment, changes) in ELSEWHERE.items():
        path = out / f"{name.replace(' ', '-').replace(',', '')}-{runs[0].parent.name}.json"
        if not path.exists():
            command = [sys.executable, __file__, "--out", str(path), "--data", str(data), "--redo", json.dumps(changes)]
            command += [] if most is None else ["--most", str(most)]
            subprocess.run([*command, "--runs", *map(str, runs)], env={**os.environ, **environment}, check=True)
        found[name] = json.loads(path.read_text())
    return found


def read(path: Path, replay: Replay) -> dict[str, Tensor]:
    return replay.read(path)[0]


def redone(replay: Replay, segment: Segment) -> dict[str, Tensor]:
    replay.redo(segment)
    return {name: tensor.clone() for name, tensor in tensors_of(replay.learner).items()}


def forge(run: Path, other_run: Path, data: Path, segment: Segment) -> Iterator[tuple[str, float]]:
    """Yields the error of each forgery of the end of a segment, against the honest replay."""
    honest = open_run(run, data)
    before, honestly = read(segment.start, honest), redone(honest, segment)
    generator = torch.Generator().manual_seed(int(segment.end.stem))

    def noise(of: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns a random direction whose tensors have the same norms as those in `of`."""
        drawn = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in of.items()}
        return {name: part * (of[name].norm() / part.norm().clamp_min(1e-30)) for name, part in drawn.items()}

    def moved(start: dict[str, Tensor], by: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
        return {name: start[name] + scale * by[name] for name in start}

    update = moved(honestly, before, -1)
    other = {**honestly, **{k: v for k, v in read(checkpoint.saved(other_run / "state")[-1], honest).items()
                            if k.startswith(PARTS[:2])}}  # fmt: skip
    first, last = segment.steps
    forged = {
        "random direction": moved(before, noise(update)),
        "no step": before,
        "another expert": other,
        "another, with noise": moved(other, noise(other), 0.05),
        "its own, 5% noise": moved(honestly, noise(update), 0.05),
    }
    paths = {int(path.stem): path for path in checkpoint.saved(run / "state")}
    if (beyond := 2 * last - first) in paths:  # half of the way to the checkpoint after the segment's end
        forged["straight line"] = moved(before, moved(read(paths[beyond], honest), before, -1), 0.5)
    seed = honest.settings.seed
    for name, replay in (("other seed", open_run(run, data, seed=seed + 10)), ("other data", open_run(run, data))):
        if name == "other data":
            replay.task = ExpertTask(Dataset.open(data, 1), replay.settings, torch.device("cpu"))
        forged[name] = redone(replay, segment)
    half = open_run(run, data)
    expected, full = (first + last) // 2, half.read
    half.read = lambda path: (full(path)[0], replace_step(full(path)[1], expected))  # type: ignore[method-assign]
    forged["half the steps, doubled"] = moved(before, moved(redone(half, segment), before, -1), 2.0)
    for name, tensors in forged.items():
        published = {key: tensors[key] for key in before}
        yield name, max(compare(before, honestly, published).values())


def replace_step(progress: Any, step: int) -> Any:
    return replace(progress, step=step, updates=progress.updates - (progress.step - step))


def draw(found: dict[str, Any], tolerance: float, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    ink, grid, teal, red = "#22313f", "#d9dee3", "#0f7173", "#e4572e"
    mpl.rcParams.update({"font.size": 9, "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": grid,
                         "xtick.color": ink, "ytick.color": ink, "savefig.dpi": 160})  # fmt: skip
    rows = [(f"honest: {name}", errors, teal) for name, errors in found["honest"].items() if name != "same"]
    rows += [(f"forged: {name}", errors, red) for name, errors in found["forged"].items()]
    figure, panel = plt.subplots(figsize=(8, 0.32 * len(rows) + 1.2), layout="constrained")
    rng = np.random.default_rng(0)
    for place, (_, errors, colour) in enumerate(reversed(rows)):
        panel.scatter(
            np.clip(errors, LEAST, MOST),
            place + 0.22 * rng.uniform(-1, 1, len(errors)),
            s=9,
            color=colour,
            alpha=0.55,
            linewidths=0,
        )
    panel.axvline(tolerance, color=ink, linewidth=1, linestyle="--")
    panel.text(tolerance * 0.85, len(rows) - 0.35, f"the gate, {tolerance:g}", ha="right", va="bottom", fontsize=8)
    panel.set_yticks(range(len(rows)), [name for name, *_ in reversed(rows)])
    panel.set(
        xscale="log",
        xlabel="error of the update, in lengths of the published one; equal bits and no update at the ends",
        ylim=(-0.6, len(rows) + 0.3),
    )
    panel.grid(axis="x", color=grid, linewidth=0.6)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"drawn: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="of others, to redo too")
    parser.add_argument("--data", type=Path, help="of these runs")
    parser.add_argument("--most", type=int, help="parts of each run")
    parser.add_argument("--redo", help="what a process elsewhere is started with")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.redo:
        write_json(given.out, redo(given.runs, given.data, json.loads(given.redo), given.most))
        return
    out, data = given.out, given.out / "data"
    if not (data / "clusters" / "partition.json").exists():
        prepare(Source("avatars", num=800), data, PrepareSettings(near_duplicates="keep"), 0, progress=False)
        partition(data, 2, progress=False)
    runs = {name: out / "runs" / name.replace(", ", "-").replace(" ", "-") for name in RUNS}
    for name, folder in runs.items():
        train_expert(data, 0, RUNS[name], folder, progress=False)
    honest = redo_elsewhere(list(runs.values()), data, out)
    for name, more in (redo_elsewhere(given.runs, given.data, out, given.most or 3) if given.runs else {}).items():
        honest[name] += more
    forged: dict[str, list[float]] = {name: [] for name in FORGED}
    folders = list(runs.values())
    if not (out / "forged.json").exists():
        for run in folders:
            alike = [other for other in folders if other != run and other.name.split("-")[0] == run.name.split("-")[0]]
            for segment in segments_of(run)[1:4:2]:
                for name, error in forge(run, alike[0], data, segment):
                    forged[name].append(error)
        write_json(out / "forged.json", forged)
    forged = read_json(out / "forged.json", "")
    errors = {name: [max(line[part] for part in PARTS) for line in lines] for name, lines in honest.items()}
    for kind, table in (("honest", errors), ("forged", forged)):
        for name, values in table.items():
            print(f"{kind}  {name:26} {len(values):4}  from {min(values):.2e}  median {np.median(values):.2e}  "
                  f"to {max(values):.2e}")  # fmt: skip
    by_part = {part: max(line[part] for name, lines in honest.items() for line in lines) for part in PARTS}
    print("largest honest error of each:", {part: f"{error:.2e}" for part, error in by_part.items()})
    whole = [max(line[part] for part in PARTS) for lines in honest.values() for line in lines
             if line["to"] - line["from"] == STEPS]  # fmt: skip
    print(f"largest honest error over {STEPS} steps in one part: {max(whole):.2e}")
    if given.plot:
        draw({"honest": errors, "forged": forged}, Gate().tolerance, given.plot)


if __name__ == "__main__":
    main()
