"""An ensemble, its students, and a monolith of a student's size and steps: quality and seconds per image.

    atoll demo --out demo
    python benchmarks/distill.py demo/model demo/data --out distilled --steps 800 --batch 32 --lr 3e-3

    atoll prepare ... --out data && atoll partition data --experts 4       # any images with captions
    atoll train-all data --router --out run && atoll assemble run --data data --out model
    python benchmarks/distill.py model data --out distilled --student s/2 --metrics frechet labels flops

For each training seed: a student by label, one for each other of --teachers, one by label that learns guidance, a
monolith with the same steps and batch, and with --more-batch N another with a batch N times as large (4 in DDM's
comparison). All start from random weights. Figures are mean and standard deviation over seeds; there is one ensemble,
so its deviation is over sampling noise. Students that learned guidance are sampled without further guidance.

Rerun the command to resume: finished training, samples and figures are reused. Models are timed in turns, one batch
each per round; the seconds depend on other load on the machine, the FLOPs, which are counted, do not.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from atoll.data.shards import Dataset
from atoll.engines.local import Local
from atoll.engines.train_all import Part
from atoll.experiments.evaluate import Contender, Evaluation
from atoll.experiments.graph import ModelNode, assemble_all, train
from atoll.experiments.settings import MetricSettings
from atoll.experiments.tables import name_of, over_seeds, with_error
from atoll.sampling.pipeline import AtollPipeline
from atoll.sampling.settings import Sampling
from atoll.storage import read_json, write_json, write_whole
from atoll.training.settings import DistillSettings, ExpertSettings

AT_A_TIME = 16


@dataclass(frozen=True)
class Entry:
    """A row of the table: its training settings (None: the teacher), and the guidance it is sampled with."""

    name: str
    training: DistillSettings | ExpertSettings | None
    guidance: float


def entries_of(args: argparse.Namespace) -> list[Entry]:
    shared: dict[str, Any] = {
        "model": args.student, "steps": args.steps, "batch": args.batch, "lr": args.lr, "lr_schedule": "cosine",
        "eval_every": args.steps, "save_every": max(1, args.steps // 8), "sample_every": 0, "device": args.device,
    }  # fmt: skip
    found = [Entry("ensemble", None, args.guidance)]
    for by in args.teachers:
        found.append(Entry(f"student by {by}", DistillSettings(**shared, teacher=by), args.guidance))
    guided = DistillSettings(**shared, guidance=args.guidance)
    found.append(Entry(f"student by label, guidance {args.guidance:g} learned", guided, 1.0))
    found.append(Entry("monolith", ExpertSettings(**shared), args.guidance))
    if args.more_batch > 1:
        large = replace(ExpertSettings(**shared), batch=args.batch * args.more_batch)
        found.append(Entry(f"monolith, {args.more_batch} times the batch", large, args.guidance))
    return found


class Comparison:
    """The whole comparison, for one teacher and one data set."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.entries = args, entries_of(args)
        self.seeds = range(args.seeds)

    def folder_of(self, entry: Entry, seed: int, kind: str) -> Path:
        name = entry.name.replace(",", "").replace(" ", "-")
        return self.args.out / f"seed_{seed}" / kind / name

    def model_of(self, entry: Entry, seed: int) -> Path:
        return self.args.model if entry.training is None else self.folder_of(entry, seed, "models")

    def train(self) -> None:
        models = [
            ModelNode(self.model_of(entry, seed), self.args.data, (self._part(entry, seed),))
            for seed in self.seeds
            for entry in self.entries
            if entry.training is not None
        ]
        train(models, Local(self.args.device))
        assemble_all(models)

    def _part(self, entry: Entry, seed: int) -> Part:
        assert entry.training is not None
        settings, folder = replace(entry.training, seed=seed), self.folder_of(entry, seed, "parts")
        teacher = self.args.model if isinstance(settings, DistillSettings) else None
        return Part(f"seed {seed} {entry.name}", folder, settings, self.args.data, teacher=teacher)

    def judge(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the figures of each entry, one set per seed."""
        found: dict[str, list[dict[str, Any]]] = {entry.name: [] for entry in self.entries}
        for seed in self.seeds:
            args = self.args
            measured = MetricSettings(
                num=args.num, first_seed=seed, features=tuple(args.features), metrics=tuple(args.metrics),
                device=args.device,
            )  # fmt: skip
            evaluation = Evaluation(args.data, args.out / "evaluation", measured)
            for entry in self.entries:
                sampling = Sampling(guidance=entry.guidance, steps=args.sampling_steps)
                contender = Contender(f"{entry.name}, seed {seed}", self.model_of(entry, seed), sampling)
                found[entry.name].append(evaluation.judge(contender)["figures"])
        return found

    def clock(self) -> dict[str, list[float]]:
        """Returns the seconds per image of each entry in each round, for the first seed's models."""
        path = self.args.out / "seconds.json"
        about = {"rounds": self.args.rounds, "steps": self.args.sampling_steps, "guidance": self.args.guidance}
        if path.exists() and (before := read_json(path, f"remove {path}"))["about"] == about:
            seconds: dict[str, list[float]] = before["seconds"]
            return seconds
        pipes = {
            entry: AtollPipeline.from_pretrained(self.model_of(entry, 0), device=self.args.device)
            for entry in self.entries
        }
        prompts = Dataset.open(self.args.data).strings("caption", range(AT_A_TIME))
        seconds = {entry.name: [] for entry in self.entries}
        for turn in tqdm(range(self.args.rounds + 1), desc="clock", unit=" rounds"):
            for entry, pipe in pipes.items():
                begun = time.perf_counter()
                pipe(
                    prompts, seed=list(range(AT_A_TIME)), guidance_scale=entry.guidance, output_type="latent",
                    num_inference_steps=self.args.sampling_steps, progress=False,
                )  # fmt: skip
                if turn:  # the first one loads the weights
                    seconds[entry.name].append((time.perf_counter() - begun) / AT_A_TIME)
        write_json(path, {"about": about, "seconds": seconds})
        return seconds


def table_of(entries: Sequence[Entry], figures: Mapping[str, Any], seconds: Mapping[str, Sequence[float]]) -> str:
    keys = list(next(iter(figures.values())))
    lines = [f"| | {' | '.join(name_of(key) for key in keys)} | seconds an image |", "|---" * (len(keys) + 2) + "|"]
    for entry in entries:
        cells = [with_error(key, figures[entry.name][key]) for key in keys]
        lines.append(f"| {entry.name} | {' | '.join(cells)} | {statistics.median(seconds[entry.name]):.4f} |")
    return "\n".join(lines)


def cost_of_learning(figures: Mapping[str, Any], seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Returns the figures of the student that learned guidance relative to its twin that is guided."""
    (learned,) = (name for name in figures if "learned" in name)
    twin = "student by label"
    lines = []
    for key, figure in figures[learned].items():
        if guided := figures[twin][key]["value"]:
            lines.append(f"{name_of(key)}, guidance learned / guided: {figure['value'] / guided:.3f}")
    pairs = zip(seconds[learned], seconds[twin], strict=True)
    return [*lines, f"seconds an image, the same: {statistics.median(a / b for a, b in pairs):.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the teacher, which `atoll assemble` has made")
    parser.add_argument("data", type=Path, help="what it was trained on, partitioned")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--student", default="mini")
    parser.add_argument("--teachers", nargs="+", default=["label", "router"], help="label must be among them")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--more-batch", type=int, default=1)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--sampling-steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--features", nargs="+", default=["simple"])
    parser.add_argument("--metrics", nargs="+", default=["frechet", "accuracy", "flops"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    if "label" not in args.teachers:
        parser.error("label must be among --teachers: the student with learned guidance is compared with it")
    torch.set_num_threads(1)
    comparison = Comparison(args)
    comparison.train()
    figures = {name: over_seeds(found) for name, found in comparison.judge().items()}
    seconds = comparison.clock()
    told = "\n".join([table_of(comparison.entries, figures, seconds), "", *cost_of_learning(figures, seconds)])
    asked = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    write_json(args.out / "results.json", {"asked": asked, "figures": figures, "seconds": seconds})
    write_whole(args.out / "results.md", lambda staged: staged.write_text(told + "\n", encoding="utf-8"))
    print(told)


if __name__ == "__main__":
    main()
