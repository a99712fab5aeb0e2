"""Simulates the latency of requests that arrive at random, given the time that batches or steps take.

These times come from a formula (`serve.py --parts theory`), or from the CPU time of sampling (`--clock cpu`).
"""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

Cost = Callable[[int], float]
"""(rows) -> seconds per step."""
Seconds = Callable[[list[int], float], float]
"""(requests of a batch, now) -> seconds for the batch."""


class Request(NamedTuple):
    """A request for one image."""

    steps: int
    rows: int  # 1, or 2 with guidance
    kind: object = None  # a static batch holds requests of one kind


def poisson(num: int, rate: float, seed: int) -> list[float]:
    """Returns the arrival times of `num` requests, at `rate` per second on average."""
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(num)))


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def static_batches(kinds: Sequence[object], arrivals: Sequence[float], seconds: Seconds, largest: int) -> list[float]:
    """Returns the latency of each request with static batches: the oldest and those of its kind run to completion."""
    latencies, waiting, now, i = [0.0] * len(kinds), list[int](), 0.0, 0
    while i < len(kinds) or waiting:
        now = now if waiting else max(now, arrivals[i])
        while i < len(kinds) and arrivals[i] <= now:
            waiting.append(i)
            i += 1
        batch = [k for k in waiting if kinds[k] == kinds[waiting[0]]][:largest]
        waiting = [k for k in waiting if k not in batch]
        now += seconds(batch, now)
        for k in batch:
            latencies[k] = now - arrivals[k]
    return latencies


def capacity(kinds: Sequence[object], seconds: Seconds, clients: int) -> float:
    """Returns the requests per second of static batches with `clients` that each send the next after the answer."""
    waiting, i, total = list(range(clients)), clients, 0.0
    while waiting:
        batch = [k for k in waiting if kinds[k] == kinds[waiting[0]]]
        new = range(i, min(i + len(batch), len(kinds)))
        waiting, i = [k for k in waiting if k not in batch] + list(new), i + len(new)
        total += seconds(batch, total)
    return len(kinds) / total


def step_level(requests: Sequence[Request], arrivals: Sequence[float], cost: Cost, places: int) -> list[float]:
    """Returns the latency of each request with step-level batching: the oldest `places` and all new ones advance."""
    latencies, running, now, i = [0.0] * len(requests), list[int](), 0.0, 0
    left = [request.steps for request in requests]
    while i < len(requests) or running:
        now = now if running else max(now, arrivals[i])
        while i < len(requests) and arrivals[i] <= now:
            running.append(i)
            i += 1
        advanced = running[:places] + [k for k in running[places:] if left[k] == requests[k].steps]
        now += cost(sum(requests[k].rows for k in advanced))
        for k in advanced:
            left[k] -= 1
            latencies[k] = now - arrivals[k]
        running = [k for k in running if left[k]]
    return latencies
