"""`atoll prepare` by a Ray cluster on this machine against its own processes: images a second, interleaved.

    python benchmarks/prepare_ray.py [--num 20000] [--size 32] [--rounds 2]

The cluster has as many CPUs as the machine and is started before; its workers start, and load torch, within the time
that is measured. Both make the same bytes, which is checked.
"""

import argparse
import filecmp
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # as the processes it is compared with
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a cluster of this process alone

from atoll.data.encode import Map
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source
from atoll.engines.settings import EngineSettings


def cpu_seconds() -> float:
    """Returns what this process and all below it have used, which the rest of the machine disturbs less than time."""
    import psutil  # type: ignore[import-untyped]

    this = psutil.Process()
    return sum(sum(process.cpu_times()[:4]) for process in (this, *this.children(recursive=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    import ray

    cores = os.cpu_count() or 1
    ray.init(num_cpus=cores, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
    engine = EngineSettings("ray").open("cpu")
    settings, source = (
        PrepareSettings(size=args.size, codec="pca:plain"),
        Source("shapes", num=args.num, size=args.size),
    )

    def seconds(out: Path, elsewhere: Map | None) -> tuple[float, float]:
        start, before = time.perf_counter(), cpu_seconds()
        prepare(source, out, settings, cores, progress=False, device="cpu", run_elsewhere=elsewhere)
        return time.perf_counter() - start, cpu_seconds() - before

    ratios = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            here, there = Path(folder) / "local", Path(folder) / "ray"
            local, on_ray = seconds(here, None), seconds(there, engine.map)
            names = [path.name for path in (here / "shards").iterdir()]
            assert filecmp.cmpfiles(here / "shards", there / "shards", names, shallow=False)[0] == names
        ratios.append((local[0] / on_ray[0], local[1] / on_ray[1]))
        speeds = [
            f"{args.num / clock:.0f} images/s ({args.num / cpu:.0f} per CPU-second)" for clock, cpu in (local, on_ray)
        ]
        print(f"local {speeds[0]}, ray {speeds[1]}: {ratios[-1][0]:.3f}x ({ratios[-1][1]:.3f}x)", flush=True)
    by_clock, by_cpu = (statistics.median(values) for values in zip(*ratios, strict=True))
    print(f"ray / local: {by_clock:.3f} by the clock, {by_cpu:.3f} by CPU time")


if __name__ == "__main__":
    main()
