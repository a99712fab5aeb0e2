"""The local engine: jobs as processes of this machine, with one table of progress and restarts of what crashes.

The processes share nothing, here no more than on machines far apart. What the table shows is read from the files that
each run writes anyway: FOLDER/metrics.jsonl, and FOLDER/run.json, which says in the end that the run is complete.
"""

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from atoll.errors import InputError, printable
from atoll.processes import dying_with_parent, stop_signals
from atoll.storage import open_regular, read_json, reason_of
from atoll.training.metrics_log import read_metrics, read_tail

MAX_RESTARTS = 3  # in a row, without a step further than before
LOOK_EVERY = 0.2  # seconds between looks at the processes
TELL_EVERY = 10.0  # seconds between lines where there is no terminal
GRACE = 60.0  # seconds to save a checkpoint in, before a process is killed
TAIL = 1 << 13  # bytes of metrics or of a log that are looked at
LARGEST = 1e30  # of a figure that is shown
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
"""Of a process, unless its slot says otherwise. Unbuffered, or one that is killed takes its last words with it."""

Slot = Mapping[str, str]
"""The resources of one process at a time: the environment variables that give it a GPU, or threads."""


@dataclass(frozen=True)
class Job:
    """A command that trains, done when FOLDER/run.json says so. To resume is to run it again."""

    name: str
    command: list[str]
    folder: Path
    steps: int


def find_slots(device: str = "auto") -> list[Slot]:
    """Returns one slot per GPU for auto and cuda, one in all for cuda:N, one per core for cpu and without GPUs."""
    if device.startswith("cuda:"):
        return [{}]
    num_gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if num_gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
        return [{"CUDA_VISIBLE_DEVICES": name} for name in visible.split(",")[:num_gpus]]
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return [{}] * cores


def run_jobs(jobs: Sequence[Job], slots: Sequence[Slot], *, progress: bool = True) -> list["Run"]:
    """Sees all jobs through, at most one per slot at a time; a job that crashes is restarted and disturbs no other.

    Ctrl-C and SIGTERM let every process save a checkpoint, and end in KeyboardInterrupt. Jobs that fail for good are
    raised as one InputError when all others have ended.
    """
    assert slots, "a job needs a slot"
    runs = [Run(job) for job in jobs]
    table = _Table(runs, progress)
    waiting, busy, free = deque(run for run in runs if run.status == "waiting"), list[Run](), deque(slots)
    deadline = math.inf
    with stop_signals() as signals:
        while busy or (waiting and not signals):
            while waiting and free and not signals:
                busy.append(waiting.popleft())
                busy[-1].start(free.popleft())
            # Two signals at once are one wish: shells and launchers often pass on what the process got already.
            insists = bool(signals) and signals[-1].time - signals[0].time > 1
            for run in busy:
                if insists or time.monotonic() > deadline:
                    run.send(signal.SIGKILL)
                elif signals and deadline == math.inf:
                    run.send(signal.SIGTERM)
            if signals:
                deadline = min(deadline, time.monotonic() + GRACE)
            table.show()
            time.sleep(LOOK_EVERY)
            for run in busy:
                run.look()
            free.extend(run.slot for run in busy if run.process is None)
            busy = [run for run in busy if run.process is not None]
        table.close()
    if signals:
        raise KeyboardInterrupt
    if failed := [run for run in runs if run.status == "failed"]:
        reasons = "; ".join(f"{run.job.name} failed ({run.reason}; its log is {run.log})" for run in failed)
        rest = "the others have ended" if len(failed) < len(runs) else "none is left"
        raise InputError(f"{reasons}: {rest}, so fix the cause and rerun the same command to resume")
    return runs


def latest_metrics(folder: Path) -> dict[str, float]:
    """Returns the newest figures of a run, from a log that another process writes and cuts when it resumes."""
    values: dict[str, float] = {}
    with suppress(InputError):
        for line in read_metrics(folder, TAIL):
            values |= {name: v for name, v in line.items() if isinstance(v, int | float) and 0 <= v < LARGEST}
    return values


