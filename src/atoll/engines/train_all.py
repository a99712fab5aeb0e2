"""All experts of a partition on one machine, and the router if asked for: `atoll train-all`."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from atoll.data.shards import Dataset
from atoll.data.view import refuse_inside
from atoll.engines.local import Job, Slot, find_slots, parse_inits, parse_objectives, run_jobs
from atoll.errors import InputError, shown
from atoll.storage import alone, make_folder, read_json
from atoll.training.distributed import Team
from atoll.training.dry_run import Drawing, available, circumstances, draw, num_parameters, total_of
from atoll.training.expert import ExpertTask
from atoll.training.loop import Task, made
from atoll.training.memory import Memory, in_words, predict
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
        """The command that would train it alone."""
        if isinstance(self.settings, RouterSettings):
            return job_of(self.name, ["train-router", str(data)], self.folder, self.settings)
        verb = ["train", str(data), "--cluster", str(self.cluster)]
        verb += [] if self.init is None else ["--init", str(self.init)]
        return job_of(f"{self.name} {self.settings.objective}", verb, self.folder, self.settings)

    def maker(self, data: Path) -> Callable[[torch.device], Task]:
        settings, dataset = self.settings, Dataset.open(data, self.cluster)
        if isinstance(settings, RouterSettings):
            return lambda device: RouterTask(dataset, settings, device)
        return lambda device: ExpertTask(dataset, settings, device, self.init)


def parts_of(
    data: Path,
    out: Path,
    settings: ExpertSettings,
    objectives: str | None,
    experts: str,
    init: str | None,
    router: RouterSettings | None,
) -> list[Part]:
    num = num_clusters_of(Dataset.open(data, partial=True))
    kinds = parse_objectives(objectives or settings.objective, num)
    inits = parse_inits(init, num)
    parts = [
        Part(out / f"expert_{k}", replace(settings, objective=kinds[k]), k, inits[k]) for k in _numbers(experts, num)
    ]
    for part in parts:
        if part.init is not None and not part.init.is_dir():
            raise InputError(f"--init {part.init} is not a folder: give an expert, or what `atoll convert` has made")
    return parts if router is None else [*parts, Part(out / "router", router)]


def slots_of(settings: ExpertSettings, at_a_time: int | None) -> list[Slot]:
    slots = find_slots(settings.device)
    if at_a_time is None:
        return slots
    if at_a_time < 1:
        raise InputError(f"--at-a-time must be at least 1, but is {at_a_time}")
    return [slots[i % len(slots)] for i in range(at_a_time)]


def train_everyone(
    data: Path,
    out: Path,
    settings: ExpertSettings,
    objectives: str | None = None,
    experts: str = "all",
    init: str | None = None,
    router: RouterSettings | None = None,
    at_a_time: int | None = None,
    progress: bool = True,
) -> Sequence[str]:
    """Each expert by the command that would train it alone; returns what to tell the user."""
    slots = slots_of(settings, at_a_time)
    jobs = [part.job(data) for part in parts_of(data, out, settings, objectives, experts, init, router)]
    refuse_inside(out, data)
    make_folder(out)
    with alone(out):
        results = run_jobs(jobs, slots, progress=progress, environment={"OMP_NUM_THREADS": str(settings.threads)})
    told = [f"{out}: {sum(r.status == 'done' for r in results)} of {len(results)} are trained"]
    for job, result in zip(jobs, results, strict=True):
        judged = f", held-out loss {_held_out(job.folder)}" if result.status == "done" else ""
        told.append(f"  {result.name:16} {result.status} at step {result.step}{judged}")
    return told


def preview_everyone(
    data: Path,
    out: Path,
    settings: ExpertSettings,
    objectives: str | None = None,
    experts: str = "all",
    init: str | None = None,
    router: RouterSettings | None = None,
    at_a_time: int | None = None,
) -> Sequence[str]:
    """What `train_everyone` would do, and the memory it would take."""
    slots = slots_of(settings, at_a_time)
    parts = parts_of(data, out, settings, objectives, experts, init, router)
    memories = []
    lines = [f"{'':10} {'objective':16} {'steps':>8} {'batch':>6} {'parameters':>11} {'memory':>9}  first weights"]
    grids: dict[Any, Drawing] = {}
    base: int | None = None
    for part in parts:
        part.job(data)  # which refuses a folder that holds another run
        team = Team(part.settings)
        task = made(part.maker(data), team.device)
        around = circumstances(task, part.settings, team, base)
        base, config = around["base"], task.network.config
        memory = predict(config, part.settings, **around)
        if config not in grids and memory.total <= available(team.device):
            grids[config] = draw(task, team)  # of the others of its size it would be the same
        memory = predict(config, part.settings, **around, drawing=grids.get(config, Drawing()).num_bytes)
        memories.append(memory)
        objective = part.settings.objective if isinstance(part.settings, ExpertSettings) else "clusters"
        lines.append(
            f"{part.name:10} {objective:16} {part.settings.steps:>8} {part.settings.batch:>6} "
            f"{num_parameters(task) / 1e6:>10.2f}M {in_words(memory.total):>9}  {part.init or 'random'}"
        )
    return [*lines, *_together(memories, slots, settings)]


def _together(memories: Sequence[Memory], slots: Sequence[Slot], settings: ExpertSettings) -> list[str]:
    """How many run at a time, and whether there is the memory for it."""
    device = settings.torch_device
    num = min(len(slots), len(memories))
    if device.type == "cuda":
        here = [slot for slot in slots if slot == slots[0]]  # each GPU has its own
        num_here = min(len(here), len(memories))
        told = f"{num} at a time, {num_here} on a GPU: {in_words(total_of(memories, num_here))} of its memory"
    else:
        num_here = num
        told = f"{num} at a time: {in_words(total_of(memories, num))} of memory in all"
    free = available(device)
    if total_of(memories, num_here) <= free:
        return [told]
    fit = max((n for n in range(num_here) if total_of(memories, n) <= free), default=0)
    smaller = "use --micro-batch, --checkpointing or a smaller --model"
    advice = f"use --at-a-time {fit * num // num_here}" if fit else smaller
    return [told, f"this is more than the {in_words(free)} there are: {advice}"]


def _held_out(folder: Path) -> str:
    """The loss that the card of a trained network tells."""
    found: Any = read_json(folder / "config.json", "train it again")
    for key in ("training", "held_out", "loss"):
        found = found.get(key) if isinstance(found, dict) else None
    return f"{found:.4f}" if isinstance(found, float) else shown(found)


def job_of(name: str, verb: list[str], folder: Path, settings: Settings) -> Job:
    """The command of one process; a folder that holds another run is refused before any starts."""
    if (folder / "run.json").exists():
        before = read_json(folder / "run.json", "remove the folder, or choose another --out")
        refuse_another(folder, before.get("settings", {}), settings)
    command = [sys.executable, "-m", "atoll.cli.main", *verb, "--out", str(folder), *as_flags(settings)]
    return Job(name, command, folder, settings.steps)


def _numbers(text: str, num: int) -> list[int]:
    if text == "all":
        return list(range(num))
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < num for part in parts):
        raise InputError(f"--experts must be all, or numbers from 0 to {num - 1} such as 0,2, but is {text!r}")
    return sorted({int(part) for part in parts})
