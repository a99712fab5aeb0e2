"""The local engine: jobs as processes of this machine, with one table of progress and restarts of what crashes.

The processes share nothing, here no more than on machines far apart. What the table shows is read from the files that
each run writes anyway: FOLDER/metrics.jsonl, and FOLDER/run.json, which says in the end that the run is complete.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from atoll.errors import InputError, printable
from atoll.processes import StopSignal, dying_with_parent, stop_signals
from atoll.storage import open_regular, parse_json, read_json, reason_of

MAX_RESTARTS = 3  # in a row, without a step further than before
LOOK_EVERY = 0.2  # seconds between looks at the processes
TELL_EVERY = 10.0  # seconds between lines where there is no terminal
GRACE = 60.0  # seconds to save a checkpoint in, before a process is killed
TAIL = 1 << 13  # bytes of metrics or of a log that are looked at
LARGEST = 1e30  # of a figure that is shown

Slot = Mapping[str, str]
"""The resources of one process at a time: the environment variables that give it a GPU."""


@dataclass(frozen=True)
class Job:
    """A command to see through. To resume is to run it again."""

    name: str
    command: list[str]
    folder: Path
    steps: int


@dataclass(frozen=True)
class Result:
    """How a job ended: done, or stopped by a signal with a checkpoint saved."""

    name: str
    status: str
    step: int
    restarts: int


def find_slots(device: str = "auto") -> list[Slot]:
    """Returns one slot per GPU for auto and cuda, one in all for cuda:N, one per core for cpu and without GPUs."""
    if device.startswith("cuda:"):
        return [{}]
    num_gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if num_gpus:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        return [{"CUDA_VISIBLE_DEVICES": visible[i] if i < len(visible) else str(i)} for i in range(num_gpus)]
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return [{}] * cores


def run_jobs(
    jobs: Sequence[Job], slots: Sequence[Slot], *, progress: bool = True, environment: Mapping[str, str] | None = None
) -> list[Result]:
    """Sees all jobs through, at most one per slot at a time; a job that crashes is restarted and disturbs no other.

    Ctrl-C and SIGTERM let every process save a checkpoint, and end in KeyboardInterrupt. Jobs that fail for good are
    raised as one InputError when all others have ended.
    """
    assert slots, "a job needs a slot"
    runs = [_Run(job, environment or {}) for job in jobs]
    table = _Table(runs, progress)
    with stop_signals() as signals:
        try:
            _see_through(runs, slots, table, signals)
        finally:
            _stop(runs, table, signals)
            table.close()
    if signals:
        raise KeyboardInterrupt
    if failed := [run for run in runs if run.status == "failed"]:
        reasons = "; ".join(f"{run.job.name} failed ({run.reason}; its log is {run.log})" for run in failed)
        rest = "the others have ended" if len(failed) < len(runs) else "none is left"
        raise InputError(f"{reasons}: {rest}, so fix the cause and rerun the same command to resume")
    return [Result(run.job.name, run.status, run.metrics.step, run.restarts) for run in runs]


def _see_through(runs: list["_Run"], slots: Sequence[Slot], table: "_Table", signals: list[StopSignal]) -> None:
    """Runs jobs until all have ended or a signal came."""
    for run in runs:
        if run.is_complete():
            run.set_done()
    waiting = deque(run for run in runs if run.status == "waiting")
    free, busy = deque(slots), list[_Run]()
    while (waiting or busy) and not signals:
        while waiting and free:
            run = waiting.popleft()
            run.start(free.popleft())
            busy.append(run)
        table.show()
        time.sleep(LOOK_EVERY)
        for run in busy:
            run.look()
        free.extend(run.slot for run in busy if run.process is None)
        busy = [run for run in busy if run.process is not None]
    table.show()


def _stop(runs: list["_Run"], table: "_Table", signals: list[StopSignal]) -> None:
    """Lets what still runs save a checkpoint; kills what takes too long, or all after another signal."""
    for run in runs:
        if run.process is not None:
            run.process.terminate()
            run.status = "stopping"
    deadline = time.monotonic() + GRACE
    while any(run.process is not None for run in runs):
        # Two signals at once are one wish: shells and launchers often pass on what the process got already.
        if time.monotonic() > deadline or (signals and signals[-1].time - signals[0].time > 1):
            for run in runs:
                run.kill()
        table.show()
        time.sleep(LOOK_EVERY)
        for run in runs:
            run.look(stopping=True)
    table.show()


class Metrics(NamedTuple):
    """The newest figures of a run."""

    step: int = 0
    loss: float | None = None
    samples_per_second: float | None = None
    seconds: float | None = None


def latest_metrics(path: Path) -> Metrics:
    """Reads the end of a metrics.jsonl that another process writes, cuts when it resumes, and may leave half."""
    values: dict[str, float] = {}
    for line in _tail(path).split(b"\n")[:-1]:
        try:
            figures = parse_json(line)
        except ValueError:
            continue  # a crash left half a line, and the next run went on behind it
        if isinstance(figures, dict) and type(figures.get("step")) is int and 0 <= figures["step"] < 10**12:
            values |= {k: v for k, v in figures.items() if isinstance(v, int | float) and abs(v) < LARGEST}
    step, *others = (values.get(name) for name in Metrics._fields)
    return Metrics(int(step or 0), *others)


def _tail(path: Path, start: int = 0) -> bytes:
    """Returns the end of a file, from `start` at most; nothing if it cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - TAIL))
            return file.read(TAIL)
    except OSError:
        return b""


