"""`atoll serve`: from flags to a running server."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.errors import InputError, plural, printable
from atoll.sampling.expert import VelocityExpert
from atoll.serving.access import Access
from atoll.serving.api import serve
from atoll.serving.guard import warn_if_open
from atoll.serving.metrics import Metrics
from atoll.serving.models import Models, Source
from atoll.serving.remote import RemoteExpert
from atoll.serving.settings import Limits
from atoll.storage import read_bytes, reason_of
from atoll.tensors import get_device


def start(
    specs: Sequence[str], limits: Limits, *, port: int, host: str, keys: Path | None, clusters: Path | None,
    remote: Sequence[str], remote_key: Path | None, remote_timeout: float, names: Sequence[str],
    origins: Sequence[str], reload_every: float, options: Mapping[str, Any],
) -> None:  # fmt: skip
    """Opens the models and serves them; prints where."""
    if not specs:
        raise InputError("there is no model: give a folder that `atoll assemble` has made, or a hub id")
    if (remote or clusters is not None) and len(specs) > 1:
        raise InputError("--remote and --clusters are of one model: serve it alone")
    access, metrics = Access(keys), Metrics()
    elsewhere = open_remotes(remote, remote_key, remote_timeout, options["device"])
    warn_if_open(host, keys)
    sources = []
    for spec in specs:
        source = Source.parse(spec, options={**options, "elsewhere": elsewhere}, clusters=clusters)
        sources.append(
            Source(source.name, source.place, source.options, source.clusters, metrics.observer(source.name))
        )

    def tell(url: str, models: Models) -> None:
        for served in models:
            index, places = served.pipe.index, plural(served.scheduler.places, "image")
            about = f"{plural(index.num_experts, 'expert')}, {places} at a time, {index.hash[:12]}"
            print(printable(f"{served.name}: {about}"), flush=True)
        print(f"the studio is at {url}, the API at {url}/v1; Ctrl-C ends it", flush=True)

    serve(
        sources, host, port, limits, access=access, metrics=metrics, names=names, origins=origins,
        reload_every=reload_every, on_start=tell,
    )  # fmt: skip


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
