"""`atoll prepare` on a local Ray cluster against its own worker processes: images per second, interleaved.

    python benchmarks/prepare_ray.py [--num 20000] [--pixels 256] [--size 32] [--rounds 2] [--ray-data]

The images are JPEGs in tar files, written beforehand; with --pixels 0 they are drawn by the processes that read them.
The cluster has as many CPUs as the machine and is started beforehand; its workers start, and load torch, within the
measured time. Both write the same bytes, which is checked. With --ray-data, a pipeline of Ray Data runs the same
functions too (`pip install pandas`).

`--rounds 1`, two cores with nothing else running: local 1059 images/s, Ray 1045 (0.99x; by CPU time 0.95x).
`--num 3000 --rounds 1 --ray-data`, two cores at a load of 24, images per second by the clock and per second of CPU:
local 52 and 205, Ray 59 and 221 (1.14x and 1.08x), Ray Data 49 and 154 (0.93x and 0.75x).
"""

import argparse
import filecmp
import io
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # like the processes it is compared with
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # only this process uses the cluster

import numpy as np
from PIL import Image

from atoll.data.encode import Map
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source
from atoll.engines.engine import encode
from atoll.engines.settings import EngineSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=20_000)
    parser.add_argument("--pixels", type=int, default=256)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ray-data", action="store_true")
    parser.add_argument("--images", type=Path, help="keep the images in this folder, or take those that are there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Source("shapes", num=args.num, size=args.size)
        if args.pixels:
            images = args.images or Path(folder) / "images"
            if not images.exists():
                write_images(images, args.num, args.pixels)
            source = Source(str(images))
        compare(source, args, Path(folder))


def compare(source: Source, args: argparse.Namespace, folder: Path) -> None:
    import ray

    cores = os.cpu_count() or 1
    ray.init(num_cpus=cores, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
    engine = EngineSettings("ray").open("cpu")
    settings = PrepareSettings(size=args.size, codec="pca:plain")
    ways: dict[str, Map | None] = {"local": None, "ray": partial(encode, engine)}
    if args.ray_data:
        ways["ray data"] = by_ray_data
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(args.rounds):
        for name in sorted(ways, reverse=bool(number % 2)):
            out = folder / f"{name} {number}"
            start, before = time.perf_counter(), cpu_seconds()
            prepare(source, out, settings, cores, progress=False, device="cpu", run_elsewhere=ways[name])
            seconds[name].append((time.perf_counter() - start, cpu_seconds() - before))
            speeds = [args.num / value for value in seconds[name][-1]]
            print(f"{name}: {speeds[0]:.0f} images/s, {speeds[1]:.0f} per second of CPU", flush=True)
        first, *others = (folder / f"{name} {number}" / "shards" for name in ways)
        names = [path.name for path in first.iterdir()]
        assert all(filecmp.cmpfiles(first, other, names, shallow=False)[0] == names for other in others)
    medians = {name: [statistics.median(values) for values in zip(*seconds[name], strict=True)] for name in ways}
    for name in [name for name in ways if name != "local"]:
        by_clock, by_cpu = (a / b for a, b in zip(medians["local"], medians[name], strict=True))
        print(f"{name} / local: {by_clock:.3f} by the clock, {by_cpu:.3f} by CPU time")


def by_ray_data(function: Any, values: Iterator[Any], then: Callable[[Any], Any] | None = None) -> Iterator[Any]:
    """Yields then(function(value)) in order, by a pipeline of Ray Data with two maps, which it fuses on CPUs."""
    import ray.data

    ray.data.DataContext.get_current().execution_options.preserve_order = True
    ray.data.DataContext.get_current().enable_progress_bars = False
    wrapped = [{"value": Opaque(value)} for value in values]  # it takes no generator that another must follow
    pipeline: Any = ray.data.from_items(wrapped, override_num_blocks=len(wrapped))
    for step in (function, then) if then else (function,):
        pipeline = pipeline.map(Step(step))
    for row in pipeline.iter_rows():
        yield row["value"].value


class Opaque:
    """Wraps a Python object so that Arrow does not convert it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Step:
    """Applies a function to the value of a row."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.__name__ = type(function).__name__

    def __call__(self, row: dict[str, Opaque]) -> dict[str, Opaque]:
        return {"value": Opaque(self.function(row["value"].value))}


def cpu_seconds() -> float:
    """Returns the CPU time of this process and its descendants, which other load disturbs less than wall-clock time."""
    import psutil  # type: ignore[import-untyped]

    this = psutil.Process()
    return sum(sum(process.cpu_times()[:4]) for process in (this, *this.children(recursive=True)))


def write_images(folder: Path, num: int, pixels: int) -> None:
    """Writes JPEGs of smooth colours with captions, 1000 per tar."""
    folder.mkdir(parents=True)
    for first in range(0, num, 1000):
        with tarfile.open(folder / f"{first:08d}.tar", "w") as archive:
            for number in range(first, min(num, first + 1000)):
                colours = np.random.default_rng(number).integers(0, 255, (8, 8, 3)).astype(np.uint8)
                file = io.BytesIO()
                Image.fromarray(colours).resize((pixels, pixels), Image.Resampling.BICUBIC).save(file, "JPEG")
                for name, content in (("jpg", file.getvalue()), ("txt", f"image {number}".encode())):
                    info = tarfile.TarInfo(f"{number:08d}.{name}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))


if __name__ == "__main__":
    main()
