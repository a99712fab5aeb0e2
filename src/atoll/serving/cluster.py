"""`atoll serve --engine ray`: the same server as a Ray Serve application.

Ray Serve's proxy forwards requests to one gateway: the app of `api.py` with its guard, keys, limits per key and image
URLs, but without weights. Behind it are replicas of each model, each with its own scheduler; Ray Serve picks the less
busy ones. An image depends only on its prompt, seed and settings; so if a replica is lost, the gateway has another one
generate the outstanding images, and the client does not notice.

With `spread`, every expert of a replica is a separate actor, called like a remote expert (`remote.py`), for models
whose experts do not fit on one GPU together.
"""

import asyncio
import re
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from atoll.cards import ModelIndex
from atoll.encoders.pretrained import require
from atoll.engines.engine import USUAL
from atoll.engines.ray import Ray
from atoll.errors import InputError, plural, printable
from atoll.sampling.assemble import find_model
from atoll.sampling.pipeline import AtollPipeline
from atoll.serving.access import Access
from atoll.serving.api import State, make_app
from atoll.serving.guard import LOG, Refusal, Refused, listen, share_interpreter, warn_if_open
from atoll.serving.images import Images, Shown
from atoll.serving.metrics import Metrics
from atoll.serving.models import Models, Served, ServedHere, Source
from atoll.serving.remote import RemoteExpert
from atoll.serving.scheduler import BusyError, Job, Observer, Preview
from atoll.serving.spread import ExpertActor, spread_experts
from atoll.serving.start import Launch, about, where
from atoll.storage import reason_of

APP = "atoll"  # the name of the Ray Serve application
LOSSES = 5  # of replicas in a row, after which a request is refused
LINGER = 60.0  # seconds for which a replaced version still answers requests for it
LOADING = 300.0  # seconds that an actor may take to load its expert
STARTING = 600.0  # seconds that the application may take to start
NOTHING = torch.empty(0)


# --- a replica ----------------------------------------------------------------------------------------------------


class Replica:
    """Runs a model with its scheduler on a node."""

    def __init__(self, launch: Launch, name: str, actor_options: Mapping[str, float] | None) -> None:
        """With `actor_options`, each expert is a separate actor that reserves these resources."""
        share_interpreter()
        self._limits, self._actors = launch.limits, actor_options
        self._source = launch.source(name)
        self._timeout, self._opening = launch.remote_timeout, asyncio.Lock()
        current = self._open()
        self._versions = {current.pipe.index.hash: current}

    def _open(self) -> ServedHere:
        source = self._source
        if self._actors is not None:
            options = dict(source.options)
            options["elsewhere"] = {**self._spread(Path(find_model(source.place))), **options["elsewhere"]}
            source = replace(source, options=options)
        return ServedHere(source, self._limits)

    def _spread(self, folder: Path) -> dict[int, RemoteExpert]:
        """Returns the folder's experts, each in a separate actor that lives as long as this process."""
        ray, options = require("ray", "ray"), self._source.options
        own = {name: options.get(name) for name in ("device", "dtype", "conversion")}
        actor = ray.remote(ExpertActor).options(max_restarts=-1, **(self._actors or {}))
        return spread_experts(
            folder, options, lambda part: ActorCarrier(actor.remote(part, self._limits.images, own), self._timeout)
        )

    async def _version(self, digest: str) -> ServedHere:
        async with self._opening:
            if digest not in self._versions:
                new = await asyncio.to_thread(self._open)
                olds, self._versions = self._versions, {**self._versions, new.pipe.index.hash: new}
                for old in olds:
                    asyncio.get_running_loop().call_later(LINGER, self._retire, old)
            if digest not in self._versions:
                raise BusyError("the model is being replaced: ask again", 1)
            return self._versions[digest]

    def _retire(self, digest: str) -> None:
        if served := self._versions.pop(digest, None):
            threading.Thread(target=served.close, daemon=True).start()

    async def make(self, digest: str, jobs: Sequence[Job]) -> AsyncIterator[Shown | Refused | None]:
        """Yields None once the images are queued, then their events; ends with a refusal if one fails."""
        try:
            served = await self._version(digest)
            images = await served.start(jobs)
        except Exception as error:
            yield Refused.of(error)
            return
        try:
            yield None
            async for shown in images.shown():
                yield shown and shown._replace(event=shown.event._replace(latents=NOTHING))
        except Exception as error:
            yield Refused.of(error)
        finally:
            images.cancel()


