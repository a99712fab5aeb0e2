"""Serving: throughput, latency, remote experts, overload and kills, all on this machine and its loopback.

    python benchmarks/serve.py MODEL [--parts throughput latency remote soak kill] [--rounds 3] [--minutes 10]

`throughput` has 16 clients against `atoll serve`, in turns with (a) one request at a time, (b) static batches that wait
for the previous one to finish, as servers without step-level batching have them, and (c) the offline pipeline at
batch 16. (a), (b) and (c) are function calls without HTTP, and make the same PNG files. `latency` has Poisson arrivals
at 70% of what (b) can do. `remote` has three experts in processes of their own, behind a delay. `soak` asks for twice
the capacity; `kill` sends SIGKILL to a remote expert 20 times. Clients are streams of this one process, without a
library of HTTP: server and clients share the machine.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import base64
import io
import json
import queue
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import torch
from PIL import Image
from tqdm import tqdm

from atoll.sampling.folder import described_png
from atoll.sampling.pipeline import AtollPipeline
from atoll.serving.settings import Limits

CLIENTS, PATH = 16, "/v1/images/generations"
PROMPTS = ["a pink ghost with a yellow party hat", "a robot", "a green cat with round glasses", "a blue frog"]


@dataclass(frozen=True)
class Ask:
    """What a client asks for."""

    number: int
    steps: int = 20
    guidance: float = 2.0

    @property
    def body(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "seed": self.number, "steps": self.steps, "guidance": self.guidance}

    @property
    def prompt(self) -> str:
        return PROMPTS[self.number % len(PROMPTS)]


def mixed(num: int, seed: int) -> list[Ask]:
    rng = random.Random(seed)
    return [Ask(i, rng.randint(5, 30), rng.choice([1.0, 2.0, 3.0])) for i in range(num)]


# --- servers ------------------------------------------------------------------------------------------------------


@contextmanager
def command(*arguments: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yields the URL of `atoll ARGUMENTS` and its process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "atoll", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = next(found[0] for line in process.stdout if (found := re.search(r"http://[\d.:]+\d", line)))
        yield url, process
    finally:
        process.kill()
        process.wait()


class StaticBatches:
    """(b): requests of equal settings that wait are one batch, and the next begins when all of it is done."""

    def __init__(self, pipe: AtollPipeline, largest: int) -> None:
        self.pipe, self.largest = pipe, largest
        self.waiting: queue.SimpleQueue[tuple[Ask, Future[float]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._loop, daemon=True).start()

    def submit(self, ask: Ask) -> "Future[float]":
        done: Future[float] = Future()
        self.waiting.put((ask, done))
        return done

    def _loop(self) -> None:
        known: list[tuple[Ask, Future[float]]] = []
        while True:
            while not known or not self.waiting.empty():
                item = self.waiting.get()
                if item is None:
                    return
                known.append(item)
            first = known[0][0]
            batch = [one for one in known if (one[0].steps, one[0].guidance) == (first.steps, first.guidance)][
                : self.largest
            ]
            known = [one for one in known if one not in batch]
            make(self.pipe, [ask for ask, _ in batch])
            for _, done in batch:
                done.set_result(time.perf_counter())


def make(pipe: AtollPipeline, asks: Sequence[Ask]) -> list[bytes]:
    """Makes images of equal settings as one batch, and files of them."""
    output = pipe(
        [ask.prompt for ask in asks], seed=[ask.number for ask in asks], num_inference_steps=asks[0].steps,
        guidance_scale=asks[0].guidance, batch_size=len(asks), progress=False,
    )  # fmt: skip
    return [
        described_png(image, prompt=ask.prompt, seed=ask.number, settings=output.settings)
        for image, ask in zip(output.images, asks, strict=True)
    ]


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.content)


class Connection:
    """A client that costs little: the machine is the server's. One connection, one request at a time."""

    def __init__(self, url: str) -> None:
        self.host, port = url.removeprefix("http://").split(":")
        self.port = int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, ask: Ask, **more: Any) -> Reply:
        status, headers, reader = await self.begin(ask, **more)
        content = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            self.close()
        return Reply(status, headers, content)

    async def begin(self, ask: Ask, **more: Any) -> tuple[int, dict[str, str], asyncio.StreamReader]:
        """Sends a request, and returns what its answer begins with."""
        if self._streams is not None and self._streams[0].at_eof():
            self.close()  # the server ends what is idle for long
        if self._streams is None:
            self._streams = await asyncio.open_connection(self.host, self.port, limit=1 << 20)
        reader, writer = self._streams
        body = json.dumps({**ask.body, **more})
        head = f"POST {PATH} HTTP/1.1\r\nhost: {self.host}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        return int(first.split()[1]), headers, reader

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Connections:
    """As many as are needed at a time, used again."""

    def __init__(self, url: str) -> None:
        self.url, self._free = url, list[Connection]()

    async def post(self, ask: Ask, **more: Any) -> Reply:
        connection = self._free.pop() if self._free else Connection(self.url)
        reply = await connection.post(ask, **more)
        self._free.append(connection)
        return reply

    def close(self) -> None:
        for connection in self._free:
            connection.close()


