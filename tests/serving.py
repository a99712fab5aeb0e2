"""Servers for tests: an app in a thread of this process, or a command in its own process."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from atoll.serving.access import Access
from atoll.serving.api import State, make_app
from atoll.serving.guard import uvicorn_config
from atoll.serving.metrics import Metrics
from atoll.serving.models import Models, ServedHere, Source
from atoll.serving.settings import Limits


def eventually(holds: Callable[[], Any], seconds: float = 60) -> Any:
    """Waits until a condition holds, and returns its value."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
    return found


@contextmanager
def in_a_thread(app: Any, limits: Limits = Limits()) -> Iterator[str]:  # noqa: B008
    """Serves an app in a thread, and yields its URL."""
    config = uvicorn_config(app, limits)
    config.port = 0
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    eventually(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(30)


def make_state(*specs: str, limits: Limits = Limits(), keys: Path | None = None, **options: Any) -> State:  # noqa: B008
    metrics = Metrics()
    clusters = options.pop("clusters", None)
    sources = [Source.parse(spec, metrics.observer, options=options, clusters=clusters) for spec in specs]
    return State(Models(sources, partial(ServedHere, limits=limits)), Access(keys), limits, metrics)


@contextmanager
def in_process(*specs: str, **options: Any) -> Iterator[tuple[str, State]]:
    """Yields the URL and the state of a server in a thread."""
    state = make_state(*specs, **options)
    with in_a_thread(make_app(state), state.limits) as url:
        yield url, state
    state.models.close(cancel=True)


class Command:
    """Runs `atoll ARGUMENTS` in its own process, until the `with` block ends."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "atoll", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.lines: list[str] = []
        self.log: list[str] = []
        for stream, kept in ((self.process.stdout, self.lines), (self.process.stderr, self.log)):
            threading.Thread(target=lambda s=stream, k=kept: k.extend(s), daemon=True).start()

    def __enter__(self) -> "Command":
        def url() -> str | None:
            assert self.process.poll() is None, "".join(self.log)
            return next(
                (found[0] for line in list(self.lines) if (found := re.search(r"http://[\d.:]+\d", line))), None
            )

        self.url = eventually(url, 120)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)
