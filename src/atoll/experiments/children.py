"""Runs work that may crash, hang or run out of memory in child processes."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from atoll.errors import InputError, printable
from atoll.processes import die_with_parent
from atoll.storage import reason_of


def in_children(function: Callable[..., Iterator[Any]], *args: Any, num: int = 1, limit: float) -> Iterator[Any]:
    """Yields what function(*args, rank) yields in `num` processes, which are killed after `limit` seconds.

    Raises a RuntimeError if one of them raises an exception, crashes, is killed or exceeds the limit.
    """
    context, end = get_context("spawn"), time.monotonic() + limit
    running: dict[Any, Any] = {}
    try:
        for rank in range(num):
            receiver, sender = context.Pipe(duplex=False)
            running[receiver] = context.Process(target=_child, args=(sender, function, (*args, rank)), daemon=True)
            running[receiver].start()
            sender.close()
        open_ones = dict(running)
        while open_ones:
            ready = wait(list(open_ones), max(0, end - time.monotonic()))
            if not ready:
                raise RuntimeError(f"there was no result within {limit:.0f} s")
            for receiver in [one for one in ready if isinstance(one, Connection)]:
                try:
                    item = receiver.recv()
                except EOFError:
                    process = open_ones.pop(receiver)
                    process.join(5)
                    if process.exitcode:
                        raise RuntimeError(_how_it_ended(process.exitcode)) from None
                    continue
                if isinstance(item, RuntimeError):
                    running[receiver].join(5)  # lets it clean up
                    raise item
                yield item
    finally:
        for process in running.values():
            if process.pid is not None and process.is_alive():
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)  # also kills compilers that it may have started
                process.kill()


def _how_it_ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "the system ended its process, as it does when memory runs out"
    return f"its process crashed ({signal.Signals(-code).name})" if code < 0 else f"its process ended with code {code}"


def _child(sender: Connection, function: Callable[..., Iterator[Any]], args: tuple[Any, ...]) -> None:
    os.setsid()
    die_with_parent()
    quiet = os.open(os.devnull, os.O_WRONLY)  # output of libraries would break the report's lines
    for handle in (1, 2):
        os.dup2(quiet, handle)
    try:
        for item in function(*args):
            sender.send(item)
    except Exception as error:
        sender.send(RuntimeError(reason(error)))


def reason(error: Exception) -> str:
    """Returns the first line of an error's message, with its class unless the message suffices."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "too little memory is free"
    name, first = type(error).__name__, reason_of(error)
    is_plain = first and isinstance(error, InputError | OSError | RuntimeError)
    return printable(first if is_plain else f"{name}: {first}" if first else name, 300)