@dataclass
class _Run:
    """A job, and what has become of it so far."""

    job: Job
    environment: Mapping[str, str]
    status: str = "waiting"
    reason: str = ""
    slot: Slot = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    _restarts_in_vain: int = 0  # since a step was further than before
    _furthest: int = 0
    _furthest_at_start: int = 0
    _log_at_start: int = 0

    def __post_init__(self) -> None:
        self.metrics = latest_metrics(self.job.folder / "metrics.jsonl")
        self._furthest = self.metrics.step

    @property
    def log(self) -> Path:
        return self.job.folder / "log.txt"

    def is_complete(self) -> bool:
        """Returns whether run.json says so, and for as many steps as are wanted now."""
        try:
            about = read_json(self.job.folder / "run.json", "")
        except InputError:
            return False
        steps = about.get("steps_done", self.job.steps)
        return about.get("complete") is True and isinstance(steps, int) and steps >= self.job.steps

    def set_done(self) -> None:
        self.status, self.metrics = "done", self.metrics._replace(step=self.job.steps)

    def start(self, slot: Slot, note: str = "") -> None:
        self.slot = slot
        self._furthest_at_start = self._furthest
        # Unbuffered, or a process that is killed takes its last words with it.
        usual = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        try:
            self.job.folder.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(self.log):
                open_regular(self.log).close()  # no FIFO, and no link to a file of somebody else's
            with self.log.open("ab", buffering=0) as log:
                if note:
                    log.write(f"[{note}]\n".encode())
                self._log_at_start = os.fstat(log.fileno()).st_size
                self.process = subprocess.Popen(
                    dying_with_parent(self.job.command),
                    env={**os.environ, **usual, **self.environment, **slot},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C at the terminal is for this process, which passes it on in order
                )
        except OSError as error:
            self.status, self.reason = "failed", f"cannot be started: {reason_of(error)}"
            return
        self.status = "running"

    def look(self, stopping: bool = False) -> None:
        """Notes how far the process is, and if it has ended, what that means."""
        if self.process is None:
            return
        code = self.process.poll()  # before the figures are read: then none of them comes later
        self.metrics = latest_metrics(self.job.folder / "metrics.jsonl")
        self._furthest = max(self._furthest, self.metrics.step)
        if code is None:
            return
        self.process = None
        if code == 0 and self.is_complete():
            self.set_done()
        elif code == 2:
            self.status, self.reason = "failed", self._last_words() or "exit code 2"
        elif code == 0 or stopping:
            self.status = "stopped"
        else:
            self._restart(_killed_by(-code) if code < 0 else f"exit code {code}")

    def _restart(self, cause: str) -> None:
        if self._furthest > self._furthest_at_start:
            self._restarts_in_vain = 0
        if self._restarts_in_vain >= MAX_RESTARTS:
            words = self._last_words()
            end = f"{words}, {cause}" if words else cause
            self.status, self.reason = "failed", f"{end}, also when restarted {MAX_RESTARTS} times"
            return
        self._restarts_in_vain += 1
        self.restarts += 1
        self.start(self.slot, f"{cause}: restart {self.restarts}")

    def _last_words(self) -> str:
        """Returns the last line that the process has written."""
        text = _tail(self.log, self._log_at_start).decode("utf-8", "replace")
        lines = [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]
        return lines[-1].removeprefix("atoll: ")[:500] if lines else ""

    def kill(self) -> None:
        """Ends the process and all that it has started."""
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def shown_status(self) -> str:
        return f"restarted {self.restarts}x" if self.status == "running" and self.restarts else self.status

    @property
    def figures(self) -> str:
        if self.status == "failed":
            return printable(self.reason)
        step, loss, speed, seconds = self.metrics
        figures = [] if loss is None else [f"loss {loss:.4f}"]
        if self.process is not None:
            figures += [] if speed is None else [f"{speed:.0f} samples/s"]
            if seconds is not None and 0 < step <= self.job.steps:
                figures.append(f"{tqdm.format_interval((self.job.steps - step) * seconds / step)} left")
        return "  ".join(figures)


