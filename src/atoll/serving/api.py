"""The image API: OpenAI's routes over the models' schedulers, and the studio.

A request becomes one job per image (`images.py`); their events are streamed, or the images returned together.
"""

import asyncio
import base64
import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from typing import Any

from atoll.errors import InputError
from atoll.serving.access import Access, Client
from atoll.serving.guard import LOG, NEEDED, Guard, Refusal, run
from atoll.serving.images import Images
from atoll.serving.metrics import Metrics
from atoll.serving.models import MAX_SHEET, Models, Served
from atoll.serving.requests import Generation, schema
from atoll.serving.scheduler import Finished, Job, Preview
from atoll.serving.settings import Limits
from atoll.serving.studio import page
from atoll.storage import read_bytes, reason_of

KEPT, KEPT_BYTES = 256, 64 << 20  # images that can be fetched by their URL
FILES = "/v1/images/files/"
PUBLIC = ("/", "/healthz", "/readyz")


class Files:
    """Keeps the latest images requested as URLs, under names that cannot be guessed."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    def keep(self, png: bytes) -> str:
        name = f"{secrets.token_urlsafe(24)}.png"
        self._kept[name] = png
        while len(self._kept) > KEPT or (len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT_BYTES):
            self._kept.popitem(last=False)
        return name

    def get(self, name: str) -> bytes:
        if name not in self._kept:
            raise Refusal(404, "there is no such image, or too many others were made since")
        return self._kept[name]


class State:
    """The state that the routes share."""

    def __init__(self, models: Models, access: Access, limits: Limits, metrics: Metrics) -> None:
        self.models, self.access, self.limits, self.metrics = models, access, limits, metrics
        self.files = Files()
        self.draining = False
        self._reloading = asyncio.Lock()

    def served(self, name: str | None) -> Served:
        try:
            return self.models.get(name)
        except InputError as error:
            raise Refusal(404, str(error), "model") from error

    async def watch(self, every: float) -> None:
        """Reloads keys and models every `every` seconds; 0: never."""
        while every > 0:
            await asyncio.sleep(every)
            await self.reload()

    async def reload(self) -> None:
        """Rereads the keys, and loads changed models alongside the old ones, which then finish their images."""
        async with self._reloading:
            try:
                self.access.reload()
            except InputError as error:
                LOG.warning("the keys stay as they were: %s", error)
            for source in await asyncio.to_thread(self.models.changed):
                try:
                    new = await asyncio.to_thread(self.models.open, source)
                except Exception as error:  # no room on the device, say: what is served stays
                    LOG.warning("%s stays as it was: %s", source.name, reason_of(error) or type(error).__name__)
                    continue
                old = self.models.swap(new)
                LOG.info("%s is %s now, it was %s", new.name, new.pipe.index.hash[:12], old.pipe.index.hash[:12])
                await asyncio.to_thread(old.close)


def make_app(state: State, names: Sequence[str] = (), origins: Sequence[str] = ()) -> Guard:
    """Returns the ASGI app."""
    try:
        from fastapi import FastAPI, Request
        from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
        from starlette.exceptions import HTTPException
    except ImportError as error:
        raise InputError(NEEDED) from error
    app = FastAPI(title="Atoll", docs_url=None, redoc_url=None, redirect_slashes=False)
    html, policy = page()

    @app.exception_handler(Exception)
    @app.exception_handler(Refusal)
    @app.exception_handler(InputError)
    async def refused(request: Request, error: Exception) -> Response:
        refusal = Refusal.of(error)  # Starlette reraises internal errors, so the guard logs them
        if isinstance(error, Refusal) and error.status == 500:  # from another process, whose log says why
            LOG.error("request %s failed", request.state.request_id)
        return JSONResponse(refusal.body, refusal.status, refusal.headers)

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        return await refused(request, Refusal(error.status_code, str(error.detail).lower()))

    @app.get("/", include_in_schema=False)
    async def studio() -> Response:
        return HTMLResponse(html, headers={"content-security-policy": policy})

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response("ok\n", media_type="text/plain")

    @app.get("/readyz")
    async def readyz() -> Response:
        word = "draining" if state.draining else "ready" if all(one.ready for one in state.models) else "starting"
        return Response(f"{word}\n", 200 if word == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        counts = [(served.name, served.counts()) for served in state.models]
        return Response(state.metrics.text(state.access, counts), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [served.about for served in state.models]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(state.served(name).about)

    @app.get("/v1/sheets/{number}")
    async def sheet(number: str, model: str | None = None) -> Response:
        """Sends the contact sheet of an expert's cluster."""
        path = state.served(model).sheet(int(number)) if re.fullmatch("[0-9]{1,5}", number) else None
        if path is None:
            raise Refusal(404, "there is no contact sheet of this expert: start the server with --clusters")
        try:
            content = await asyncio.to_thread(read_bytes, path, MAX_SHEET)
        except OSError as error:
            raise Refusal(404, "the contact sheet of this expert cannot be read") from error
        return Response(content, media_type="image/png")

    @app.get(FILES + "{name}")
    async def file(name: str) -> Response:
        return Response(state.files.get(name), media_type="image/png")

    body = {"required": True, "content": {"application/json": {"schema": schema()}}}

    @app.post("/v1/images/generations", openapi_extra={"requestBody": body})
    async def generations(request: Request) -> Response:
        answer = await _generate(state, request)
        if isinstance(answer, dict):
            return JSONResponse(answer)
        return StreamingResponse(answer, media_type="text/event-stream")

    return Guard(
        app, state.access, state.limits, lambda path: path in PUBLIC or path.startswith(FILES), names, origins,
        state.metrics.request,
    )  # fmt: skip


