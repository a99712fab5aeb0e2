"""`atoll reproduce`: the papers' comparisons, at equal budget and with several seeds of training.

OUT/pictures/, OUT/prepared/   the data, where a recipe names it
OUT/data/PARTITION/            the data, cut into clusters
OUT/seed_0/parts/              experts, monoliths and routers, each trained by a process of its own
OUT/seed_0/models/             assembled of them
OUT/evaluation/                their images and the features of these
OUT/results.json, results.md, and two images of each comparison: figures, and samples of the first seed

Parts that several comparisons need are trained once. The same command resumes after any end.
"""

import errno
import json
import math
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from atoll.config import build
from atoll.data.builtin import NAMES as BUILT_IN
from atoll.data.download import PACKAGES, fetch
from atoll.data.prepare import Settings as Preparation
from atoll.data.prepare import prepare
from atoll.data.shards import Dataset
from atoll.data.sources import Source
from atoll.data.view import refuse_inside
from atoll.encoders.features import make_features
from atoll.engines.local import find_slots
from atoll.errors import InputError
from atoll.experiments.cache import write_text
from atoll.experiments.evaluate import ON_A_SHEET, REAL, Contender, Evaluation, Sampling
from atoll.experiments.flops import flops_of_step
from atoll.experiments.graph import Graph, ModelNode, PartNode
from atoll.experiments.measure import Images, MetricSettings
from atoll.experiments.studies import RANDOM, Clusters, Model, Part, Row, Study, get_study, monolith, parts_of
from atoll.experiments.tables import SHOWN, draw_metrics, over_seeds, render_results
from atoll.partition.partition import partition
from atoll.plots.canvas import save_picture
from atoll.plots.contact_sheet import draw_samples
from atoll.processes import die_with_parent
from atoll.storage import alone, make_folder, open_regular, read_json, reason_of, write_json
from atoll.training.expert import ExpertTask
from atoll.training.router import RouterTask
from atoll.training.settings import ExpertSettings, RouterSettings, read_settings, read_toml

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Data:
    """The [data] table of a recipe: how a set that is given by name is prepared."""

    num: int = 10_000  # images, at most
    size: int = 32
    codec: str = "pca"
    text: str = "words"
    features: str = "simple"
    holdout: float = 0.05

    def make(self, name: str, out: Path, progress: bool) -> Path:
        """The folder with the prepared images; what is there is not made again."""
        source = Source(name, num=self.num, size=self.size) if name in BUILT_IN else self._fetch(name, out, progress)
        settings = self.settings(PACKAGES[name].license if name in PACKAGES else "unknown")
        prepare(source, out / "prepared", settings, progress=progress)
        return out / "prepared"

    def settings(self, license_: str) -> Preparation:
        return Preparation(
            self.size, self.codec, self.text, self.features, self.holdout, near_duplicates="keep", license=license_
        )

    def _fetch(self, name: str, out: Path, progress: bool) -> Source:
        tar = fetch(name, out / "pictures", min(self.num, PACKAGES[name].num), progress=progress)
        return Source(str(tar), size=self.size)


@dataclass(frozen=True)
class Plan:
    """The [study] table of a recipe: how large the comparisons are."""

    num_experts: int = 8
    seeds: int = 3
    balance: float | None = 1.3  # clusters are at most so many times as large as their mean
    ddpm_weighting: str | None = None  # None: as plain as the paper's
    num: int = 1000  # images of each model
    split: str | None = None  # whose captions are prompts: held_out, train or all
    reference: int = 10_000  # images of the training data, at most
    features: tuple[str, ...] = ("efficientnet",)
    varied: int = 50
    each: int = 4
    guidance: float = 2.0
    steps: int = 20
    batch: int = 250  # images at a time, which experts share

    def __post_init__(self) -> None:
        if isinstance(self.features, str) or not all(isinstance(spec, str) for spec in self.features):
            raise InputError(f'features must be a list of names such as ["simple"], but are {self.features!r}')
        object.__setattr__(self, "features", tuple(self.features))
        for name, least in (("num_experts", 2), ("seeds", 1), ("num", 2), ("varied", 1), ("each", 2)):
            if type(getattr(self, name)) is not int or getattr(self, name) < least:
                raise InputError(f"{name} must be a whole number of at least {least}, but is {getattr(self, name)!r}")
        if not 0 < self.guidance < math.inf:
            raise InputError(f"guidance must be above 0 and finite, but is {self.guidance!r}")

    @property
    def sampling(self) -> Sampling:
        return Sampling(guidance=self.guidance, steps=self.steps, batch=self.batch)

    def measured(self, device: str) -> MetricSettings:
        return MetricSettings(
            num=self.num, split=self.split, num_reference=self.reference, features=self.features, varied=self.varied,
            each=self.each, device=device,
        )  # fmt: skip


