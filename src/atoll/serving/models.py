"""Opens and describes the models that are served, and swaps in new versions without dropping a request."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from atoll.cards import ExpertCard, ModelIndex
from atoll.errors import InputError, plural, unknown
from atoll.sampling.assemble import find_model
from atoll.sampling.expert import VelocityExpert
from atoll.sampling.model_card import CREDITS
from atoll.sampling.pipeline import AtollPipeline
from atoll.serving.apart import SchedulerProcess
from atoll.serving.images import Images, OwnImages
from atoll.serving.remote import RemoteExpert
from atoll.serving.scheduler import Job, Observer, Scheduler
from atoll.serving.settings import Limits
from atoll.serving.spread import spread_here
from atoll.storage import read_bytes

NAME = re.compile(r"[A-Za-z0-9._/-]{1,128}")
SHEET = "sheet.png"  # of a cluster, as `atoll partition` writes it
MAX_SHEET = 32 << 20
MAX_CREDITS = 64 << 10
Cards = Mapping[int, ExpertCard]  # by expert number


@dataclass(frozen=True)
class Source:
    """Where a model comes from, and under which name it is served."""

    name: str
    place: str  # a folder or a hub id
    options: Mapping[str, Any] = field(default_factory=dict)  # of AtollPipeline
    clusters: Path | None = None  # written by `atoll partition`, for the contact sheets
    observer: Observer | None = None

    @classmethod
    def parse(cls, spec: str, observer: Callable[[str], Observer] | None = None, **more: Any) -> "Source":
        """Parses PLACE or NAME=PLACE; the default name of a folder is its last part, that of a hub id the id."""
        name, equals, place = spec.partition("=")
        if not equals:
            place, path = spec, Path(spec)
            name = (path.resolve().name if path.exists() else spec) or "model"
            name = re.sub(r"[^A-Za-z0-9._/-]", "-", name)
        if not NAME.fullmatch(name):
            raise InputError(
                f"a model is named by letters, digits, dots and dashes, but one is {name!r}: use NAME=FOLDER"
            )
        return cls(name, place, observer=observer and observer(name), **more)


class Served:
    """One version of a model, with its description; a subclass generates its images."""

    def __init__(self, source: Source, pipe: AtollPipeline) -> None:
        self.source, self.name, self.pipe = source, source.name, pipe
        space = pipe.index.latent_space
        self.side = space.shape[1] * space.codec.factor
        self.about = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "atoll",
                      "atoll": self._describe()}  # fmt: skip

    @property
    def ready(self) -> bool:
        """Returns whether it accepts images now."""
        return True

    async def start(self, jobs: Sequence[Job]) -> Images:
        """Submits images; raises BusyError if there is no room."""
        raise NotImplementedError

    def counts(self) -> tuple[int, int]:
        """Returns how many images are in flight, and how many wait."""
        raise NotImplementedError

    def close(self, cancel: bool = False) -> None:
        """Stops accepting images, and returns when those left are finished or cancelled."""

    def _describe(self) -> dict[str, Any]:
        index, pipe = self.pipe.index, self.pipe
        return {
            "hash": index.hash,
            "size": f"{self.side}x{self.side}",
            "license": index.license,
            "guidance": pipe.guidance,
            "steps": pipe.made_for,  # None: any number
            "router": None if index.router is None else index.router.model,
            "credits": self._credits(),
            "experts": [self._expert(k, expert) for k, expert in enumerate(pipe.ensemble.experts)],
        }

    def _credits(self) -> str | None:
        """Returns the credits, if the model's folder has them, as a federation's does."""
        try:
            return read_bytes(self.pipe.folder / CREDITS, MAX_CREDITS, self.pipe.folder).decode()
        except (OSError, ValueError):
            return None

    def _expert(self, number: int, expert: VelocityExpert | None) -> dict[str, Any]:
        """Returns an expert's description: its objective, data, training and location."""
        about: dict[str, Any] = {"number": number, "objective": self.pipe.objectives[number]}
        place = "missing" if expert is None else "elsewhere" if expert.elsewhere else "here"
        card: ExpertCard | None = getattr(expert, "card", None)
        if card is not None:
            data, training = card.data, card.training or {}
            about |= {
                "cluster": card.cluster, "license": card.license, "data": data and data.name,
                "images": data and data.pictures, "samples": training.get("samples"),
                "parameters": training.get("parameters"), "objective": self._objective(number, card),
            }  # fmt: skip
        return {**about, "place": place, "sheet": self.sheet(number) is not None}

    def _objective(self, number: int, card: ExpertCard) -> str:
        return self.pipe.index.objectives[number] or str(card.objective.get("prediction"))

    def sheet(self, number: int) -> Path | None:
        """Returns the contact sheet of an expert's cluster, if there is one."""
        known = self.source.clusters
        path = None if known is None else known / f"{number:02d}" / SHEET
        return (
            path if path is not None and number in range(len(self.pipe.ensemble.experts)) and path.is_file() else None
        )


