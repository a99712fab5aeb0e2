"""The interface of engines, which run jobs to completion wherever there are resources, and what they share.

`local` and `ray` differ in where a job's process starts. Supervision is here: processes that crash or are lost are
restarted, those that exit with a user error are not, and all are shown in one table.
"""

import math
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tqdm import tqdm

from atoll.errors import InputError, printable
from atoll.processes import stop_signals
from atoll.storage import read_json, reason_of
from atoll.training.metrics_log import read_metrics

MAX_RESTARTS = 3  # restarts in a row without progress
MAX_LOSSES = 20  # the same for lost workers and nodes, which are seldom the job's fault
LOOK_EVERY = 0.2  # seconds between polls of the processes
TELL_EVERY = 10.0  # seconds between lines of progress without a terminal
GRACE = 60.0  # seconds for saving a checkpoint before a process is killed
TAIL = 1 << 13  # bytes read from the end of metrics and logs
LARGEST = 1e30  # figures from here on are not shown

Function = Callable[[Any], Any]


@dataclass(frozen=True)
class Resources:
    """The resources that a job reserves while it runs, all on one machine."""

    cpus: int = 1
    gpus: int | None = None  # None: one if there are any

    def __post_init__(self) -> None:
        if self.cpus < 1 or (self.gpus or 0) < 0:
            raise InputError(f"a job needs at least one CPU and no fewer than 0 GPUs, not {self.cpus} and {self.gpus}")


USUAL = Resources()


@dataclass(frozen=True)
class Job:
    """A training command, done when FOLDER/run.json says so. Running it again resumes it."""

    name: str
    command: list[str]
    folder: Path
    steps: int
    resources: Resources = USUAL
    environment: Mapping[str, str] = field(default_factory=dict)
    is_shared: bool = True  # whether this machine and the node that runs it must share the folder


class Engine(Protocol):
    """Runs jobs, or maps a function over items, on one machine or many."""

    def run(self, jobs: Sequence[Job], progress: bool = True) -> list["Run"]:
        """Runs all jobs to completion, as many in parallel as resources allow; a crash does not affect other jobs.

        On Ctrl-C or SIGTERM, every job saves a checkpoint, and KeyboardInterrupt is raised. If jobs fail for good, one
        InputError is raised after all others have ended.
        """

    def map(
        self, function: Function, items: Iterable[Any], resources: Resources = USUAL, then: Function | None = None
    ) -> Iterator[Any]:
        """Yields function(item) of each item, in order; only a few items are read ahead.

        Each call runs in another process, and may be repeated if that dies, so it must write files atomically. An
        InputError that the function raises is raised here. `then` is applied to the function's result; where there
        are GPUs, an engine may run it in processes that each keep a GPU, and the function on CPUs alone.
        """


def encode(engine: Engine, read: Function, items: Iterable[Any], then: Function | None = None) -> Iterator[Any]:
    """Maps `read`, and then `then`, over the items of `prepare`; reading alone reserves no GPU."""
    return engine.map(read, items, Resources(gpus=None if then else 0), then)


@dataclass(frozen=True)
class Both:
    """Composes two functions, to run both in one process."""

    function: Function
    then: Function

    def __call__(self, item: Any) -> Any:
        return self.then(self.function(item))


class Look(NamedTuple):
    """The observed state of a job's process."""

    code: int | None  # exit code; None while it runs
    metrics: Mapping[str, float]
    complete: bool  # whether run.json says so
    last_words: str
    loss: str = ""  # why it was lost, if its worker or node ended rather than the process


class Process(Protocol):
    """The process of a job, running or about to start."""

    def look(self) -> Look | None:
        """Returns its state, or None while it waits for resources."""

    def send(self, number: int) -> None:
        """Makes it save a checkpoint and end (SIGTERM), or kills it with its children (SIGKILL)."""


Start = Callable[[Job, str], Process | None]
"""Writes a note to a job's log and starts it; returns None if no resources are free, raises OSError on failure."""


def run_jobs(jobs: Sequence[Job], start: Start, progress: bool = True) -> list["Run"]:
    """Runs all jobs to completion, as described in Engine.run."""
    runs = [Run(job) for job in jobs]
    table = _Table(runs, progress)
    deadline = math.inf
    with stop_signals() as signals:
        while any(run.process or (run.is_pending and not signals) for run in runs):
            for run in runs:
                if run.is_pending and not signals:
                    run.start(start)
            # Signals at about the same time count as one: shells and launchers often forward what the process got.
            insists = bool(signals) and signals[-1].time - signals[0].time > 1
            for run in runs:
                if insists or time.monotonic() > deadline:
                    run.send(signal.SIGKILL)
                elif signals and deadline == math.inf:
                    run.send(signal.SIGTERM)
            if signals:
                deadline = min(deadline, time.monotonic() + GRACE)
            table.show()
            time.sleep(LOOK_EVERY)
            for run in runs:
                run.look()
        table.close()
    if signals:
        raise KeyboardInterrupt
    if failed := [run for run in runs if run.status == "failed"]:
        reasons = "; ".join(f"{run.job.name} failed ({run.reason}; its log is {run.log})" for run in failed)
        rest = "the others have ended" if len(failed) < len(runs) else "none is left"
        raise InputError(f"{reasons}: {rest}, so fix the cause and rerun the same command to resume")
    return runs


