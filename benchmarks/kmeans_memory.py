"""k-means over features on disk that are larger than the memory limit, at two sizes: seconds and peak memory.

    python benchmarks/kmeans_memory.py [--rows 2000000] [--dim 256] [--fine 1024] [--limit 1.0]

Random rows in half precision are written as the shards of a data set, and partitioned as in DDM in a separate process,
whose peak resident size the kernel reports. --limit, in GB, limits the address space beyond what the libraries take, so
that a process that needs more fails.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")


def write_rows(folder: Path, num_rows: int, dim: int) -> None:
    import numpy as np

    from atoll.data.shards import write_shard

    for start in range(0, num_rows, 4096):
        num = min(4096, num_rows - start)
        rows = np.random.default_rng(start).standard_normal((num, dim), dtype=np.float32).astype(np.float16)
        numbers = np.arange(start, start + num)
        write_shard(folder / f"{start:09d}.safetensors", {"row": numbers, "features": rows}, {})


def cluster(folder: Path, fine: int, limit: float) -> None:
    import torch

    from atoll.data.shards import Dataset, Shard
    from atoll.partition.kmeans import hierarchical

    torch.set_num_threads(1)
    torch.ones(64, 64) @ torch.ones(64, 64)  # makes the libraries allocate their own memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if limit:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + int(limit * 1e9),) * 2)
    shards = [Shard(path) for path in sorted(folder.glob("*.safetensors"))]
    rows = Dataset(folder, None, shards).column("features")  # type: ignore[arg-type]
    start = time.perf_counter()
    centroids, labels = hierarchical(rows, 8, fine=fine, progress=sys.stderr.isatty())
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    gigabytes = len(rows) * centroids.fine.shape[1] * 2 / 1e9
    print(
        f"{len(rows):9,} x {centroids.fine.shape[1]} ({gigabytes:.2f} GB on disk) in {len(centroids.fine)} and 8 "
        f"clusters: {seconds:.0f} s, {len(rows) / seconds:,.0f} rows/s, peak {peak:.0f} MiB, "
        f"of which the libraries {before:.0f} MiB; sizes from {labels.bincount().min()} to {labels.bincount().max()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--fine", type=int, default=1024)
    parser.add_argument("--limit", type=float, default=0.0)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # for the measured process
    args = parser.parse_args()
    if args.folder is not None:
        cluster(args.folder, args.fine, args.limit)
        return
    for num_rows in (args.rows // 10, args.rows):
        with tempfile.TemporaryDirectory() as folder:
            write_rows(Path(folder), num_rows, args.dim)
            command = [sys.executable, __file__, "--folder", folder, "--fine", args.fine, "--limit", args.limit]
            subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main()
