"""What both servers have around their routes: a guard against what is not a proper request, and an orderly end.

The guard is plain ASGI. It gives every request an id, refuses strange hosts and origins, asks for the key, takes the
body within its limits of size and time, adds headers that keep browsers careful, and writes one line of log per
request: who, what, how long, never a prompt.
"""

import asyncio
import ipaddress
import json
import logging
import re
import signal
import socket
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

from atoll.errors import InputError, printable
from atoll.serving.access import Access
from atoll.serving.scheduler import BusyError
from atoll.serving.settings import Limits

LOG = logging.getLogger("atoll.serving")
NEEDED = "serving needs FastAPI, uvicorn, httpx and prometheus-client: run `pip install 'atoll[serve]'`"
SWITCH = 0.0005  # seconds
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
}
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Refusal(Exception):
    """An answer that is an error, as OpenAI's clients expect one."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after

    @classmethod
    def of(cls, error: Exception) -> "Refusal":
        """Returns how an error is told: what the caller did wrong as it is, what we did wrong not at all."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, BusyError):
            return cls(429, str(error), retry_after=error.retry_after)
        if isinstance(error, InputError):
            return cls(400, str(error))
        return cls(500, "something went wrong here: the log has it under the request's id")

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 404: "not_found_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        error = {"message": printable(self.message), "type": kind, "param": self.param, "code": None}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


class Refused(NamedTuple):
    """A refusal on its way from another process; exceptions do not travel well."""

    status: int
    message: str
    param: str | None
    retry_after: int | None

    @classmethod
    def of(cls, error: Exception) -> "Refused":
        refusal = Refusal.of(error)
        if refusal.status == 500:
            LOG.error("images failed", exc_info=error)
        return cls(refusal.status, refusal.message, refusal.param, refusal.retry_after)


