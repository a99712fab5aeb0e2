"""The overhead of the training loop over the bare step, and two processes against two threads.

    python benchmarks/train.py [--rounds 15] [--steps 10]

The loop reads its rows from shards, draws noise, encodes the texts, skips bad steps, updates the EMA and writes
metrics. The bare step is that of train_step.py, on tensors in memory. Both train the expert of side_by_side.py but with
3 channels: d = 256, 6 blocks, 64 image tokens, captions of `shapes` as 77 tokens of width 768.
"""

from side_by_side import DEPTH, WIDTH, ratio  # isort: skip

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from train_step import make_step

from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.shards import Dataset
from atoll.data.sources import Source
from atoll.partition.partition import partition
from atoll.training.expert import ExpertTask
from atoll.training.loop import train
from atoll.training.metrics_log import read_metrics
from atoll.training.settings import ExpertSettings
from atoll.training.task import Batch

MODEL = f"{WIDTH}x{DEPTH}/2"


CPU = torch.device("cpu")


class Interrupted(ExpertTask):
    """Does a bare step before each of the loop's, and times both."""

    def start(self, step: Callable[[], object]) -> None:
        self.step, self.end = step, time.perf_counter()
        self.seconds: dict[str, list[float]] = {"bare step": [], "whole loop": []}

    def loss(self, network: nn.Module, batch: Batch, host: Batch) -> Tensor:
        begin = time.perf_counter()
        self.step()
        end = time.perf_counter()
        self.seconds["whole loop"].append(begin - self.end)
        self.seconds["bare step"].append(end - begin)
        self.end = end
        return super().loss(network, batch, host)


def loop_against_step(data: Path, folder: Path, rounds: int, batch: int) -> None:
    settings = ExpertSettings(model=MODEL, batch=batch, steps=rounds + 3, log_every=5, sample_every=0)
    bare = ExpertTask(Dataset.open(data, 0), settings, CPU)
    read = bare.read(torch.arange(batch).numpy(), bare.draw(batch, torch.Generator().manual_seed(0)))
    latents, t = read.latents.float(), read.t
    tokens, mask = bare.text.encode(read.ids)
    target = torch.randn_like(latents)
    task = Interrupted(Dataset.open(data, 0), settings, CPU)
    task.start(make_step(bare.network, lambda: bare.network(latents, t, tokens, mask), target))
    train(lambda device: task, settings, folder, progress_bar=False)
    seconds = {name: times[3:] for name, times in task.seconds.items()}  # the first are slower
    for name, times in seconds.items():
        print(f"{name:22} {1000 * statistics.median(times):7.1f} ms, {batch / statistics.median(times):6.1f} samples/s")
    print(f"throughput, whole loop / bare step:     {ratio(seconds['bare step'], seconds['whole loop'])}")


def processes_against_threads(data: Path, folder: Path, rounds: int, steps: int, batch: int) -> None:
    """Compares two experts with one thread each, in parallel, with one expert with two threads for twice the steps."""
    turns: list[tuple[float, float]] = []
    for turn in range(rounds):
        apart = [_start(data, folder / f"{turn}-{k}", k, steps, 1, batch) for k in (0, 1)]
        together = max(map(_seconds, apart))
        turns.append((together, _seconds(_start(data, folder / f"{turn}-2", 0, 2 * steps, 2, batch))))
    for name, times in zip(("two processes", "two threads"), zip(*turns, strict=True), strict=True):
        print(f"{name:22} {statistics.median(times):7.1f} s for {2 * steps} steps")
    shares = sorted(threads / processes for processes, threads in turns)
    spread = f"{shares[0]:.2f} to {shares[-1]:.2f}"
    print(f"throughput, processes / threads:        {statistics.median(shares):.2f} ({spread})")


def _start(data: Path, out: Path, cluster: int, steps: int, threads: int, batch: int) -> subprocess.Popen[str]:
    worker = ["--worker", data, "--out", out, "--cluster", cluster, "--threads", threads]
    command = [sys.executable, __file__, *worker, "--steps", steps, "--batch", batch]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True, env=environment)


def _seconds(process: subprocess.Popen[str]) -> float:
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args!r} failed")
    return float(out)


def work(data: Path, out: Path, cluster: int, threads: int, steps: int, batch: int) -> None:
    """Trains an expert, and prints the seconds of all steps but the first two."""
    settings = ExpertSettings(
        model=MODEL, batch=batch, steps=steps + 2, threads=threads, sample_every=0, log_every=1, eval_every=10**6
    )
    train(lambda device: ExpertTask(Dataset.open(data, cluster), settings, device), settings, out, progress_bar=False)
    seconds = [line["seconds"] for line in read_metrics(out) if "seconds" in line]
    print(seconds[-1] - seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cluster", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args.worker, args.out, args.cluster, args.threads, args.steps, args.batch)
        return
    with TemporaryDirectory() as place:
        data = Path(place) / "data"
        settings = PrepareSettings(size=16, codec="pixels", text="words:768x77")
        prepare(Source("shapes", num=1000, size=16), data, settings, 0, progress=False)
        partition(data, 2, method="random", progress=False)
        loop_against_step(data, Path(place) / "loop", args.rounds, args.batch)
        processes_against_threads(data, Path(place), 3, args.steps, args.batch)


if __name__ == "__main__":
    main()
