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

    def seconds(out: Path, elsewhere: Map | None) -> float:
        start = time.perf_counter()
        prepare(source, out, settings, cores, progress=False, device="cpu", run_elsewhere=elsewhere)
        return time.perf_counter() - start

    ratios = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            here, there = Path(folder) / "local", Path(folder) / "ray"
            local, on_ray = seconds(here, None), seconds(there, engine.map)
            names = [path.name for path in (here / "shards").iterdir()]
            assert filecmp.cmpfiles(here / "shards", there / "shards", names, shallow=False)[0] == names
        ratios.append(local / on_ray)
        print(
            f"local {args.num / local:.0f} images/s, ray {args.num / on_ray:.0f} images/s: {ratios[-1]:.3f}x",
            flush=True,
        )
    print(f"ray / local: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