@dataclass
class Guard:
    """Around an ASGI app."""

    app: Callable[[Scope, Receive, Send], Awaitable[None]]
    access: Access
    limits: Limits
    public: Callable[[str], bool] = field(default=lambda path: False)  # the paths that need no key
    names: Collection[str] = ()  # by which the server may be called; addresses and localhost always
    origins: Collection[str] = ()  # other sites whose pages may ask
    observe: Callable[[str, int, float], None] = field(default=lambda path, status, seconds: None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid4().hex.encode()
        status, begin, who = 0, time.perf_counter(), "-"
        extra = {**HEADERS, b"x-request-id": request_id}

        async def answer(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                known = {name for name, _ in message["headers"]}
                more = [(name, value) for name, value in extra.items() if name not in known]
                message = {**message, "headers": [*message["headers"], *more]}
            async with asyncio.timeout(self.limits.patience):  # a client that does not read
                await send(message)

        try:
            self._check_origin(scope, headers, extra)
            client = self.access.client(
                headers.get(b"authorization", b"").decode("latin-1"), (scope["client"] or "-")[0]
            )
            is_public = self.public(scope["path"]) and scope["method"] in ("GET", "HEAD")
            if scope["method"] == "OPTIONS":
                await _respond(answer, 204, b"", {})
                return
            if client is None and not is_public:
                raise Refusal(401, "this server wants an API key: send Authorization: Bearer KEY")
            who = "-" if client is None else client.name
            body = await self._read_body(headers, receive)
            scope.setdefault("state", {}).update(client=client, request_id=request_id.decode())
            await self.app(scope, _replay(body, receive), answer)
        except Refusal as refusal:
            if not status:
                own = {"content-type": "application/json", "connection": "close", **refusal.headers}
                await _respond(answer, refusal.status, json.dumps(refusal.body).encode(), own)
        except TimeoutError:
            status = status or 408
        except Exception:
            LOG.exception("request %s failed", request_id.decode())
            if not status:
                body = json.dumps(Refusal.of(RuntimeError()).body).encode()
                with suppress(OSError, TimeoutError):
                    await _respond(answer, 500, body, {"content-type": "application/json"})
        finally:
            seconds = time.perf_counter() - begin
            self.observe(scope["path"], status, seconds)
            LOG.info(
                json.dumps(
                    {
                        "time": round(time.time(), 3), "id": request_id.decode(), "client": who,
                        "method": scope["method"], "path": printable(scope["path"], 200), "status": status,
                        "seconds": round(seconds, 4),
                    }
                )
            )  # fmt: skip

    def _check_origin(self, scope: Scope, headers: Mapping[bytes, bytes], extra: dict[bytes, bytes]) -> None:
        """Refuses names that are not ours, so that no site can pose as us by its DNS, and pages of other sites."""
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._is_ours(host):
            raise Refusal(421, f"this server is not {host!r}: call it by its address, or start it with --name")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin in self.origins:
            extra[b"access-control-allow-origin"] = origin.encode("latin-1")
            extra[b"access-control-allow-headers"] = b"authorization, content-type, x-request-id"
            extra[b"access-control-allow-methods"] = b"GET, POST"
            extra[b"vary"] = b"origin"
        elif origin and urlsplit(origin).netloc.lower() != host.lower():
            raise Refusal(403, "pages of other sites may not ask here: start the server with --allow-origin for them")

    def _is_ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
            urlsplit(f"//{host}").port  # noqa: B018  # raises if it is none
            if not re.fullmatch(r"[a-z0-9.:_-]+", name):
                return False
            if name == "localhost" or name in self.names:
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    async def _read_body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        too_large = Refusal(413, f"the request is larger than {self.limits.body:,} bytes: send less")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self.limits.body:
            raise too_large
        body = b""
        try:
            async with asyncio.timeout(self.limits.patience):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(400, "the client has gone")
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self.limits.body:
                        raise too_large
        except TimeoutError as error:
            raise Refusal(408, f"the request did not come within {self.limits.patience:g} seconds") from error
        return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives the body first, and then whatever else comes."""
    given = False

    async def again() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _respond(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    raw = [(name.encode(), value.encode()) for name, value in {**headers, "content-length": str(len(body))}.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def share_interpreter() -> None:
    """Lets the threads of a server have the interpreter soon after they ask for it.

    A thread that computes releases it at every operation, but has it again before another is awake, until that one has
    waited for 5 ms, as Python has it: a preview passes through three threads.
    """
    sys.setswitchinterval(SWITCH)


def set_up_log() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)


def uvicorn_config(app: Any, limits: Limits) -> Any:
    """Returns how uvicorn shall serve an app: patient, but not for ever."""
    try:
        import uvicorn
        from uvicorn.protocols.http.h11_impl import H11Protocol
    except ImportError as error:
        raise InputError(NEEDED) from error

    class Patient(H11Protocol):
        """Closes a connection whose request does not come in time; uvicorn itself would wait for ever."""

        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.timer = self.loop.call_later(limits.patience, transport.abort)

        def data_received(self, data: bytes) -> None:
            if self.timer is None and (self.cycle is None or self.cycle.response_complete):
                self.timer = self.loop.call_later(limits.patience, self.transport.abort)
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()  # the guard watches over the body

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _stop(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

    return uvicorn.Config(
        app, http=Patient, ws="none", lifespan="off", log_config=None, log_level="warning", access_log=False,
        proxy_headers=False, server_header=False, limit_concurrency=limits.connections, timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(limits.drain)), h11_max_incomplete_event_size=32 << 10,
    )  # fmt: skip


def run(
    app: Any, host: str, port: int, limits: Limits, *, on_start: Callable[[str], None], on_stop: Callable[[], None],
    on_hangup: Callable[[], None],
) -> None:  # fmt: skip
    """Serves until SIGTERM or SIGINT; then finishes what is in flight. SIGHUP calls `on_hangup`."""
    share_interpreter()
    config = uvicorn_config(app, limits)
    import uvicorn

    class Server(uvicorn.Server):
        """One that ends with 0 after SIGTERM: an orderly end is no failure."""

        def capture_signals(self) -> Any:
            return nullcontext()

    set_up_log()
    server = Server(config)

    async def serve(listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            on_stop()
            server.handle_exit(number, None)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
        address, own_port = listening.getsockname()[:2]
        on_start(f"http://{f'[{address}]' if ':' in address else address}:{own_port}")
        await server.serve([listening])

    with listen(host, port) as listening:
        asyncio.run(serve(listening))


def warn_if_open(host: str, keys: Path | None) -> None:
    """Says so where other machines can ask without a key."""
    if keys is None and host not in ("localhost", "::1") and not host.startswith("127."):
        warnings.warn(f"whoever reaches {host} may ask: give --keys, or leave --host out", stacklevel=3)


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens there, or says why none can."""
    if not 0 <= port <= 65535:
        raise InputError(f"cannot listen on port {port}: choose a --port from 1 to 65535, or 0 for any that is free")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(address[:2], family=family, backlog=1024)
        # asyncio would set it only on sockets that name their protocol; without, an answer waits 40 ms for the client's
        # acknowledgement of its head. Connections take it over.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise InputError(f"cannot listen on {host} port {port} ({error}): choose another --host or --port") from error