class Run:
    """A job, and what has become of it so far: waiting, running, stopping, stopped, failed or done."""

    def __init__(self, job: Job) -> None:
        self.job, self.log = job, job.folder / "log.txt"
        self.reason = ""
        self.slot: Slot = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.metrics = latest_metrics(job.folder)
        self.status = "done" if self.is_complete() else "waiting"
        self.restarts = self._restarts_in_vain = 0  # the latter since a step was further than before
        self._furthest, self._log_start = self.step, 0

    def is_complete(self) -> bool:
        """Returns whether run.json says so, and for as many steps as are wanted now."""
        try:
            about = read_json(self.job.folder / "run.json", "")
        except InputError:
            return False
        steps = about.get("steps_done", self.job.steps)
        return about.get("complete") is True and isinstance(steps, int) and steps >= self.job.steps

    @property
    def step(self) -> int:
        return self.job.steps if self.status == "done" else int(self.metrics.get("step", 0))

    def start(self, slot: Slot, note: str = "") -> None:
        self.slot, self.status = slot, "running"
        try:
            self.job.folder.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(self.log):
                open_regular(self.log).close()  # no FIFO, and no link to a file of somebody else's
            with self.log.open("ab", buffering=0) as log:
                log.write(note.encode())
                self._log_start = log.tell()
                self.process = subprocess.Popen(
                    dying_with_parent(self.job.command),
                    env={**os.environ, **ENVIRONMENT, **slot},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C at the terminal is for this process, which passes it on in order
                )
        except OSError as error:
            self.status, self.reason = "failed", f"cannot be started: {reason_of(error)}"

    def look(self) -> None:
        """Notes how far the process is, and if it has ended, what that means."""
        if self.process is None:
            return
        code = self.process.poll()  # before the figures are read: then none of them comes later
        self.metrics = latest_metrics(self.job.folder)
        if self.step > self._furthest:
            self._furthest, self._restarts_in_vain = self.step, 0
        if code is None:
            return
        self.process = None
        cause = f"exit code {code}"
        if code < 0:
            cause = f"{signal.strsignal(-code)} (signal {-code}{', most likely for lack of memory' * (code == -9)})"
        if code == 0 and self.is_complete():
            self.status = "done"
        elif code == 2:
            self.status, self.reason = "failed", self._last_words() or cause
        elif code == 0 or self.status == "stopping":
            self.status = "stopped"
        elif self._restarts_in_vain == MAX_RESTARTS:
            words = ", ".join(filter(None, (self._last_words(), cause)))
            self.status, self.reason = "failed", f"{words}, also when restarted {MAX_RESTARTS} times"
        else:
            self._restarts_in_vain += 1
            self.restarts += 1
            self.start(self.slot, f"[{cause}: restart {self.restarts}]\n")

    def _last_words(self) -> str:
        """Returns the last line that the process has written."""
        try:
            text = read_tail(self.log, TAIL, self._log_start).decode("utf-8", "replace")
        except OSError:
            return ""
        return re.split(r"[\r\n]", text.strip())[-1].strip().removeprefix("atoll: ")[:500]

    def send(self, number: int) -> None:
        """Has the process save a checkpoint and end (SIGTERM), or ends it with all that it has started (SIGKILL)."""
        if self.process is not None:
            self.status = "stopping"
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    @property
    def figures(self) -> str:
        """Returns the newest figures for people, or why it has failed."""
        if self.status == "failed":
            return printable(self.reason)
        loss, speed, seconds = (self.metrics.get(name) for name in ("loss", "samples_per_second", "seconds"))
        figures = [] if loss is None else [f"loss {loss:.4f}"]
        if self.process is not None and speed is not None:
            figures.append(f"{speed:.0f} samples/s")
        if self.process is not None and seconds is not None and 0 < self.step <= self.job.steps:
            figures.append(f"{tqdm.format_interval((self.job.steps - self.step) * seconds / self.step)} left")
        return "  ".join(figures)


class _Table:
    """Progress: on a terminal a bar per job, elsewhere a line per job whose status is new or, seldom, that runs."""

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
        with suppress(OSError):  # a terminal or pipe that is gone must not end a training
            for i, (run, bar) in enumerate(zip(self.runs, self._bars, strict=True)):
                status = f"restarted {run.restarts}x" if run.status == "running" and run.restarts else run.status
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
