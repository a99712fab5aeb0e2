"""Federations for tests: tiny data, people with their own keys, and experts that train in a moment."""

import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source
from atoll.federation.contribute import contribute
from atoll.federation.create import create
from atoll.federation.gate import Gate
from atoll.federation.judge import Judgement
from atoll.federation.keys import Identity
from atoll.federation.roles import Federation
from atoll.partition.partition import partition
from atoll.training.settings import ExpertSettings

SETTINGS = ExpertSettings(model="8x1/4", steps=4, batch=8, log_every=2, eval_every=100, sample_every=0, warmup=1)
GATE = Gate(
    segment_steps=2,
    segments=1,
    held_out=8,
    levels=2,
    baseline_margin=100,
    present_margin=100,
    copy_distance=0,
    samples=0,
)
TRAINING = {"model": "8x1/4", "steps": 4, "batch": 8, "log_every": 2, "eval_every": 100, "warmup": 1}
GOOD = Judgement(accepted=True, reason="it is good", figures={})


def make_data(folder: Path, num: int = 64, clusters: int = 2, kind: str = "shapes", seed: int = 0) -> Path:
    """Makes a built-in data set with clusters."""
    settings = PrepareSettings(size=16, codec="pixels", holdout=0.2, license="CC0-1.0")
    prepare(Source(kind, None, num, 16, seed, None), str(folder), settings, num_workers=0, progress=False)
    if clusters:
        partition(folder, clusters, method="kmeans", fine=8, progress=False)
    return folder


@contextmanager
def person(home: Path, name: str):
    """Gives the code in the block this person's key, trusted roots and cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOLL_HOME", str(home / name))
        patch.setenv("XDG_CACHE_HOME", str(home / name / "cache"))
        yield Identity.load_or_make(name)


class World:
    """A federation in a store, and people who share only that store."""

    def __init__(self, url: str, home: Path, data: Path) -> None:
        self.url, self.home, self.data = url, home, data

    def person(self, name: str):
        return person(self.home, name)

    def create(
        self, founder: str = "anna", verifiers: tuple[str, ...] = (), verdicts: int = 1, **options
    ) -> Federation:
        people = []
        for name in verifiers:
            with self.person(name) as identity:
                people.append(identity.person)
        values = {"gate": GATE, "training": TRAINING, "lease": 600, "fresh": 86400, "name": "test", **options}
        with self.person(founder) as identity:
            return create(self.url, identity, self.data, verifiers=people, num_verdicts=verdicts, **values)

    def open(self, name: str) -> Federation:
        with self.person(name):
            return Federation.open(self.url)

    def train(self, name: str, slot: int | None = None, seed: int = 0, **options):
        with self.person(name) as identity:
            settings = replace(SETTINGS, seed=seed)
            return contribute(Federation.open(self.url), identity, settings, slot=slot, progress=False, **options)

    def verify(self, name: str) -> list[str]:
        from atoll.federation.verify import verify

        with self.person(name) as identity:
            return verify(Federation.open(self.url, refresh=False), identity)

    def run(self, name: str, *arguments: str) -> None:
        """Runs a command of `atoll federation` within this process."""
        with self.person(name):
            main(["federation", *arguments])


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def environment(home: Path, name: str) -> dict[str, str]:
    """Returns the environment for a process of this person."""
    return {**os.environ, "ATOLL_HOME": str(home / name), "XDG_CACHE_HOME": str(home / name / "cache")}
