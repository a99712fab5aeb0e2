"""Processes that read pictures side by side. They hand results back in the order of the items."""

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import chain
from multiprocessing import get_context

from atoll.data.images import Transform
from atoll.data.sources import Item, Reading, read_items
from atoll.errors import InputError

AT_A_TIME = 32  # items handed to a process


class Readers:
    """Reads chunks of items, by this process alone or by others that are one chunk ahead of it."""

    def __init__(self, transform: Transform, pool: ProcessPoolExecutor | None) -> None:
        self._read = partial(read_items, transform=transform)
        self._pool = pool

    def read(self, items: list[Item]) -> list[Reading]:
        return next(self.read_all([items]))

    def read_all(self, chunks: Iterable[list[Item]]) -> Iterator[list[Reading]]:
        """What became of the items of each chunk."""
        if self._pool is None:
            yield from map(self._read, chunks)
            return
        ahead: deque[Iterator[list[Reading]]] = deque()
        for chunk in chunks:
            parts = [chunk[i : i + AT_A_TIME] for i in range(0, len(chunk), AT_A_TIME)]
            ahead.append(self._pool.map(self._read, parts))
            if len(ahead) > 1:
                yield list(chain.from_iterable(ahead.popleft()))
        yield from (list(chain.from_iterable(done)) for done in ahead)


@contextmanager
def readers(num_workers: int, transform: Transform) -> Iterator[Readers]:
    """Readers with num_workers processes, or with none but this."""
    if num_workers < 1:
        yield Readers(transform, None)
        return
    try:
        with ProcessPoolExecutor(num_workers, get_context("spawn"), _follow, (os.getpid(),)) as pool:
            yield Readers(transform, pool)
    except BrokenProcessPool as error:
        raise InputError(
            "a process that reads pictures was killed, most likely for lack of memory: "
            "run the same command with --workers 1, it goes on from here"
        ) from error


def _follow(parent: int) -> None:
    """End when the parent is gone, however it went: a killed run leaves no process behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
