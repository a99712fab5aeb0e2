"""What the training loop costs beside the bare step, and whether two processes are better than two threads.

    python benchmarks/train.py [--rounds 15] [--steps 10]

The loop reads its rows from shards, draws noise, encodes the texts, skips bad steps, averages the weights and writes
metrics. The bare step is that of train_step.py, on tensors that are there already. Both are the expert of
side_by_side.py but for 3 channels: d = 256, 6 blocks, 64 image tokens, captions of `shapes` in 77 places of 768.
"""

from side_by_side import DEPTH, WIDTH, ratio, take_turns  # isort: skip

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm
from train_step import make_step

from atoll.data.prepare import Settings as PrepareSettings
from atoll.data.prepare import prepare
from atoll.data.shards import Dataset
from atoll.data.sources import Source
from atoll.partition.partition import partition
from atoll.training.distributed import Team
from atoll.training.expert import ExpertTask
from atoll.training.loop import Session
from atoll.training.settings import ExpertSettings

MODEL = f"{WIDTH}x{DEPTH}/2"


def loop_against_step(data: Path, folder: Path, rounds: int, batch: int) -> None:
    settings = ExpertSettings(model=MODEL, batch=batch, steps=10_000, log_every=5, sample_every=0)
    team = Team(settings)
    task = ExpertTask(Dataset.open(data, 0), settings, team.device)
    session = Session(task, settings, folder, team, progress=False)
    bar = tqdm(disable=True)

    bare = ExpertTask(Dataset.open(data, 0), settings, team.device)
    _, latents, ids = bare.read(torch.arange(batch).numpy())
    tokens, mask = bare.text.encode(ids)
    t, target = torch.rand(batch), torch.randn_like(latents)
    step = make_step(bare.network, lambda: bare.network(latents, t, tokens, mask), target)
    seconds = take_turns({"bare step": step, "whole loop": lambda: session.advance(bar)}, rounds)
    session.run.close()
    for name, times in seconds.items():
        print(f"{name:22} {1000 * statistics.median(times):7.1f} ms, {batch / statistics.median(times):6.1f} samples/s")
    print(f"throughput, whole loop / bare step:     {ratio(seconds['bare step'], seconds['whole loop'])}")


def processes_against_threads(data: Path, folder: Path, rounds: int, steps: int, batch: int) -> None:
    """The seconds of two experts with one thread each, side by side, and of one expert with two, twice as long."""
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
    """Train, and print the seconds that it took after the first step."""
    settings = ExpertSettings(model=MODEL, batch=batch, steps=10_000, threads=threads, sample_every=0)
    team = Team(settings)
    session = Session(ExpertTask(Dataset.open(data, cluster), settings, team.device), settings, out, team, False)
    bar = tqdm(disable=True)
    session.advance(bar)
    begun = time.perf_counter()
    for _ in range(steps):
        session.advance(bar)
    print(time.perf_counter() - begun)
    session.run.close()


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
