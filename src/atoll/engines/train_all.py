"""All experts of a partition on one machine, and the router if asked for: `atoll train-all`."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from atoll.data.shards import Dataset
from atoll.data.view import refuse_inside
from atoll.diffusion.objective import get_objective
from atoll.engines.local import Job, Slot, find_slots, run_jobs
from atoll.errors import InputError, shown
from atoll.storage import alone, make_folder, read_json
from atoll.training.distributed import Distributed
from atoll.training.dry_run import Forecast, PreviewedTask, forecast_of
from atoll.training.expert import ExpertTask
from atoll.training.loop import build_task
from atoll.training.memory import available, in_words
from atoll.training.router import RouterTask, num_clusters_of
from atoll.training.settings import ExpertSettings, RouterSettings, Settings, as_flags, refuse_another


@dataclass(frozen=True)
class Part:
    """One process to be: the expert of a cluster, or the router."""

    folder: Path
    settings: ExpertSettings | RouterSettings
    cluster: int | None = None  # None: it is the router
    init: Path | None = None

    @property
    def name(self) -> str:
        return "router" if isinstance(self.settings, RouterSettings) else f"expert {self.cluster}"

    def job(self, data: Path) -> Job:
        """Returns the command that would train it alone."""
        if isinstance(self.settings, RouterSettings):
            return job_of(self.name, ["train-router", str(data)], self.folder, self.settings)
        verb = ["train", str(data), "--cluster", str(self.cluster)]
        verb += [] if self.init is None else ["--init", str(self.init)]
        return job_of(f"{self.name} {self.settings.objective}", verb, self.folder, self.settings)

    def task(self, data: Path, device: torch.device) -> PreviewedTask:
        settings, dataset = self.settings, Dataset.open(data, self.cluster)
        if isinstance(settings, RouterSettings):
            return RouterTask(dataset, settings, device)
        return ExpertTask(dataset, settings, device, self.init)


def train_all(
    data: Path,
    out: Path,
    settings: ExpertSettings,
    objectives: str | None = None,
    experts: str = "all",
    init: str | None = None,
    router: RouterSettings | None = None,
    at_a_time: int | None = None,
    progress: bool = True,
    dry_run: bool = False,
) -> Sequence[str]:
    """Trains each expert by the command that would train it alone; returns lines for the user."""
    slots = find_slots(settings.device)
    if at_a_time is not None:
        if at_a_time < 1:
            raise InputError(f"--at-a-time must be at least 1, but is {at_a_time}")
        slots = [slots[i % len(slots)] for i in range(at_a_time)]
    num = num_clusters_of(Dataset.open(data, partial=True))
    names, inits = parse_objectives(objectives or settings.objective, num), parse_inits(init, num)
    for folder in inits:
        if folder is not None and not folder.is_dir():
            raise InputError(f"--init {folder} is not a folder: give an expert, or what `atoll convert` has made")
    parts = [
        Part(out / f"expert_{k}", replace(settings, objective=names[k]), k, inits[k])
        for k in _parse_numbers(experts, num)
    ]
    if router is not None:
        parts.append(Part(out / "router", router))
    jobs = [part.job(data) for part in parts]
    refuse_inside(out, data)
    if dry_run:
        return _preview(parts, data, slots, settings)
    make_folder(out)
    with alone(out):
        results = run_jobs(jobs, slots, progress=progress, environment={"OMP_NUM_THREADS": str(settings.threads)})
    lines = [f"{out}: {sum(r.status == 'done' for r in results)} of {len(results)} are trained"]
    for job, result in zip(jobs, results, strict=True):
        loss = f", held-out loss {_held_out(job.folder)}" if result.status == "done" else ""
        lines.append(f"  {result.name:16} {result.status} at step {result.step}{loss}")
    return lines


def _preview(parts: Sequence[Part], data: Path, slots: Sequence[Slot], settings: ExpertSettings) -> list[str]:
    """Returns what would be trained, and the memory it would take."""
    sizes = []
    forecasts: dict[Any, Forecast] = {}  # networks of the same size take the same
    lines = [f"{'':10} {'objective':16} {'steps':>8} {'batch':>6} {'parameters':>11} {'memory':>9}  first weights"]
    for part in parts:
        distributed = Distributed(part.settings)
        task = build_task(partial(part.task, data), distributed.device)
        config = task.network.config
        if config not in forecasts:
            forecasts[config] = forecast_of(task, part.settings, distributed)
        sizes.append(forecasts[config].memory.total)
        num_parameters = sum(p.numel() for p in task.network.parameters())
        objective = part.settings.objective if isinstance(part.settings, ExpertSettings) else "clusters"
        lines.append(
            f"{part.name:10} {objective:16} {part.settings.steps:>8} {part.settings.batch:>6} "
            f"{num_parameters / 1e6:>10.2f}M {in_words(sizes[-1]):>9}  {part.init or 'random'}"
        )
    return [*lines, *_together(sizes, slots, settings)]


def _together(sizes: Sequence[int], slots: Sequence[Slot], settings: ExpertSettings) -> list[str]:
    """Returns how many run at a time, and whether there is the memory for it."""
    device = settings.torch_device
    num = num_per_device = min(len(slots), len(sizes))
    if device.type == "cuda":  # each GPU has its own memory
        num_per_device = min(sum(slot == slots[0] for slot in slots), len(sizes))

    def total(num: int) -> int:
        return sum(sorted(sizes, reverse=True)[:num])  # the largest may meet

    needed, free = total(num_per_device), available(device)
    if device.type == "cuda":
        line = f"{num} at a time, {num_per_device} on a GPU: {in_words(needed)} of its memory"
    else:
        line = f"{num} at a time: {in_words(needed)} of memory in all"
    if needed <= free:
        return [line]
    fit = max((n for n in range(num_per_device) if total(n) <= free), default=0)
    smaller = "use --micro-batch, --checkpointing or a smaller --model"
    advice = f"use --at-a-time {fit * num // num_per_device}" if fit else smaller
    return [line, f"this is more than the {in_words(free)} there are: {advice}"]


def _held_out(folder: Path) -> str:
    """Returns the loss that the card of a trained network tells."""
    value: Any = read_json(folder / "config.json", "train it again")
    for key in ("training", "held_out", "loss"):
        value = value.get(key) if isinstance(value, dict) else None
    return f"{value:.4f}" if isinstance(value, float) else shown(value)


def job_of(name: str, verb: list[str], folder: Path, settings: Settings) -> Job:
    """Returns the command of one process; a folder that holds another run is refused before any starts."""
    if (folder / "run.json").exists():
        before = read_json(folder / "run.json", "remove the folder, or choose another --out")
        refuse_another(folder, before.get("settings", {}), settings)
    command = [sys.executable, "-m", "atoll.cli.main", *verb, "--out", str(folder), *as_flags(settings)]
    return Job(name, command, folder, settings.steps)


def _parse_numbers(text: str, num: int) -> list[int]:
    if text == "all":
        return list(range(num))
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < num for part in parts):
        raise InputError(f"--experts must be all, or numbers from 0 to {num - 1} such as 0,2, but is {text!r}")
    return sorted({int(part) for part in parts})


def parse_objectives(text: str, num_experts: int) -> list[str]:
    """Returns the objective of each expert: "fm" for all, "2ddpm:6fm" in order, or "0=ddpm,3=ddpm,*=fm" by number."""
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
    """Returns the first weights of each expert: a folder for all, or "0=a,*=b" by number; None for who is not named."""
    if text is None or not re.match(r"\s*(\*|[0-9]+)\s*=", text):
        return [None if text is None else Path(text)] * num_experts
    return [None if name is None else Path(name) for name in _by_number(text, num_experts, "folders of --init")]


def _by_number(
    text: str, num_experts: int, what: str, check: Callable[[str], object] = lambda name: None
) -> list[str | None]:
    """Returns the name of each expert in "0=a,3=b,*=c"; None for who is not named."""
    named: dict[int | None, str] = {}  # None for all that are not named
    for part in text.split(","):
        match = re.fullmatch(r"(\*|[0-9]{1,9})\s*=\s*(.+)", part.strip())
        if match is None:
            raise InputError(f"{part!r} in the {what} {text!r} must be NUMBER=NAME, or *=NAME for all others")
        expert = None if match[1] == "*" else int(match[1])
        if expert is not None and expert >= num_experts:
            raise InputError(f"the {what} name expert {expert}, but experts are 0 to {num_experts - 1} here")
        if expert in named:
            name = "*" if expert is None else f"expert {expert}"
            raise InputError(f"the {what} {text!r} name {name} twice: name it once")
        check(match[2])
        named[expert] = match[2]
    return [named.get(k, named.get(None)) for k in range(num_experts)]
