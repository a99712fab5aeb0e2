"""`atoll train-all`: trains all experts of a partition, and optionally the router."""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atoll.cards import ModelIndex, PartitionCard
from atoll.data.local_copy import local_copy
from atoll.data.shards import Dataset
from atoll.data.view import refuse_inside
from atoll.diffusion.objective import get_objective
from atoll.engines.engine import USUAL, Engine, Job, Resources, Run
from atoll.engines.local import Local, Slot
from atoll.errors import InputError
from atoll.sampling.assemble import find_model
from atoll.storage import read_json, work_folder
from atoll.training.distill import resolved_settings
from atoll.training.distributed import Distributed
from atoll.training.dry_run import forecast
from atoll.training.expert import ExpertTask
from atoll.training.loop import build_task
from atoll.training.memory import available, in_words
from atoll.training.mirror import Mirror
from atoll.training.router import RouterTask
from atoll.training.settings import DistillSettings, ExpertSettings, RouterSettings, as_flags, refuse_another
from atoll.training.task import CaptionedTask

TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]  # launches several processes for one network


class Part(NamedTuple):
    """An expert, a monolith, a student or a router, trained by a process of its own."""

    name: str
    folder: Path
    settings: ExpertSettings | RouterSettings | DistillSettings
    data: Path
    cluster: int | None = None  # of an expert or its student; None: all of the data
    init: "Part | Path | None" = None  # the part or folder whose weights it starts from
    teacher: Path | None = None  # of a student
    allow_missing: bool = False  # whether experts of the teacher may be missing
    reuse: Path | None = None  # the few-step student whose trajectories this one trains on
    mirror: str | None = None  # a URL that its folder is copied to

    @property
    def init_folder(self) -> Path | None:
        return self.init.first_weights if isinstance(self.init, Part) else self.init

    @property
    def first_weights(self) -> Path:
        """Returns the folder of initial weights for parts that start from this one."""
        return self.folder

    @property
    def verb(self) -> list[str]:
        """Returns the subcommand with its positional arguments and flags other than settings."""
        if isinstance(self.settings, RouterSettings):
            return ["train-router", str(self.data)]
        init = [] if self.init is None else ["--init", str(self.init_folder)]
        if self.teacher is not None:
            own = [] if self.cluster is None else ["--cluster", str(self.cluster)]
            missing = ["--allow-missing"] * self.allow_missing
            reuse = [] if self.reuse is None else ["--reuse", str(self.reuse)]
            return ["distill", str(self.teacher), str(self.data), *own, *init, *missing, *reuse]
        return ["train", str(self.data), "--cluster", "all" if self.cluster is None else str(self.cluster), *init]

    def make_task(self, device: torch.device) -> CaptionedTask:
        dataset = Dataset.open(local_copy(self.data, self.cluster), self.cluster)
        if isinstance(self.settings, RouterSettings):
            return RouterTask(dataset, self.settings, device)
        return ExpertTask(dataset, self.settings, device, self.init_folder)

    def _settled(self) -> ExpertSettings | RouterSettings | DistillSettings:
        """Returns the settings as saved with a run; some of a student's defaults depend on its teacher."""
        if self.teacher is None or not isinstance(self.settings, DistillSettings):
            return self.settings
        return resolved_settings(self.settings, ModelIndex.read(find_model(self.teacher)), self.cluster)

    def job(self, resources: Resources = USUAL) -> Job:
        """Returns the job that trains this part; raises an InputError if the folder holds a different run."""
        if (self.folder / "run.json").exists():
            before = read_json(self.folder / "run.json", "remove the folder, or choose another --out")
            refuse_another(self.folder, before.get("settings", {}), self._settled())
        threads = self.settings.threads
        on_cpu = self.settings.device == "cpu" or resources.gpus == 0
        processes = max(1, resources.cpus // threads) if on_cpu else resources.gpus or 1
        launch = [*TORCHRUN, f"--nproc-per-node={processes}"] if processes > 1 else []
        mirror = ["--mirror", self.mirror] if self.mirror else []
        command = [sys.executable, *launch, "-m", "atoll.cli.main", *self.verb, "--out", str(self.folder), *mirror]
        return Job(
            self.name,
            [*command, *as_flags(self.settings)],
            self.folder,
            self.settings.steps,
            resources,
            {"OMP_NUM_THREADS": str(threads)},
            is_shared=self.mirror is None,
        )


def train_all(
    data: Path,
    out: Path,
    settings: ExpertSettings,
    objectives: str | None = None,
    experts: str = "all",
    init: str | None = None,
    router: RouterSettings | None = None,
    engine: Engine | None = None,
    resources: Resources = USUAL,
    mirror: str | None = None,
    progress: bool = True,
    dry_run: bool = False,
) -> Sequence[str]:
    """Trains each expert with the command that would train it alone; returns lines for the user."""
    engine = engine or Local(settings.device)
    num = PartitionCard.read(data / "clusters").num_clusters
    names = parse_objectives(objectives or settings.objective, num)
    inits = [None if name is None else Path(name) for name in parse_by_number(init, num)]
    for folder in inits:
        if folder is not None and not folder.is_dir():
            raise InputError(f"--init {folder} is not a folder: give an expert, or what `atoll convert` has made")
    parts = [
        Part(f"expert {k} {names[k]}", out / f"expert_{k}", replace(settings, objective=names[k]), data, k, inits[k])
        for k in _parse_numbers(experts, num)
    ]
    if router is not None:
        parts.append(Part("router", out / "router", router, data))
    if mirror:
        parts = [part._replace(mirror=f"{mirror.rstrip('/')}/{part.folder.name}") for part in parts]
    jobs = [part.job(resources) for part in parts]
    refuse_inside(out, data)
    if dry_run:
        if not isinstance(engine, Local):
            raise InputError("--dry-run looks at this machine: leave --engine out")
        return _preview(parts, engine.slots(resources), settings.torch_device)
    with work_folder(out):
        runs = engine.run(jobs, progress)
        for part in parts:
            if part.mirror:  # it may have been trained on a node that shares no folder with this machine
                Mirror(part.mirror, part.folder).restore(state=False)
    return [f"{out}: {sum(run.status == 'done' for run in runs)} of {len(runs)} are trained", *map(_line, runs)]


def train_one(part: Part, engine: Engine, resources: Resources = USUAL, progress: bool = True) -> Sequence[str]:
    """Trains one part with the engine; returns lines for the user."""
    refuse_inside(part.folder, part.data)
    return [f"{part.folder}:", *map(_line, engine.run([part.job(resources)], progress))]


def _line(run: Run) -> str:
    loss = ""
    if run.status == "done":
        card = read_json(run.job.folder / "config.json", "train it again")
        loss = f", held-out loss {card['training']['held_out']['loss']:.4f}"
    return f"  {run.job.name:16} {run.status} at step {run.step}{loss}"


def _preview(parts: Sequence[Part], slots: Sequence[Slot], device: torch.device) -> list[str]:
    """Returns lines on what would be trained, and the memory that it would take."""
    sizes, by_config = [], dict[Any, int]()  # networks of the same configuration need equal memory
    lines = [f"{'':10}{'objective':16} {'steps':>8} {'batch':>6} {'parameters':>11} {'memory':>9}  first weights"]
    for part in parts:
        distributed, settings = Distributed(part.settings), part.settings
        task = build_task(part.make_task, distributed.device)
        config, num_parameters = task.network.config, sum(p.numel() for p in task.network.parameters())
        if config not in by_config:
            by_config[config] = forecast(task, settings, distributed)[0](settings).total
        sizes.append(by_config[config])
        lines.append(
            f"{part.name:26} {settings.steps:>8} {settings.batch:>6} "
            f"{num_parameters / 1e6:>10.2f}M {in_words(sizes[-1]):>9}  {part.init or 'random'}"
        )
    num = min(len(slots), len(sizes))
    num_per_device = min(slots.count(slots[0]), num)
    needed, free = sum(sorted(sizes)[-num_per_device:]), available(device)  # the largest may run together
    lines.append(f"{num} at a time: {in_words(needed)} of memory {'on a GPU' if device.type == 'cuda' else 'in all'}")
    if needed > free:
        advice = "use a smaller --at-a-time, --micro-batch or --model, or --checkpointing"
        lines.append(f"this is more than the {in_words(free)} there are: {advice}")
    return lines


def _parse_numbers(text: str, num: int) -> list[int]:
    chosen = {str(k) for k in range(num)} if text == "all" else {part.strip() for part in text.split(",")}
    numbers = [k for k in range(num) if str(k) in chosen]
    if len(numbers) < len(chosen):
        raise InputError(f"--experts must be all, or numbers from 0 to {num - 1} such as 0,2, but is {text!r}")
    return numbers


def parse_objectives(text: str, num_experts: int) -> list[str]:
    """Returns the objective of each expert: "fm" for all, or "2ddpm:6fm" in order."""
    names = [text.strip()] * num_experts
    if ":" in text or text[:1].isdecimal():
        counts = [re.fullmatch(r"\s*([0-9]{1,5})(\D.*)", part) for part in text.split(":")]
        names = [match[2].strip() for match in counts if match for _ in range(int(match[1]))]
        if len(names) != num_experts or not all(counts):
            raise InputError(
                f"the objectives {text!r} do not give each of {num_experts} experts one: give one name for all, or "
                "counts that add up, such as 2ddpm:6fm for 8 experts"
            )
    for name in set(names):
        get_objective(name)
    return names


def parse_by_number(text: str | None, num_experts: int) -> list[str | None]:
    """Returns a name per expert: from one for all, or from "0=a,3=b,*=c" by number; None if none is given."""
    if text is None or not re.match(r"\s*(\*|[0-9]+)\s*=", text):
        return [text and text.strip()] * num_experts
    named: dict[str, str] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\*|0|[1-9][0-9]{0,8})\s*=\s*(.+?)\s*", part)
        if match is None or match[1] in named or (match[1] != "*" and int(match[1]) >= num_experts):
            raise InputError(
                f"{part!r} in {text!r} must be NUMBER=NAME, with a number from 0 to {num_experts - 1} that is named "
                "once, or *=NAME for all others"
            )
        named[match[1]] = match[2]
    return [named.get(str(k), named.get("*")) for k in range(num_experts)]
