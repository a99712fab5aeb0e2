"""`atoll serve`: from flags to a running server."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from atoll.errors import InputError, plural, printable
from atoll.sampling.expert import VelocityExpert
from atoll.serving.access import Access
from atoll.serving.api import State, serve
from atoll.serving.guard import warn_if_open
from atoll.serving.metrics import Metrics
from atoll.serving.models import Cards, Models, Scheduled, Served, ServedApart, ServedHere, Source
from atoll.serving.remote import RemoteExpert
from atoll.serving.scheduler import Observer
from atoll.serving.settings import MOST_WAITING, Limits
from atoll.storage import read_bytes, reason_of
from atoll.tensors import get_device


@dataclass(frozen=True)
class Launch:
    """The options of `atoll serve`. They can be sent to other processes, which open the models."""

    models: Sequence[str]
    limits: Limits = Limits()  # noqa: RUF009
    host: str = "127.0.0.1"
    port: int = 8000
    keys: Path | None = None
    clusters: Path | None = None
    remote: Sequence[str] = ()
    remote_key: Path | None = None
    remote_timeout: float = 10.0
    names: Sequence[str] = ()
    origins: Sequence[str] = ()
    reload_every: float = 10.0
    options: Mapping[str, Any] = field(default_factory=lambda: {"device": "cpu"})  # of AtollPipeline

    def __post_init__(self) -> None:
        if not self.models:
            raise InputError("there is no model: give a folder that `atoll assemble` has made, or a hub id")
        if (self.remote or self.clusters is not None) and len(self.models) > 1:
            raise InputError("--remote and --clusters are of one model: serve it alone")

    def sources(self, metrics: Metrics, cards: Cards | None = None) -> list[Source]:
        """Returns the models' sources with their remote experts; each must answer, unless its card is in `cards`."""
        elsewhere = open_remotes(self.remote, self.remote_key, self.remote_timeout, self.options["device"], cards or {})
        options = {**self.options, "elsewhere": elsewhere}
        return [Source.parse(spec, metrics.observer, options=options, clusters=self.clusters) for spec in self.models]

    def source(self, name: str, cards: Cards | None = None) -> Source:
        """Returns one model's source, for a process that serves only this one."""
        return next(source for source in self.sources(Metrics(), cards) if source.name == name)


def open_here(
    launch: Launch, spread: bool, threads: int, name: str, folder: Path, cards: Cards, observer: Observer
) -> ServedHere:
    """Opens a model in the process that generates its images; the server enforces the queue limit."""
    torch.set_num_threads(threads)
    source = replace(launch.source(name, cards), place=str(folder), observer=observer)
    return ServedHere(source, replace(launch.limits, waiting=MOST_WAITING), spread)


def start(launch: Launch, spread: bool = False) -> None:
    """Opens and serves the models, and prints the URL. With `spread`, each expert runs in its own process.

    On a CPU, each model runs in its own process anyway; on a GPU it runs in this one, which then decodes there, too.
    """
    on_cpu = get_device(launch.options["device"]).type == "cpu"
    if spread and (not on_cpu or launch.options.get("max_resident")):
        raise InputError(
            "--spread on one machine is for experts that are all in memory and run on its CPU: leave out "
            "--max-resident and add --device cpu, or add --engine ray for a GPU per expert"
        )
    access, metrics = Access(launch.keys), Metrics()
    sources = launch.sources(metrics)
    launch = replace(launch, models=[f"{source.name}={source.place}" for source in sources])  # final names
    warn_if_open(launch.host, launch.keys)
    if on_cpu:
        open_model = partial(open_here, launch, spread, torch.get_num_threads())
        torch.set_num_threads(1)  # decoding in this process must not take cores from the others
        models = Models(sources, partial(ServedApart, limits=launch.limits, open_model=open_model))
    else:
        models = Models(sources, partial(ServedHere, limits=launch.limits))

    def tell(url: str) -> None:
        for served in models:
            places = plural(served.scheduler.places, "image") if isinstance(served, Scheduled) else ""
            print(printable(f"{about(served)}, {places} at a time"), flush=True)
        print(where(url), flush=True)

    serve(
        State(models, access, launch.limits, metrics), launch.host, launch.port, names=launch.names,
        origins=launch.origins, reload_every=launch.reload_every, on_start=tell,
    )  # fmt: skip


def about(served: Served) -> str:
    """Returns a line that describes a served model."""
    index = served.pipe.index
    return f"{served.name}: {plural(index.num_experts, 'expert')}, {index.hash[:12]}"


def where(url: str) -> str:
    """Returns the line that shows the URLs."""
    return f"the studio is at {url}, the API at {url}/v1; Ctrl-C ends it"


def open_remotes(
    specs: Sequence[str], key_file: Path | None, timeout: float, device: str, cards: Cards
) -> dict[int, VelocityExpert]:
    """Returns the experts of NUMBER=URL specs; each must answer, unless its card is in `cards`."""
    key = None
    if key_file is not None:
        try:
            key = read_bytes(key_file, 4096).decode("ascii").strip()
        except (OSError, ValueError) as error:
            raise InputError(f"{key_file} cannot be read ({reason_of(error)}): give a file with one API key") from error
    experts: dict[int, VelocityExpert] = {}
    for spec in specs:
        found = re.fullmatch(r"(\d{1,5})=(https?://.+)", spec)
        if found is None or int(found[1]) in experts:
            raise InputError(f"--remote takes NUMBER=URL, each number once, but one is {spec!r}")
        number = int(found[1])
        experts[number] = RemoteExpert(
            found[2], key=key, timeout=timeout, device=get_device(device), card=cards.get(number)
        )
    return experts
