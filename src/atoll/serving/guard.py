"""What both servers share around their routes: a guard that rejects improper requests, and a graceful shutdown.

The guard is plain ASGI middleware. It assigns every request an id, refuses unknown hosts and origins, checks the key,
reads the body within limits of size and time, adds security headers for browsers, and logs one line per request:
client, path, status and duration, never a prompt.
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
    """An error response, in the form that OpenAI's clients expect."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after

    @classmethod
    def of(cls, error: Exception) -> "Refusal":
        """Returns the response to an error: the caller's mistakes are explained, internal errors not disclosed."""
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
    """A refusal sent from another process; exceptions do not pickle reliably."""

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
    """ASGI middleware that checks and logs every request to `app`."""

    app: Callable[[Scope, Receive, Send], Awaitable[None]]
    access: Access
    limits: Limits
    public: Callable[[str], bool] = field(default=lambda path: False)  # the paths that need no key
    names: Collection[str] = ()  # host names to accept, besides IP addresses and localhost
    origins: Collection[str] = ()  # other sites whose pages may send requests
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
        """Refuses unknown host names, which prevents DNS rebinding, and requests from pages of other sites."""
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
            urlsplit(f"//{host}").port  # noqa: B018  # raises ValueError if it is invalid
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
    """Returns a `receive` that yields the body first, then any further messages."""
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
    """Shortens Python's switch interval, so that the threads of a server soon get the interpreter lock.

    A computing thread releases the lock at every operation, but has it back before another thread wakes up, until that
    one has waited for the switch interval, 5 ms by default. A preview passes through three threads.
    """
    sys.setswitchinterval(SWITCH)


def set_up_log() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)


def uvicorn_config(app: Any, limits: Limits) -> Any:
    """Returns uvicorn's config for an app, with limits on how long clients may take."""
    try:
        import uvicorn
        from uvicorn.protocols.http.h11_impl import H11Protocol
    except ImportError as error:
        raise InputError(NEEDED) from error

    class Patient(H11Protocol):
        """Closes a connection whose request does not arrive in time; uvicorn itself would wait forever."""

        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.timer = self.loop.call_later(limits.patience, transport.abort)

        def data_received(self, data: bytes) -> None:
            if self.timer is None and (self.cycle is None or self.cycle.response_complete):
                self.timer = self.loop.call_later(limits.patience, self.transport.abort)
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()  # the guard limits the time for the body

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
    """Serves until SIGTERM or SIGINT, then finishes requests in flight. SIGHUP calls `on_hangup`."""
    share_interpreter()
    config = uvicorn_config(app, limits)
    import uvicorn

    class Server(uvicorn.Server):
        """Exits with 0 after SIGTERM: a graceful shutdown is not a failure."""

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
    """Warns if other machines can send requests without a key."""
    if keys is None and host not in ("localhost", "::1") and not host.startswith("127."):
        warnings.warn(f"whoever reaches {host} may ask: give --keys, or leave --host out", stacklevel=3)


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; raises InputError if the address cannot be used."""
    if not 0 <= port <= 65535:
        raise InputError(f"cannot listen on port {port}: choose a --port from 1 to 65535, or 0 for any that is free")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(address[:2], family=family, backlog=1024)
        # asyncio sets this only on sockets with an explicit protocol; without it, the body of a response waits 40 ms
        # for the client to acknowledge the header. Accepted connections inherit it.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise InputError(f"cannot listen on {host} port {port} ({error}): choose another --host or --port") from error