def by_clients(url: str, asks: Sequence[Ask], clients: int = CLIENTS) -> float:
    """Returns the seconds that so many clients need, each with one request at a time."""

    async def run() -> float:
        todo = iter(asks)

        async def work() -> None:
            connection = Connection(url)
            for ask in todo:
                reply = await connection.post(ask)
                assert reply.status == 200, reply.content
            connection.close()

        begin = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(clients)))
        return time.perf_counter() - begin

    return asyncio.run(run())


# --- parts --------------------------------------------------------------------------------------------------------


def throughput(model: str, pipe: AtollPipeline, rounds: int) -> None:
    print(f"\nthroughput, {CLIENTS} clients, 20 steps, guidance 2; images/s, median of {rounds} rounds in turns")
    static = StaticBatches(pipe, CLIENTS)
    num = 8 * CLIENTS
    asks = [Ask(i) for i in range(num)]

    def one_at_a_time() -> float:
        begin = time.perf_counter()
        for ask in asks[:8]:
            make(pipe, [ask])
        return (time.perf_counter() - begin) * num / 8

    def batches() -> float:
        """Closed loop: a client sends its next request when it has its answer."""
        begin, todo = time.perf_counter(), iter(asks)

        def client() -> None:
            for ask in todo_locked(todo, lock):
                static.submit(ask).result()

        lock = threading.Lock()
        threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin

    def offline() -> float:
        begin = time.perf_counter()
        for start in range(0, num, CLIENTS):
            make(pipe, asks[start : start + CLIENTS])
        return time.perf_counter() - begin

    with command("serve", f"m={model}", "--port", 0, "--images", CLIENTS) as (url, process):
        by_clients(url, asks[:CLIENTS])
        cpu = cpu_seconds(process.pid)
        contestants: dict[str, Callable[[], float]] = {
            "served": lambda: by_clients(url, asks), "(a) one at a time": one_at_a_time,
            "(b) static batches": batches, "(c) offline, batch 16": offline,
        }  # fmt: skip
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in tqdm(range(rounds), "throughput", unit=" rounds", leave=False, disable=None):
            for name, run in contestants.items():
                seconds[name].append(run())
        served_cpu = (cpu_seconds(process.pid) - cpu) / (rounds * num)
        for name, taken in seconds.items():
            ratios = [other / own for own, other in zip(seconds["served"], taken, strict=True)]
            print(f"{name:22} {num / statistics.median(taken):7.1f}   served / this {statistics.median(ratios):5.2f}")
        begin = time.process_time()
        offline()
        offline_cpu = (time.process_time() - begin) / num
        print(f"CPU per image: served {1000 * served_cpu:.1f} ms, offline {1000 * offline_cpu:.1f} ms")
        first_preview(url)


def todo_locked(todo: Iterator[Ask], lock: threading.Lock) -> Iterator[Ask]:
    while True:
        with lock:
            ask = next(todo, None)
        if ask is None:
            return
        yield ask


