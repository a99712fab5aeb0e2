"""Do initial weights from a DDPM checkpoint help flow-matching experts on other data? (paper, section 3.5)

    atoll fetch cifar-10 --out pictures
    atoll prepare pictures/cifar-10.tar --codec pca:4x16 --near-duplicates keep --license "none stated" --out data
    atoll partition data --experts 4 --balance 1.3
    python benchmarks/init.py data --out init [--plot docs/figures/init.png]

A class-conditional DiT, diffusers' own, learns noise prediction on clusters 0 and 1 with the linear betas of DDPM.
`atoll convert` converts it to initial weights, and `atoll train` trains experts of clusters 2 and 3 from these and from
scratch, with the same settings, none of them chosen by the outcome. The report is the number of steps in which the
initialised experts reach the final held-out loss of those from scratch. Rerun it to resume.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F
from tqdm import tqdm

from atoll.data.shards import Dataset
from atoll.data.view import DatasetView
from atoll.engines.engine import Job
from atoll.engines.local import Local
from atoll.errors import InputError
from atoll.storage import read_json, write_json

LEARNT, NEW = (0, 1), (2, 3)  # clusters
WIDTH, DEPTH, HEADS, PATCH = 128, 6, 4, 2  # of `--model mini/2`
BATCH, LR, WARMUP = 64, 0.1152 / WIDTH, 60  # the defaults of `atoll train` at this width
EVAL_EVERY = 50


def read_classes(data: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the latents of the clusters that the DiT learns, and their class numbers."""
    parts = [DatasetView(Dataset.open(data, k)) for k in LEARNT]
    labels = [rows.data.strings("label") for rows in parts]
    classes = sorted({label for own in labels for label in own})
    chosen: list[NDArray[np.int64]] = [getattr(rows, split) for rows in parts]
    latents = torch.cat([rows.latents(own) for rows, own in zip(parts, chosen, strict=True)])
    kinds = [classes.index(own[i]) for own, rows in zip(labels, chosen, strict=True) for i in rows]
    return latents, torch.tensor(kinds)


