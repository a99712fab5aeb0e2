"""Processes that end with their parent, and signals for a graceful stop.

Run as a script, this file executes a command that gets SIGTERM when its parent dies; it therefore imports only the
standard library.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, NamedTuple


class StopSignal(NamedTuple):
    signal: signal.Signals
    time: float  # by time.monotonic()


def start_with_pipe(
    target: Callable[..., None], *arguments: Any, **options: Any
) -> tuple[Connection, ForkServerProcess]:
    """Starts target(pipe, *arguments) in a process, and returns the other end of the pipe and the process.

    It is forked from a process without threads that has already imported the target's module. Raises OSError.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([target.__module__])
    pipe, there = context.Pipe()
    process = context.Process(target=target, args=(there, *arguments), **options)
    try:
        process.start()
    except (OSError, EOFError) as error:  # EOFError: the server could not fork
        pipe.close()
        reason = getattr(error, "strerror", None) or "the fork failed"
        raise OSError(f"no process can be started ({reason})") from error
    finally:
        there.close()
    return pipe, process


@contextmanager
def stop_signals(interruptible: bool = False) -> Iterator[list[StopSignal]]:
    """Yields the list of SIGINT and SIGTERM signals received so far, to check whenever it is convenient to stop.

    If `interruptible`, Ctrl-C after the first signal raises KeyboardInterrupt at once. Outside the main thread, the
    only one that can set handlers, the list stays empty.
    """
    received: list[StopSignal] = []

    def note(number: int, _: object) -> None:
        received.append(StopSignal(signal.Signals(number), time.monotonic()))
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def die_with_parent() -> None:
    """Makes the calling `multiprocessing` process exit when its parent is gone, for whatever reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """Returns a command that runs `command` and, on Linux, sends it SIGTERM when this process dies.

    A separate program does this, since code between fork and exec may deadlock if the parent has threads (torch, tqdm).
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _exec(parent: int, command: list[str]) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, which survives exec
        if os.getppid() != parent:
            sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"atoll: cannot start {command[0]} ({error.strerror}): check that it is there", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    _exec(int(sys.argv[1]), sys.argv[2:])
