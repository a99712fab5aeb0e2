"""Requests that arrive at random, and how long each takes, by a clock that runs only while there is work.

What a batch or a step takes is given: from a formula (`serve.py --parts theory`), or by making the images and looking
at the CPU time (`--clock cpu`).
"""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

Cost = Callable[[int], float]
"""(rows) -> seconds of a step."""
Seconds = Callable[[list[int], float], float]
"""(requests of a batch, now) -> seconds that the batch takes."""


class Request(NamedTuple):
    """An image to make."""

    steps: int
    rows: int  # 1, or 2 with guidance
    kind: object = None  # a static batch holds requests of one kind


def poisson(num: int, rate: float, seed: int) -> list[float]:
    """Returns when `num` requests arrive, at so many per second."""
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(num)))


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def static_batches(kinds: Sequence[object], arrivals: Sequence[float], seconds: Seconds, largest: int) -> list[float]:
    """Returns the latency of each request: the oldest, and those like it, run to their end before the next begin."""
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
    """Returns the requests per second of static batches if so many clients each ask again once they have an answer."""
    waiting, i, total = list(range(clients)), clients, 0.0
    while waiting:
        batch = [k for k in waiting if kinds[k] == kinds[waiting[0]]]
        new = range(i, min(i + len(batch), len(kinds)))
        waiting, i = [k for k in waiting if k not in batch] + list(new), i + len(new)
        total += seconds(batch, total)
    return len(kinds) / total


def step_level(requests: Sequence[Request], arrivals: Sequence[float], cost: Cost, places: int) -> list[float]:
    """Returns the latency of each request: the oldest `places` advance by a step, and new ones by their first."""
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