def first_preview(url: str) -> None:
    """Alone, and while 15 others are in flight."""

    async def run(others: int) -> tuple[float, float]:
        clients, client = Connections(url), Connection(url)
        work = [asyncio.create_task(clients.post(Ask(i, 40))) for i in range(others)]
        await asyncio.sleep(0.2)
        before, begin = await steps(url), time.perf_counter()
        _, _, reader = await client.begin(Ask(99), stream=True, partial_images=20)
        await reader.readuntil(b"data: ")
        await reader.readuntil(b"\n\n")
        first = time.perf_counter() - begin
        await reader.readuntil(b"0\r\n\r\n")  # the end of the stream
        after = await steps(url)
        client.close()
        await asyncio.gather(*work)
        return first, (after[1] - before[1]) / (after[0] - before[0])

    for others in (0, CLIENTS - 1):
        found = [asyncio.run(run(others)) for _ in range(5)]
        preview, step = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"first preview with {others} others: {1000 * preview:.0f} ms, {preview / step:.2f} steps")


async def steps(url: str) -> tuple[float, float]:
    """Returns how many steps the server has made, and their seconds."""
    text = (await asyncio.to_thread(httpx.get, f"{url}/metrics")).text
    count, total = (
        float(re.findall(rf"^atoll_step_seconds_{kind}{{.*}} (\S+)", text, re.M)[0]) for kind in ("count", "sum")
    )
    return count, total


def latency(model: str, pipe: AtollPipeline, seconds: float) -> None:
    static = StaticBatches(pipe, CLIENTS)
    for name, asks_of in (
        ("mixed: 5 to 30 steps, guidance 1, 2 or 3", mixed),
        ("alike: 20 steps", lambda n, s: [Ask(i) for i in range(n)]),
    ):
        begin, some = time.perf_counter(), asks_of(4 * CLIENTS, 0)
        for done in [static.submit(ask) for ask in some]:
            done.result()
        capacity = len(some) / (time.perf_counter() - begin)
        rate = 0.7 * capacity
        asks = asks_of(max(20, int(rate * seconds)), 1)
        rng = random.Random(2)
        arrivals = list(accumulate(rng.expovariate(rate) for _ in asks))
        with command("serve", f"m={model}", "--port", 0, "--images", CLIENTS, "--waiting", 100_000) as (url, _):
            by_clients(url, asks[:CLIENTS])
            ours = asyncio.run(_open_loop(url, asks, arrivals))
            theirs = _open_loop_static(static, asks, arrivals)
        print(f"\nlatency, {name}; {rate:.1f} requests/s, 70% of what static batches can do, {len(asks)} requests")
        for who, found in (("served", ours), ("(b) static batches", theirs)):
            print(f"{who:22} p50 {1000 * _quantile(found, 0.5):6.0f} ms   p95 {1000 * _quantile(found, 0.95):6.0f} ms")
        print(f"p95 of (b) / served: {_quantile(theirs, 0.95) / _quantile(ours, 0.95):.2f}")


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def _open_loop(url: str, asks: Sequence[Ask], arrivals: Sequence[float]) -> list[float]:
    clients, begin = Connections(url), time.perf_counter()

    async def one(ask: Ask, at: float) -> float:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        reply = await clients.post(ask)
        assert reply.status == 200, reply.content
        return time.perf_counter() - begin - at

    found = await asyncio.gather(*(one(ask, at) for ask, at in zip(asks, arrivals, strict=True)))
    clients.close()
    return found


def _open_loop_static(static: StaticBatches, asks: Sequence[Ask], arrivals: Sequence[float]) -> list[float]:
    begin, waiting = time.perf_counter(), []
    for ask, at in zip(asks, arrivals, strict=True):
        time.sleep(max(0.0, begin + at - time.perf_counter()))
        waiting.append(static.submit(ask))
    return [done.result() - begin - at for done, at in zip(waiting, arrivals, strict=True)]