def latest_metrics(folder: Path) -> dict[str, float]:
    """Returns the newest figures of a run, from a log that another process writes, and truncates when it resumes."""
    values: dict[str, float] = {}
    with suppress(InputError):
        for line in read_metrics(folder, TAIL):
            values |= {name: v for name, v in line.items() if isinstance(v, int | float) and 0 <= v < LARGEST}
    return values


def is_complete(folder: Path, steps: int) -> bool:
    """Returns whether run.json says that the run is complete, for at least this many steps."""
    try:
        about = read_json(folder / "run.json", "")
    except InputError:
        return False
    done = about.get("steps_done", steps)
    return about.get("complete") is True and isinstance(done, int) and done >= steps


class Run:
    """A job and its status: waiting, running, restarting, stopping, stopped, failed or done."""

    def __init__(self, job: Job) -> None:
        self.job, self.log = job, job.folder / "log.txt"
        self.reason = self._note = ""
        self.process: Process | None = None
        self.metrics: Mapping[str, float] = latest_metrics(job.folder)
        self.status = "done" if is_complete(job.folder, job.steps) else "waiting"
        self.restarts = self._restarts_in_vain = 0  # the latter since the last progress
        self._furthest = self.step

    @property
    def step(self) -> int:
        return self.job.steps if self.status == "done" else int(self.metrics.get("step", 0))

    @property
    def is_pending(self) -> bool:
        """Returns whether the job has yet to be started or restarted."""
        return self.process is None and self.status in ("waiting", "restarting")

    def start(self, start: Start) -> None:
        try:
            self.process = start(self.job, self._note)
        except OSError as error:
            self.status, self.reason = "failed", f"cannot be started: {reason_of(error)}"
        self.look()

    def look(self) -> None:
        """Updates the metrics, and the status if the process has ended."""
        look = None if self.process is None else self.process.look()
        if look is None:
            return
        if self.status in ("waiting", "restarting"):
            self.status = "running"
        self.metrics = look.metrics or self.metrics
        if self.step > self._furthest:
            self._furthest, self._restarts_in_vain = self.step, 0
        if look.code is None:
            return
        self.process = None
        cause, most = look.loss or _cause(look.code), MAX_LOSSES if look.loss else MAX_RESTARTS
        if look.code == 0 and look.complete:
            self.status = "done"
        elif look.code == 2:
            self.status, self.reason = "failed", look.last_words or cause
        elif look.code == 0 or self.status == "stopping":
            self.status = "stopped"
        elif self._restarts_in_vain >= most:
            words = ", ".join(filter(None, (look.last_words, cause)))
            self.status, self.reason = "failed", f"{words}, also when restarted {self._restarts_in_vain} times"
        else:
            self._restarts_in_vain += 1
            self.restarts += 1
            self.status, self._note = "restarting", f"[{cause}: restart {self.restarts}]\n"

    def send(self, number: int) -> None:
        if self.process is not None:
            self.status = "stopping"
            self.process.send(number)

    @property
    def figures(self) -> str:
        """Returns the newest figures as text, or why the job failed."""
        if self.status == "failed":
            return printable(self.reason)
        loss, speed, seconds = (self.metrics.get(name) for name in ("loss", "samples_per_second", "seconds"))
        figures = [] if loss is None else [f"loss {loss:.4f}"]
        if self.process is not None and speed is not None:
            figures.append(f"{speed:.0f} samples/s")
        if self.process is not None and seconds is not None and 0 < self.step <= self.job.steps:
            figures.append(f"{tqdm.format_interval((self.job.steps - self.step) * seconds / self.step)} left")
        return "  ".join(figures)


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"{signal.strsignal(-code)} (signal {-code}{', most likely for lack of memory' * (code == -9)})"


class _Table:
    """Shows progress: on a terminal a bar per job, otherwise a line when a job's status changes and every 10 s."""

    def __init__(self, runs: list[Run], progress: bool) -> None:
        self.runs, self._lines = runs, progress and not sys.stderr.isatty()
        width = max((len(run.job.name) for run in runs), default=0)
        self._names = [run.job.name.ljust(width) for run in runs]
        self._statuses = ["waiting"] * len(runs)
        self._last = time.monotonic()
        self._bars = [
            tqdm(
                total=run.job.steps,
                desc=self._names[i],
                position=i,
                dynamic_ncols=True,
                file=sys.stderr,
                disable=not progress or self._lines,
                bar_format="{desc} {percentage:3.0f}%|{bar:20}| {n}/{total}{postfix}",
            )
            for i, run in enumerate(runs)
        ]

    def show(self) -> None:
        is_time = self._lines and time.monotonic() - self._last >= TELL_EVERY
        self._last = time.monotonic() if is_time else self._last
        with suppress(OSError):  # losing the terminal or pipe must not end training
            for i, (run, bar) in enumerate(zip(self.runs, self._bars, strict=True)):
                restarted = run.status in ("running", "restarting") and run.restarts
                status = f"restarted {run.restarts}x" if restarted else run.status
                bar.n = min(run.step, run.job.steps)
                bar.set_postfix_str(f"{status:<14}{run.figures}")
                if self._lines and (status != self._statuses[i] or (is_time and run.process is not None)):
                    self._statuses[i] = status
                    line = f"{self._names[i]}  {status:<14}{run.step}/{run.job.steps}  {run.figures}"
                    print(line.rstrip(), file=sys.stderr, flush=True)

    def close(self) -> None:
        self.show()
        with suppress(OSError):
            for bar in self._bars:
                bar.close()