JUDGED = ("num", "split", "reference", "features", "varied", "each", "guidance", "steps", "batch")
"""What of a plan may change between runs: nothing that is trained depends on it."""


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how it is judged. `expert.batch` is the monolith's; experts have equal shares of it."""

    plan: Plan
    expert: ExpertSettings
    router: RouterSettings
    data: Data = Data()

    @classmethod
    def read(cls, given: str | Path) -> "Recipe":
        """By the name of one that comes with atoll, or its path."""
        content, where = read_toml(given), str(given)
        plan = build(Plan, content.get("study", {}), f"[study] of {where}")
        data = build(Data, content.get("data", {}), f"[data] of {where}")
        expert = read_settings(content, ExpertSettings, where)
        for name in ("objective", "schedule", "weighting"):
            if getattr(expert, name) != getattr(ExpertSettings(), name):
                raise InputError(f"{name} in {where} is chosen by each comparison: leave it out")
        return cls(plan, expert, read_settings(content, RouterSettings, where), data)

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


def reproduce(names: Sequence[str], data: str, out: Path, recipe: Recipe, progress: bool = True) -> dict[str, Any]:
    """Train, assemble, judge and tell; returns what results.json says.

    `data` is a folder that `atoll prepare` has made, or the name of a set, which is then fetched and prepared in `out`.
    """
    torch.set_num_threads(1)
    studies = {name: get_study(name, recipe.plan.num_experts, recipe.plan.sampling) for name in names}
    _check(recipe, parts_of(studies.values()))
    named = data in PACKAGES or data in BUILT_IN
    if not named:
        refuse_inside(out, Path(data))
        if not (Path(data) / "dataset.json").exists():
            raise InputError(
                f"there is no dataset.json in {data}: give a folder that `atoll prepare` has made, or one of "
                f"{', '.join((*PACKAGES, *BUILT_IN))}"
            )
    make_folder(out)
    with alone(out):
        _check_same(out, recipe, data if named else None)
        folder = recipe.data.make(data, out, progress) if named else Path(data)
        return _Reproduction(studies, folder, out, recipe, progress).run()


def _check(recipe: Recipe, parts: Sequence[Part]) -> None:
    """Whatever is wrong with a recipe is found before hours of training, and before it is written down."""
    for spec in recipe.plan.measured(recipe.expert.device).features:
        make_features(spec)
    for part in parts:
        settings = recipe.settings_of(part, 0)
        if isinstance(settings, ExpertSettings):
            _ = settings.resolved_objective
    recipe.data.settings("unknown")


def _check_same(out: Path, recipe: Recipe, name: str | None) -> None:
    """What lies in OUT was begun with the same recipe and set, but for how many seeds it has and how it is judged."""
    path = out / "recipe.json"
    wanted = {**json.loads(json.dumps(asdict(recipe))), "set": name}
    wanted["plan"] = {key: value for key, value in wanted["plan"].items() if key not in (*JUDGED, "seeds")}
    if not path.exists():
        write_json(path, wanted)
    elif read_json(path, f"remove {out}, or choose another --out") != wanted:
        raise InputError(f"{out} was begun with another recipe or other data: give those, or choose another --out")


