"""The image API: OpenAI's routes over the schedulers of the models, and the studio.

A request becomes one job per image. Its events come from the scheduler's thread, images are decoded in a thread of
their own, and the event loop does nothing that takes time.
"""

import asyncio
import base64
import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from atoll.errors import InputError
from atoll.sampling.folder import described_png, png_of
from atoll.serving.access import Access, Client
from atoll.serving.guard import LOG, NEEDED, Guard, Refusal, run
from atoll.serving.metrics import Metrics
from atoll.serving.models import MAX_SHEET, Models, Served, Source
from atoll.serving.requests import Generation, schema
from atoll.serving.scheduler import Event, Failed, Finished, Job, Preview
from atoll.serving.settings import Limits
from atoll.serving.studio import page
from atoll.storage import read_bytes

KEPT, KEPT_BYTES = 256, 64 << 20  # images that can be fetched by their URL
FILES = "/v1/images/files/"
PUBLIC = ("/", "/healthz", "/readyz")
BEAT = 15.0  # seconds after which a stream says that it is alive


class Images:
    """The images of one request on their way."""

    def __init__(self, served: Served, jobs: Sequence[Job], pool: ThreadPoolExecutor) -> None:
        self.served, self.jobs, self._pool = served, jobs, pool
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()
        self._images = served.scheduler.submit(jobs, [partial(self._tell, i) for i in range(len(jobs))])

    def _tell(self, index: int, event: Event) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def events(self) -> AsyncIterator[tuple[int, Event | None]]:
        """Yields the number of an image and what happened to it, until all are done; None: nothing, for a while."""
        left = len(self.jobs)
        while left:
            try:
                async with asyncio.timeout(BEAT):
                    index, event = await self._events.get()
            except TimeoutError:
                yield -1, None
                continue
            if isinstance(event, Failed):
                raise event.error
            left -= isinstance(event, Finished)
            yield index, event

    async def render(self, index: int, event: Preview | Finished) -> bytes:
        """Returns a PNG; a finished one says how it was made."""
        return await self._loop.run_in_executor(self._pool, self._render, self.jobs[index], event)

    def _render(self, job: Job, event: Preview | Finished) -> bytes:
        pipe = self.served.pipe
        if isinstance(event, Preview):
            return png_of(pipe.render(event.latents)[0])
        settings = pipe.settings_of(job.plan) | ({"without": list(event.without)} if event.without else {})
        return described_png(
            pipe.render(event.latents)[0], prompt=job.prompt, negative_prompt=job.negative, seed=job.seed,
            model=pipe.index.hash, settings=settings,
        )  # fmt: skip

    def cancel(self) -> None:
        for image in self._images:
            image.cancel()


