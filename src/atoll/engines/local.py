"""All experts of a partition on one machine: a process each, one table of progress, and restarts of what crashes.

The processes share nothing, here no more than on machines far apart. What the table shows is read from the files that
each run writes anyway: FOLDER/metrics.jsonl, and FOLDER/run.json, which says in the end that the run is complete.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from tqdm import tqdm

from atoll.diffusion.objective import get_objective
from atoll.errors import InputError, printable
from atoll.storage import open_regular, parse_json, read_json, reason_of

MAX_RESTARTS = 3  # in a row, without a step further than before
LOOK_EVERY = 0.2  # seconds between looks at the processes
TELL_EVERY = 10.0  # seconds between lines where there is no terminal
GRACE = 60.0  # seconds to save a state in, before a process is killed
MOST_AT_ONCE = 1 << 24  # bytes of metrics that are read between two looks
LARGEST = 1e30  # of a figure that is shown

Slot = Mapping[str, str]
"""A place for one process at a time: the environment variables that put it there."""


@dataclass(frozen=True)
class Job:
    """A command to see through. To resume is to run it again."""

    name: str
    command: list[str]
    folder: Path
    steps: int


@dataclass(frozen=True)
class Result:
    """How a job ended: done, or stopped by a signal with its state saved."""

    name: str
    status: str
    step: int
    restarts: int


def parse_objectives(text: str, num_experts: int) -> list[str]:
    """The objective of each expert: "fm" for all, "2ddpm:6fm" in order, or "0=ddpm,3=ddpm,*=fm" by number."""
    if "=" in text:
        named = _by_number(text, num_experts, "objectives", get_objective)
        missing = [str(k) for k in range(num_experts) if named[k] is None]
        if missing:
            few = ", ".join(missing[:5]) + (" and others" if len(missing) > 5 else "")
            raise InputError(f"the objectives {text!r} leave out {few}: end with *=fm to name all others")
        return [name for name in named if name is not None]
    if ":" not in text and not re.match(r"\s*[0-9]", text):
        get_objective(text.strip())
        return [text.strip()] * num_experts
    counts: list[tuple[int, str]] = []
    for part in text.split(":"):
        match = re.fullmatch(r"([0-9]{1,9})(\D.*)", part.strip())
        if match is None:
            raise InputError(f"{part!r} in the objectives {text!r} must be a count and a name: write 2ddpm:6fm")
        get_objective(match[2])
        counts.append((int(match[1]), match[2]))
    if (total := sum(num for num, _ in counts)) != num_experts:
        raise InputError(
            f"the objectives {text!r} are for {total} experts, and there are {num_experts}: make the counts add up"
        )
    return [name for num, name in counts for _ in range(num)]


def parse_inits(text: str | None, num_experts: int) -> list[Path | None]:
    """The first weights of each expert: a folder for all, or "0=a,*=b" by number; None for who is not named."""
    if text is None or not re.match(r"\s*(\*|[0-9]+)\s*=", text):
        return [None if text is None else Path(text)] * num_experts
    return [None if name is None else Path(name) for name in _by_number(text, num_experts, "folders of --init")]


def _by_number(
    text: str, num_experts: int, what: str, check: Callable[[str], object] = lambda name: None
) -> list[str | None]:
    """The name of each expert in "0=a,3=b,*=c"; None for who is not named."""
    named: dict[int | None, str] = {}  # None for all that are not named
    for part in text.split(","):
        match = re.fullmatch(r"(\*|[0-9]{1,9})\s*=\s*(.+)", part.strip())
        if match is None:
            raise InputError(f"{part!r} in the {what} {text!r} must be NUMBER=NAME, or *=NAME for all others")
        expert = None if match[1] == "*" else int(match[1])
        if expert is not None and expert >= num_experts:
            raise InputError(f"the {what} name expert {expert}, but experts are 0 to {num_experts - 1} here")
        if expert in named:
            raise InputError(f"the {what} {text!r} name {_called(expert)} twice: name it once")
        check(match[2])
        named[expert] = match[2]
    return [named.get(k, named.get(None)) for k in range(num_experts)]


def _called(expert: int | None) -> str:
    return "*" if expert is None else f"expert {expert}"


def find_slots(device: str = "auto") -> list[Slot]:
    """One slot a GPU for auto and cuda, one in all for cuda:N, one a core for cpu and where there is no GPU."""
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
    """See all jobs through, at most one a slot at a time; a job that crashes starts again and disturbs no other.

    Ctrl-C and SIGTERM let every process save its state, and end in KeyboardInterrupt. Jobs that fail for good are
    raised as one InputError when all others have ended.
    """
    assert slots, "a job needs a slot"
    runs = [_Run(job, environment or {}) for job in jobs]
    with _asked_to_stop() as asked, _table(runs, progress) as table:
        try:
            _see_through(runs, slots, table, asked)
        finally:
            _stop(runs, table, asked)
    if asked:
        raise KeyboardInterrupt
    if failed := [run for run in runs if run.status == "failed"]:
        told = "; ".join(f"{run.job.name} failed ({run.reason}; its log is {run.log})" for run in failed)
        rest = "the others have ended" if len(failed) < len(runs) else "none is left"
        raise InputError(f"{told}: {rest}, so mend the cause and rerun the same command to resume")
    return [Result(run.job.name, run.status, run.metrics.step, run.restarts) for run in runs]


@dataclass
class Metrics:
    """The newest figures in a metrics.jsonl that another process writes, cuts when it resumes, and may leave half."""

    path: Path
    step: int = 0
    loss: float | None = None
    samples_per_second: float | None = None
    _offset: int = 0
    _inode: int = 0

    def read(self) -> None:
        """Take in the lines that have come since."""
        try:
            with open_regular(self.path) as file:
                about = os.fstat(file.fileno())
                if about.st_size < self._offset or about.st_ino != self._inode:
                    self.step = self._offset = 0
                    self._inode = about.st_ino
                file.seek(self._offset)
                content = file.read(MOST_AT_ONCE)
        except OSError:
            return  # not there yet
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                values = parse_json(line)
            except ValueError:
                continue  # a crash left half a line, and the next run went on behind it
            if isinstance(values, dict) and type(values.get("step")) is int and 0 <= values["step"] < 10**12:
                self.step = values["step"]
                self.loss = _number(values.get("loss"), self.loss)
                self.samples_per_second = _number(values.get("samples_per_second"), self.samples_per_second)


def _number(value: object, before: float | None) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else before


# A process may outlive a parent that was killed by SIGKILL, which can tell nobody. The kernel can. The command is
# started through this program, as code between fork and exec may deadlock if the parent has threads (torch, tqdm).
_FOLLOW = """
import os, signal, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, which outlasts exec
    if os.getppid() != parent:
        sys.exit(1)
