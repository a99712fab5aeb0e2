"""Samples per second of four experts on the local engine and on Ray, interleaved on this machine.

    python benchmarks/engines.py DATA [--rounds 3] [--steps 300]

DATA is the output of `atoll prepare` and `atoll partition --experts 4`. Rates are those that the experts log, and those
of whole commands including startup; a Ray cluster of one node is started beforehand.

Two cores, nothing else running, `--steps 150`: the experts log 244 samples/s on the local engine, 243 and 239 on Ray
(0.99x); for whole commands 319, and 310 and 304 (0.96x). Time ran out before a second run of the local engine.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from atoll.training.metrics_log import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    from ray.cluster_utils import Cluster

    system = {"worker_niceness": 0}
    head = {"num_cpus": os.cpu_count(), "object_store_memory": 80 << 20, "_system_config": system}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
    engines = {"local": [], "ray": ["--engine", "ray", "--address", cluster.address]}
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    try:
        for number in range(args.rounds):
            for name in sorted(engines, reverse=bool(number % 2)):
                rates[name].append(measure(args.data, args.steps, engines[name]))
                print(name, *(f"{rate:.0f}" for rate in rates[name][-1]), flush=True)
    finally:
        cluster.shutdown()
    for i, what in enumerate(("logged by the experts", "of whole commands")):
        local, ray = (statistics.median(pair[i] for pair in rates[name]) for name in ("local", "ray"))
        print(f"samples/s {what}: local {local:.0f}, ray {ray:.0f}: {ray / local:.3f}x")


def measure(data: Path, steps: int, flags: list[str]) -> tuple[float, float]:
    """Returns samples per second, as logged and over the whole command."""
    settings = f"--model mini --batch 32 --steps {steps} --log-every 20 --sample-every 0 --device cpu".split()
    with TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "atoll", "train-all", str(data), *settings, "--out", str(out), *flags]
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.perf_counter() - start
        logs = [read_metrics(path) for path in sorted(out.glob("expert_*"))]
        logged = [line["samples_per_second"] for log in logs for line in log if "samples_per_second" in line]
        return statistics.mean(logged), len(logs) * steps * 32 / seconds


if __name__ == "__main__":
    main()
