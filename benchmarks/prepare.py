"""`atoll prepare` and `atoll partition` on shapes: images per second and peak memory, at two sizes of the data.

    python benchmarks/prepare.py [--few 5000] [--many 20000] [--size 32]

Each run is a separate process. Memory is the peak resident size of that process, alone and together with its workers,
as reported by the kernel.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

COMMAND = Path(sys.executable).parent / "atoll"


def resident(pid: int) -> int:
    """Returns the peak resident bytes of a process, 0 if it is gone."""
    try:
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])  # type: ignore[index]
    except (OSError, TypeError):
        return 0


def children(pid: int) -> list[int]:
    try:
        direct = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return direct + [grandchild for child in direct for grandchild in children(child)]


def run(*arguments: object) -> tuple[float, float, float]:
    """Returns the seconds, the peak MB of the process, and its peak MB including all workers."""
    start = time.perf_counter()
    process = subprocess.Popen([COMMAND, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak: dict[int, int] = {}

    def watch() -> None:
        while process.poll() is None:
            for pid in (process.pid, *children(process.pid)):
                peak[pid] = max(peak.get(pid, 0), resident(pid))
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    if process.wait():
        raise SystemExit(f"atoll {' '.join(map(str, arguments))} failed")
    thread.join()
    return time.perf_counter() - start, peak[process.pid] / 1e6, sum(peak.values()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", type=int, default=5000)
    parser.add_argument("--many", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=32)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    peaks: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for num in (args.few, args.many):
            out = Path(folder) / str(num)
            for verb, arguments in (
                ("prepare", ("shapes", "--num", num, "--size", args.size, "--out", out)),
                ("partition", (out, "--experts", 8)),
            ):
                seconds, alone, together = run(verb, *arguments)
                peaks[verb, num] = alone
                print(
                    f"{verb:9} {num:6} shapes: {seconds:6.1f} s, {num / seconds:6.0f} images/s, "
                    f"peak {alone:5.0f} MB, with workers {together:5.0f} MB",
                    flush=True,
                )
    for verb in ("prepare", "partition"):
        ratio = peaks[verb, args.many] / peaks[verb, args.few]
        print(f"{verb}: peak memory at {args.many} over that at {args.few}: {ratio:.3f}")


if __name__ == "__main__":
    main()
