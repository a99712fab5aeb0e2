"""The Ray engine: runs the same jobs on the nodes of a cluster, wherever Ray finds resources.

Each job has an actor, which reserves its resources and starts its process on a node. If the actor or node dies, the
process saves a checkpoint, if it still can, and ends; the job is restarted elsewhere.
"""

import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from atoll.engines.engine import GRACE, MAX_LOSSES, USUAL, Both, Function, Job, Look, Resources, Run, run_jobs
from atoll.engines.local import LocalProcess, in_order
from atoll.errors import InputError
from atoll.storage import alone, reason_of

LOST = -1  # exit code of a process whose actor or node is gone
PATIENCE = 120.0  # seconds for a node to report its versions


class Ray:
    """Runs jobs and maps functions on a Ray cluster."""

    def __init__(self, address: str | None = None, device: str = "auto", at_a_time: int | None = None) -> None:
        from atoll.encoders.pretrained import require  # here: it imports torch, which actors do not need

        self.ray, self.device, self.at_a_time = require("ray", "ray"), device, at_a_time
        if not self.ray.is_initialized():
            self._connect(address)
        self._check_nodes()

    def _connect(self, address: str | None) -> None:
        address = address or os.environ.get("RAY_ADDRESS")
        try:
            if address and (place := re.search(r"([^/]+):(\d{1,5})$", address)):
                # Tests the connection first, since Ray itself would wait for many minutes.
                socket.create_connection((place[1].strip("[]"), int(place[2])), timeout=10).close()
            self.ray.init(address or "auto", log_to_driver=False, logging_level="error")
        except (OSError, ValueError, OverflowError, RuntimeError) as error:
            where, reason = f"at {address}" if address else "on this machine", reason_of(error)[:200]
            raise InputError(
                f"there is no Ray cluster {where} ({reason}): start one by `ray start --head`, or give its --address"
            ) from error

    def _check_nodes(self) -> None:
        """Raises an InputError if a node has other versions of Python, torch or atoll."""
        wanted = {"Python": platform.python_version(), "torch": version("torch"), "atoll": version("atoll")}

        def find() -> dict[str, str]:  # a closure, which is sent by value: a node may not have atoll
            import importlib.metadata
            import platform

            versions = {"Python": platform.python_version()}
            for name in ("torch", "atoll"):
                try:
                    versions[name] = importlib.metadata.version(name)
                except importlib.metadata.PackageNotFoundError:
                    versions[name] = ""
            return versions

        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        task = self.ray.remote(find)
        answers = [
            task.options(num_cpus=0, scheduling_strategy=strategy(node["NodeID"], soft=False)).remote()
            for node in nodes
        ]
        for node, answer in zip(nodes, answers, strict=True):
            try:
                versions = self.ray.get(answer, timeout=PATIENCE)
            except self.ray.exceptions.RayError:
                continue  # the node is gone, so it will not be used
            for name, needed in wanted.items():
                if versions[name] != needed:
                    has = f"{name} {versions[name]}" if versions[name] else f"no {name}"
                    raise InputError(
                        f"the node {node['NodeManagerAddress']} has {has}, and here it is {needed}: install the same "
                        "version on every node"
                    )

    def needed(self, resources: Resources) -> dict[str, float]:
        """Returns the resources that Ray reserves for a job; raises an InputError if no node has them."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        has_gpus = self.device != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes)
        gpus = int(has_gpus) if resources.gpus is None else resources.gpus
        if not any(node.get("CPU", 0) >= resources.cpus and node.get("GPU", 0) >= gpus for node in nodes):
            there = "; ".join(
                sorted({f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes})
            )
            raise InputError(
                f"a job asks for {resources.cpus} CPUs and {gpus} GPUs, and no node of the cluster has them (there are "
                f"nodes with {there}): ask for less, or add a node"
            )
        return {"num_cpus": resources.cpus, "num_gpus": gpus}

    def run(self, jobs: Sequence[Job], progress: bool = True) -> list[Run]:
        reserved = {job.name: self.needed(job.resources) for job in jobs}
        here = Path.cwd()
        processes: list[RayProcess] = []

        def start(job: Job, note: str) -> RayProcess | None:
            if self.at_a_time is not None and sum(not process.has_ended for process in processes) >= self.at_a_time:
                return None
            job = replace(job, folder=here / job.folder)
            if job.is_shared:
                job.folder.mkdir(parents=True, exist_ok=True)
            processes.append(RayProcess(self.ray, job, note, here, reserved[job.name]))
            return processes[-1]

        return run_jobs(jobs, start, progress)

    def map(
        self, function: Function, items: Iterable[Any], resources: Resources = USUAL, then: Function | None = None
    ) -> Iterator[Any]:
        gpus = self.needed(resources)["num_gpus"]
        num_workers = max(1, int(self.ray.cluster_resources().get("CPU", 1) // resources.cpus))
        encoders: list[_Encoder] = []
        if then is not None and gpus:
            free = self.ray.available_resources().get("GPU", 0)  # does not wait for GPUs of other jobs
            sent = self.ray.put(then)
            encoders = [_Encoder(self.ray, sent, gpus) for _ in range(max(1, int(free // gpus)))]
            num_workers += len(encoders)
            resources = replace(resources, gpus=0)
        elif then is not None:
            function = Both(function, then)
        task = self.ray.remote(_call).options(**self.needed(resources), max_retries=MAX_LOSSES)
        here, shared = str(Path.cwd()), self.ray.put(function)

        def submit(item: Any) -> Any:
            reference = task.remote(here, shared, item)
            # Results of reading stay in their node's object store until an encoder fetches them.
            return min(encoders, key=lambda encoder: encoder.num_waiting).submit(reference) if encoders else reference

        def result(reference: Any) -> Any:
            try:
                return self.ray.get(reference)
            except self.ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, InputError) else error from None
            except self.ray.exceptions.RayError as error:
                raise InputError(
                    f"a worker was lost {MAX_LOSSES} times at the same piece of work ({reason_of(error)[:200]}): look "
                    "for what ends it in the cluster's logs, often a lack of memory, and rerun the same command"
                ) from error

        try:
            yield from in_order(submit, result, items, 2 * num_workers)
        finally:
            for encoder in encoders:
                encoder.end()


def _call(folder: str, function: Function, item: Any) -> Any:
    """Runs on a node: calls the function in the folder that relative paths refer to."""
    import torch

    torch.set_num_threads(1)
    with suppress(OSError):
        os.chdir(folder)
    return function(item)


class Caller:
    """Runs on a node: an actor for a function that loads a network at the first call and keeps it."""

    def __init__(self, function: Function) -> None:
        self._function = function

    def call(self, result: Any) -> Any:
        return self._function(result)


class _Encoder:
    """An actor that keeps GPUs for a function. If it dies, Ray restarts it and repeats its unfinished calls."""

    def __init__(self, ray: Any, function: Any, gpus: float) -> None:
        options = {"num_cpus": 0, "num_gpus": gpus, "max_restarts": -1, "max_task_retries": MAX_LOSSES}
        self._ray, self._actor = ray, ray.remote(Caller).options(**options).remote(function)
        self._waiting: list[Any] = []

    @property
    def num_waiting(self) -> int:
        if self._waiting:
            _, self._waiting = self._ray.wait(
                self._waiting, num_returns=len(self._waiting), timeout=0, fetch_local=False
            )
        return len(self._waiting)

    def submit(self, reference: Any) -> Any:
        self._waiting.append(self._actor.call.remote(reference))
        return self._waiting[-1]

    def end(self) -> None:
        self._ray.kill(self._actor)


class Actor:
    """Runs on a node: starts a job's process and reports its state."""

    def start(self, job: Job, note: str, here: Path, python: str) -> Look:
        with suppress(OSError):
            os.chdir(here)  # on a node that does not share the folder, only absolute paths work
        if job.is_shared and not job.folder.is_dir():
            raise OSError(
                f"the node {socket.gethostname()} does not see {job.folder}, give --out in a folder that all nodes "
                "share, or a --mirror"
            )
        command = [sys.executable if word == python else word for word in job.command]
        _wait_until_free(job.folder)
        self.process = LocalProcess(replace(job, command=command), {}, note)
        return self.look()

    def look(self) -> Look:
        return self.process.look()

    def send(self, number: int) -> None:
        self.process.send(number)


