"""Serving: throughput, latency, remote experts, overload and kills, all on this machine and its loopback.

    python benchmarks/serve.py MODEL [--parts throughput theory latency remote soak kill] [--rounds 3] [--minutes 10]

`throughput` runs 16 clients against `atoll serve`, in turns with (a) one request at a time, (b) static batches that
wait for the previous one to finish, as in servers without step-level batching, and (c) the offline pipeline at batch
16. (a), (b) and (c) are function calls without HTTP, and make the same PNG files. `theory` measures the CPU time of a
step by the number of images, and simulates what scheduling can gain. `latency` has Poisson arrivals at 70% of the
capacity of (b) for 16 clients. With `--added 20`, all experts of both sides are remote, behind a delay of 20 ms; with
`--spread`, they are in separate processes of this machine; with `--clock cpu`, time is the CPU time of the work,
without HTTP, for machines with other load.
`remote` has three experts in separate processes, behind a delay. `soak` sends requests at twice the capacity; `kill`
sends SIGKILL to a remote expert 20 times. Clients are streams of this one process, without an HTTP library, since they
share the machine with the server.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import base64
import io
import json
import math
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
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection as ProcessPipe
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image
from queueing import Cost, Request, capacity, poisson, quantile, static_batches, step_level
from tqdm import tqdm

from atoll.sampling.folder import described_png
from atoll.sampling.pipeline import AtollPipeline
from atoll.serving.guard import share_interpreter
from atoll.serving.remote import RemoteExpert
from atoll.serving.scheduler import Event, Finished, Job, Observer, Preview, Scheduler
from atoll.serving.settings import Limits
from atoll.serving.spread import spread_here

CLIENTS, PATH = 16, "/v1/images/generations"
PROMPTS = ["a pink ghost with a yellow party hat", "a robot", "a green cat with round glasses", "a blue frog"]


@dataclass(frozen=True)
class Ask:
    """A client's request."""

    number: int
    steps: int = 20
    guidance: float = 2.0

    @property
    def body(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "seed": self.number, "steps": self.steps, "guidance": self.guidance}

    @property
    def kind(self) -> tuple[int, float]:
        """Returns the key of requests that can share a static batch."""
        return self.steps, self.guidance

    @property
    def prompt(self) -> str:
        return PROMPTS[self.number % len(PROMPTS)]


def mixed(num: int, seed: int) -> list[Ask]:
    rng = random.Random(seed)
    return [Ask(i, rng.randint(5, 30), rng.choice([1.0, 2.0, 3.0])) for i in range(num)]


# --- servers ------------------------------------------------------------------------------------------------------


