"""The effect of conversion, solver, number of steps and routing on samples of trained experts, on avatars.

    atoll prepare avatars --num 4000 --out data
    atoll partition data --experts 4 --balance 1.3
    atoll train-all data --recipe laptop --objectives fm --router --out fm      # an hour in all, 2 cores
    atoll train-all data --recipe laptop --objectives ddpm --out ddpm
    python benchmarks/quality.py conversion [--num 400]
    python benchmarks/quality.py solvers [--plot docs/figures/steps.png]
    python benchmarks/quality.py routing

`right` is the share of samples in which every attribute of the prompt is read back correctly, FD the Frechet distance
to the data on the features `simple`, which are colours and edges: it is comparable only within one table.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.data.shards import Dataset
from atoll.data.view import DatasetView, decode_rows
from atoll.diffusion.solvers import EVALUATIONS, SOLVERS, uniform_times
from atoll.encoders.codec import to_uint8
from atoll.encoders.codecs import load_codec
from atoll.encoders.features import make_features
from atoll.encoders.text import load_text_encoder
from atoll.experiments.images import tensor_of
from atoll.metrics.frechet import Moments, frechet_distance
from atoll.metrics.labels import are_right
from atoll.networks.expert import Expert
from atoll.networks.router import Router
from atoll.plots.canvas import COLOURS, save_image
from atoll.plots.contact_sheet import contact_sheet
from atoll.sampling.ensemble import Ensemble, generate
from atoll.sampling.expert import Prompts, VelocityExpert
from atoll.sampling.routing import get_routing
from atoll.training.held_out import evaluate_expert

CPU = torch.device("cpu")
BUDGETS = (6, 10, 20, 50)


class Judged(NamedTuple):
    right: float
    distance: float
    seconds: float
    pictures: NDArray[np.uint8]


class Judge:
    """Prompts, seeds and the data's features, shared by all comparisons."""

    def __init__(self, data: Path, num: int, seed: int = 0) -> None:
        self.data = Dataset.open(data)
        self.text, self.codec = load_text_encoder(data), load_codec(data)
        rows = np.sort(np.random.default_rng(seed).choice(len(self.data), num, replace=False))
        self.captions = self.data.strings("caption", rows)
        self.seeds = [seed * num + i for i in range(num)]
        images = decode_rows(self.data, np.arange(len(self.data)), self.codec)
        self.network = make_features("simple")
        self.reference = Moments.of(self.network.extract(tensor_of(images)).numpy())

    def judge(
        self,
        ensemble: Ensemble,
        *,
        solver: str = "multistep",
        steps: int = 20,
        guidance: float = 2.0,
        routing: str = "top1",
        every: int = 1,
    ) -> Judged:
        begun = time.perf_counter()
        parts = []
        for first in range(0, len(self.captions), 100):
            prompts = Prompts.encode(self.text, self.captions[first : first + 100])
            seeds = self.seeds[first : first + 100]
            how = get_routing(routing, every=every)
            parts.append(
                generate(ensemble, prompts, seeds, solver=solver, times=uniform_times(steps), routing=how,
                         guidance=guidance)
            )  # fmt: skip
        seconds = time.perf_counter() - begun
        latents = torch.cat(parts)
        pictures = to_uint8(self.codec.decode(latents))
        right = float(np.mean(are_right(pictures, self.captions)))
        distance = frechet_distance(self.reference, Moments.of(self.network.extract(tensor_of(pictures)).numpy()))
        return Judged(right, distance, seconds, pictures)


def drawn_to_the_mean(expert: Expert, judge_: Judge) -> Expert:
    """Returns the expert with its cluster's mean as prior mean, whatever the text."""
    rows = DatasetView(Dataset.open(judge_.data.folder, expert.network.card["data"]["cluster"]))
    assert expert.prior is not None
    blind = replace(expert.prior, weight=torch.zeros_like(expert.prior.weight))
    with torch.no_grad():
        found = evaluate_expert(expert.network, expert.objective, rows, judge_.text, CPU, 2048, 128, blind)
    return replace(expert, calibration=found.calibration, prior=blind)


def show(name: str, found: Judged) -> None:
    print(f"| {name:44} | {found.right:.3f} | {found.distance:6.3f} | {found.seconds:5.1f} |", flush=True)