try:
    os.execvp(command[0], command)
except OSError as error:
    print(f"atoll: cannot start {command[0]} ({error.strerror}): check that it is there", file=sys.stderr)
    sys.exit(2)
"""


@dataclass
class _Run:
    """A job, and what has become of it so far."""

    job: Job
    environment: Mapping[str, str]
    status: str = "waiting"
    reason: str = ""
    slot: Slot = field(default_factory=dict)
    restarts: int = 0
    _in_vain: int = 0  # restarts since a step was further than before
    _furthest: int = 0
    _furthest_at_start: int = 0
    _log_at_start: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _pace: tuple[float, int] | None = None  # when this process reached which step, first and last
    _latest: tuple[float, int] | None = None

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.job.folder / "metrics.jsonl")
        self.metrics.read()
        self._furthest = self.metrics.step

    @property
    def log(self) -> Path:
        return self.job.folder / "log.txt"

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def state(self) -> str:
        """The status for a person."""
        if self.status == "running" and self.restarts:
            return f"restarted {self.restarts}x"
        return self.status

    @property
    def seconds_left(self) -> float | None:
        """By the pace of this process, once it has gone some way."""
        if self._pace is None or self._latest is None or self._latest[1] <= self._pace[1] or not self.is_running:
            return None
        (since, first), (until, last) = self._pace, self._latest
        return (self.job.steps - last) * (until - since) / (last - first)

    def is_complete(self) -> bool:
        """Whether run.json says so, and for as many steps as are asked now."""
        try:
            about = read_json(self.job.folder / "run.json", "")
        except InputError:
            return False
        steps = about.get("steps_done", self.job.steps)
        return about.get("complete") is True and isinstance(steps, int) and steps >= self.job.steps

    def start(self, slot: Slot, note: str = "") -> None:
        self.slot = slot
        self._pace = self._latest = None
        self._furthest_at_start = self._furthest
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        unbuffered = {"PYTHONUNBUFFERED": "1"}  # or a process that is killed takes its last words with it
        try:
            self.job.folder.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(self.log):
                open_regular(self.log).close()  # no FIFO, and no link to a file of somebody else's
            with self.log.open("ab", buffering=0) as log:
                if note:
                    log.write(f"[{note}]\n".encode())
                self._log_at_start = os.fstat(log.fileno()).st_size
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _FOLLOW, str(os.getpid()), *self.job.command],
                    env={**os.environ, **threads, **unbuffered, **self.environment, **slot},
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
        """See how far the process is, and if it has ended, what that means."""
        if self._process is None:
            return
        code = self._process.poll()  # before the figures are read: then none of them comes later
        self._read_metrics()
        if code is None:
            return
        self._process = None
        if code == 0 and self.is_complete():
            self.status, self.metrics.step = "done", self.job.steps
        elif code == 2:
            self.status, self.reason = "failed", self._last_words() or "exit code 2"
        elif code == 0 or stopping:
            self.status = "stopped"
        else:
            self._crashed(code)

    def _read_metrics(self) -> None:
        before = self.metrics.step
        self.metrics.read()
        step = self.metrics.step
        self._furthest = max(self._furthest, step)
        if step != before:
            self._latest = (time.monotonic(), step)
            if self._pace is None or step < before:
                self._pace = self._latest

    def _crashed(self, code: int) -> None:
        how = _killed_by(-code) if code < 0 else f"exit code {code}"
        if self._furthest > self._furthest_at_start:
            self._in_vain = 0
        if self._in_vain >= MAX_RESTARTS:
            words = self._last_words()
            end = f"{words}, {how}" if words else how
            self.status, self.reason = "failed", f"{end}, also when restarted {MAX_RESTARTS} times"
            return
        self._in_vain += 1
        self.restarts += 1
        self.start(self.slot, f"{how}: restart {self.restarts}")

    def _last_words(self) -> str:
        """The last line that the process has written."""
        try:
            with open_regular(self.log) as log:
                text = _tail(log, self._log_at_start).decode("utf-8", "replace")
        except OSError:
            return ""
        lines = [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]
        return lines[-1].removeprefix("atoll: ")[:500] if lines else ""

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self.status = "stopping"

    def kill(self) -> None:
        """End the process and all that it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _tail(file: BinaryIO, start: int, limit: int = 1 << 16) -> bytes:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(start, end - limit))
    return file.read()


