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

    All images in flight are batched, step by step; each is the same as from `atoll sample` with the same prompt, seed
    and settings. SIGTERM finishes images in flight and exits; SIGHUP checks for new keys and versions at once.

    For example:
      atoll serve model
      atoll serve model --port 9000 --keys keys.json --clusters data/clusters
      atoll serve birds=run/birds small=org/small-model --images 32
      atoll serve model --remote 2=https://experts.example.org
      atoll serve /shared/model --engine ray --replicas 4

    Args:
        model: Folders from `atoll assemble`, hub ids or URLs of federations, optionally as NAME=FOLDER; the first is
            the default.
        limits: How much is processed at once.
        port: Port to listen on; 0 picks a free one.
        host: Address to listen on; by default only this machine can connect.
        keys: A JSON file with the SHA-256 of API keys and their limits; without it, no key is required.
        clusters: The clusters folder from `atoll partition`, whose contact sheets the studio shows.
        remote: Remote experts, as NUMBER=URL of an `atoll serve-expert`.
        remote_key: A file with the API key that is sent to them.
        remote_timeout: Seconds to wait for a remote expert before the next most probable one takes its place.
        name: Host names accepted in requests, besides IP addresses and localhost.
        allow_origin: Origins allowed to call the API from a browser (CORS), such as https://example.org; none by
            default.
        reload: Seconds between checks for a new version of a model or of the keys; 0 for never.
        max_resident: How many experts may be in memory at once; all by default.
        device: auto, cpu, cuda or cuda:N.
        dtype: Precision of the experts: float32, bfloat16 or float16; by default as saved.
        conversion: calibrated, exact or paper; as for `atoll sample`.
        engine: local: this machine; ray: a Ray Serve application on a cluster.
        address: Address of the Ray cluster, such as 10.0.0.1:6379; by default RAY_ADDRESS, or the one on this machine.
        replicas: Number of replicas per model, with one GPU each if there are any.
        spread: Run every expert in its own process, so that on a CPU several cores share each step; on a Ray cluster
            in its own actor, with its own GPU if there are any.
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