class ActorCarrier:
    """Carries a remote expert's requests to its actor."""

    def __init__(self, actor: Any, timeout: float) -> None:
        self._ray, self._actor, self.timeout = require("ray", "ray"), actor, timeout

    def request(self, method: str, path: str, body: bytes | None, largest: int) -> tuple[int, bytes]:
        try:
            answer: tuple[int, bytes] = self._ray.get(
                self._actor.answer.remote(body), timeout=LOADING if body is None else self.timeout
            )
        except self._ray.exceptions.RayError as error:
            raise OSError(reason_of(error)[:200] or type(error).__name__) from error
        return answer

    def close(self) -> None:
        self._ray.kill(self._actor)


# --- the gateway --------------------------------------------------------------------------------------------------


class Replicated(Served):
    """A model whose images are generated by replicas."""

    def __init__(self, source: Source, handle: Any) -> None:
        super().__init__(source, AtollPipeline(source.place, **source.options))
        self.handle, self.observer, self.in_flight = handle, source.observer or Observer(), 0

    async def start(self, jobs: Sequence[Job]) -> Images:
        images = ReplicaImages(self, jobs)
        await images.ask()
        return images

    def counts(self) -> tuple[int, int]:
        return self.in_flight, 0  # only their replica knows which of them wait


class ReplicaImages:
    """The images of a request, generated by a replica, or by another one if that is lost."""

    def __init__(self, served: Replicated, jobs: Sequence[Job]) -> None:
        self.served, self.jobs = served, jobs
        self._left = list(range(len(jobs)))  # those that are not done
        self._asked: list[int] = []  # those requested from the current stream
        self._last = [-1] * len(jobs)  # the last preview shown of each image
        self._stream: Any = None
        self._lost = require("ray", "ray").exceptions.RayError

    async def ask(self) -> None:
        """Submits the images that are left to a replica."""
        self.cancel()
        served, self._asked = self.served, list(self._left)
        for number in range(LOSSES):
            await asyncio.sleep(0.1 * number)
            with suppress(self._lost, TimeoutError):
                self._stream = served.handle.options(stream=True).make.remote(
                    served.pipe.index.hash, [self.jobs[i] for i in self._asked]
                )
                async with asyncio.timeout(LOADING):
                    taken = await anext(self._stream)
                if isinstance(taken, Refused):
                    raise Refusal(*taken)
                served.in_flight += len(self._asked)
                return
            self._stream = None
        raise Refusal(503, "no replica of the model answers: ask again", retry_after=5)

    async def shown(self) -> AsyncIterator[Shown | None]:
        while self._left:
            try:
                async for shown in self._stream:
                    if shown is None:
                        yield None
                        continue
                    if isinstance(shown, Refused):
                        raise Refusal(*shown)
                    number = self._asked[shown.number]
                    if isinstance(shown.event, Preview):
                        if shown.event.number <= self._last[number]:
                            continue  # shown by a replica that was lost
                        self._last[number] = shown.event.number
                    else:
                        self._left.remove(number)
                        self.served.observer.finished(None, bool(shown.event.without))
                    yield shown._replace(number=number)
            except self._lost as error:
                LOG.warning("a replica is lost (%s): others make its images", reason_of(error)[:200])
            if self._left:
                await self.ask()

    def cancel(self) -> None:
        if self._stream is not None:
            self.served.in_flight -= len(self._asked)
            self._stream.cancel()
            self._stream = None


class Gateway:
    """Runs the API and the studio, without weights, on a node."""

    def __init__(self, launch: Launch, handles: Mapping[str, Any]) -> None:
        global _app  # noqa: PLW0603
        metrics = Metrics()
        models = Models(launch.sources(metrics), lambda source: Replicated(source, handles[source.name]))
        self.state = State(models, Access(launch.keys), launch.limits, metrics)
        _app = make_app(self.state, launch.names, launch.origins)
        self._watching = asyncio.create_task(self.state.watch(launch.reload_every))  # Ray Serve's loop is running

    async def about(self) -> list[str]:
        return [about(served) for served in self.state.models]

    async def reload(self) -> None:
        await self.state.reload()

    async def drain(self, seconds: float) -> None:
        """Stops accepting requests, and waits for those in flight."""
        self.state.draining, end = True, time.monotonic() + seconds
        while self.state.access.held and time.monotonic() < end:
            await asyncio.sleep(0.05)


_app: Any = None  # of the gateway in this process


def _gateway_app() -> Any:
    """Returns the ASGI app; Ray Serve calls this after constructing the gateway."""
    return _app


# --- the command --------------------------------------------------------------------------------------------------


