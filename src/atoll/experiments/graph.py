"""The graph that every experiment is: parts are trained, models are assembled of them, and rows measure models.

A node is a folder that is made once, so rerunning the command resumes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from atoll.cards import INDEX
from atoll.engines.local import find_slots, run_jobs
from atoll.engines.train_all import job_of
from atoll.errors import InputError
from atoll.sampling.assemble import assemble
from atoll.storage import read_json, work_folder, write_json
from atoll.training.settings import DistillSettings, ExpertSettings, RouterSettings

AnySettings = ExpertSettings | RouterSettings | DistillSettings


class PartNode(NamedTuple):
    """An expert, a monolith, a student or a router, trained by a process of its own."""

    name: str
    folder: Path
    settings: AnySettings
    data: Path
    cluster: int | None = None  # of an expert; None: all of the data
    init: "PartNode | None" = None  # whose weights it starts from
    teacher: Path | None = None  # of a student

    @property
    def verb(self) -> list[str]:
        """Returns the verb of the command line, with its arguments."""
        if isinstance(self.settings, RouterSettings):
            return ["train-router", str(self.data)]
        if self.teacher is not None:
            return ["distill", str(self.teacher), str(self.data)]
        init = [] if self.init is None else ["--init", str(self.init.folder)]
        return ["train", str(self.data), "--cluster", "all" if self.cluster is None else str(self.cluster), *init]


class ModelNode(NamedTuple):
    """Parts that are sampled as one."""

    folder: Path
    data: Path
    parts: tuple[PartNode, ...]  # the router is among them, or the model has none

    @property
    def is_complete(self) -> bool:
        return (self.folder / INDEX).exists()


@contextmanager
def begun(out: Path, name: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Holds a folder that is empty, or that was begun with the same settings, which are kept in a file of this name."""
    with work_folder(out):
        path, wanted = out / name, json.loads(json.dumps(settings))
        files = sorted(file.name for file in out.iterdir() if not file.name.startswith("."))
        if files and not path.exists():
            raise InputError(f"{out} holds {files[0]} and no {name}: choose another --out")
        if files and read_json(path, f"remove {out}, or choose another --out") != wanted:
            raise InputError(f"{out} was begun with other settings or other data: give those, or choose another --out")
        write_json(path, wanted)
        yield


def parts_of(models: Iterable[ModelNode]) -> list[PartNode]:
    """Returns all parts, each once, also those whose weights others start from."""
    parts = [part for model in models for part in model.parts]
    return list(dict.fromkeys([*(part.init for part in parts if part.init), *parts]))


def train(models: Sequence[ModelNode], device: str, progress: bool = True) -> None:
    """Trains all parts that are not complete, those that start from another's weights after the others."""
    # The longest first, so that no core idles long at the end.
    ordered = sorted(
        parts_of(models), key=lambda p: (isinstance(p.settings, RouterSettings), -p.settings.steps * p.settings.batch)
    )
    for later in (False, True):
        jobs = [job_of(p.name, p.verb, p.folder, p.settings) for p in ordered if (p.init is not None) == later]
        run_jobs(jobs, find_slots(device), progress=progress)


def assemble_all(models: Sequence[ModelNode]) -> None:
    for model in models:
        if not model.is_complete:
            router = next((part.folder for part in model.parts if isinstance(part.settings, RouterSettings)), None)
            experts = [part.folder for part in model.parts if part.folder != router]
            assemble(experts, router, model.folder, model.data, without_router=router is None)
