"""All experts of a partition on one machine, and the router if asked for: `atoll train-all`."""

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from atoll.data.shards import Dataset
from atoll.errors import InputError
from atoll.files import alone, make_folder, read_json
from atoll.training.fleet import Job, find_slots, parse_objectives, run_jobs
from atoll.training.router import num_clusters_of
from atoll.training.rows import refuse_inside
from atoll.training.settings import ExpertSettings, RouterSettings, Settings, as_flags, difference, read_recipe


def train_everyone(
    data: Path,
    out: Path,
    settings: ExpertSettings,
    objectives: str | None = None,
    experts: str = "all",
    router: bool = False,
    at_a_time: int | None = None,
    recipe: Path | None = None,
    progress: bool = True,
) -> Sequence[str]:
    """Each expert by the command that would train it alone; returns what to tell the user."""
    num = num_clusters_of(Dataset.open(data, partial=True))
    kinds = parse_objectives(objectives or settings.objective, num)
    chosen = _numbers(experts, num)
    slots = find_slots(settings.device)
    if at_a_time is not None:
        if at_a_time < 1:
            raise InputError(f"--at-a-time must be at least 1, but is {at_a_time}")
        slots = [slots[i % len(slots)] for i in range(at_a_time)]
    jobs = []
    for k in chosen:
        mine = replace(settings, objective=kinds[k])
        jobs.append(
            job_of(f"expert {k} {kinds[k]}", ["train", str(data), "--cluster", str(k)], out / f"expert_{k}", mine)
        )
    if router:
        # What differs from the recipe was set by flags, and flags are for everyone.
        shared = {f.name: getattr(settings, f.name) for f in fields(Settings)}
        usual = None if recipe is None else read_recipe(recipe, ExpertSettings)
        flags = {name: value for name, value in shared.items() if usual is None or getattr(usual, name) != value}
        plan = replace(RouterSettings() if recipe is None else read_recipe(recipe, RouterSettings), **flags)
        jobs.append(job_of("router", ["train-router", str(data)], out / "router", plan))
    refuse_inside(out, data)
    make_folder(out)
    with alone(out):
        results = run_jobs(jobs, slots, progress=progress, environment={"OMP_NUM_THREADS": str(settings.threads)})
    told = [f"{out}: {sum(r.status == 'done' for r in results)} of {len(results)} are trained"]
    for job, result in zip(jobs, results, strict=True):
        judged = ""
        if result.status == "done":
            held_out = read_json(job.folder / "config.json", "train it again")["training"]["held_out"]
            judged = f", held-out loss {held_out['loss']:.4f}"
        told.append(f"  {result.name:16} {result.status} at step {result.step}{judged}")
    return told


def job_of(name: str, verb: list[str], folder: Path, settings: Settings) -> Job:
    """The command of one process; a folder that holds another run is refused before any starts."""
    if (folder / "run.json").exists():
        before = read_json(folder / "run.json", "remove the folder, or choose another --out")
        if found := difference(before.get("settings", {}), settings):
            raise InputError(f"{folder} was begun with {found}: give the same command to go on, or another --out")
    command = [sys.executable, "-m", "atoll.cli.main", *verb, "--out", str(folder), *as_flags(settings)]
    return Job(name, command, folder, settings.steps)


def _numbers(text: str, num: int) -> list[int]:
    if text == "all":
        return list(range(num))
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < num for part in parts):
        raise InputError(f"--experts must be all, or numbers from 0 to {num - 1} such as 0,2, but is {text!r}")
    return sorted({int(part) for part in parts})
