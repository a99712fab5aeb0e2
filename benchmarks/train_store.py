"""`atoll train` from an object store against the same data on the local disk: seconds of whole runs, interleaved.

    python benchmarks/train_store.py s3://bucket/data [--cluster 0] [--model mini] [--steps 400] [--rounds 2]

The data is partitioned. Each run from the store starts with an empty cache, so downloading the cluster is part of the
measured time; the local runs read a copy made beforehand. Both verify every shard before the first step.

SeaweedFS on the same two cores, nothing else running, 6000 avatars in 4 clusters, `--steps 150 --batch 32`: 26.8 and
26.1 s from the disk, 26.4 and 26.5 s from the store: 1.00x.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from atoll.object_store import download, place_of

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--cluster", type=int, default=0)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as home:
        local = Path(home) / "data"
        download(place_of(args.url), local)

        def seconds(data: object, name: str) -> tuple[float, float]:
            """Returns wall-clock and CPU seconds; other load disturbs the latter less."""
            flags = ["--cluster", args.cluster, "--steps", args.steps, "--batch", args.batch]
            flags += ["--model", args.model, "--sample-every", "0"]
            command = [sys.executable, "-m", "atoll", "train", data, *flags, "--out", f"{home}/{name}"]
            environment = {**os.environ, "XDG_CACHE_HOME": f"{home}/cache-{name}"}
            start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([str(word) for word in command], check=True, capture_output=True, env=environment)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            return time.perf_counter() - start, used

        for i in range(args.rounds):
            here, there = seconds(local, f"local-{i}"), seconds(args.url, f"store-{i}")
            same = len({(Path(home) / f"{name}-{i}" / "model.safetensors").read_bytes() for name in ("local", "store")})
            assert same == 1, "the weights differ"
            ratios.append((here[0] / there[0], here[1] / there[1]))
            seen = f"local disk {here[0]:.1f} s ({here[1]:.1f} s of CPU), store {there[0]:.1f} s ({there[1]:.1f} s)"
            print(f"{seen}: {ratios[-1][0]:.3f}x ({ratios[-1][1]:.3f}x), weights equal", flush=True)
    by_clock, by_cpu = (statistics.median(values) for values in zip(*ratios, strict=True))
    print(f"throughput from the store / from the local disk: {by_clock:.3f} by the clock, {by_cpu:.3f} by CPU time")


if __name__ == "__main__":
    main()