def _wait_until_free(folder: Path) -> None:
    """Waits until the process of a lost actor has saved a checkpoint and released the folder."""
    deadline = time.monotonic() + GRACE
    while folder.exists() and time.monotonic() < deadline:
        try:
            with alone(folder):
                return
        except InputError:
            time.sleep(0.1)


class RayProcess:
    """A job's process on some node, with the state that its actor last reported."""

    def __init__(self, ray: Any, job: Job, note: str, here: Path, needed: Mapping[str, float]) -> None:
        self.ray, self.has_ended = ray, False
        self._actor = ray.remote(Actor).options(**needed).remote()
        self._answer = self._actor.start.remote(job, note, here, sys.executable)
        self._seen: Look | None = None

    def look(self) -> Look | None:
        ready, _ = self.ray.wait([self._answer], timeout=0)
        if ready and not self.has_ended:
            try:
                self._seen = self.ray.get(self._answer)
            except self.ray.exceptions.RayTaskError as error:
                if not isinstance(error.cause, OSError):
                    raise
                self._seen = Look(2, {}, False, f"cannot be started: {reason_of(error.cause)}")
            except self.ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[-1].strip()
                self._seen = Look(LOST, {}, False, "", f"lost with its worker or node ({reason[:300]})")
            if self._seen.code is None:
                self._answer = self._actor.look.remote()
            else:
                self._end(self._seen)
        return self._seen

    def _end(self, look: Look) -> None:
        """Records the final state and releases the resources."""
        self._seen, self.has_ended = look, True
        self.ray.kill(self._actor)

    def send(self, number: int) -> None:
        if self._seen is None:  # it has not started
            self._end(Look(LOST, {}, False, "", "stopped"))
        else:
            self._actor.send.remote(number)
