"""A whole federation run by separate processes that share nothing but the store, evaluated like `atoll demo`.

    atoll demo --out demo
    python benchmarks/federation_walk.py demo/data --router demo/run/router --against demo/results.json --out walk

A founder, four contributors, two verifiers who must agree, and a user who samples: each has their own key, cache and
processes. One contributor trains with DDPM, one on private images: other avatars with the captions of a slot. The
report is the share of images in which every attribute of the prompt is right, for the model from the store and for the
one that `atoll demo` trained on one machine with the same steps. Rerun the command to resume. `--quick` is for tests:
tiny networks, and a gate that lets them pass.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from PIL import Image

from atoll.cards import PartitionCard
from atoll.data.builtin.avatars import attributes_of, draw_avatar
from atoll.data.shards import Dataset
from atoll.experiments.demo import CHOSEN, FULL, QUICK, SIZE, Judge
from atoll.federation.roles import url_of
from atoll.sampling.assemble import find_model
from atoll.storage import read_json, write_json
from atoll.training.settings import ExpertSettings, as_flags

LOOSE = ("segment_steps=5", "segments=1", "held_out=16", "levels=2", "baseline_margin=100", "present_margin=100",
         "copy_distance=0", "samples=4", "sample_margin=100")  # fmt: skip
FIGURES = ("prompt_accuracy", "prompt_accuracy_heldout", "frechet")


class World:
    """A store, and participants who share nothing else."""

    def __init__(self, out: Path, url: str) -> None:
        self.out, self.url, self.stages = out, url, dict[str, dict[str, float]]()

    def environment(self, name: str) -> dict[str, str]:
        home = self.out / "people" / name
        return {"ATOLL_HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}

    def start(self, name: str, verb: str, *arguments: object) -> "subprocess.Popen[str]":
        """Starts a command of `atoll federation`, or `sample`, as a participant's own process."""
        words = ["sample"] if verb == "sample" else ["federation", verb]
        return subprocess.Popen(
            [sys.executable, "-m", "atoll", *words, self.url, *map(str, arguments)], text=True,
            env={**os.environ, **self.environment(name)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, name: str, verb: str, *arguments: object) -> str:
        return finish(self.start(name, verb, *arguments))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Prints the wall-clock and CPU time of the block."""
        clock, before = time.perf_counter(), cpu_seconds()
        yield
        self.stages[name] = {
            "seconds": round(time.perf_counter() - clock, 1),
            "cpu_seconds": round(cpu_seconds() - before, 1),
        }
        print(name, "{seconds:.1f} s, {cpu_seconds:.1f} s of CPU".format(**self.stages[name]), sep=": ", flush=True)


def cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def finish(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, process.args[3:]))}: {output}")  # type: ignore[index]
    return output


def draw_own(data: Path, slot: int, folder: Path) -> None:
    """Draws other avatars with the captions of a slot's images, as pairs of PNG and text files."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, dataset = np.random.default_rng(7), Dataset.open(data, slot)
    for i, caption in enumerate(dataset.strings("caption")):
        Image.fromarray(draw_avatar(attributes_of(caption), SIZE, rng)).save(folder / f"{i:06d}.png")
        (folder / f"{i:06d}.txt").write_text(caption)


def main(
    data: Annotated[Path, tyro.conf.Positional],
    out: Path,
    url: str | None = None,
    router: Path | None = None,
    against: Path | None = None,
    quick: bool = False,
) -> None:
    """Runs a federation, and evaluates the resulting model.

    Args:
        data: Partitioned avatars, as from `atoll demo`.
        out: Output folder.
        url: URL of the store; OUT/store by default.
        router: A router trained on the data.
        against: The results.json of a demo on the same data.
        quick: Use tiny networks; the figures mean nothing.
    """
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    plan, gate = (QUICK, ["--gate", *LOOSE]) if quick else (FULL, [])
    world = World(out, url_of(url or out / "store"))
    sizes = PartitionCard.read(data / "clusters").sizes
    ddpm, own = sorted(range(len(sizes)), key=lambda slot: sizes[slot])[:2]
    draw_own(data, own, out / "mine")
    with world.stage("create"):
        flags = as_flags(replace(plan.expert, save_every=ExpertSettings.save_every), ExpertSettings())
        keys = [person_key(world, name) for name in ("vera", "walt")]
        routed = [] if router is None else ["--router", router]
        said = world.run("anna", "create", "--data", data, "--name", "avatars", "--as", "anna", "--verifier", *keys,
                         "--verdicts", 2, *routed, *flags, *gate)  # fmt: skip
        fingerprint = re.search("root: ([0-9a-f ]+)", said)[1].strip()  # type: ignore[index]
    with world.stage("join"):
        for name in ("ben", "carla", "dora", "emil"):
            brought = ["--data", out / "mine"] if name == "dora" else []
            world.run(name, "join", "--name", name, "--root", fingerprint, *brought)
    with world.stage("train"):
        different = as_flags(plan.ddpm, plan.expert)
        first = [world.start("emil", "train", "--slot", ddpm, *different), world.start("dora", "train")]
        print(*(finish(process).splitlines()[-2] for process in first), sep="\n")
        others = [world.start(name, "train") for name in ("ben", "carla")]  # they lease any free slot
        print(*(finish(process).splitlines()[-2] for process in others), sep="\n")
    with world.stage("verify"):
        judging = [world.start(name, "verify") for name in ("vera", "walt")]
        print(*map(finish, judging), sep="\n")
    with world.stage("sample"):
        world.run("eve", "sample", *CHOSEN, "--out", out / "samples")
        print(world.run("eve", "status", "--html", out / "page.html", "--shares"))
    with world.stage("judge"):
        os.environ |= world.environment("eve")
        found: dict[str, Any] = Judge(data, plan).judge(find_model(world.url), {}).about["figures"]
    results = {"federation": {name: found[name] for name in FIGURES}, "stages": world.stages}
    if against is not None:
        alone = read_json(against, "give the results.json of `atoll demo`")
        results["one machine"] = {name: alone[name] for name in FIGURES}
    write_json(out / "results.json", results)
    for name in ("federation", "one machine"):
        if name in results:
            print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in results[name].items()))
    total = {kind: sum(stage[kind] for stage in world.stages.values()) for kind in ("seconds", "cpu_seconds")}
    print(f"in all {total['seconds']:.0f} s, {total['cpu_seconds']:.0f} of CPU")


def person_key(world: World, name: str) -> str:
    """Returns KEY=NAME of a participant who has not joined yet."""
    from atoll.federation.keys import Identity

    os.environ |= world.environment(name)
    return f"{Identity.load_or_make(name).key}={name}"


if __name__ == "__main__":
    tyro.cli(main)
