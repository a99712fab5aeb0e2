"""S3 servers for tests: moto's in this process, SeaweedFS in its own process, and faulty servers."""

import http.client
import http.server
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

SECRET = "a-secret-that-no-one-may-see"
BUCKET = "lake"


def use_server(patch, endpoint):
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        patch.setenv(name, value)


def make_bucket(endpoint):
    import boto3

    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)


@contextmanager
def moto_server():
    """Yields the URL of an empty bucket, and sets its endpoint in the environment."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        use_server(patch, endpoint)
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")).close()
        make_bucket(endpoint)
        yield f"s3://{BUCKET}"
    server.stop()


class WrongServer:
    """An HTTP server that counts requests and gives each the same response: whole, truncated or none."""

    def __init__(self, status=200, body="", length=None, hang=False):
        self.requests, self.release = [], threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(handler):
                self.requests.append(f"{handler.command} {handler.path}")
                if hang:
                    self.release.wait(60)
                    return
                handler.send_response(status)
                handler.send_header("Content-Length", str(len(body) if length is None else length))
                handler.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
                handler.send_header("ETag", '"1"')
                handler.end_headers()
                if handler.command != "HEAD":
                    handler.wfile.write(body.encode())
                handler.close_connection = True

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}", self.requests

    def __exit__(self, *_):
        self.release.set()
        self.server.shutdown()
        self.server.server_close()


class SeaweedFS:
    """A real S3 server in its own process, which can be killed and restarted with what it has stored."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.process = folder, None
        folder.mkdir(parents=True, exist_ok=True)
        self.let_in(SECRET)
        self.port = _free_port()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def let_in(self, secret: str) -> None:
        """Sets the secrets for full access and for a reader, from the next start on."""
        rights = {"someone": ["Admin", "Read", "Write", "List", "Tagging"], "reader": ["Read", "List"]}
        people = [
            {"name": name, "credentials": [{"accessKey": name, "secretKey": secret}], "actions": actions}
            for name, actions in rights.items()
        ]
        (self.folder / "s3.json").write_text(json.dumps({"identities": people}))

    def start(self) -> None:
        """Starts the server, retrying with other internal ports if one is taken meanwhile."""
        for last in (False, False, False, True):
            try:
                return self._start()
            except RuntimeError as error:
                self.kill()
                if last or "address already in use" not in str(error):
                    raise

    def _start(self) -> None:
        weed = shutil.which("weed") or str(Path(os.sys.executable).parent / "weed")
        inner = [
            f"-{part}.port{kind}={_free_port()}" for part in ("master", "volume", "filer") for kind in ("", ".grpc")
        ]
        log = self.folder / "log.txt"
        log.unlink(missing_ok=True)
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [weed, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self.folder}", "-s3",
                 f"-s3.port={self.port}", f"-s3.port.grpc={_free_port()}", f"-s3.config={self.folder / 's3.json'}",
                 *inner, "-volume.max=20", "-master.volumeSizeLimitMB=64", "-master.telemetry=false",
                 "-s3.port.iceberg=0", "-s3.port.lance=0"],
                stdout=file, stderr=file, start_new_session=True,
                env={name: value for name, value in os.environ.items() if name[:4] != "AWS_"},  # it would accept these
            )  # fmt: skip
        deadline = time.monotonic() + 90
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SeaweedFS does not start: {log.read_text()[-8000:]}")
            # Checks its own log first: another test's server may answer on its port.
            if f"at http port {self.port}" in log.read_text():
                with suppress(urllib.error.URLError, OSError):
                    urllib.request.urlopen(f"{self.endpoint}/status", timeout=2).close()
                    return
            time.sleep(0.1)

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextmanager
def seaweedfs(folder: Path):
    """Yields a running server with an empty bucket, and sets its endpoint in the environment."""
    pytest.importorskip("boto3")
    server = SeaweedFS(folder)
    server.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            use_server(patch, server.endpoint)
            make_bucket(server.endpoint)
            yield server
    finally:
        server.kill()


def _free_port() -> int:
    """Returns a port below the ephemeral range: an ephemeral one could go to any other test's connection before the
    server binds it."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class FaultyProxy:
    """A proxy for an S3 server that mishandles one request in five: it drops, delays, truncates or repeats it,
    or answers 500 or 503 in the server's place."""

    FAULTS = ("drop", "drop answer", "delay", "truncate", "repeat", "500", "503")

    def __init__(self, endpoint: str, share: float = 0.2, seed: int = 0) -> None:
        self.share, self.faults = share, Counter()
        self._random, self._guard = random.Random(seed), threading.Lock()
        host, port = endpoint.removeprefix("http://").split(":")

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(handler):
                body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
                fault = self.choose()
                if fault == "drop":
                    return handler.cut()
                if fault in ("500", "503"):
                    return handler.answer(int(fault), {}, b"")
                if fault == "delay":
                    time.sleep(self._random.uniform(0.1, 0.5))
                for _ in range(2 if fault == "repeat" else 1):
                    status, headers, content = handler.forward(body)
                if fault == "drop answer":
                    return handler.cut()
                handler.answer(status, headers, content, truncate=fault == "truncate")

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

            def forward(handler, body):
                connection = http.client.HTTPConnection(host, int(port), timeout=60)
                try:
                    connection.request(handler.command, handler.path, body, dict(handler.headers))
                    answer = connection.getresponse()
                    return answer.status, dict(answer.getheaders()), answer.read()
                finally:
                    connection.close()

            def answer(handler, status, headers, content, truncate=False):
                handler.send_response(status)
                skipped = {"content-length", "transfer-encoding", "connection", "date", "server"}
                for name, value in headers.items():
                    if name.lower() not in skipped:
                        handler.send_header(name, value)
                size = headers.get("Content-Length", len(content)) if handler.command == "HEAD" else len(content)
                handler.send_header("Content-Length", str(size))
                handler.end_headers()
                if handler.command != "HEAD":
                    handler.wfile.write(content[: len(content) // 2] if truncate else content)
                if truncate:
                    handler.cut()

            def cut(handler):
                handler.close_connection = True
                with suppress(OSError):
                    handler.connection.shutdown(socket.SHUT_RDWR)

            def log_message(self, *_):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_):
                pass  # a client that has gone

        self.server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def choose(self) -> str:
        with self._guard:
            fault = self._random.choice(self.FAULTS) if self._random.random() < self.share else "none"
            self.faults[fault] += 1
            return fault

    def __enter__(self) -> "FaultyProxy":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()
