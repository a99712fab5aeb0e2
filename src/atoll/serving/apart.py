"""Runs a model's scheduler in a separate process, behind the interface of one in this process.

HTTP, decoding and PNG encoding then do not compete with the steps for the interpreter lock. An image depends only on
its prompt, seed and settings; so if the process is lost, a new one generates the outstanding images, and clients do
not notice.
"""

import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch

from atoll.errors import InputError
from atoll.processes import start_with_pipe
from atoll.sampling.pipeline import AtollPipeline, ImageTrace
from atoll.serving.guard import LOG, Refusal, Refused, set_up_log, share_interpreter
from atoll.serving.scheduler import BusyError, Event, Failed, Finished, InFlight, Job, Observer, Preview, Scheduler
from atoll.serving.settings import Limits

LOSSES = 3  # an image in flight at this many losses of the process is refused: it may be their cause
PATIENCE = 30.0  # seconds that the process gets to exit once its images are cancelled
PAUSES = (1.0, 30.0)  # seconds before the next attempt to open the model: initial and maximum


class Opened(Protocol):
    """An open model with its scheduler, such as `ServedHere`."""

    scheduler: Scheduler
    pipe: AtollPipeline

    def close(self, cancel: bool = False) -> None:
        """Finishes or cancels its images."""


class Ready(NamedTuple):
    """Reports that the model is open."""

    hash: str
    places: int


class Stepped(NamedTuple):
    """The results of a step; tensors are sent as NumPy arrays, which is faster."""

    seconds: float
    images: int  # advanced by the step; 0: there was no step
    samples: Counter[int]
    events: list[tuple[int, Any]]  # by image number
    finished: list[tuple[float | None, bool]]  # arguments of `Observer.finished`
    backlog: float


@dataclass(eq=False)
class Owed:
    """An image that the process has yet to finish."""

    number: int
    job: Job
    tell: Callable[[Event], None]
    forget: Callable[["Owed"], None]
    shown: int = -1  # the step of the last preview
    losses: int = 0

    def cancel(self) -> None:
        """Stops the image at the next step; no further events are reported."""
        self.forget(self)


class SchedulerProcess:
    """Generates submitted images, as `Scheduler` does."""

    def __init__(
        self, open_model: Callable[[Observer], Opened], limits: Limits, observer: Observer | None = None
    ) -> None:
        """Starts the process, which opens the model; `wait` returns when it is open.

        The queue limit is enforced here: the process accepts whatever it is sent.
        """
        self._open, self.limits, self.observer = open_model, limits, observer or Observer()
        self.places, self._hash = limits.images, ""
        self._lock, self._ready, self._closed = threading.RLock(), threading.Event(), False
        self._owed: dict[int, Owed] = {}
        self._next, self._backlog, self._fault, self._pause = 0, 0.0, "", PAUSES[0]
        try:
            self._pipe, self._process = self._start()
        except OSError as error:
            raise InputError(f"{error}: end others, and try again") from error
        # Must run before multiprocessing's own exit handler, which joins the process but does not tell it to exit.
        self._at_exit = Finalize(None, self.close, kwargs={"cancel": True}, exitpriority=10)
        self._reader = threading.Thread(target=self._read, name="atoll-events", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def ready(self) -> bool:
        """Returns whether it accepts images."""
        return self._ready.is_set() and not self._closed

    def wait(self, digest: str) -> None:
        """Waits until the process has opened the model with this hash; raises InputError if it cannot."""
        self._ready.wait()
        if not self._hash:
            raise InputError(self._fault)
        if self._hash != digest:
            raise InputError("the model's files changed while they were opened: try again when they are complete")

    def submit(self, jobs: Sequence[Job], tell: Sequence[Callable[[Event], None]]) -> list[Owed]:
        """Queues all of these images or, if there is no room, none, and raises BusyError."""
        with self._lock:
            if self._closed:
                raise BusyError("the model is being replaced or shut down: ask again", 1)
            if not self._ready.is_set():
                raise Refusal(503, "the process that makes images is being started again: ask again", retry_after=1)
            if len(self._owed) + len(jobs) > self.places + self.limits.waiting:
                raise BusyError.of(self.counts()[1], len(jobs), self._backlog)
            numbers = range(self._next, self._next + len(jobs))
            images = [Owed(*row, self._forget) for row in zip(numbers, jobs, tell, strict=True)]
            self._next = numbers.stop
            self._owed.update(zip(numbers, images, strict=True))
            self._send("submit", list(zip(numbers, jobs, strict=True)))
        return images

    def counts(self) -> tuple[int, int]:
        """Returns how many images are in flight, and how many wait."""
        num = len(self._owed)
        return min(num, self.places), max(0, num - self.places)

    def close(self, cancel: bool = False) -> None:
        """Stops accepting images, finishes or cancels those left, and returns when the process has ended."""
        with self._lock:
            self._closed = True
            if cancel:
                self._owed.clear()
            if cancel and not self._ready.is_set():
                self._process.kill()  # it reads nothing until it has opened the model
            self._end_if_done()
        self._reader.join(PATIENCE if cancel else None)
        self._process.kill()
        self._reader.join()
        self._at_exit.cancel()

    def _forget(self, image: Owed) -> None:
        with self._lock:
            if self._owed.pop(image.number, None) is not None:
                self._send("cancel", image.number)
                self._end_if_done()

    def _end_if_done(self) -> None:
        """Tells the process to exit once no image is left; until then it reads, so that images can be cancelled."""
        if self._closed and not self._owed:
            self._send("close", None)

    def _start(self) -> tuple[Connection, ForkServerProcess]:
        return start_with_pipe(_run, self._open, name="atoll-scheduler")

    def _send(self, *message: object) -> None:
        with suppress(OSError):  # the process is lost: the reader thread will notice
            self._pipe.send(message)

    # --- the reader thread ----------------------------------------------------------------------------------------

    def _read(self) -> None:
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                if not self._replace():
                    return
                continue
            if isinstance(message, Ready):
                self._opened(message)
            elif isinstance(message, str):
                self._fault = message
                self._process.kill()
            else:
                self._tell(message)

    def _opened(self, ready: Ready) -> None:
        with self._lock:
            if self._hash not in ("", ready.hash):
                self._fault = "the folder holds another model now"  # --reload serves that one instead
                self._process.kill()
                return
            self._hash, self.places, self._pause = ready.hash, ready.places, PAUSES[0]
            self._send("submit", [(number, image.job) for number, image in self._owed.items()])
            self._ready.set()
            self._end_if_done()

    def _tell(self, step: Stepped) -> None:
        self._backlog = step.backlog
        for number, event in step.events:
            with self._lock:
                image = self._owed.get(number)
                if image is None:
                    continue  # it was cancelled
                if not isinstance(event, Preview):
                    del self._owed[number]
                elif event.number <= image.shown:
                    continue  # shown by a process that was lost
                else:
                    image.shown = event.number
            image.tell(_unpacked(event))
        if step.images:
            self.observer.stepped(step.seconds, step.images, step.samples)
        for waited, without in step.finished:
            self.observer.finished(waited, without)
        with self._lock:
            self._end_if_done()

    def _replace(self) -> bool:
        """Restarts the process after it has ended; returns False if there is nothing left to do."""
        self._process.kill()  # in case only its pipe was closed
        self._process.join()
        with self._lock:
            was_ready, code = self._ready.is_set(), self._process.exitcode
            if not self._hash:  # it has never opened the model: `wait` reports why
                self._fault = self._fault or f"the process that opens the model ended with {code}"
                self._ready.set()
                return False
            if self._closed and not self._owed:
                return False
            self._ready.clear()
            failed = []
            for image in list(self._owed.values()):
                image.losses += 1
                if image.losses >= LOSSES:
                    failed.append(self._owed.pop(image.number))
        for image in failed:
            image.tell(Failed(Refusal(503, "the process that makes images was lost: ask again", retry_after=5)))
        LOG.warning("the process that makes images is lost (exit code %s): another is started", code)
        if not was_ready:
            self._wait(self._fault or "it ended before")
        while not (self._closed and not self._owed):
            self._fault = ""
            try:
                pipe, process = self._start()
            except OSError as error:
                self._wait(str(error))
                continue
            with self._lock:
                self._pipe, self._process = pipe, process
            return True
        return False

    def _wait(self, reason: str) -> None:
        LOG.warning("it could not open the model (%s): it is tried again in %g seconds", reason, self._pause)
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, PAUSES[1])


