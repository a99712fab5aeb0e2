"""The graph of an experiment: parts are trained, models are assembled from them, and rows measure models.

Each node is a folder that is made once, so rerunning the command resumes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from atoll.cards import CONFIG, INDEX, DatasetCard
from atoll.convert import Options, convert, save
from atoll.convert.dit import dit_weights
from atoll.engines.engine import Engine
from atoll.engines.train_all import Part
from atoll.errors import InputError
from atoll.networks.dit import DiT
from atoll.sampling.assemble import assemble
from atoll.storage import read_json, work_folder, write_json, write_whole
from atoll.training.checkpoint import path_of
from atoll.training.settings import RouterSettings
from atoll.training.snapshot import write_snapshot


class PretrainedPart(Part):
    """A DDPM DiT of other data, with AdaLN-Zero and no text, that initialises experts like a published DiT (Eq. 19)."""

    @property
    def first_weights(self) -> Path:
        return self.folder.with_name("converted")

    def convert(self) -> None:
        """Writes the network with the keys of a published DiT, and converts that file."""
        if (self.first_weights / CONFIG).exists():
            return
        network = DiT.from_pretrained(self.folder)
        file = self.folder.with_name("dit.safetensors")
        write_whole(file, lambda staged: save_file(dit_weights(network), staged))
        convert_dit_file(file, self.first_weights, self.data, license=str(network.card.get("license", "unknown")),
                         kind="dit", label=0, num_heads=network.config.num_heads)  # fmt: skip


def convert_dit_file(file: Path, out: Path, data: Path, **options: Any) -> None:
    """Converts a DiT's file to initial weights for experts of a data set."""
    card = DatasetCard.read(data)
    save(convert(file, Options(text_dim=card.text.dim, input_size=card.latent_shape[1], **options)), out)


class PartOnTheWay(Part):
    """A snapshot of an expert after `settings.steps` of a longer run, which is its `init`."""

    def make(self) -> None:
        if not (self.folder / CONFIG).exists():
            assert isinstance(self.init, Part)
            task = self.init.make_task(torch.device("cpu"))
            write_snapshot(task, path_of(self.init.folder / "state", self.settings.steps), self.settings, self.folder)


class ModelNode(NamedTuple):
    """A model assembled from parts."""

    folder: Path
    data: Path
    parts: tuple[Part, ...]  # experts, and the router if the model has one

    @property
    def is_complete(self) -> bool:
        return (self.folder / INDEX).exists()


@contextmanager
def begun(out: Path, name: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Locks a folder that is empty or was begun with the same settings, which are saved in a file of this name."""
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
    """Returns all parts once, each after the part whose weights it starts from."""

    def with_init(part: Part) -> Iterator[Part]:
        if isinstance(part.init, Part):
            yield from with_init(part.init)
        yield part

    return list(dict.fromkeys(one for model in models for part in model.parts for one in with_init(part)))


def train(models: Sequence[ModelNode], engine: Engine, progress: bool = True) -> None:
    """Trains all incomplete parts, each after its initial weights, and students after their teachers."""
    parts = parts_of(models)
    # The longest first, so that cores idle little at the end.
    ordered = sorted(
        parts, key=lambda p: (isinstance(p.settings, RouterSettings), -p.settings.steps * p.settings.batch)
    )
    jobs = [part for part in ordered if not isinstance(part, PartOnTheWay)]
    for stage in range(1 + max((stage_of(part) for part in jobs), default=0)):
        if stage == STUDENTS:
            _take_snapshots(parts)
            assemble_all([model for model in models if all(stage_of(part) < STUDENTS for part in model.parts)])
        engine.run([part.job() for part in jobs if stage_of(part) == stage], progress)
        for part in jobs:
            if isinstance(part, PretrainedPart):
                part.convert()
    _take_snapshots(parts)


def _take_snapshots(parts: Iterable[Part]) -> None:
    for part in parts:
        if isinstance(part, PartOnTheWay):
            part.make()


STUDENTS = 2


def stage_of(part: Part) -> int:
    """Returns the stage a part is trained in: 0, 1 if it starts from another's weights, 2 for students."""
    return STUDENTS if part.teacher is not None else int(part.init is not None)


def assemble_all(models: Sequence[ModelNode]) -> None:
    for model in models:
        if not model.is_complete:
            router = next((part.folder for part in model.parts if isinstance(part.settings, RouterSettings)), None)
            experts = [part.folder for part in model.parts if part.folder != router]
            assemble(experts, router, model.folder, model.data, without_router=router is None)