class _Reproduction:
    def __init__(self, studies: Mapping[str, Study], data: Path, out: Path, recipe: Recipe, progress: bool) -> None:
        self.studies, self.data, self.out, self.recipe, self.progress = studies, data, out, recipe, progress
        self.parts = parts_of(studies.values())
        self.seeds = range(recipe.plan.seeds)

    def run(self) -> dict[str, Any]:
        for clusters in dict.fromkeys(part.clusters for part in self.parts):
            self._partition(clusters)
        models = dict.fromkeys(row.model for study in self.studies.values() for row in study.rows)
        graph = Graph(
            [self._part(part, seed) for seed in self.seeds for part in self.parts],
            [self._model(model, seed) for model in models for seed in self.seeds],
        )
        graph.train(self.recipe.expert.device, self.progress)
        graph.assemble()
        judged = self._judge()
        results = self._results(judged)
        write_json(self.out / "results.json", results)
        write_text(self.out / "results.md", render_results(results))
        for name, study in self.studies.items():
            save_picture(draw_metrics(results["studies"][name]["rows"], SHOWN), self.out / f"{name}.png")
            real = judged[self._real(study)]
            rows = {row.label: judged[self._measured(study, row, 0)].images for row in study.rows}
            save_picture(draw_samples({REAL: real.images, **rows}, real.captions), self.out / f"{name}_samples.png")
        return results

    # --- making -----------------------------------------------------------------------------------------------------

    def _data_of(self, clusters: Clusters) -> Path:
        return self.out / "data" / clusters.name

    def _partition(self, clusters: Clusters) -> None:
        folder = self._data_of(clusters)
        if (folder / "clusters" / "partition.json").exists():
            ours, theirs = Dataset.open(self.data).card, Dataset.open(folder).card
            if (ours.source, ours.settings, ours.codec) == (theirs.source, theirs.settings, theirs.codec):
                return
            raise InputError(f"{self.out} was begun with other data than {self.data}: choose another --out")
        staged = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(staged, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            # Where the rows lie: in shards, or in the clusters of another partition.
            left_out = ("clusters", ".*") if (self.data / "shards").exists() else (".*",)
            copy_folder(self.data, staged, left_out)
        except OSError as error:
            raise InputError(f"cannot copy {self.data} to {folder} ({reason_of(error)}): free the disk") from error
        balance = None if clusters.method == RANDOM else self.recipe.plan.balance
        partition(staged, clusters.num, method=clusters.method, cap=balance, progress=self.progress)
        staged.rename(folder)

    def _folder_of(self, part: Part, seed: int) -> Path:
        return self.out / f"seed_{seed}" / "parts" / part.name

    def _part(self, part: Part, seed: int) -> PartNode:
        data, settings = self._data_of(part.clusters), self.recipe.settings_of(part, seed)
        name, folder = f"seed {seed} {part.name}", self._folder_of(part, seed)
        if part.is_router:
            return PartNode.router(name, data, folder, settings)
        init = None if part.first is None else self._folder_of(part.first, seed)
        return PartNode.expert(name, data, part.cluster, folder, settings, init)

    def _model(self, model: Model, seed: int) -> ModelNode:
        router = None if model.router is None else self._part(model.router, seed)
        experts = [self._part(part, seed) for part in model.experts]
        return ModelNode(self._model_folder(model, seed), self._data_of(model.experts[0].clusters), experts, router)

    def _model_folder(self, model: Model, seed: int) -> Path:
        return self.out / f"seed_{seed}" / "models" / model.name

    # --- measuring --------------------------------------------------------------------------------------------------

    def _judge(self) -> dict["_Row", "_Measured"]:
        """Measures each row of each seed once, however many tables it is in, by one process per slot."""
        studies = self.studies.values()
        real = dict.fromkeys(self._real(study) for study in studies)
        rows = dict.fromkeys(
            self._measured(study, row, seed) for seed in self.seeds for study in studies for row in study.rows
        )
        slots = find_slots(self.recipe.expert.device)[: len(rows)]
        context = get_context("spawn")
        environments = context.SimpleQueue()
        for slot in slots:
            environments.put(dict(slot))
        measure = partial(_measure, self.out / "evaluation", self.recipe.plan.measured(self.recipe.expert.device))
        judged = {}
        with (
            ProcessPoolExecutor(len(slots), context, _begin, (environments,)) as pool,
            tqdm(total=len(real) + len(rows), desc="judging", unit=" rows", disable=not self.progress) as bar,
        ):
            try:
                for some in (real, rows):  # what all are compared with is there before it is needed
                    futures = {pool.submit(measure, row): row for row in some}
                    for future in as_completed(futures):
                        judged[futures[future]] = future.result()
                        bar.update()
            except BrokenProcessPool as error:
                raise InputError(
                    "a process that judges was killed, perhaps for lack of memory: rerun the same command to resume, "
                    "or have fewer images at a time, by `batch` in [study]"
                ) from error
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return judged

    def _real(self, study: Study) -> "_Row":
        return _Row(self._data_of(study.clusters), study.cluster)

    def _measured(self, study: Study, row: Row, seed: int) -> "_Row":
        return self._real(study)._replace(model=self._model_folder(row.model, seed), sampling=row.sampling)

    # --- telling ----------------------------------------------------------------------------------------------------

    def _results(self, judged: Mapping["_Row", "_Measured"]) -> dict[str, Any]:
        card = Dataset.open(self.data).card
        return {
            "data": {"name": card.source.name, "pictures": card.counts.rows, "license": card.license},
            "seeds": len(self.seeds),
            "recipe": json.loads(json.dumps(asdict(self.recipe))),
            "training_flops": self._count_flops(),
            "studies": {name: self._tell(study, judged) for name, study in self.studies.items()},
        }

    def _tell(self, study: Study, judged: Mapping["_Row", "_Measured"]) -> dict[str, Any]:
        rows: list[dict[str, Any]] = [{"name": REAL, "figures": judged[self._real(study)].about["figures"]}]
        for row in study.rows:
            of_seeds = [judged[self._measured(study, row, seed)].about for seed in self.seeds]
            about = {"hash": [one["hash"] for one in of_seeds], "sampling": asdict(row.sampling)}
            figures = over_seeds([one["figures"] for one in of_seeds])
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


def copy_folder(source: Path, out: Path, left_out: Sequence[str]) -> None:
    """Copies a folder but for the names `left_out`; raises OSError for what is no file of its own."""
    ignored = shutil.ignore_patterns(*left_out)

    def look(folder: str, names: list[str]) -> set[str]:
        for name in names:
            path = Path(folder, name)
            if path.is_symlink() and path.is_dir():  # which may lead anywhere, or round in a circle
                raise OSError(errno.EPERM, "it is a link to a folder", str(path))
        return ignored(folder, names)

    def copy(one: str, other: str) -> None:
        with open_regular(Path(one), source) as file, open(other, "wb") as copied:
            shutil.copyfileobj(file, copied)

    shutil.copytree(source, out, ignore=look, copy_function=copy)


def _begin(environments: "SimpleQueue[dict[str, str]]") -> None:
    """Of a process that judges: it has a GPU of its own where there are any, and ends when the one that asked does."""
    os.environ.update(environments.get())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    torch.set_num_threads(1)
    die_with_parent()


class _Row(NamedTuple):
    """A model, sampled in some way; without one, real images."""

    data: Path
    cluster: int | None
    model: Path | None = None
    sampling: Sampling = Sampling()


class _Measured(NamedTuple):
    """What a process tells of a row."""

    about: dict[str, Any]
    images: Images
    captions: list[str]


@cache
def _open(out: Path, settings: MetricSettings, data: Path, cluster: int | None) -> Evaluation:
    """Networks and reference, once per process."""
    return Evaluation(data, out, settings, cluster=cluster, progress=False)


def _measure(out: Path, settings: MetricSettings, row: _Row) -> _Measured:
    evaluation = _open(out, settings, row.data, row.cluster)
    captions = evaluation.prompts[:ON_A_SHEET]
    if row.model is None:
        (about, *_) = evaluation.real() or [{"figures": {}}]
        return _Measured(about, evaluation.real_images(), captions)
    contender = Contender(row.model.name, row.model, row.sampling)
    return _Measured(evaluation.judge(contender), evaluation.first_images(contender), captions)
