"""The local engine: runs jobs as processes of this machine.

The processes share nothing, just as on separate machines. Their state is read from the files that each run writes:
FOLDER/metrics.jsonl, and FOLDER/run.json, which says in the end that the run is complete.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import islice
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from typing import Any

from atoll.engines.engine import (
    TAIL,
    USUAL,
    Both,
    Function,
    Job,
    Look,
    Resources,
    Run,
    is_complete,
    latest_metrics,
    run_jobs,
)
from atoll.errors import InputError
from atoll.processes import die_with_parent, dying_with_parent
from atoll.storage import open_regular
from atoll.training.metrics_log import read_tail

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
"""The environment of a process, which its job may override. Unbuffered, so that a killed process's output is kept."""

Slot = Mapping[str, str]
"""The resources of one process: the environment variables that assign GPUs to it."""


class Local:
    """Runs one job per GPU in parallel, or per core if there is no GPU, or `at_a_time` jobs."""

    def __init__(self, device: str = "auto", at_a_time: int | None = None) -> None:
        self.device, self.at_a_time = device, at_a_time

    def slots(self, resources: Resources) -> list[Slot]:
        slots = find_slots(self.device, resources)
        return [slots[i % len(slots)] for i in range(self.at_a_time or len(slots))]

    def run(self, jobs: Sequence[Job], progress: bool = True) -> list[Run]:
        gpus = [job.resources.gpus for job in jobs if job.resources.gpus is not None]
        slots = self.slots(Resources(max([1, *(job.resources.cpus for job in jobs)]), max(gpus, default=None)))
        processes: list[LocalProcess | None] = [None] * len(slots)

        def start(job: Job, note: str) -> LocalProcess | None:
            for i, process in enumerate(processes):
                if process is None or process.popen.poll() is not None:
                    processes[i] = LocalProcess(job, slots[i], note)
                    return processes[i]
            return None

        return run_jobs(jobs, start, progress)

    def map(
        self, function: Function, items: Iterable[Any], resources: Resources = USUAL, then: Function | None = None
    ) -> Iterator[Any]:
        slots, context = self.slots(resources), get_context("spawn")
        call = function if then is None else Both(function, then)
        environments = context.SimpleQueue()
        for slot in slots:
            environments.put(dict(slot))
        try:
            with ProcessPoolExecutor(len(slots), context, _begin, (environments,)) as pool:
                yield from in_order(lambda item: pool.submit(call, item), Future.result, items, 2 * len(slots))
        except BrokenProcessPool as error:
            raise InputError(
                "a process was killed, perhaps for lack of memory: rerun the same command to resume, with fewer images "
                "at a time"
            ) from error


def in_order(submit: Function, result: Function, items: Iterable[Any], ahead: int) -> Iterator[Any]:
    """Submits items and yields their results in order, with at most `ahead` in flight."""
    rest = iter(items)
    waiting = [submit(item) for item in islice(rest, ahead)]
    while waiting:
        yield result(waiting.pop(0))
        waiting += [submit(item) for item in islice(rest, 1)]


def _begin(environments: "SimpleQueue[dict[str, str]]") -> None:
    """Initialises a process of a pool, which has its own GPU if there are any, and ends when its parent does."""
    import torch

    os.environ.update(environments.get())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    torch.set_num_threads(1)
    die_with_parent()


def find_slots(device: str = "auto", resources: Resources = USUAL) -> list[Slot]:
    """Returns one slot per GPU for auto and cuda, a single one for cuda:N, one per core for cpu and without GPUs.

    If a job needs several GPUs or cores, there are correspondingly fewer slots.
    """
    import torch  # here: the Ray engine's actors import this module and do not need torch

    if device.startswith("cuda:"):
        return [{}]
    num_gpus = 0 if device == "cpu" or resources.gpus == 0 else torch.cuda.device_count()
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    size, num = (resources.gpus or 1, num_gpus) if num_gpus or resources.gpus else (resources.cpus, cores)
    if num < size:
        kind = "GPUs" if num_gpus or resources.gpus else "CPUs"
        raise InputError(f"a job asks for {size} {kind}, and this machine has {num}: ask for fewer, or use a cluster")
    if num_gpus:
        names = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))).split(",")[:num_gpus]
        return [{"CUDA_VISIBLE_DEVICES": ",".join(names[i : i + size])} for i in range(0, num - size + 1, size)]
    return [{}] * (num // size)


class LocalProcess:
    """A job's process on this machine."""

    def __init__(self, job: Job, slot: Slot, note: str = "") -> None:
        self.job, self.log = job, job.folder / "log.txt"
        job.folder.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(self.log):
            open_regular(self.log).close()  # refuses FIFOs, and links that someone put there
        with self.log.open("ab", buffering=0) as log:
            log.write(note.encode())
            self._log_start = log.tell()
            self.popen = subprocess.Popen(
                dying_with_parent(job.command),
                env={**os.environ, **ENVIRONMENT, **slot, **job.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C at the terminal goes to this process alone, which forwards it
            )

    def look(self) -> Look:
        code = self.popen.poll()  # polled before reading the metrics, so that those of an ended process are complete
        complete = code == 0 and is_complete(self.job.folder, self.job.steps)
        words = "" if code is None else self._last_words()
        return Look(code, latest_metrics(self.job.folder), complete, words)

    def _last_words(self) -> str:
        """Returns the last line that the process wrote."""
        try:
            text = read_tail(self.log, TAIL, self._log_start).decode("utf-8", "replace")
        except OSError:
            return ""
        return re.split(r"[\r\n]", text.strip())[-1].strip().removeprefix("atoll: ")[:500]

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)