def _packed(event: Event) -> Any:
    if isinstance(event, Failed):
        return Refused.of(event.error)
    packed: Any = event
    packed = packed._replace(latents=event.latents.cpu().numpy())
    return (
        packed
        if isinstance(event, Preview)
        else packed._replace(trace=(event.trace.times, event.trace.weights.numpy()))
    )


def _unpacked(event: Any) -> Event:
    if isinstance(event, Refused):
        return Failed(Refusal(*event))
    event = event._replace(latents=torch.from_numpy(event.latents))
    if isinstance(event, Preview):
        return event
    times, weights = event.trace
    finished: Finished = event._replace(trace=ImageTrace(times, torch.from_numpy(weights)))
    return finished


# --- in the process -----------------------------------------------------------------------------------------------


class Sender(Observer):
    """Sends the scheduler's events to the server, once per step."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._events, self._finished = pipe, list[tuple[int, Any]](), list[tuple[float | None, bool]]()
        self.scheduler: Scheduler | None = None

    def tell(self, number: int, event: Event) -> None:
        self._events.append((number, _packed(event)))
        if isinstance(event, Failed):
            self.stepped(0.0, 0, Counter())  # there may be no further step to send it

    def finished(self, waited: float | None, without: bool) -> None:
        self._finished.append((waited, without))

    def stepped(self, seconds: float, images: int, samples: Counter[int]) -> None:
        backlog = 0.0 if self.scheduler is None else self.scheduler.backlog()
        message = Stepped(seconds, images, samples, self._events, self._finished, backlog)
        self._events, self._finished = [], []
        self.send(message)

    def send(self, message: object) -> None:
        with suppress(OSError):  # the server is gone
            self._pipe.send(message)


def _run(pipe: Connection, open_model: Callable[[Observer], Opened]) -> None:
    """Generates images until told to exit, or until the other end of the pipe is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the server handles them: it has images to finish
    set_up_log()
    warnings.simplefilter("ignore", UserWarning)  # the server has already warned
    share_interpreter()
    sender = Sender(pipe)
    try:
        served = open_model(sender)
    except InputError as error:
        sender.send(str(error))
        return
    sender.scheduler = scheduler = served.scheduler
    sender.send(Ready(served.pipe.index.hash, scheduler.places))
    images: WeakValueDictionary[int, InFlight] = WeakValueDictionary()  # the scheduler keeps them until they are done
    while True:
        try:
            kind, content = pipe.recv()
        except (EOFError, OSError):
            kind, content = "close", None  # the server was killed: nobody waits for these images
        if kind == "submit":
            numbers, jobs = [number for number, _ in content], [job for _, job in content]
            made = scheduler.submit(jobs, [partial(sender.tell, number) for number in numbers])
            images.update(zip(numbers, made, strict=True))
        elif kind == "cancel":
            if image := images.get(content):
                image.cancel()
        else:
            served.close(cancel=True)
            return