@contextmanager
def command(*arguments: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Starts `atoll ARGUMENTS`; yields its URL and process."""
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
    """(b): waiting requests of equal settings form a batch, and the next one starts when it is complete."""

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
            batch = [one for one in known if one[0].kind == first.kind][: self.largest]
            known = [one for one in known if one not in batch]
            make(self.pipe, [ask for ask, _ in batch])
            for _, done in batch:
                done.set_result(time.perf_counter())

    def by_clients(self, asks: Sequence[Ask]) -> float:
        """Returns the seconds that 16 clients need, each of which sends its next request after the answer."""
        begin, todo, lock = time.perf_counter(), iter(asks), threading.Lock()

        def client() -> None:
            for ask in todo_locked(todo, lock):
                self.submit(ask).result()

        threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin


def make(pipe: AtollPipeline, asks: Sequence[Ask]) -> list[bytes]:
    """Samples images of equal settings as one batch; returns PNG files."""
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
    """A cheap client, since it shares the machine with the server: one connection, one request at a time."""

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
        """Sends a request, and returns the start of the response."""
        if self._streams is not None and self._streams[0].at_eof():
            self.close()  # the server closes idle connections
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
    """A pool of connections that grows as needed."""

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
    """Returns the seconds that this many clients need, each with one request at a time."""

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


def throughput(model: str, pipe: AtollPipeline, rounds: int, spread: bool) -> None:
    print(f"\nthroughput, {CLIENTS} clients, 20 steps, guidance 2; images/s, median of {rounds} rounds in turns")
    static = StaticBatches(pipe, CLIENTS)
    num = 8 * CLIENTS
    asks = [Ask(i) for i in range(num)]

    def one_at_a_time() -> float:
        begin = time.perf_counter()
        for ask in asks[:8]:
            make(pipe, [ask])
        return (time.perf_counter() - begin) * num / 8

    def offline() -> float:
        begin = time.perf_counter()
        for start in range(0, num, CLIENTS):
            make(pipe, asks[start : start + CLIENTS])
        return time.perf_counter() - begin

    with ExitStack() as stack:
        serve = ("serve", f"m={model}", "--port", 0, "--images", CLIENTS)
        url, process = stack.enter_context(command(*serve))
        by_clients(url, asks[:CLIENTS])
        cpu = cpu_seconds(process.pid)
        contestants: dict[str, Callable[[], float]] = {
            "served": lambda: by_clients(url, asks), "(a) one at a time": one_at_a_time,
            "(b) static batches": lambda: static.by_clients(asks), "(c) offline, batch 16": offline,
        }  # fmt: skip
        urls = {"served": url}
        if spread:
            urls["served --spread"], _ = stack.enter_context(command(*serve, "--spread"))
            by_clients(urls["served --spread"], asks[:CLIENTS])
            contestants["served --spread"] = lambda: by_clients(urls["served --spread"], asks)
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        before = cpu_times()
        for _ in tqdm(range(rounds), "throughput", unit=" rounds", leave=False, disable=None):
            for name, run in contestants.items():
                seconds[name].append(run())
        served_cpu = (cpu_seconds(process.pid) - cpu) / (rounds * num)
        for name, taken in seconds.items():
            ratios = [other / own for own, other in zip(seconds["served"], taken, strict=True)]
            print(
                f"{name:22} {num / statistics.median(taken):7.1f}   served / this {statistics.median(ratios):5.2f}"
                f"   best round {num / min(taken):5.1f}, served / this {min(taken) / min(seconds['served']):5.2f}"
            )
        print(f"{stolen_share(before):.0%} of the machine's time went to other guests of its host")
        begin = time.process_time()
        offline()
        offline_cpu = (time.process_time() - begin) / num
        print(f"CPU per image: served {1000 * served_cpu:.1f} ms, offline {1000 * offline_cpu:.1f} ms")
        for name, one in urls.items():
            print(name)
            first_preview(one)


def cpu_times() -> list[int]:
    """Returns the ticks of all cores: user, nice, system, idle, iowait, irq, softirq and steal (Linux)."""
    return [int(ticks) for ticks in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]


def stolen_share(before: Sequence[int]) -> float:
    """Returns the share of CPU time since `before` that the host withheld from this virtual machine (steal)."""
    ticks = [now - then for now, then in zip(cpu_times(), before, strict=True)]
    return ticks[7] / max(1, sum(ticks))


def todo_locked(todo: Iterator[Ask], lock: threading.Lock) -> Iterator[Ask]:
    while True:
        with lock:
            ask = next(todo, None)
        if ask is None:
            return
        yield ask


def first_preview(url: str) -> None:
    """Prints the time to the first preview, alone and with 15 other requests in flight."""

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
        found = [asyncio.run(run(others)) for _ in range(9 if others == 0 else 5)]
        preview, step = (statistics.median(column) for column in zip(*found, strict=True))
        ratios = [own / of for own, of in found]
        print(
            f"first preview with {others} others: {1000 * preview:.1f} ms, {preview / step:.2f} steps of "
            f"{1000 * step:.1f} ms; {min(ratios):.2f} to {max(ratios):.2f}"
        )


async def steps(url: str) -> tuple[float, float]:
    """Returns how many steps the server has done, and their total seconds."""
    text = (await asyncio.to_thread(httpx.get, f"{url}/metrics")).text
    count, total = (
        float(re.findall(rf"^atoll_step_seconds_{kind}{{.*}} (\S+)", text, re.M)[0]) for kind in ("count", "sum")
    )
    return count, total


LOADS: dict[str, Callable[[int, int], list[Ask]]] = {
    "mixed": mixed,  # 5 to 30 steps, guidance 1, 2 or 3
    "alike": lambda num, seed: [Ask(i) for i in range(num)],  # 20 steps, guidance 2
}


class Steps(Observer):
    """Records the CPU time of each step by the number of images."""

    def __init__(self) -> None:
        self.seconds: dict[int, list[float]] = {}
        self._last: tuple[float, int] | None = None

    def stepped(self, seconds: float, images: int, samples: Counter[int]) -> None:
        now = time.thread_time()  # of the scheduler's thread, which calls this
        if self._last is not None and self._last[1] == images:
            self.seconds.setdefault(images, []).append(now - self._last[0])
        self._last = now, images


def theory(pipe: AtollPipeline) -> None:
    """Measures the cost of a step, and predicts from it what scheduling can gain."""
    observer = Steps()
    scheduler = Scheduler(pipe, Limits(images=CLIENTS), observer)
    print("\nCPU time of a step, ms, by the number of images (guidance 2, four prompts; each at a step of its own)")
    found: dict[int, float] = {}
    for num in (1, 2, 4, 8, 16):
        ended = threading.Semaphore(0)

        def tell(event: Event, ended: threading.Semaphore = ended) -> None:
            if not isinstance(event, Preview):
                ended.release()

        asks = [Ask(i, 40 + i) for i in range(num)]
        jobs = [Job(ask.prompt, "", ask.number, pipe.plan(steps=ask.steps, guidance=2.0), str(ask)) for ask in asks]
        scheduler.submit(jobs, [tell] * num)
        for _ in jobs:
            ended.acquire()
        found[num] = statistics.median(observer.seconds[num])
        print(f"{num:3} images {1000 * found[num]:6.1f}   per image {1000 * found[num] / num:5.2f}")
    scheduler.close()
    per_row = (found[16] - found[8]) / 16  # an image is a row, or two if guided
    rows, costs = zip((1, found[1] - per_row), *((2 * num, seconds) for num, seconds in found.items()), strict=True)

    def cost(num: int) -> float:
        return float(np.interp(num, rows, costs))

    predict(cost)


def predict(cost: Cost, num: int = 4000) -> None:
    """Prints the p95 latency of static batches against other policies, all simulated with the same arrivals."""
    print("p95 of static batches, simulated at 70% load, against that of")
    for name, asks_of in LOADS.items():
        asks = asks_of(num, 1)
        requests, kinds = [Request(ask.steps, 1 + (ask.guidance != 1)) for ask in asks], [ask.kind for ask in asks]

        def seconds(batch: list[int], now: float, requests: Sequence[Request] = requests) -> float:
            return requests[batch[0]].steps * cost(len(batch) * requests[batch[0]].rows)

        arrivals = poisson(num, 0.7 * capacity(kinds, seconds, CLIENTS), 2)
        static = quantile(static_batches(kinds, arrivals, seconds, CLIENTS), 0.95)
        alone = quantile([request.steps * cost(request.rows) for request in requests], 0.95)
        gains = [
            f"at most {places} at a time {static / quantile(step_level(requests, arrivals, cost, places), 0.95):.2f}"
            for places in (16, 8, 4, 2)
        ]
        print(f"  {name}: {', '.join(gains)}; a machine for each request {static / alone:.2f}")


def latency(
    model: str, pipe: AtollPipeline, loads: Sequence[str], seconds: float, seeds: Sequence[int], added: float,
    spread: bool,
) -> None:  # fmt: skip
    """Measures latency at 70% of the capacity of static batches.

    With `added`, all experts are remote, behind a delay of that many milliseconds; with `spread`, the experts of both
    sides are in separate processes.
    """
    with ExitStack() as stack:
        flags: list[object] = ["--spread"] if spread else []
        if spread:
            experts = spread_here(Path(model), {"device": "cpu"}, CLIENTS)
            for expert in experts.values():
                stack.callback(expert.close)
            pipe = AtollPipeline(model, elsewhere=experts)
        elif added:
            urls = stack.enter_context(owners(model, range(pipe.index.num_experts)))
            urls = stack.enter_context(delayed(urls, added / 1000))
            pipe = AtollPipeline(model, elsewhere={k: RemoteExpert(url, timeout=60) for k, url in urls.items()})
            flags = [flag for k, url in urls.items() for flag in ("--remote", f"{k}={url}")] + ["--remote-timeout", 60]
        static = StaticBatches(pipe, CLIENTS)
        serve = ("serve", f"m={model}", "--port", 0, "--images", CLIENTS, "--waiting", 100_000, *flags)
        url, _ = stack.enter_context(command(*serve))
        for name in loads:
            asks = LOADS[name](2 * CLIENTS, 0)
            by_clients(url, asks[:CLIENTS])
            rate = 0.7 * len(asks) / static.by_clients(asks)
            where = f"all experts remote, {added:g} ms added" if added else "experts here" + ", spread" * spread
            print(f"\nlatency, {name}; {where}; {rate:.2f} requests/s, 70% of what static batches can do")
            both, before = (list[float](), list[float]()), cpu_times()
            for seed in seeds:
                asks = LOADS[name](max(20, int(rate * seconds)), seed)
                arrivals = poisson(len(asks), rate, seed)
                both[0].extend(ours := asyncio.run(_open_loop(url, asks, arrivals)))
                both[1].extend(theirs := _open_loop_static(static, asks, arrivals))
                _compare(f"seed {seed}, {len(asks)} requests", ours, theirs)
            _compare("all", *both)
            print(f"  {stolen_share(before):.0%} of the machine's time went to other guests of its host")


class Turns:
    """Two CPU-time clocks: the side that is behind runs, so that both meet the same other load on this machine."""

    def __init__(self) -> None:
        self._now, self._changed = [0.0, 0.0], threading.Condition()

    def take(self, who: int, now: float) -> None:
        """Waits until the other side is not behind."""
        with self._changed:
            self._now[who] = now
            self._changed.notify_all()
            self._changed.wait_for(lambda: (self._now[who], who) < (self._now[1 - who], 1 - who) or now == math.inf)

    def end(self, who: int) -> None:
        self.take(who, math.inf)


class Clock:
    """The CPU time of the calling thread, plus, for each step, that of experts in separate processes.

    Of the latter it adds the longest, or their sum divided by the cores if that is more: the time that the step would
    take on an idle machine.
    """

    def __init__(self, experts: Collection[RemoteExpert] = ()) -> None:
        self._spent, self._step, self._open, self._lock = 0.0, list[float](), 0, threading.Lock()
        for expert in experts:
            expert.guided_velocity = partial(self._timed, expert, expert.guided_velocity)  # type: ignore[method-assign]

    def __call__(self) -> float:
        return time.thread_time() + self._spent

    def _timed(self, expert: RemoteExpert, ask: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        def now() -> float:
            # Linux: nanoseconds that the process's only thread has run
            with open(f"/proc/{expert._carrier._process.pid}/schedstat") as file:  # type: ignore[attr-defined]
                return time.thread_time() + int(file.read().split()[0]) / 1e9

        with self._lock:
            self._open += 1
        begin = now()
        u = ask(*arguments)
        with self._lock:
            self._step.append(now() - begin)
            self._open -= 1
            if self._open == 0:
                self._spent += max(*self._step, sum(self._step) / len(os.sched_getaffinity(0)))
                self._step.clear()
        return u


class OnCpuClock(Observer):
    """A scheduler whose requests arrive by a clock that counts only the CPU time of its steps.

    So other load on this machine matters less. If nothing is in flight, the clock jumps to the next arrival. Encoding
    PNG files in the scheduler's thread counts; HTTP does not, just as for static batches.
    """

    def __init__(
        self, pipe: AtollPipeline, clock: Clock, asks: Sequence[Ask], arrivals: Sequence[float], turns: Turns
    ) -> None:
        self.pipe, self.clock, self.asks, self.arrivals, self.turns = pipe, clock, asks, arrivals, turns
        self.latencies = [0.0] * len(asks)
        self._now, self._cpu, self._arrived = arrivals[0], clock() - time.thread_time(), 0
        self._open: set[int] = set()
        self._done: list[int] = []  # in this step
        self._ended = threading.Event()
        self._scheduler = Scheduler(pipe, Limits(images=CLIENTS, waiting=100_000), self)

    def start(self) -> None:
        self._submit()

    def end(self) -> list[float]:
        self._ended.wait()
        self._scheduler.close()
        return self.latencies

    def stepped(self, seconds: float, images: int, samples: Counter[int]) -> None:
        cpu = self.clock()  # of the scheduler's thread, which calls this
        self._now, self._cpu = self._now + cpu - self._cpu, cpu
        for k in self._done:
            self.latencies[k] = self._now - self.arrivals[k]
        self._done.clear()
        self._submit()
        self.turns.take(0, self._now if self._open else math.inf)  # all is done

    def _submit(self) -> None:
        if not self._open and self._arrived < len(self.asks):
            self._now = max(self._now, self.arrivals[self._arrived])
        while self._arrived < len(self.asks) and self.arrivals[self._arrived] <= self._now:
            k, self._arrived = self._arrived, self._arrived + 1
            ask = self.asks[k]
            plan = self.pipe.plan(steps=ask.steps, guidance=ask.guidance)
            self._open.add(k)
            self._scheduler.submit([Job(ask.prompt, "", ask.number, plan, str(k))], [partial(self._tell, k)])
        if not self._open:
            self._ended.set()

    def _tell(self, k: int, event: Event) -> None:
        assert isinstance(event, Finished), event
        ask, image = self.asks[k], self.pipe.render(event.latents)[0]
        described_png(image, prompt=ask.prompt, seed=ask.number, settings=self.pipe.settings_of(self.pipe.plan()))
        self._open.remove(k)
        self._done.append(k)


def latency_on_cpu_clock(
    model: str, pipe: AtollPipeline, loads: Sequence[str], num: int, seeds: Sequence[int], spread: bool
) -> None:
    """Measures latency at 70% of the capacity of static batches, with the CPU time of the work as the clock."""
    pipes, clocks = (pipe, pipe), (Clock(), Clock())
    if spread:
        experts = [spread_here(Path(model), {"device": "cpu"}, CLIENTS) for _ in range(2)]
        pipes = AtollPipeline(model, elsewhere=experts[0]), AtollPipeline(model, elsewhere=experts[1])
        clocks = Clock(experts[0].values()), Clock(experts[1].values())

    def cpu_seconds_of(asks: Sequence[Ask], turns: Turns | None, batch: list[int], now: float) -> float:
        if turns is not None:
            turns.take(1, now)
        begin = clocks[1]()
        make(pipes[1], [asks[k] for k in batch])
        return clocks[1]() - begin

    for name in loads:
        asks = LOADS[name](3 * CLIENTS, 0)
        rate = 0.7 * capacity([ask.kind for ask in asks], partial(cpu_seconds_of, asks, None), CLIENTS)
        print(f"\nlatency by CPU time, {name}; {rate:.2f} requests/s, 70% of what static batches can do")
        both = list[float](), list[float]()
        for seed in seeds:
            asks = LOADS[name](num, seed)
            arrivals = poisson(num, rate, seed)
            kinds, turns = [ask.kind for ask in asks], Turns()
            scheduled = OnCpuClock(pipes[0], clocks[0], asks, arrivals, turns)
            scheduled.start()
            theirs = static_batches(kinds, arrivals, partial(cpu_seconds_of, asks, turns), CLIENTS)
            turns.end(1)
            ours = scheduled.end()
            both[0].extend(ours)
            both[1].extend(theirs)
            _compare(f"seed {seed}, {num} requests", ours, theirs)
        _compare("all", *both)


def _compare(name: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
    shares = [[1000 * quantile(found, share) for share in (0.5, 0.95)] for found in (ours, theirs)]
    (p50, p95), (static_p50, static_p95) = shares
    print(
        f"  {name}: served p50 {p50:.0f} ms, p95 {p95:.0f}; static batches {static_p50:.0f}, {static_p95:.0f}; "
        f"p95 {static_p95 / p95:.2f} times lower",
        flush=True,
    )


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


@contextmanager
def owners(model: str, numbers: Sequence[int]) -> Iterator[dict[int, str]]:
    """Serves these experts, each in its own process; yields their URLs."""
    with ExitStack() as stack:
        yield {k: stack.enter_context(command("serve-expert", f"{model}/expert_{k}", "--port", 0))[0] for k in numbers}


@contextmanager
def delayed(urls: dict[int, str], delay: float) -> Iterator[dict[int, str]]:
    """Yields the URLs of proxies that add half of `delay` each way, all in one separate process."""
    here, there = get_context("spawn").Pipe()
    ports = [int(url.rsplit(":")[-1]) for url in urls.values()]
    process = get_context("spawn").Process(target=_proxy, args=(ports, delay, there), daemon=True)
    process.start()
    try:
        yield {k: f"http://127.0.0.1:{port}" for k, port in zip(urls, here.recv(), strict=True)}
    finally:
        process.kill()
        process.join()


def _proxy(ports: Sequence[int], delay: float, tell: ProcessPipe) -> None:
    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(1 << 20):
            loop.call_later(delay / 2, writer.write, data)
        loop.call_later(delay / 2, writer.close)

    async def start(port: int) -> asyncio.Server:
        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pipe(reader, back), pipe(there, writer), return_exceptions=True)

        return await asyncio.start_server(connect, "127.0.0.1", 0)

    async def run() -> None:
        servers = [await start(port) for port in ports]
        tell.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.gather(*(server.serve_forever() for server in servers))

    asyncio.run(run())


def remote(model: str, pipe: AtollPipeline, rounds: int) -> None:
    """Compares three remote experts and a local one with all local: equal images, and the cost of the network."""
    asks = [Ask(i) for i in range(CLIENTS)]
    owned = list(range(1, min(4, pipe.index.num_experts)))
    with ExitStack() as stack:
        urls = stack.enter_context(owners(model, owned))
        print(
            f"\nexperts {owned} in processes of their own; ms per image of 20 steps, median of {rounds} rounds in turns"
        )
        pipes = {"all local": pipe}
        for delay in (0.0, 0.02, 0.1):
            far = stack.enter_context(delayed(urls, delay))
            experts = {k: RemoteExpert(url, timeout=30) for k, url in far.items()}
            pipes[f"{1000 * delay:.0f} ms added"] = AtollPipeline(model, elsewhere=experts)

        def timed(one: AtollPipeline, num: int) -> float:
            begin = time.perf_counter()
            make(one, asks[:num])
            return 1000 * (time.perf_counter() - begin) / num

        found: dict[str, list[list[float]]] = {name: [] for name in pipes}
        for one in pipes.values():
            make(one, asks)
        for _ in range(rounds):
            for name, one in pipes.items():
                found[name].append([timed(one, num) for num in (1, CLIENTS)])
        options: dict[str, Any] = {"seed": 3, "routing": "full", "output_type": "latent", "progress": False}
        here = torch.as_tensor(pipe(PROMPTS, **options).images)
        for name, one in pipes.items():
            alone, batch = (statistics.median(column) for column in zip(*found[name], strict=True))
            apart = float((torch.as_tensor(one(PROMPTS, **options).images) - here).abs().max())
            print(f"{name:14} alone {alone:6.0f}   in a batch of {CLIENTS} {batch:6.1f}   latents apart {apart:.0e}")


@dataclass
class Soak:
    """The outcomes of requests at twice the capacity."""

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
        """Returns how many requests were sent."""
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
    """Checks arrivals at twice the capacity: bounded memory, quick refusals, no response lost or mixed up."""
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
        print(f"lost: {lost}; 429 after {1000 * quantile(found.refusals or [0.0], 0.95):.0f} ms (p95)")
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
    """Sends SIGKILL to a remote expert repeatedly; checks that all images finish, and that affected ones say so."""
    processes = get_context("forkserver")  # restarts at once, without importing torch again
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


def family(pid: int) -> list[int]:
    """Returns a process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


def rss(pid: int) -> float:
    """Returns the memory of a process and its descendants, in MB."""
    pages = sum(int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in family(pid))
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process and its descendants so far."""
    fields = [Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split() for one in family(pid)]
    return sum(int(own[11]) + int(own[12]) for own in fields) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder that `atoll assemble` has made")
    parser.add_argument("--parts", nargs="+", default=["throughput", "latency", "remote"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60, help="of arrivals in `latency`, for each seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of `latency`")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="of `latency`")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="of `latency`")
    parser.add_argument("--added", type=float, default=0, help="ms, by which `latency` delays all experts, then remote")
    parser.add_argument(
        "--spread",
        action="store_true",
        help="each expert in a process: both sides of `latency`, one more server in `throughput`",
    )
    parser.add_argument("--minutes", type=float, default=10, help="of `soak`")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--requests", type=int, default=200, help="of `kill`, at least; of `latency --clock cpu`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    share_interpreter()
    pipe = AtollPipeline(args.model)
    make(pipe, [Ask(0)])
    parts: dict[str, Callable[[], None]] = {
        "throughput": lambda: throughput(args.model, pipe, args.rounds, args.spread),
        "theory": lambda: theory(pipe),
        "latency": lambda: (
            latency(args.model, pipe, args.loads, args.seconds, args.seeds, args.added, args.spread)
            if args.clock == "wall"
            else latency_on_cpu_clock(args.model, pipe, args.loads, args.requests, args.seeds, args.spread)
        ),
        "remote": lambda: remote(args.model, pipe, args.rounds),
        "soak": lambda: soak(args.model, pipe, args.minutes),
        "kill": lambda: kill(args.model, args.kills, args.requests),
    }
    for name in args.parts:
        parts[name]()


if __name__ == "__main__":
    main()