async def _generate(state: State, request: Any) -> dict[str, Any] | AsyncIterator[bytes]:
    """Returns the response to a request: all images at once, or a stream of events."""
    asked = Generation.parse(request.headers.get("content-type", ""), await request.body())
    if state.draining:
        raise Refusal(503, "the server is shutting down: ask another, or again", retry_after=5)
    served, client = state.served(asked.model), request.state.client
    assert isinstance(client, Client)
    jobs = asked.jobs(served, client.name, state.limits)
    with ExitStack() as stack:
        stack.enter_context(client.hold(len(jobs)))
        images = await served.start(jobs)
        stack.callback(images.cancel)
        common = _settings(served, jobs)
        if asked.stream:
            return _stream(images, jobs, common, stack.pop_all())
        work = asyncio.create_task(_collect(images, jobs, common, asked, state.files, str(request.base_url)))
        gone = asyncio.create_task(_gone(request.receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Refusal(499, "the client has gone")
            return work.result()
        finally:
            work.cancel()
            gone.cancel()


async def _gone(receive: Callable[[], Any]) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _about(job: Job, event: Finished, trace: bool = False) -> dict[str, Any]:
    """Returns the metadata that accompanies an image."""
    about = {"seed": job.seed, "shares": [round(share, 6) for share in event.trace.shares]}
    if event.without:
        about["without"] = list(event.without)
    return {**about, "trace": event.trace.describe()["evaluations"]} if trace else about


def _settings(served: Served, jobs: Sequence[Job]) -> dict[str, Any]:
    common = {"background": "opaque", "output_format": "png", "quality": "high", "size": f"{served.side}x{served.side}"}
    return {**common, "model": served.name, "settings": served.pipe.settings_of(jobs[0].plan)}


async def _collect(
    images: Images, jobs: Sequence[Job], common: dict[str, Any], asked: Generation, files: Files, base: str
) -> dict[str, Any]:
    data: list[dict[str, Any]] = [{}] * len(jobs)
    async for shown in images.shown():
        if shown is not None and isinstance(shown.event, Finished):
            if asked.response_format == "url":
                image = {"url": base.rstrip("/") + FILES + files.keep(shown.png)}
            else:
                image = {"b64_json": _base64(shown.png)}
            data[shown.number] = {**image, **_about(jobs[shown.number], shown.event, bool(asked.trace))}
    return {"created": int(time.time()), "data": data, **common}


async def _stream(
    images: Images, jobs: Sequence[Job], common: dict[str, Any], stack: ExitStack
) -> AsyncIterator[bytes]:
    """Yields server-sent events: previews with the experts' weights, then each image."""
    with stack:
        sent = [0] * len(jobs)
        try:
            async for shown in images.shown():
                if shown is None:
                    yield b": still at work\n\n"
                    continue
                index, event, png = shown
                about = {"created_at": int(time.time()), **common, "b64_json": _base64(png), "index": index}
                if isinstance(event, Preview):
                    kind = "image_generation.partial_image"
                    about |= {
                        "partial_image_index": sent[index], "step": event.number + 1,
                        "t": round(event.t, 6), "weights": [round(weight, 6) for weight in event.weights],
                    }  # fmt: skip
                    sent[index] += 1
                else:
                    kind = "image_generation.completed"
                    about |= _about(jobs[index], event, trace=True)
                yield f"event: {kind}\ndata: {json.dumps({'type': kind, **about})}\n\n".encode()
        except Exception as error:
            refusal = Refusal.of(error)
            if refusal.status == 500:
                LOG.exception("a stream failed")
            yield f"event: error\ndata: {json.dumps(refusal.body)}\n\n".encode()


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


# ------------------------------------------------------------------------------------------------------------------


def serve(
    state: State, host: str, port: int, *, names: Sequence[str] = (), origins: Sequence[str] = (),
    reload_every: float = 10.0, on_start: Callable[[str], None],
) -> None:  # fmt: skip
    """Serves models until SIGTERM; `on_start` is called with the URL."""
    tasks: set[asyncio.Task[None]] = set()

    def spawn(work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def started(url: str) -> None:
        on_start(url)
        spawn(state.watch(reload_every))

    def stop() -> None:
        state.draining = True

    try:
        app = make_app(state, names, origins)
        run(app, host, port, state.limits, on_start=started, on_stop=stop, on_hangup=lambda: spawn(state.reload()))
    finally:
        state.models.close(cancel=True)