@asynccontextmanager
async def _delayed(port: int, delay: float) -> AsyncIterator[int]:
    """Yields the port of a proxy that adds half of `delay` each way."""

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 20):
            await asyncio.sleep(delay / 2)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pipe(reader, back), pipe(there, writer), return_exceptions=True)

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def remote(model: str, pipe: AtollPipeline, rounds: int) -> None:
    """Three experts with their owners, one here; the same images, and what the way costs."""
    from atoll.serving.remote import RemoteExpert

    asks = [Ask(i) for i in range(CLIENTS)]
    owned = list(range(1, min(4, pipe.index.num_experts)))
    proxies: list[Any] = []
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    with ExitStack() as stack:
        urls = {k: stack.enter_context(command("serve-expert", f"{model}/expert_{k}", "--port", 0))[0] for k in owned}
        print(
            f"\nexperts {owned} in processes of their own; ms per image of 20 steps, alone and in a batch of {CLIENTS}"
        )

        def timed(one: AtollPipeline, num: int) -> float:
            begin = time.perf_counter()
            make(one, asks[:num])
            return 1000 * (time.perf_counter() - begin) / num

        def report(name: str, one: AtollPipeline) -> None:
            found = [[timed(one, num) for num in (1, CLIENTS)] for _ in range(rounds)]
            alone, batch = (statistics.median(column) for column in zip(*found, strict=True))
            print(f"{name:22} {alone:8.0f} {batch:8.1f}")

        report("all local", pipe)
        for delay in (0.0, 0.02, 0.1):

            def opened(k: int, delay: float = delay) -> Any:
                proxy = _delayed(int(urls[k].rsplit(":")[-1]), delay)
                proxies.append(proxy)  # which would end with the last reference to it
                port = asyncio.run_coroutine_threadsafe(proxy.__aenter__(), loop).result()
                return RemoteExpert(f"http://127.0.0.1:{port}", timeout=30)

            far = AtollPipeline(model, elsewhere={k: opened(k) for k in owned})
            report(f"{1000 * delay:.0f} ms added", far)
            options: dict[str, Any] = {"seed": 3, "routing": "full", "output_type": "latent", "progress": False}
            here, there = (torch.as_tensor(one(PROMPTS, **options).images) for one in (pipe, far))
            print(f"  largest difference of latents, routing full: {float((here - there).abs().max()):.1e}")


@dataclass
class Soak:
    """What happened to requests at twice the capacity."""

    url: str
    pid: int
    counts: Counter[str]
    refusals: list[float]
    kept: list[tuple[Ask, bytes]]
    memory: list[float]

    async def one(self, clients: Connections, ask: Ask) -> None:
        begin = time.perf_counter()
        reply = await clients.post(ask)
        self.counts[str(reply.status)] += 1
        if reply.status == 429:
            self.refusals.append(time.perf_counter() - begin)
            assert int(reply.headers["retry-after"]) >= 1
        elif reply.status == 200:
            content = base64.b64decode(reply.body["data"][0]["b64_json"])
            texts = Image.open(io.BytesIO(content)).text  # type: ignore[attr-defined]
            self.counts["mixed up"] += (texts["prompt"], json.loads(texts["seed"])) != (ask.prompt, ask.number)
            if len(self.kept) < 40 and ask.number % 7 == 0:
                self.kept.append((ask, content))

    async def run(self, rate: float, seconds: float) -> int:
        """Returns how many were sent."""
        rng, sent, at, begin = random.Random(4), 0, 0.0, time.perf_counter()
        tasks: set[asyncio.Task[None]] = set()
        clients = Connections(self.url)
        with tqdm(total=round(seconds), unit=" s", leave=False, disable=None) as bar:
            while (now := time.perf_counter() - begin) < seconds:
                bar.update(int(now) - bar.n)
                if now >= at:
                    ask = Ask(sent, rng.randint(5, 30), rng.choice([1.0, 2.0, 3.0]))
                    task = asyncio.create_task(self.one(clients, ask))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    sent, at = sent + 1, at + rng.expovariate(rate)
                if len(self.memory) <= now // 5:
                    self.memory.append(rss(self.pid))
                await asyncio.sleep(max(0.0, at - (time.perf_counter() - begin)))
        await asyncio.gather(*tasks)
        clients.close()
        return sent


