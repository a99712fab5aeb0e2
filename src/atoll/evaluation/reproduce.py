"""`atoll reproduce`: the papers' comparisons on one's own data, at equal budget and with several seeds of training.

OUT/data/PARTITION/      the data, cut into clusters
OUT/seed_0/parts/        experts, monoliths and routers, each trained by a process of its own
OUT/seed_0/models/       assembled of them
OUT/seed_0/evaluation/   their pictures and figures
OUT/results.json, results.md, and a picture of each comparison

Parts that several comparisons need are trained once. The same command goes on after any end.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from atoll.config import build
from atoll.data.clusters import partition
from atoll.data.shards import Dataset
from atoll.data.sheets import save_picture
from atoll.errors import InputError
from atoll.evaluation.comparison import draw_metrics
from atoll.evaluation.evaluate import REAL, Contender, Evaluation, Sampling
from atoll.evaluation.judge import flops_of_step
from atoll.evaluation.studies import RANDOM, Clusters, Model, Part, Study, get_study, monolith, parts_of
from atoll.evaluation.tables import write_results
from atoll.evaluation.yardstick import Settings as Measured
from atoll.files import alone, make_folder, read_json, reason_of, write_json
from atoll.sampling.assemble import INDEX, assemble
from atoll.training.everyone import job_of
from atoll.training.expert import ExpertTask
from atoll.training.fleet import find_slots, run_jobs
from atoll.training.router import RouterTask
from atoll.training.rows import refuse_inside
from atoll.training.settings import ExpertSettings, RouterSettings, read_settings, read_toml

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Plan:
    """The [study] table of a recipe: how large the comparisons are."""

    num_experts: int = 8
    seeds: int = 3
    balance: float | None = 1.3  # clusters are at most so many times as large as their mean
    ddpm_weighting: str | None = None  # None: as plain as the paper's
    num: int = 1000  # pictures of each model
    features: tuple[str, ...] = ("efficientnet",)
    varied: int = 50
    each: int = 4
    guidance: float = 2.0
    steps: int = 20

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(self.features))
        for name, least in (("num_experts", 2), ("seeds", 1), ("num", 2), ("varied", 1), ("each", 2)):
            if type(getattr(self, name)) is not int or getattr(self, name) < least:
                raise InputError(f"{name} must be a whole number of at least {least}, but is {getattr(self, name)!r}")

    @property
    def sampling(self) -> Sampling:
        return Sampling(guidance=self.guidance, steps=self.steps)

    @property
    def measured(self) -> Measured:
        return Measured(num=self.num, features=self.features, varied=self.varied, each=self.each)


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how it is judged. `expert.batch` is the monolith's; experts have equal shares of it."""

    plan: Plan
    expert: ExpertSettings
    router: RouterSettings

    @classmethod
    def read(cls, path: Path) -> "Recipe":
        content = read_toml(path)
        plan = build(Plan, content.pop("study", {}), f"[study] of {path}")
        where = str(path)
        return cls(plan, read_settings(content, ExpertSettings, where), read_settings(content, RouterSettings, where))

    def settings_of(self, part: Part, seed: int) -> ExpertSettings | RouterSettings:
        """As the papers share a budget: the same steps for all, and the monolith's batch divided by the experts."""
        if part.is_router:
            return replace(self.router, text=part.kind == "router", seed=seed)
        share = 1 if part.cluster is None else part.clusters.num
        if self.expert.batch % share:
            raise InputError(f"a batch of {self.expert.batch} cannot be shared by {share} experts: choose a multiple")
        kind, _, schedule = part.kind.partition("-")
        weighting = self.plan.ddpm_weighting if kind == "ddpm" else None
        return replace(
            self.expert, objective=kind, schedule=schedule or None, weighting=weighting,
            batch=self.expert.batch // share, seed=seed,
        )  # fmt: skip