def pretrain(data: Path, out: Path, steps: int, batch: int = BATCH) -> None:
    """Trains a tiny DiT as published: class-conditional, 1000 steps of linear betas, unweighted loss on the noise."""
    from diffusers import DDPMScheduler, DiTTransformer2DModel

    torch.manual_seed(0)
    latents, kinds = read_classes(data, "train")
    channels, size = latents.shape[1:3]
    model: Any = DiTTransformer2DModel(
        num_attention_heads=HEADS, attention_head_dim=WIDTH // HEADS, in_channels=channels, out_channels=channels,
        num_layers=DEPTH, sample_size=size, patch_size=PATCH, num_embeds_ada_norm=int(kinds.max()) + 1,
    )  # fmt: skip
    for block in model.transformer_blocks:
        block.norm1.emb = model.transformer_blocks[0].norm1.emb  # shared embedding of time and class, as in DiT
    averaged = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    noise: Any = DDPMScheduler(num_train_timesteps=1000, beta_schedule="linear")
    optimizer = torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.99), weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))

    def loss_of(x0: torch.Tensor, kind: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        eps = torch.randn_like(x0)
        return F.mse_loss(model(noise.add_noise(x0, eps, t), t, kind).sample, eps)

    out.mkdir(parents=True, exist_ok=True)
    begun, losses = time.perf_counter(), []
    with (out / "metrics.jsonl").open("w") as metrics:
        for step in tqdm(range(1, steps + 1), disable=None):
            rows = torch.randint(len(latents), (batch,))
            loss = loss_of(latents[rows], kinds[rows], torch.randint(1000, (batch,)))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
            decay = min(0.9999, (1 + step) / (10 + step))
            for name, weight in model.state_dict().items():
                averaged[name].lerp_(weight, 1 - decay)
            losses.append(loss.item())
            if step % 50 == 0:
                pace = step * batch / (time.perf_counter() - begun)
                line = {"step": step, "loss": mean(losses[-50:]), "samples_per_second": pace}
                metrics.write(json.dumps(line) + "\n")
                metrics.flush()
    model = DiTTransformer2DModel.from_config(model.config)
    model.load_state_dict(averaged)
    model.eval()
    with torch.no_grad():
        x0, kind = read_classes(data, "held_out")
        held_out = loss_of(x0, kind, torch.randint(1000, (len(x0),))).item()
    model.save_pretrained(out / "dit")
    seconds = round(time.perf_counter() - begun)
    write_json(out / "run.json", {"complete": True, "steps_done": steps, "seconds": seconds, "held_out": held_out})


def job_of(data: Path, out: Path, start: str, cluster: int, seed: int, steps: int) -> Job:
    folder = out / f"{start}_{cluster}_{seed}"
    flags = {
        "cluster": cluster, "objective": "fm", "seed": seed, "steps": steps, "batch": BATCH, "lr": LR, "warmup": WARMUP,
        "eval-every": EVAL_EVERY, "sample-every": 0, "out": folder,
    }  # fmt: skip
    command = [sys.executable, "-m", "atoll.cli.main", "train", str(data)]
    command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    command += ["--init", str(out / "first_weights")] if start == "init" else ["--model", f"mini/{PATCH}"]
    return Job(f"{start}, cluster {cluster}, seed {seed}", command, folder, steps)


def convert(data: Path, out: Path) -> None:
    target = out / "first_weights"
    if (target / "config.json").exists():
        return
    text_dim = read_json(data / "dataset.json", "prepare the data first")["text"]["dim"]
    command = [sys.executable, "-m", "atoll.cli.main", "convert", str(out / "pretrained" / "dit"), "--to", "expert"]
    subprocess.run([*command, "--text-dim", str(text_dim), "--license", "unknown", "--out", str(target)], check=True)


def curve_of(folder: Path) -> tuple[list[int], list[float]]:
    """Returns steps and their held-out losses."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line["held_out"]) for line in lines if "held_out" in line]
    return [step for step, _ in found], [loss for _, loss in found]


def steps_to(loss: float, steps: list[int], losses: list[float]) -> float | None:
    """Returns the step at which a curve first reaches a loss, interpolated linearly between measurements."""
    for i, value in enumerate(losses):
        if value <= loss:
            if i == 0:
                return float(steps[0])
            share = (losses[i - 1] - loss) / (losses[i - 1] - value)
            return steps[i - 1] + share * (steps[i] - steps[i - 1])
    return None


def report(out: Path, seeds: int) -> None:
    print("| cluster | seed | held-out loss, from scratch | with first weights | steps to the first | times as fast |")
    print("|---|---|---|---|---|---|")
    ratios: dict[float, list[float]] = {}
    for cluster in NEW:
        for seed in range(seeds):
            steps, scratch = curve_of(out / f"scratch_{cluster}_{seed}")
            others, init = curve_of(out / f"init_{cluster}_{seed}")
            for share in (0.25, 0.5, 1.0):
                at = max(0, round(share * len(steps)) - 1)
                reached = steps_to(scratch[at], others, init)
                ratios.setdefault(share, []).append(steps[at] / reached if reached else math.nan)
            told = f"{reached:.0f} of {steps[-1]}" if reached else "never"
            fast = ratios[1.0][-1]
            print(f"| {cluster} | {seed} | {scratch[-1]:.4f} | {init[-1]:.4f} | {told} | {fast:.2f} |")
    print()
    for share, every in ratios.items():
        spread = f" +- {stdev(every):.2f}" if len(every) > 1 else ""
        print(f"times as fast to the loss from scratch after {share:.0%} of the steps: {mean(every):.2f}{spread}"
              f" ({min(every):.2f} to {max(every):.2f} in {len(every)} pairs)")  # fmt: skip


def draw(out: Path, seeds: int, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    ink, grid = "#22313f", "#d9dee3"
    mpl.rcParams.update(
        {"font.size": 10, "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": grid, "xtick.color": ink,
         "ytick.color": ink, "axes.grid": True, "grid.color": grid, "grid.linewidth": 0.6, "axes.spines.top": False,
         "axes.spines.right": False, "savefig.dpi": 160, "axes.titlesize": 11, "legend.frameon": False}
    )  # fmt: skip
    figure, panels = plt.subplots(1, len(NEW), figsize=(10, 4), sharey=True, layout="constrained")
    names = {"scratch": ("from scratch", "#e4572e"), "init": ("converted DDPM weights", "#0f7173")}
    for panel, cluster in zip(panels, NEW, strict=True):
        ends = []
        for start, (label, colour) in names.items():
            curves = [curve_of(out / f"{start}_{cluster}_{seed}") for seed in range(seeds)]
            for steps, losses in curves:
                panel.plot(steps, losses, color=colour, linewidth=0.7, alpha=0.45)
            middle = np.mean([losses for _, losses in curves], axis=0)
            panel.plot(curves[0][0], middle, color=colour, linewidth=2, label=label)
            ends.append(middle[-1])
        panel.axhline(ends[0], color=ink, linewidth=0.8, linestyle=":")
        panel.set(title=f"cluster {cluster}", xlabel="steps")
    low = min(min(line.get_ydata()) for panel in panels for line in panel.lines)
    panels[0].set(ylabel="held-out loss (flow matching)", ylim=(0.95 * low, 2.6 * low))
    panels[0].legend(loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"drawn: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1200, help="of each expert")
    parser.add_argument("--pretrain-steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-a-time", type=int, default=2, help="processes")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--only-pretrain", action="store_true", help="what the first process is started with")
    given = parser.parse_args()
    if given.only_pretrain:
        pretrain(given.data, given.out, given.pretrain_steps)
        return
    try:
        compare(given.data, given.out, given.steps, given.pretrain_steps, given.seeds, given.at_a_time)
    except InputError as error:
        sys.exit(f"init.py: {error}")
    report(given.out, given.seeds)
    if given.plot:
        draw(given.out, given.seeds, given.plot)


def compare(data: Path, out: Path, steps: int, pretrain_steps: int, seeds: int, at_a_time: int) -> None:
    """Trains all that does not exist yet: the DiT beside the experts from scratch, then the initialised experts."""
    command = [sys.executable, str(Path(__file__).resolve()), str(data), "--only-pretrain"]
    command += ["--pretrain-steps", str(pretrain_steps), "--out", str(out / "pretrained")]
    first = [Job("DDPM on clusters 0 and 1", command, out / "pretrained", pretrain_steps)]
    pairs = [(cluster, seed) for seed in range(seeds) for cluster in NEW]
    first += [job_of(data, out, "scratch", cluster, seed, steps) for cluster, seed in pairs]
    engine = Local("cpu", at_a_time)
    engine.run(first)
    convert(data, out)
    engine.run([job_of(data, out, "init", cluster, seed, steps) for cluster, seed in pairs])
    about = read_json(out / "pretrained" / "run.json", "")
    print(f"DiT: held-out loss {about['held_out']:.4f} after {about['steps_done']} steps, {about['seconds']} s")


if __name__ == "__main__":
    main()
