"""`atoll serve --spread`: runs every expert in its own process, called like a remote one (`remote.py`).

On a CPU the experts of a step are then computed in parallel. Threads would gain little: experts are many small
operations, each of which needs the interpreter lock. A lost process is restarted; meanwhile its weight goes to the
others.
"""

import json
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from atoll.cards import CONFIG, ModelIndex
from atoll.config import build
from atoll.engines.local import find_slots
from atoll.errors import InputError
from atoll.networks.dit import DiTConfig
from atoll.processes import start_with_pipe
from atoll.sampling.expert import FolderExpert
from atoll.sampling.pipeline import get_dtype
from atoll.serving.guard import Refusal
from atoll.serving.owner import Owner
from atoll.serving.remote import Carrier, RemoteExpert
from atoll.storage import read_json, reason_of
from atoll.tensors import get_device

FAILED = 500
ADVICE = "copy the model again"
HANGING = 300.0  # seconds without a response after which a process is killed; large experts take long on a CPU
PATIENCE = 10.0  # seconds that a process has to finish its current request, at shutdown


class ExpertActor:
    """Computes the velocities of one expert in its own process, on this machine or on a node."""

    def __init__(self, folder: Path, samples: int, options: Mapping[str, Any]) -> None:
        dtype = options.get("dtype")
        expert = FolderExpert(
            folder, conversion=options.get("conversion"), dtype=None if dtype is None else get_dtype(dtype),
            device=get_device(options["device"]), index=ModelIndex.read(folder.parent),
        )  # fmt: skip
        self._owner = Owner(expert, samples)

    def answer(self, body: bytes | None) -> tuple[int, bytes]:
        """Returns status and velocities; without a body, the expert's card."""
        if body is None:
            return 200, json.dumps(self._owner.expert.card.values()).encode()
        try:
            return 200, self._owner.answer(body, "")
        except Refusal as refusal:
            return refusal.status, refusal.message.encode()


def spread_experts(
    folder: Path, options: Mapping[str, Any], carry: Callable[[Path], Carrier]
) -> dict[int, RemoteExpert]:
    """Returns the experts of a model's folder that are not `elsewhere` already, each started by `carry`."""
    device, known = get_device(options["device"]), options.get("elsewhere") or {}
    carriers: dict[int, Carrier] = {}
    try:
        for k, part in enumerate(ModelIndex.read(folder).experts):
            if part is not None and k not in known:
                carriers[k] = carry(folder / part.folder)
        return {
            k: RemoteExpert(f"process:expert_{k}", device=device, carrier=carrier) for k, carrier in carriers.items()
        }
    except (InputError, OSError) as error:
        for carrier in carriers.values():
            carrier.close()
        if isinstance(error, InputError):
            raise
        raise InputError(f"{error}: end others, and try again") from error


def spread_here(folder: Path, options: Mapping[str, Any], samples: int) -> dict[int, RemoteExpert]:
    """Returns the experts, each in a process of this machine; they share its cores."""
    index = ModelIndex.read(folder)
    threads = max(1, min(torch.get_num_threads(), len(find_slots("cpu")) // len(index.experts)))
    torch.set_num_threads(threads)  # in this process too, whose idle threads would take the others' cores
    own = {name: options.get(name) for name in ("device", "dtype", "conversion")}
    configs = {
        k: build(DiTConfig, read_json(folder / part.folder / CONFIG, ADVICE).get("architecture"), f"{part.folder}")
        for k, part in enumerate(index.experts)
        if part is not None
    }
    experts = spread_experts(folder, options, lambda part: ProcessCarrier(part, samples, own, threads))
    for k, expert in experts.items():
        expert.config = configs[k]
    return experts


class ProcessCarrier:
    """Carries a remote expert's requests to its process, which is restarted if it is lost."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments, self._lock, self._closed = arguments, threading.Lock(), False
        self._start()
        # Must run before multiprocessing's own exit handler, which joins the process but does not tell it to exit.
        self._at_exit = Finalize(None, self.close, exitpriority=10)

    def _start(self) -> None:
        self._pipe, self._process = start_with_pipe(_run, *self._arguments, daemon=True)

    def request(self, method: str, path: str, body: bytes | None, largest: int) -> tuple[int, bytes]:
        with self._lock:
            if not self._process.is_alive() and not self._closed:
                self._end()
                self._start()
            try:
                self._pipe.send_bytes(body or b"")
                if not self._pipe.poll(HANGING):
                    self._process.kill()
                    raise OSError(f"its process did not answer within {HANGING:g} seconds and was ended")
                answer = self._pipe.recv_bytes()
            except EOFError as error:
                raise OSError("its process has ended") from error
        status, content = int.from_bytes(answer[:2], "big"), answer[2:]
        if status == FAILED:
            raise OSError(content.decode())
        return status, content

    def close(self) -> None:
        """Ends the process after its current request."""
        with self._lock:
            self._closed = True
            self._end()
        self._at_exit.cancel()

    def _end(self) -> None:
        self._pipe.close()  # on EOF the process exits, also if this one is killed
        self._process.join(PATIENCE)
        self._process.kill()
        self._process.join()


def _run(pipe: Connection, folder: Path, samples: int, options: Mapping[str, Any], threads: int) -> None:
    """Answers requests until the other end of the pipe is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the server handles them: it has images to finish
    torch.set_num_threads(threads)
    actor: ExpertActor | None = None
    while True:
        try:
            body = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            actor = actor or ExpertActor(folder, samples, options)
            status, content = actor.answer(body or None)
        except Exception as error:  # an unexpected error fails this request, not the process
            status, content = FAILED, (reason_of(error) or type(error).__name__).encode()
        pipe.send_bytes(status.to_bytes(2, "big") + content)
