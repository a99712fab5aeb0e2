"""`atoll serve`."""

from pathlib import Path
from typing import Annotated

import tyro

from atoll.errors import InputError, unknown
from atoll.serving.settings import Limits


def serve(
    model: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    limits: Annotated[Limits, tyro.conf.arg(name="")],
    port: int = 8000,
    host: str = "127.0.0.1",
    keys: Path | None = None,
    clusters: Path | None = None,
    remote: tuple[str, ...] = (),
    remote_key: Path | None = None,
    remote_timeout: float = 10.0,
    name: tuple[str, ...] = (),
    allow_origin: tuple[str, ...] = (),
    reload: float = 10.0,
    max_resident: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    conversion: str | None = None,
    engine: str = "local",
    address: str | None = None,
    replicas: int = 1,
    spread: bool = False,
) -> None:
    """Serve models: an OpenAI-compatible image API, and a studio in the browser.

    All images in flight advance together, one step at a time; an image is the one that `atoll sample` makes of the same
    prompt, seed and settings. SIGTERM finishes what is in flight, SIGHUP looks for new keys and new versions at once.

    For example:
      atoll serve model
      atoll serve model --port 9000 --keys keys.json --clusters data/clusters
      atoll serve birds=run/birds small=org/small-model --images 32
      atoll serve model --remote 2=https://experts.example.org
      atoll serve /shared/model --engine ray --replicas 4

    Args:
        model: Folders that `atoll assemble` has made, hub ids or URLs of federations, each also as NAME=FOLDER; the
            first is the default.
        limits: How much is done at a time.
        port: Where to listen; 0 takes any that is free.
        host: The address to listen on; by default only this machine can ask.
        keys: A JSON file with the SHA-256 of API keys and their limits; without it, whoever reaches the port may ask.
        clusters: The folder that `atoll partition` has made: the studio shows its contact sheets.
        remote: Experts that are elsewhere, as NUMBER=URL of an `atoll serve-expert`.
        remote_key: A file with the API key that is sent to them.
        remote_timeout: Seconds until an expert that does not answer loses its weight to the next most probable one.
        name: Host names by which the server may be called, beside addresses and localhost.
        allow_origin: Sites whose pages may ask, such as https://example.org; none by default.
        reload: Seconds between looks for a new version of a model or of the keys; 0 is never.
        max_resident: How many experts may be in memory at a time; all by default.
        device: auto, cpu, cuda or cuda:N.
        dtype: What experts compute in: float32, bfloat16 or float16; by default as they were saved.
        conversion: calibrated, exact or paper; as for `atoll sample`.
        engine: local: this machine; ray: a Ray Serve application on a cluster.
        address: Of the Ray cluster, such as 10.0.0.1:6379; by default RAY_ADDRESS, or the one on this machine.
        replicas: How many times each model is there, with a GPU each where there are any.
        spread: Puts every expert into a process of its own: on a CPU, several cores then share each step. On a Ray
            cluster into an actor, with a GPU of its own where there are any.
    """
    from atoll.serving.start import Launch, start

    launch = Launch(
        model, limits, host, port, keys, clusters, remote, remote_key, remote_timeout, name, allow_origin, reload,
        {"max_resident": max_resident, "device": device, "dtype": dtype, "conversion": conversion},
    )  # fmt: skip
    if engine == "ray":
        from atoll.serving.cluster import start_on_cluster

        start_on_cluster(launch, address, replicas, spread)
    elif engine != "local":
        raise unknown("engine", engine, ("local", "ray"))
    elif address is not None or replicas != 1:
        raise InputError("--address and --replicas are of a Ray cluster: add --engine ray")
    else:
        start(launch, spread)
