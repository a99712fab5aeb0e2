"""The graph that every experiment is: parts are trained, models are assembled of them, and rows measure models.

A node is a folder that is made once, so rerunning the command resumes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from atoll.cards import INDEX
from atoll.engines.local import find_slots, run_jobs
from atoll.engines.train_all import job_of
from atoll.sampling.assemble import assemble
from atoll.storage import read_json
from atoll.training.settings import RouterSettings, Settings


class PartNode(NamedTuple):
    """An expert, a monolith, a student or a router, trained by a process of its own."""

    name: str
    verb: Sequence[str]  # of the command line, with its arguments
    folder: Path
    settings: Settings
    init: Path | None = None  # the part whose weights it starts from

    @classmethod
    def expert(
        cls, name: str, data: Path, cluster: int | None, folder: Path, settings: Settings, init: Path | None = None
    ) -> Self:
        """Without a cluster, the monolith."""
        where = "all" if cluster is None else str(cluster)
        return cls(name, ["train", str(data), "--cluster", where], folder, settings, init)

    @classmethod
    def router(cls, name: str, data: Path, folder: Path, settings: Settings) -> Self:
        return cls(name, ["train-router", str(data)], folder, settings)

    @property
    def is_complete(self) -> bool:
        path = self.folder / "run.json"
        return path.exists() and read_json(path, f"remove {self.folder}, and rerun the command").get("complete") is True


class ModelNode(NamedTuple):
    """Parts that are sampled as one."""

    folder: Path
    data: Path
    experts: Sequence[PartNode]
    router: PartNode | None = None

    @property
    def parts(self) -> list[PartNode]:
        return [*self.experts, *([self.router] if self.router else [])]

    @property
    def is_complete(self) -> bool:
        return (self.folder / INDEX).exists()


@dataclass(frozen=True)
class Graph:
    """All parts and models of an experiment."""

    parts: Sequence[PartNode]
    models: Sequence[ModelNode]

    def train(self, device: str, progress: bool = True) -> None:
        """Trains all parts that are not complete, those that start from another's weights after the others."""
        # The longest first, so that no core idles long at the end.
        longest = sorted(
            self.parts,
            key=lambda part: (isinstance(part.settings, RouterSettings), -part.settings.steps * part.settings.batch),
        )
        for later in (False, True):
            jobs = [
                job_of(part.name, [*part.verb, *(["--init", str(part.init)] if part.init else [])], part.folder,
                       part.settings)
                for part in longest
                if (part.init is not None) == later
            ]  # fmt: skip
            run_jobs(jobs, find_slots(device), progress=progress, environment={"OMP_NUM_THREADS": "1"})

    def assemble(self) -> None:
        for model in self.models:
            if not model.is_complete:
                experts = [part.folder for part in model.experts]
                router = model.router.folder if model.router else None
                assemble(experts, router, model.folder, model.data, without_router=router is None)