def start_on_cluster(launch: Launch, address: str | None, replicas: int, spread: bool) -> None:
    """Serves on a Ray cluster until SIGTERM, and prints the URL."""
    if not 1 <= replicas <= 1000:
        raise InputError(f"--replicas must be from 1 to 1000, but is {replicas}")
    serve, launch = require("ray.serve", "ray,serve"), _resolved(launch)
    sources = launch.sources(Metrics())
    indexes = {source.name: ModelIndex.read(find_model(source.place)) for source in sources}
    Access(launch.keys)  # refuses an invalid file here rather than in the gateway
    warn_if_open(launch.host, launch.keys)
    with listen(launch.host, launch.port) as free:
        launch = replace(launch, port=free.getsockname()[1])
    engine = Ray(address, launch.options["device"])
    needed = engine.needed(USUAL)
    actors = sum(1 + spread * sum(one is not None for one in index.experts) for index in indexes.values())
    _require_room(engine.ray, needed, replicas * actors)
    deployment, limits = serve.deployment, launch.limits
    handles = {
        name: deployment(Replica)
        .options(
            name=re.sub("[^A-Za-z0-9]+", "-", f"model-{name}"), num_replicas=replicas, ray_actor_options=needed,
            max_ongoing_requests=limits.connections, graceful_shutdown_timeout_s=limits.drain,
        )
        .bind(launch, name, needed if spread else None)
        for name in indexes
    }  # fmt: skip
    gateway = deployment(serve.ingress(_gateway_app)(Gateway)).options(
        name="gateway", num_replicas=1, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=limits.connections,
        graceful_shutdown_timeout_s=limits.drain,
    )  # fmt: skip
    stop, reload = threading.Event(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    signal.signal(signal.SIGHUP, lambda *_: reload.set())
    http = {"host": launch.host, "port": launch.port}
    serve.start(proxy_location="HeadOnly", http_options=http, logging_config={"enable_access_log": False})
    try:
        handle = _run(serve, gateway.bind(launch, handles), stop)
        for line in handle.about.remote().result(timeout_s=LOADING) if handle is not None else ():
            print(printable(f"{line}, {plural(replicas, 'replica')}"), flush=True)
        if handle is not None:
            print(where(_find(launch.host, launch.port)), flush=True)
            while not stop.wait(0.2):
                if reload.is_set():
                    reload.clear()
                    handle.reload.remote()
            handle.drain.remote(limits.drain).result(timeout_s=limits.drain + 30)
    finally:
        serve.delete(APP)
        if not serve.status().applications:
            serve.shutdown()


def _resolved(launch: Launch) -> Launch:
    """Returns the launch with absolute paths: workers run in another folder."""

    def place(spec: str) -> str:
        name, equals, own = spec.rpartition("=")
        source = Source.parse(spec)
        return f"{source.name}={Path(own).resolve()}" if Path(own).exists() else f"{name}{equals}{own}"

    paths = {name: getattr(launch, name) for name in ("keys", "clusters", "remote_key")}
    absolute = {name: path and path.resolve() for name, path in paths.items()}
    return replace(launch, models=tuple(map(place, launch.models)), **absolute)


def _require_room(ray: Any, each: Mapping[str, float], num: int) -> None:
    """Raises InputError if the cluster lacks free resources, for which Ray would wait forever."""
    free = ray.available_resources()
    for name, what in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        if num * each[name] > free.get(what, 0):
            raise InputError(
                f"{plural(num, 'worker')} with {plural(int(each[name]), what)} each are asked for, and the cluster "
                f"has {free.get(what, 0):g} free: ask for fewer --replicas, or add nodes"
            )


def _run(serve: Any, app: Any, stop: threading.Event) -> Any:
    """Returns the application's handle once it runs; None if it was stopped before that."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(serve.run(app, name=APP, route_prefix="/"))
        except Exception as error:
            ended.append(error)

    threading.Thread(target=run, daemon=True).start()
    end = time.monotonic() + STARTING
    while not ended and time.monotonic() < end and not stop.wait(0.05):
        pass
    if not ended and not stop.is_set():
        raise InputError(f"the replicas did not start within {STARTING:g} seconds: look into `serve status`")
    if ended and isinstance(ended[0], Exception):
        raise InputError(f"the replicas cannot be started ({reason_of(ended[0])[:300]}): look into `serve status`")
    return ended[0] if ended else None


def _find(host: str, port: int) -> str:
    """Returns the URL of Ray Serve's proxy; one that already ran on the cluster may listen elsewhere."""
    name = f"[{host}]" if ":" in host else host
    try:
        with socket.create_connection((host, port), timeout=30):
            return f"http://{name}:{port}"
    except OSError as error:
        raise InputError(
            f"Ray Serve does not listen on {host} port {port}: if it runs on this cluster already, `serve shutdown` "
            "ends it, or give its --host and --port"
        ) from error