def soak(model: str, pipe: AtollPipeline, minutes: float) -> None:
    """Arrivals at twice the capacity: bounded memory, quick refusals, no answer lost or mixed up."""
    with command("serve", f"m={model}", "--port", 0) as (url, process):
        asks = mixed(6 * CLIENTS, 3)
        by_clients(url, asks)
        capacity = len(asks) / by_clients(url, asks)
        found = Soak(url, process.pid, Counter(), [], [], [])
        sent = asyncio.run(found.run(2 * capacity, 60 * minutes))
        memory, quarter = found.memory, len(found.memory) // 4
        early, late = statistics.mean(memory[quarter : 2 * quarter]), statistics.mean(memory[3 * quarter :])
        lost = sent - found.counts["200"] - found.counts["429"]
        print(f"\n{minutes:g} minutes at {2 * capacity:.1f} requests/s, twice the capacity")
        print(f"{sent} sent: {dict(found.counts)}")
        print(f"lost: {lost}; 429 after {1000 * _quantile(found.refusals or [0.0], 0.95):.0f} ms (p95)")
        print(f"memory: {memory[0]:.0f} MB at first, {early:.0f} in the second quarter, {late:.0f} in the last")
        process.send_signal(signal.SIGTERM)
        print(f"SIGTERM: exit code {process.wait(120)}")
    worst = 0
    for ask, content in found.kept:
        own = Image.open(io.BytesIO(make(pipe, [ask])[0]))
        pairs = zip(own.tobytes(), Image.open(io.BytesIO(content)).tobytes(), strict=True)
        worst = max(worst, *(abs(a - b) for a, b in pairs))
    print(f"{len(found.kept)} of them against the pipeline: largest difference {worst} of 255")


def kill(model: str, kills: int, requests: int) -> None:
    """SIGKILL to a remote expert, again and again; all images finish, and those affected say so."""
    processes = get_context("forkserver")  # so that it is back in a moment, not after an import of torch
    processes.set_forkserver_preload(["atoll.serving.owner"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    def start() -> Any:
        process = processes.Process(target=_own, args=(f"{model}/expert_0", port), daemon=True)
        process.start()
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/readyz").status_code == 200:
                    return process
            time.sleep(0.05)

    owner = start()
    with command("serve", f"m={model}", "--port", 0, "--remote", f"0={url}", "--remote-timeout", 20) as (served, _):
        ended, killed = threading.Event(), 0

        def killer() -> None:
            nonlocal owner, killed
            while killed < kills:
                time.sleep(1.5 + 2 * random.random())
                owner.kill()
                owner.join()
                killed += 1
                owner = start()
            time.sleep(1)
            ended.set()

        statuses: Counter[str] = Counter()

        async def run() -> int:
            sent = 0

            async def work() -> None:
                nonlocal sent
                connection = Connection(served)
                while sent < requests or not ended.is_set():
                    sent += 1
                    reply = await connection.post(Ask(sent, steps=4), routing="full")
                    away = reply.status == 200 and "without" in reply.body["data"][0]
                    statuses[f"{reply.status}{' without expert 0' if away else ''}"] += 1
                connection.close()

            threading.Thread(target=killer, daemon=True).start()
            await asyncio.gather(*(work() for _ in range(4)))
            return sent

        sent = asyncio.run(run())
        print(f"\n{killed} kills of a remote expert during {sent} requests: {dict(statuses)}")
    owner.kill()


def _own(folder: str, port: int) -> None:
    from atoll.serving.owner import serve_velocities

    with open(os.devnull, "w") as quiet, redirect_stdout(quiet), redirect_stderr(quiet):
        serve_velocities(
            Path(folder), "127.0.0.1", port, keys=None, names=(), samples=256, limits=Limits(), device="cpu",
            dtype=None, conversion=None,
        )  # fmt: skip


def rss(pid: int) -> float:
    """Returns the memory of a process in MB."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder that `atoll assemble` has made")
    parser.add_argument("--parts", nargs="+", default=["throughput", "latency", "remote"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30, help="of arrivals, per row of `latency`")
    parser.add_argument("--minutes", type=float, default=10, help="of `soak`")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--requests", type=int, default=200, help="of `kill`, at least")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pipe = AtollPipeline(args.model)
    make(pipe, [Ask(0)])
    parts: dict[str, Callable[[], None]] = {
        "throughput": lambda: throughput(args.model, pipe, args.rounds),
        "latency": lambda: latency(args.model, pipe, args.seconds),
        "remote": lambda: remote(args.model, pipe, args.rounds),
        "soak": lambda: soak(args.model, pipe, args.minutes),
        "kill": lambda: kill(args.model, args.kills, args.requests),
    }
    for name in args.parts:
        parts[name]()


if __name__ == "__main__":
    main()