def compare_conversions(judge_: Judge, fm: list[Expert], ddpm: list[Expert], router: Router, out: Path | None) -> None:
    print("| experts, conversion | right | FD | seconds |\n|---|---|---|---|")
    half = len(fm) // 2
    blind = [drawn_to_the_mean(expert, judge_) for expert in ddpm]
    kinds: list[tuple[str, list[Expert], str | None]] = [
        ("all fm, exact", fm, "exact"),
        ("all fm, calibrated", fm, "calibrated"),
        ("half ddpm, exact", [*ddpm[:half], *fm[half:]], "exact"),
        ("half ddpm, the paper's", [*ddpm[:half], *fm[half:]], "paper"),
        ("half ddpm, calibrated to the mean", [*blind[:half], *fm[half:]], "eps"),
        ("half ddpm, calibrated to the text", [*ddpm[:half], *fm[half:]], "eps"),
        ("all ddpm, the paper's", ddpm, "paper"),
        ("all ddpm, calibrated to the mean", blind, "calibrated"),
        ("all ddpm, calibrated to the text", ddpm, "calibrated"),
    ]
    for name, experts, conversion in kinds:
        fields = [VelocityExpert.of(e, None if conversion == "eps" else conversion) for e in experts]
        found = judge_.judge(Ensemble(fields, router))
        show(name, found)
        if out is not None:
            title = f"{name}: {found.right:.0%} right, FD {found.distance:.2f}"
            save_image(contact_sheet(found.pictures[:48], title), out / f"{name.replace(' ', '-')}.png")


def compare_solvers(judge_: Judge, experts: list[Expert], router: Router, plot: Path | None) -> None:
    print("| solver, evaluations | right | FD | seconds |\n|---|---|---|---|")
    ensemble = Ensemble([VelocityExpert.of(expert) for expert in experts], router)
    distances: dict[str, list[float]] = {solver: [] for solver in SOLVERS}
    for evaluations in BUDGETS:
        for solver in SOLVERS:
            found = judge_.judge(ensemble, solver=solver, steps=evaluations // EVALUATIONS[solver])
            show(f"{solver}, {evaluations}", found)
            distances[solver].append(found.distance)
    if plot is not None:
        draw_distances(distances, plot)


def draw_distances(distances: dict[str, list[float]], path: Path) -> None:
    """Plots the Frechet distance of each solver against its number of evaluations."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for (solver, values), colour in zip(distances.items(), COLOURS, strict=False):
        wide = 2.6 if solver == "multistep" else 1.4
        axes.plot(BUDGETS, values, "o-", label=solver, color=colour, linewidth=wide, markersize=4)
    axes.set_xscale("log")
    axes.set_xticks(BUDGETS, [str(budget) for budget in BUDGETS])
    axes.minorticks_off()
    axes.set_xlabel("evaluations of the velocity")
    axes.set_ylabel("Frechet distance")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#d9dee3", linewidth=0.6)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160, bbox_inches="tight")


def compare_routing(judge_: Judge, experts: list[Expert], router: Router) -> None:
    print("| routing | right | FD | seconds |\n|---|---|---|---|")
    ensemble = Ensemble([VelocityExpert.of(expert) for expert in experts], router)
    for routing in ("top1", "topk:2", "full", "threshold:0.1", "sample"):
        show(routing, judge_.judge(ensemble, routing=routing))
    for every in (2, 5, 20):
        show(f"top1, router asked every {every}", judge_.judge(ensemble, every=every))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["conversion", "solvers", "routing"])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--fm", type=Path, default=Path("fm"))
    parser.add_argument("--ddpm", type=Path, default=Path("ddpm"))
    parser.add_argument("--num", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write contact sheets")
    parser.add_argument("--plot", type=Path, help="where to draw the solvers' distances")
    args = parser.parse_args()
    torch.set_num_threads(1)
    judge_ = Judge(args.data, args.num, args.seed)
    router = Router.from_pretrained(args.fm / "router")
    num = router.config.num_experts
    fm, ddpm = ([Expert.load(run / f"expert_{k}") for k in range(num)] for run in (args.fm, args.ddpm))
    mixed = [*ddpm[: num // 2], *fm[num // 2 :]]
    if args.what == "conversion":
        compare_conversions(judge_, fm, ddpm, router, args.out)
    elif args.what == "solvers":
        compare_solvers(judge_, mixed, router, args.plot)
    else:
        compare_routing(judge_, mixed, router)


if __name__ == "__main__":
    main()
