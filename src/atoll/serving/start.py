"""`atoll serve`: from flags to a running server."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from atoll.errors import InputError, plural, printable
from atoll.sampling.expert import VelocityExpert
from atoll.serving.access import Access
from atoll.serving.api import State, serve
from atoll.serving.guard import warn_if_open
from atoll.serving.metrics import Metrics
from atoll.serving.models import Models, Served, ServedHere, Source
from atoll.serving.remote import RemoteExpert
from atoll.serving.settings import Limits
from atoll.storage import read_bytes, reason_of
from atoll.tensors import get_device


@dataclass(frozen=True)
class Launch:
    """What is served, and how: what the flags say. It can be sent to other processes, which open the models."""

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

    def sources(self, metrics: Metrics) -> list[Source]:
        """Returns the models with their experts elsewhere, which have told by then what they are."""
        elsewhere = open_remotes(self.remote, self.remote_key, self.remote_timeout, self.options["device"])
        options = {**self.options, "elsewhere": elsewhere}
        return [Source.parse(spec, metrics.observer, options=options, clusters=self.clusters) for spec in self.models]


def start(launch: Launch) -> None:
    """Opens the models and serves them; prints where."""
    access, metrics = Access(launch.keys), Metrics()
    sources = launch.sources(metrics)
    warn_if_open(launch.host, launch.keys)
    models = Models(sources, partial(ServedHere, limits=launch.limits))

    def tell(url: str) -> None:
        for served in models:
            places = plural(served.scheduler.places, "image") if isinstance(served, ServedHere) else ""
            print(printable(f"{about(served)}, {places} at a time"), flush=True)
        print(where(url), flush=True)

    serve(
        State(models, access, launch.limits, metrics), launch.host, launch.port, names=launch.names,
        origins=launch.origins, reload_every=launch.reload_every, on_start=tell,
    )  # fmt: skip


def about(served: Served) -> str:
    """Returns a line about a model that is served."""
    index = served.pipe.index
    return f"{served.name}: {plural(index.num_experts, 'expert')}, {index.hash[:12]}"


def where(url: str) -> str:
    """Returns the line that says where to look."""
    return f"the studio is at {url}, the API at {url}/v1; Ctrl-C ends it"


def open_remotes(specs: Sequence[str], key_file: Path | None, timeout: float, device: str) -> dict[int, VelocityExpert]:
    """Returns the experts of NUMBER=URL, after each has told what it is."""
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
        experts[int(found[1])] = RemoteExpert(found[2], key=key, timeout=timeout, device=get_device(device))
    return experts