class Scheduled(Served):
    """A model with a scheduler."""

    scheduler: Scheduler | SchedulerProcess

    async def start(self, jobs: Sequence[Job]) -> Images:
        return OwnImages(self.pipe, self.scheduler, jobs)

    def counts(self) -> tuple[int, int]:
        return self.scheduler.counts()

    def close(self, cancel: bool = False) -> None:
        self.scheduler.close(cancel)


class ServedHere(Scheduled):
    """A model whose images this process generates."""

    scheduler: Scheduler

    def __init__(self, source: Source, limits: Limits, spread: bool = False) -> None:
        """With `spread`, each expert of the folder runs in its own process."""
        options, self._own = dict(source.options), dict[int, RemoteExpert]()
        if spread:
            self._own = spread_here(find_model(source.place, options.get("revision")), options, limits.images)
            options["elsewhere"] = {**self._own, **(options.get("elsewhere") or {})}
        try:
            super().__init__(source, AtollPipeline(source.place, **options))
            self.scheduler = Scheduler(self.pipe, limits, source.observer)
        except BaseException:
            self._close_own()
            raise

    def close(self, cancel: bool = False) -> None:
        super().close(cancel)
        self._close_own()

    def _close_own(self) -> None:
        for expert in self._own.values():
            expert.close()


class ServedApart(Scheduled):
    """A model whose images another process generates; this one decodes them and holds no experts' weights."""

    scheduler: SchedulerProcess

    def __init__(
        self, source: Source, limits: Limits, open_model: Callable[[str, Path, Cards, Observer], ServedHere]
    ) -> None:
        """`open_model` is called in that process, with the model's name and folder and the remote experts' cards."""
        folder = find_model(source.place, source.options.get("revision"))  # so that only one process downloads it
        remote: Mapping[int, VelocityExpert] = source.options.get("elsewhere") or {}
        cards = {k: expert.card for k, expert in remote.items() if isinstance(expert, RemoteExpert)}
        self.scheduler = SchedulerProcess(partial(open_model, source.name, folder, cards), limits, source.observer)
        try:
            super().__init__(source, AtollPipeline(folder, **source.options))
            self.scheduler.wait(self.pipe.index.hash)
        except BaseException:
            self.scheduler.close(cancel=True)
            raise

    @property
    def ready(self) -> bool:
        return self.scheduler.ready


class Models:
    """All models by name; the first is the default."""

    def __init__(self, sources: Sequence[Source], open_model: Callable[[Source], Served]) -> None:
        names = [source.name for source in sources]
        if len(set(names)) < len(names) or not names:
            raise InputError(f"{plural(len(names), 'model')} need as many names: give them as NAME=FOLDER")
        self.open = open_model  # also for a new version, alongside the one being served
        self._served = {source.name: open_model(source) for source in sources}

    def __iter__(self) -> Any:
        return iter(self._served.values())

    def get(self, name: str | None) -> Served:
        served = next(iter(self._served.values())) if name is None else self._served.get(name)
        if served is None:
            raise unknown("model", name, self._served)
        return served

    def changed(self) -> list[Source]:
        """Returns the sources whose files have changed since they were loaded."""
        changed = []
        for served in self:
            try:
                index = ModelIndex.read(find_model(served.source.place, served.source.options.get("revision")))
            except InputError:
                continue  # being written, or gone: keep what is loaded
            if index.hash != served.pipe.index.hash:
                changed.append(served.source)
        return changed

    def swap(self, new: Served) -> Served:
        """Switches to a new version; returns the old one, which still has images to finish."""
        old, self._served[new.name] = self._served[new.name], new
        return old

    def close(self, cancel: bool = False) -> None:
        for served in self:
            served.close(cancel)