def _killed_by(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"killed by {name}" + (", most likely for lack of memory" if number == signal.SIGKILL else "")


class _Table:
    """Progress: on a terminal a bar per job, elsewhere a line per job whose status is new or, seldom, that runs."""

    def __init__(self, runs: list[_Run], progress: bool) -> None:
        self.runs, self._progress, self._bars = runs, progress, list[tqdm]()
        self._width = max((len(run.job.name) for run in runs), default=0)
        self._statuses = ["waiting"] * len(runs)
        self._start = self._last = time.monotonic()
        if progress and sys.stderr.isatty():
            for i, run in enumerate(runs):
                count = f"{{n:{len(str(run.job.steps))}}}/{{total}}"
                self._bars.append(
                    tqdm(
                        total=run.job.steps,
                        desc=run.job.name.ljust(self._width),
                        position=i,
                        dynamic_ncols=True,
                        file=sys.stderr,
                        bar_format=f"{{desc}} {{percentage:3.0f}}%|{{bar:20}}| {count}{{postfix}}",
                    )
                )

    def show(self) -> None:
        with suppress(OSError):  # a terminal or pipe that is gone must not end a training
            if self._bars:
                self._draw_bars()
            elif self._progress:
                self._print_lines()

    def _draw_bars(self) -> None:
        for run, bar in zip(self.runs, self._bars, strict=True):
            bar.n = min(run.metrics.step, run.job.steps)
            bar.set_postfix_str(f"{run.shown_status:<14}{run.figures}", refresh=False)
            bar.refresh()

    def _print_lines(self) -> None:
        now = time.monotonic()
        is_time = now - self._last >= max(TELL_EVERY, (now - self._start) / 20)
        if is_time:
            self._last = now
        for i, run in enumerate(self.runs):
            status = run.shown_status
            if status != self._statuses[i] or (is_time and run.process is not None):
                self._statuses[i] = status
                line = f"{run.job.name:<{self._width}}  {status:<14}{run.metrics.step}/{run.job.steps}"
                print(f"{line}  {run.figures}".rstrip(), file=sys.stderr, flush=True)

    def close(self) -> None:
        for bar in self._bars:
            with suppress(OSError):
                bar.close()
