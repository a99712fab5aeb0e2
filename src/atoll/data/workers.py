"""Processes that read pictures side by side. They hand results back in the order of the items."""

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from multiprocessing import get_context

from atoll.data.images import Transform
from atoll.data.sources import Item, Reading, read_items
from atoll.errors import InputError

AT_A_TIME = 32  # items handed to a process


class Readers:
    """Reads items, by this process alone or by others that are some pieces ahead of it."""

    def __init__(self, transform: Transform, pool: ProcessPoolExecutor | None, ahead: int = 1) -> None:
        self._read = partial(read_items, transform=transform)
        self._pool, self._ahead = pool, ahead

    def read_all(self, items: Iterable[Item]) -> Iterator[Reading]:
        """What became of each item, in their order."""
        source = iter(items)
        pieces = iter(lambda: list(islice(source, AT_A_TIME)), [])
        if self._pool is None:
            yield from chain.from_iterable(map(self._read, pieces))
            return
        ahead: deque[Future[list[Reading]]] = deque()
        for piece in pieces:
            ahead.append(self._pool.submit(self._read, piece))
            if len(ahead) > self._ahead:
                yield from ahead.popleft().result()
        for future in ahead:
            yield from future.result()


@contextmanager
def readers(num_workers: int, transform: Transform, num_ahead: int) -> Iterator[Readers]:
    """Readers with num_workers processes that read some `num_ahead` items ahead, or with none but this."""
    if num_workers < 1:
        yield Readers(transform, None)
        return
    try:
        with ProcessPoolExecutor(num_workers, get_context("spawn"), _follow, (os.getpid(),)) as pool:
            yield Readers(transform, pool, max(num_workers, num_ahead // AT_A_TIME))
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