def _killed_by(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"killed by {name}" + (", most likely for lack of memory" if number == signal.SIGKILL else "")


def _see_through(runs: list[_Run], slots: Sequence[Slot], table: "_Table", asked: list[float]) -> None:
    """Until all jobs have ended or someone has asked to stop."""
    for run in runs:
        if run.is_complete():
            run.status, run.metrics.step = "done", run.job.steps
    waiting = deque(run for run in runs if run.status == "waiting")
    free, busy = deque(slots), list[_Run]()
    while (waiting or busy) and not asked:
        while waiting and free:
            run = waiting.popleft()
            run.start(free.popleft())
            busy.append(run)
        table.show()
        time.sleep(LOOK_EVERY)
        for run in busy:
            run.look()
        free.extend(run.slot for run in busy if not run.is_running)
        busy = [run for run in busy if run.is_running]
    table.show()


def _stop(runs: list[_Run], table: "_Table", asked: list[float]) -> None:
    """Let what still runs save its state; kill what takes too long, or all if asked once more."""
    for run in runs:
        run.terminate()
    deadline = time.monotonic() + GRACE
    while any(run.is_running for run in runs):
        # Two signals at once are one wish: shells and launchers often pass on what the process got already.
        if time.monotonic() > deadline or (asked and asked[-1] - asked[0] > 1):
            for run in runs:
                run.kill()
        table.show()
        time.sleep(LOOK_EVERY)
        for run in runs:
            run.look(stopping=True)
    table.show()


@contextmanager
def _asked_to_stop() -> Iterator[list[float]]:
    """When Ctrl-C or SIGTERM came: a list to look at, as an exception anywhere could lose a process just started."""
    asked: list[float] = []
    if threading.current_thread() is not threading.main_thread():  # no other may set handlers
        yield asked
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda *_: asked.append(time.monotonic()))
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Table:
    """Shows nothing."""

    def __init__(self, runs: list[_Run]) -> None:
        self.runs = runs

    def show(self) -> None:
        with suppress(OSError):  # a terminal or pipe that is gone must not end a training
            self.draw()

    def draw(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Bars(_Table):
    """A bar a job, waiting and finished ones as well."""

    def __init__(self, runs: list[_Run]) -> None:
        super().__init__(runs)
        width = max((len(run.job.name) for run in runs), default=0)
        self._bars = [
            tqdm(
                total=run.job.steps,
                desc=run.job.name.ljust(width),
                position=i,
                leave=True,
                dynamic_ncols=True,
                file=sys.stderr,
                bar_format="{desc} {percentage:3.0f}%|{bar:20}| {n:WIDTH}/{total}{postfix}".replace(
                    "WIDTH", str(len(str(run.job.steps)))
                ),
            )
            for i, run in enumerate(runs)
        ]

    def draw(self) -> None:
        for run, bar in zip(self.runs, self._bars, strict=True):
            bar.n = min(run.metrics.step, run.job.steps)
            bar.set_postfix_str(f"{run.state:<14}{_figures(run)}", refresh=False)
            bar.refresh()

    def close(self) -> None:
        for bar in self._bars:
            with suppress(OSError):
                bar.close()


class _Lines(_Table):
    """A line a job that has a new state; for those that run also from time to time, ever more seldom."""

    def __init__(self, runs: list[_Run]) -> None:
        super().__init__(runs)
        self._width = max((len(run.job.name) for run in runs), default=0)
        self._told = ["waiting"] * len(runs)
        self._start = self._last = time.monotonic()

    def draw(self) -> None:
        now = time.monotonic()
        is_time = now - self._last >= max(TELL_EVERY, (now - self._start) / 20)
        if is_time:
            self._last = now
        for i, run in enumerate(self.runs):
            if run.state != self._told[i] or (is_time and run.is_running):
                self._told[i] = run.state
                line = f"{run.job.name:<{self._width}}  {run.state:<14}{run.metrics.step}/{run.job.steps}"
                print(f"{line}  {_figures(run)}".rstrip(), file=sys.stderr, flush=True)


def _figures(run: _Run) -> str:
    if run.status == "failed":
        return printable(run.reason)
    loss, pace, left = run.metrics.loss, run.metrics.samples_per_second, run.seconds_left
    figures = [] if loss is None else [f"loss {loss:.4f}"]
    if run.is_running:
        figures += [] if pace is None else [f"{pace:.0f} samples/s"]
        figures += [] if left is None else [f"{tqdm.format_interval(left)} left"]
    return "  ".join(figures)


@contextmanager
def _table(runs: list[_Run], progress: bool) -> Iterator[_Table]:
    kind = _Table if not progress else _Bars if sys.stderr.isatty() else _Lines
    table = kind(runs)
    try:
        yield table
    finally:
        table.close()