def reproduce(names: Sequence[str], data: Path, out: Path, recipe: Recipe, progress: bool = True) -> dict[str, Any]:
    """Train, assemble, judge and tell; returns what results.json says."""
    torch.set_num_threads(1)
    studies = {name: get_study(name, recipe.plan.num_experts, recipe.plan.sampling) for name in names}
    refuse_inside(out, data)
    make_folder(out)
    with alone(out):
        _check_same(out, recipe)
        return _Reproduction(studies, data, out, recipe, progress).go()


def _check_same(out: Path, recipe: Recipe) -> None:
    """What lies in OUT was begun with the same recipe, but for how many seeds it has."""
    path = out / "recipe.json"
    wanted = json.loads(json.dumps(asdict(recipe)))
    wanted["plan"].pop("seeds")
    if not path.exists():
        write_json(path, wanted)
    elif read_json(path, f"remove {out}, or choose another --out") != wanted:
        raise InputError(f"{out} was begun with another recipe: give that one, or choose another --out")


class _Reproduction:
    def __init__(self, studies: Mapping[str, Study], data: Path, out: Path, recipe: Recipe, progress: bool) -> None:
        self.studies, self.data, self.out, self.recipe, self.progress = studies, data, out, recipe, progress
        self.parts = parts_of(studies.values())
        self.seeds = range(recipe.plan.seeds)

    def go(self) -> dict[str, Any]:
        for clusters in dict.fromkeys(part.clusters for part in self.parts):
            self._partition(clusters)
        self._train()
        for study in self.studies.values():
            for model in {row.model for row in study.rows}:
                for seed in self.seeds:
                    self._assemble(model, seed)
        judged = self._judge()
        results = self._results(judged)
        write_json(self.out / "results.json", results)
        write_results(results, self.out / "results.md")
        for name in self.studies:
            save_picture(draw_metrics({"models": results["studies"][name]["rows"]}), self.out / f"{name}.png")
        return results

    # --- making -----------------------------------------------------------------------------------------------------

    def _data_of(self, clusters: Clusters) -> Path:
        return self.out / "data" / clusters.name

    def _partition(self, clusters: Clusters) -> None:
        folder = self._data_of(clusters)
        if (folder / "clusters" / "partition.json").exists():
            return
        staged = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(staged, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            shutil.copytree(self.data, staged, ignore=shutil.ignore_patterns("clusters", ".*"))
        except OSError as error:
            raise InputError(f"cannot copy {self.data} to {folder} ({reason_of(error)}): free the disk") from error
        balance = None if clusters.method == RANDOM else self.recipe.plan.balance
        partition(staged, clusters.num, method=clusters.method, cap=balance, progress=self.progress)
        staged.rename(folder)

    def _folder_of(self, part: Part, seed: int) -> Path:
        return self.out / f"seed_{seed}" / "parts" / part.name

    def _train(self) -> None:
        jobs = []
        for seed in self.seeds:
            for part in self.parts:
                data, settings = self._data_of(part.clusters), self.recipe.settings_of(part, seed)
                verb = ["train-router", str(data)]
                if not part.is_router:
                    verb = ["train", str(data), "--cluster", "all" if part.cluster is None else str(part.cluster)]
                jobs.append(job_of(f"seed {seed} {part.name}", verb, self._folder_of(part, seed), settings))
        # The longest first: no core idles long at the end.
        jobs.sort(key=lambda job: "_all" not in job.name)
        device = self.recipe.expert.device
        run_jobs(jobs, find_slots(device), progress=self.progress, environment={"OMP_NUM_THREADS": "1"})

    def _model_of(self, model: Model, seed: int) -> Path:
        return self.out / f"seed_{seed}" / "models" / model.name

    def _assemble(self, model: Model, seed: int) -> None:
        folder = self._model_of(model, seed)
        if (folder / INDEX).exists():
            return
        experts = [self._folder_of(part, seed) for part in model.experts]
        router = None if model.router is None else self._folder_of(model.router, seed)
        data = self._data_of(model.experts[0].clusters)
        assemble(experts, router, folder, data, without_router=router is None)

    # --- judging ----------------------------------------------------------------------------------------------------

    def _judge(self) -> dict[tuple[str, int], list[dict[str, Any]]]:
        """The figures of each row of each study and seed, some studies at a time."""
        todo = [(name, seed) for name in self.studies for seed in self.seeds]
        slots = min(len(find_slots(self.recipe.expert.device)), len(todo))
        found = {}
        with (
            ProcessPoolExecutor(slots, get_context("spawn"), torch.set_num_threads, (1,)) as pool,
            tqdm(total=len(todo), desc="judging", unit=" tables", disable=not self.progress) as bar,
        ):
            futures = {key: pool.submit(_judge_study, self._task(*key)) for key in todo}
            for key, future in futures.items():
                found[key] = future.result()
                bar.update()
        return found

    def _task(self, name: str, seed: int) -> "_Task":
        study = self.studies[name]
        # Routing by oracle asks for the clusters of the prompts, so the data is the partition that most models have.
        data = self._data_of(study.rows[-1].model.experts[0].clusters)
        contenders = tuple(Contender(row.label, self._model_of(row.model, seed), row.sampling) for row in study.rows)
        out = self.out / f"seed_{seed}" / "evaluation"
        return _Task(contenders, data, out, study.cluster, self.recipe.plan.measured)

    # --- telling ----------------------------------------------------------------------------------------------------

    def _results(self, judged: Mapping[tuple[str, int], list[dict[str, Any]]]) -> dict[str, Any]:
        about = Dataset.open(self.data).about
        return {
            "data": {"name": about["source"]["name"], "pictures": about["counts"]["rows"], "license": about["license"]},
            "seeds": len(self.seeds),
            "recipe": json.loads(json.dumps(asdict(self.recipe))),
            "training_flops": self._count_flops(),
            "studies": {name: self._tell(name, study, judged) for name, study in self.studies.items()},
        }

    def _tell(self, name: str, study: Study, judged: Mapping[tuple[str, int], list[dict[str, Any]]]) -> dict[str, Any]:
        columns = [judged[name, seed] for seed in self.seeds]
        rows: list[dict[str, Any]] = [
            {"name": REAL, "figures": _over_seeds([column[0]["figures"] for column in columns])}
        ]
        for i, row in enumerate(study.rows, 1):
            of_seeds = [column[i] for column in columns]
            about = {"hash": [one["hash"] for one in of_seeds], "sampling": asdict(row.sampling)}
            figures = _over_seeds([one["figures"] for one in of_seeds])
            rows.append({"name": row.label, "hddm": row.hddm, "ddm": row.ddm, **about, "figures": figures})
        return {"title": study.title, "claim": study.claim, "cluster": study.cluster, "rows": rows}

    def _count_flops(self) -> dict[str, float]:
        """Of training the monolith, which all experts together have too, and the router: what equal budget means."""
        num = self.recipe.plan.num_experts
        data = Dataset.open(self._data_of(monolith(num).experts[0].clusters))
        usual = self.recipe.expert
        step = flops_of_step(ExpertTask(data, usual, CPU), usual.batch)
        router = flops_of_step(RouterTask(data, self.recipe.router, CPU), self.recipe.router.batch)
        return {"monolith": step * usual.steps, "router": router * self.recipe.router.steps}


@dataclass(frozen=True)
class _Task:
    """What a process needs to judge a study of one seed."""

    contenders: tuple[Contender, ...]
    data: Path
    out: Path
    cluster: int | None
    measured: Measured


def _judge_study(task: _Task) -> list[dict[str, Any]]:
    """The figures of real pictures, and of each model in turn."""
    evaluation = Evaluation(task.data, task.out, task.measured, cluster=task.cluster, progress=False)
    real = evaluation.real() or [{"figures": {}}]
    return [*real, *(evaluation.judge(one) for one in task.contenders)]


def _over_seeds(found: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The mean of each figure over seeds of training, and the deviation among them."""
    combined = {}
    for key in found[0]:
        values = [float(figures[key]["value"]) for figures in found]
        error = float(np.std(values, ddof=1)) if len(values) > 1 else None
        combined[key] = {"value": float(np.mean(values)), "error": error, "values": values}
    return combined
