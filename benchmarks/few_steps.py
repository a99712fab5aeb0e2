"""Few-step students: against closed forms, by distillation method, and the quality of their images.

    python benchmarks/few_steps.py oracle                                   # a closed form in two dimensions
    python benchmarks/few_steps.py methods demo --out methods               # three objectives, equal CPU time
    python benchmarks/few_steps.py avatars demo --out few                   # 4, 2 and 1 steps, three seeds
    python benchmarks/few_steps.py avatars demo --out few --experts         # and a student of each expert, mixed
    python benchmarks/few_steps.py clock demo --out few                     # and their time per image
    python benchmarks/few_steps.py real MODEL DATA --out few-real           # any data with labels

DEMO is the output of `atoll demo --out demo`. `methods` counts the CPU seconds of teacher and student alike:
*trajectories*, as in `atoll distill --steps-out`, samples the teacher first and trains on the trajectories repeatedly;
*segments* noises images of the data, and solves the teacher's ODE to the end of each step; *consistency* takes one of
20 steps with the teacher, and the rest with the student's EMA. Rerun `avatars` and `real` to resume.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from atoll.cards import ModelIndex
from atoll.data.shards import Dataset
from atoll.diffusion.oracle import ClusteredGaussians
from atoll.errors import plural
from atoll.experiments.demo import CHOSEN, FULL, Judge
from atoll.experiments.evaluate import Contender, Evaluation
from atoll.experiments.settings import MetricSettings
from atoll.plots.contact_sheet import draw_samples
from atoll.sampling.assemble import assemble
from atoll.sampling.pipeline import AtollPipeline
from atoll.sampling.settings import Sampling
from atoll.training.distill import Teacher, distill, resolved_settings
from atoll.training.few_steps import FewStepTask
from atoll.training.settings import DistillSettings
from atoll.training.task import on_linear_path

CPU, COUNTS = torch.device("cpu"), (4, 2, 1)
SETTINGS = DistillSettings(
    steps=1000, batch=32, lr=3e-3, lr_schedule="cosine", save_every=500, eval_every=1000, sample_every=0
)


# --- a closed form ------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """(x, t) -> velocity in two dimensions: an MLP on sines and cosines of both."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.randn(3, 64) * torch.tensor([[1.0], [1.0], [3.0]]), requires_grad=False)
        layers = [nn.Linear(131, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)]
        self.layers = nn.Sequential(*layers, nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        given = torch.cat([x, t[:, None]], 1)
        angles = given @ self.waves
        return self.layers(torch.cat([given, angles.sin(), angles.cos()], 1))


def sliced_wasserstein(one: Tensor, other: Tensor) -> float:
    """Returns the mean distance between sorted projections, over 200 directions."""
    angles = torch.linspace(0, math.pi, 201)[:-1]
    directions = torch.stack([angles.cos(), angles.sin()])
    return float(((one @ directions).sort(0).values - (other @ directions).sort(0).values).abs().mean())


def oracle(seconds: float) -> None:
    """Trains students of 1, 2 and 4 steps on a mixture of 48 Gaussians, whose velocity is known in closed form."""
    exact, num = ClusteredGaussians.islands(), 20_000
    data = ClusteredGaussians(exact.means.float(), exact.variances.float(), exact.weights.float())
    real, others = (data.sample(num, torch.Generator().manual_seed(seed))[0] for seed in (7, 8))

    @torch.no_grad()
    def trajectories(noise: Tensor, steps: int, ends: int) -> Tensor:
        x, states, last = noise, [noise], None
        for i in range(steps):
            u = data.velocity(x, torch.full((len(x),), 1 - i / steps).clamp(1e-4, 1 - 1e-4))
            x, last = x - (u if last is None else 1.5 * u - 0.5 * last) / steps, u
            if (i + 1) % (steps // ends) == 0:
                states.append(x)
        return torch.stack(states, 1)

    test = torch.randn(num, 2, generator=torch.Generator().manual_seed(3))
    taught = trajectories(test, 40, 1)[:, -1]
    print(f"sliced Wasserstein distance to {num} points of the data; two draws: {sliced_wasserstein(real, others):.4f}")
    print(f"teacher, 40 steps: {sliced_wasserstein(taught, real):.4f}")
    pool = trajectories(torch.randn(200_000, 2, generator=torch.Generator().manual_seed(4)), 40, 4)
    for count in COUNTS:
        torch.manual_seed(0)
        network, begin, stride = Small(), time.process_time(), 4 // count
        optimizer = torch.optim.Adam(network.parameters(), 2e-3)
        while (done := (time.process_time() - begin) / seconds) < 1:
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (1 + math.cos(math.pi * done))
            rows, step = torch.randint(len(pool), (1024,)), torch.randint(count, (1024,))
            x, y = pool[rows, step * stride], pool[rows, (step + 1) * stride]
            loss = ((network(x, 1 - step / count) - (x - y) * count) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        x = test
        with torch.no_grad():
            for i in range(count):
                x = x - network(x, torch.full((num,), 1 - i / count)) / count
        found = sliced_wasserstein(x, real), sliced_wasserstein(x, taught), float((x - taught).norm(dim=1).mean())
        print(
            "student, {} steps: {:.4f}; to its teacher {:.4f}, and {:.4f} apart from the same noise".format(
                count, *found
            )
        )


# --- which method -------------------------------------------------------------------------------------------------


class Lesson:
    """Makes batches for one method: (x, t, tokens and mask, target, weight)."""

    def __init__(self, task: FewStepTask, ema: nn.Module) -> None:
        self.task, self.ema, self.num = task, ema, task.num_steps
        self.random = torch.Generator().manual_seed(0)

    def _noised(self, t: Tensor) -> tuple[Tensor, tuple[Tensor, ...], Callable[[Tensor, Tensor], Tensor]]:
        task, view = self.task, self.task.view
        rows = view.train[torch.randint(len(view.train), (len(t),), generator=self.random).numpy()]
        x0, ids = view.latents(rows), view.tokens(rows)
        text = task.text.encode(ids)
        prompts = task._prompts(text[0], ids)
        x = on_linear_path(x0, torch.randn(x0.shape, generator=self.random), t)
        return x, text, lambda x, t: task.teacher.velocity(x, t.clamp(0, 1), prompts)

    @torch.no_grad()
    def segments(self) -> tuple[Tensor, ...]:
        t = (torch.randint(self.num, (32,), generator=self.random) + 1) / self.num
        x, text, velocity = self._noised(t)
        substeps, y, last = self.task.teacher_steps // self.num, x, None
        for i in range(substeps):
            u = velocity(y, t - i / substeps / self.num)
            y, last = y - (u if last is None else 1.5 * u - 0.5 * last) / substeps / self.num, u
        return x, t, *text, (x - y) * self.num, torch.ones(len(t))

    @torch.no_grad()
    def consistency(self) -> tuple[Tensor, ...]:
        steps = self.task.teacher_steps
        t = (torch.randint(steps, (32,), generator=self.random) + 1) / steps
        x, text, velocity = self._noised(t)
        end, s = ((t * self.num).ceil() - 1).clamp(min=0) / self.num, t - 1 / steps
        y = x - velocity(x, t) / steps
        wide = (s - end).clamp(min=0)[:, None, None, None]
        y = y - wide * self.ema(y, s.clamp(min=1e-3), *text)
        return x, t, *text, (x - y) / (t - end)[:, None, None, None], ((t - end) * self.num) ** 2

    def trajectories(self) -> tuple[Tensor, ...]:
        rows = torch.randint(self.task.num_rows, (32,), generator=self.random).numpy()
        batch = self.task.read(rows, self.task.draw(32, self.random))
        text = self.task.text.encode(batch.ids)
        return batch.eps, batch.t, *text, (batch.eps - batch.latents) * self.num, torch.ones(32)


def methods(demo: Path, out: Path, seconds: float, num: int) -> None:
    judge = Judge(demo / "data", FULL)
    for count in (4, 1):
        for name in ("trajectories", "segments", "consistency"):
            model, index = demo / "model", ModelIndex.read(demo / "model")
            settings = resolved_settings(replace(SETTINGS, steps_out=count, trajectories=num), index, None)
            teacher = Teacher.open(model, index, settings, CPU)
            task = FewStepTask(Dataset.open(demo / "data"), settings, CPU, teacher, model / "expert_1")
            network, ema = task.network.train(), {k: v.clone() for k, v in task.network.state_dict().items()}
            frozen = FewStepTask(Dataset.open(demo / "data"), settings, CPU, teacher, model / "expert_1").network.eval()
            lesson, begin, updates = Lesson(task, frozen), time.process_time(), 0
            if name == "trajectories":
                parts = [range(i, i + 64) for i in range(0, num, 64)]
                task.states = torch.cat([task.trajectories(task.view.train, part) for part in parts])
            optimizer = torch.optim.AdamW(network.parameters(), 3e-3, betas=(0.9, 0.99), weight_decay=0)
            start = time.process_time()
            while (done := (time.process_time() - start) / (seconds - start + begin)) < 1:
                for group in optimizer.param_groups:
                    group["lr"] = 3e-3 * min(20 * done, (1 + math.cos(math.pi * done)) / 2)
                x, t, tokens, mask, target, weight = getattr(lesson, name)()
                loss = (((network(x, t, tokens, mask) - target) ** 2).flatten(1).mean(1) * weight).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                updates += 1
                decay = min(0.999, (1 + updates) / (10 + updates))
                for key, value in network.state_dict().items():
                    ema[key].lerp_(value, 1 - decay)
                frozen.load_state_dict(ema)
            network.load_state_dict(ema)
            network.eval()
            folder = out / f"{name}_{count}"
            task.as_expert({}).save(folder / "student")
            assemble([folder / "student"], None, folder / "model", demo / "data")
            print(
                f"{count} steps, {name}, {updates} updates: {told(judge.judge(folder / 'model', {}).about['figures'])}",
                flush=True,
            )


# --- how good -----------------------------------------------------------------------------------------------------


def told(figures: dict[str, float]) -> str:
    right = [f"{100 * figures[name]:.1f}%" for name in ("prompt_accuracy", "prompt_accuracy_heldout")]
    return (
        f"right {', '.join(right)}, FD {figures['frechet']:.3f}, diversity {figures['diversity']:.3f}, "
        f"{figures['flops_an_image'] / 1e6:.0f} MFLOPs, {figures['seconds_an_image']:.4f} s"
    )


def students(model: Path, data: Path, out: Path, seeds: int, experts: bool) -> Iterator[tuple[str, int, Path]]:
    """Trains all students that do not exist yet; yields the name, seed and model folder of each."""
    first, num = out / "steps_4" / "seed_0", ModelIndex.read(model).num_experts
    for seed in range(seeds):
        for count in COUNTS:
            folder = out / f"steps_{count}" / f"seed_{seed}"
            settings, reuse = replace(SETTINGS, steps_out=count, seed=seed), None if folder == first else first
            distill(model, data, settings, folder, model / "expert_1", reuse=reuse)
            yield plural(count, "step"), seed, assembled([folder], None, folder / "model", data)
    if not experts:
        return
    for count in (4, 1):  # one student per expert, with the same updates and trajectories in total
        folder = out / f"experts_{count}"
        for k in range(num):
            settings = replace(SETTINGS, steps_out=count, steps=SETTINGS.steps // num, trajectories=4096 // num)
            reuse = None if count == 4 else out / "experts_4" / f"expert_{k}"
            distill(model, data, settings, folder / f"expert_{k}", model / f"expert_{k}", cluster=k, reuse=reuse)
        parts = [folder / f"expert_{k}" for k in range(num)]
        name = f"{plural(count, 'step')}, a student of each expert"
        yield name, 0, assembled(parts, model / "router", folder / "model", data)


def assembled(parts: Sequence[Path], router: Path | None, out: Path, data: Path) -> Path:
    if not (out / "model_index.json").exists():
        assemble(parts, router, out, data)
    return out


def avatars(demo: Path, out: Path, seeds: int, experts: bool) -> None:
    judge, path = Judge(demo / "data", FULL), out / "figures.json"
    found: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    shown = [("20 steps, the ensemble", demo / "model")]

    def measure(name: str, model: Path) -> None:
        if name not in found:
            found[name] = judge.judge(model, {}).about["figures"]
            path.write_text(json.dumps(found))
        print(f"{name:44} {told(found[name])}", flush=True)

    out.mkdir(parents=True, exist_ok=True)
    measure("ensemble, 20 steps, guidance 2", demo / "model")
    for name, seed, model in students(demo / "model", demo / "data", out, seeds, experts):
        measure(f"{name}, seed {seed}", model)
        if seed == 0:
            shown.append((name, model))
    for name in dict.fromkeys(name.rsplit(", seed", 1)[0] for name in found):
        rows = [found[row] for row in found if row.rsplit(", seed", 1)[0] == name]
        mean = {key: float(np.mean([row[key] for row in rows])) for key in rows[0] if isinstance(rows[0][key], float)}
        spread = [float(np.std([row[key] for row in rows])) for key in ("prompt_accuracy", "frechet")]
        print(f"mean of {len(rows)}: {name:36} {told(mean)}; ± {100 * spread[0]:.1f}%, {spread[1]:.3f}")
    prompts = judge.seen[:8]
    images = {}
    for name, model in shown:
        made = AtollPipeline(model)(prompts, seed=list(range(len(prompts))), output_type="np", progress=False)
        images[name] = np.asarray(255 * np.asarray(made.images), np.uint8)
    draw_samples(images, prompts, "the same prompts and noise").save(out / "few_steps.png")


def clock(demo: Path, out: Path) -> None:
    """Prints the CPU time per image on one core, without decoding: medians of seven interleaved rounds."""
    pipes = {"ensemble": AtollPipeline(demo / "model")}
    pipes |= {f"{count} steps": AtollPipeline(out / f"steps_{count}" / "seed_0" / "model") for count in COUNTS}
    seconds: dict[tuple[str, int], list[float]] = {(name, num): [] for name in pipes for num in (1, len(CHOSEN))}
    for _ in range(8):
        for (name, num), found in seconds.items():
            begin = time.process_time()
            pipes[name](list(CHOSEN[:num]), seed=list(range(num)), output_type="latent", progress=False)
            found.append((time.process_time() - begin) / num)
    for (name, num), found in seconds.items():
        print(f"{name:12} {1000 * float(np.median(found[1:])):6.1f} ms per image at batch {num}")


def real(model: Path, data: Path, out: Path, seeds: int, num: int) -> None:
    """Evaluates the ensemble and its students by kernel distance and label accuracy."""
    measured = MetricSettings(num=num, features=("efficientnet:96", "simple"), metrics=("frechet", "kernel", "labels"))
    evaluation = Evaluation(data, out / "evaluation", measured)

    def measure(name: str, folder: Path) -> None:
        figures = evaluation.judge(Contender(name, folder, Sampling()))["figures"]
        shown = {key: figure["value"] for key, figure in figures.items() if isinstance(figure, dict)}
        print(f"{name:34} " + ", ".join(f"{key} {value:.4g}" for key, value in shown.items() if value), flush=True)

    measure("ensemble, 20 steps, guidance 2", model)
    for name, seed, folder in students(model, data, out, seeds, experts=False):
        measure(f"{name}, seed {seed}", folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("oracle", "methods", "avatars", "clock", "real"))
    parser.add_argument("given", type=Path, nargs="*", help="DEMO, or MODEL and DATA")
    parser.add_argument("--out", type=Path, default=Path("few"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=240, help="of a core, for `oracle` and `methods`")
    parser.add_argument("--num", type=int, default=None, help="trajectories of `methods`, or images of `real`")
    parser.add_argument("--experts", action="store_true", help="also a student of each expert")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.part == "oracle":
        oracle(args.seconds)
    elif args.part == "methods":
        methods(args.given[0], args.out, args.seconds, args.num or 2048)
    elif args.part == "avatars":
        avatars(args.given[0], args.out, args.seeds, args.experts)
    elif args.part == "clock":
        clock(args.given[0], args.out)
    else:
        real(args.given[0], args.given[1], args.out, args.seeds, args.num or 400)


if __name__ == "__main__":
    main()
