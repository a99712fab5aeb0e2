"""The graph that every experiment is: parts are trained, models are assembled of them, and rows measure models.

A node is a folder that is made once, so rerunning the command resumes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from atoll.cards import INDEX
from atoll.engines.engine import Engine
from atoll.engines.train_all import Part
from atoll.errors import InputError
from atoll.sampling.assemble import assemble
from atoll.storage import read_json, work_folder, write_json
from atoll.training.settings import RouterSettings


class ModelNode(NamedTuple):
    """Parts that are sampled as one."""

    folder: Path
    data: Path
    parts: tuple[Part, ...]  # the router is among them, or the model has none

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


def parts_of(models: Iterable[ModelNode]) -> list[Part]:
    """Returns all parts, each once, also those whose weights others start from."""
    parts = [part for model in models for part in model.parts]
    return list(dict.fromkeys([*(part.init for part in parts if isinstance(part.init, Part)), *parts]))


def train(models: Sequence[ModelNode], engine: Engine, progress: bool = True) -> None:
    """Trains all parts that are not complete, those that start from another's weights after the others."""
    # The longest first, so that no core idles long at the end.
    ordered = sorted(
        parts_of(models), key=lambda p: (isinstance(p.settings, RouterSettings), -p.settings.steps * p.settings.batch)
    )
    for later in (False, True):
        jobs = [part.job() for part in ordered if (part.init is not None) == later]
        engine.run(jobs, progress)


def assemble_all(models: Sequence[ModelNode]) -> None:
    for model in models:
        if not model.is_complete:
            router = next((part.folder for part in model.parts if isinstance(part.settings, RouterSettings)), None)
            experts = [part.folder for part in model.parts if part.folder != router]
            assemble(experts, router, model.folder, model.data, without_router=router is None)