class Files:
    """The last images that were asked for as URLs; their names cannot be guessed."""

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
    """What the routes share."""

    def __init__(self, models: Models, access: Access, limits: Limits, metrics: Metrics) -> None:
        self.models, self.access, self.limits, self.metrics = models, access, limits, metrics
        self.files, self.pool = Files(), ThreadPoolExecutor(1, "atoll-render")
        self.draining = False
        self._reloading = asyncio.Lock()

    def served(self, name: str | None) -> Served:
        try:
            return self.models.get(name)
        except InputError as error:
            raise Refusal(404, str(error), "model") from error

    async def reload(self) -> None:
        """Reads the keys again, and loads models whose files have changed beside the old ones, which then finish."""
        async with self._reloading:
            try:
                self.access.reload()
            except InputError as error:
                LOG.warning("the keys stay as they were: %s", error)
            for source in await asyncio.to_thread(self.models.changed):
                try:
                    new = await asyncio.to_thread(self.models.open, source)
                except InputError as error:
                    LOG.warning("%s stays as it was: %s", source.name, error)
                    continue
                old = self.models.swap(new)
                LOG.info("%s is %s now, it was %s", new.name, new.pipe.index.hash[:12], old.pipe.index.hash[:12])
                await asyncio.to_thread(old.scheduler.close)


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
        refusal = Refusal.of(error)  # what is our own fault is left to the guard, which logs it
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
        return Response("draining\n" if state.draining else "ready\n", 503 if state.draining else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        counts = [(served.name, served.scheduler.counts()) for served in state.models]
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
    """Returns what a request is answered with: all images at once, or a stream of what happens to them."""
    asked = Generation.parse(request.headers.get("content-type", ""), await request.body())
    if state.draining:
        raise Refusal(503, "the server is shutting down: ask another, or again", retry_after=5)
    served, client = state.served(asked.model), request.state.client
    assert isinstance(client, Client)
    jobs = asked.jobs(served, client.name, state.limits)
    with ExitStack() as stack:
        stack.enter_context(client.hold(len(jobs)))
        images = Images(served, jobs, state.pool)
        stack.callback(images.cancel)
        if asked.stream:
            return _stream(images, stack.pop_all())
        work = asyncio.create_task(_collect(images, asked, state.files, str(request.base_url)))
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
    """Returns what is said of an image beside itself."""
    about = {"seed": job.seed, "shares": [round(share, 6) for share in event.trace.shares]}
    if event.without:
        about["without"] = list(event.without)
    return {**about, "trace": event.trace.describe()["evaluations"]} if trace else about


def _settings(images: Images) -> dict[str, Any]:
    served = images.served
    common = {"background": "opaque", "output_format": "png", "quality": "high", "size": f"{served.side}x{served.side}"}
    return {**common, "model": served.name, "settings": served.pipe.settings_of(images.jobs[0].plan)}


async def _collect(images: Images, asked: Generation, files: Files, base: str) -> dict[str, Any]:
    data: list[dict[str, Any]] = [{}] * len(images.jobs)
    async for index, event in images.events():
        if isinstance(event, Finished):
            png = await images.render(index, event)
            url = asked.response_format == "url"
            image = {"url": base.rstrip("/") + FILES + files.keep(png)} if url else {"b64_json": _base64(png)}
            data[index] = {**image, **_about(images.jobs[index], event, bool(asked.trace))}
    return {"created": int(time.time()), "data": data, **_settings(images)}


async def _stream(images: Images, stack: ExitStack) -> AsyncIterator[bytes]:
    """Yields server-sent events: previews with the experts' weights, then each image."""
    with stack:
        common, sent = _settings(images), [0] * len(images.jobs)
        try:
            async for index, event in images.events():
                if not isinstance(event, Preview | Finished):
                    yield b": still at work\n\n"
                    continue
                about: dict[str, Any] = {
                    "type": "image_generation.partial_image",
                    "created_at": int(time.time()),
                    **common,
                }
                about |= {"b64_json": _base64(await images.render(index, event)), "index": index}
                if isinstance(event, Preview):
                    about |= {
                        "partial_image_index": sent[index], "step": event.number + 1,
                        "t": round(event.t, 6), "weights": [round(weight, 6) for weight in event.weights],
                    }  # fmt: skip
                    sent[index] += 1
                else:
                    about |= {"type": "image_generation.completed", **_about(images.jobs[index], event, trace=True)}
                yield f"event: {about['type']}\ndata: {json.dumps(about)}\n\n".encode()
        except Exception as error:
            refusal = Refusal.of(error)
            if refusal.status == 500:
                LOG.exception("a stream failed")
            yield f"event: error\ndata: {json.dumps(refusal.body)}\n\n".encode()


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


# ------------------------------------------------------------------------------------------------------------------


def serve(
    sources: Sequence[Source], host: str, port: int, limits: Limits, *, access: Access, metrics: Metrics,
    names: Sequence[str] = (), origins: Sequence[str] = (), reload_every: float = 10.0,
    on_start: Callable[[str, Models], None],
) -> None:  # fmt: skip
    """Serves models until SIGTERM; `on_start` is told the address."""
    models = Models(sources, limits)
    state = State(models, access, limits, metrics)
    tasks: set[asyncio.Task[None]] = set()

    def spawn(work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def watch() -> None:
        while reload_every > 0:
            await asyncio.sleep(reload_every)
            await state.reload()

    def started(url: str) -> None:
        on_start(url, models)
        spawn(watch())

    def stop() -> None:
        state.draining = True

    try:
        app = make_app(state, names, origins)
        run(app, host, port, limits, on_start=started, on_stop=stop, on_hangup=lambda: spawn(state.reload()))
    finally:
        models.close(cancel=True)
