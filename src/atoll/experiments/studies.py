"""The papers' comparisons as data: the parts and models that each needs, and the figures that the papers report.

HDDM is *Heterogeneous Decentralized Diffusion Models*, DDM its predecessor. Their figures are Inception FID on data of
another size and kind: they are listed to compare the order of the rows, never the numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from atoll.config import build, check_choices
from atoll.data.download import PACKAGES, fetch
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source
from atoll.encoders.features import make_features
from atoll.engines.train_all import Part
from atoll.errors import InputError, unknown
from atoll.experiments.graph import ModelNode, PartOnTheWay, PretrainedPart
from atoll.experiments.settings import MetricSettings
from atoll.sampling.routing import get_routing
from atoll.sampling.settings import Sampling
from atoll.training.settings import DistillSettings, ExpertSettings, RouterSettings, read_settings, read_toml

KMEANS, RANDOM = "kmeans", "random"
SHARES = (4, 2)  # checkpoints after a quarter and a half of a run are evaluated too
PLACES = (0, 3)  # the experts that HDDM trains with DDPM
PAPER = "paper"  # conversion; the default is calibrated for noise-predicting experts, exact for others


@dataclass(frozen=True)
class Data:
    """The [data] table of a recipe: how a data set given by name is prepared."""

    num: int = 10_000  # maximum number of images
    size: int = 32
    codec: str = "pca:plain"  # as for the tables of docs/results.md
    text: str = "words"
    features: str = "simple"
    holdout: float = 0.05

    def settings(self, license_: str = "unknown") -> PrepareSettings:
        own = (self.size, self.codec, self.text, self.features, self.holdout)
        return PrepareSettings(*own, near_duplicates="keep", license=license_)

    def source(self, name: str, out: Path, progress: bool) -> tuple[Source, str]:
        """Returns the source of a data set, fetched if necessary, and its licence."""
        if package := PACKAGES.get(name):
            tar = fetch(name, out / "pictures", min(self.num, package.num), progress=progress)
            return Source(str(tar), size=self.size), package.license
        return Source(name, num=self.num, size=self.size), "unknown"

    def make(self, name: str, out: Path, progress: bool) -> tuple[Path, Source]:
        """Prepares a data set, unless that was done before; returns its folder and its source."""
        source, license_ = self.source(name, out, progress)
        prepare(source, out / "prepared", self.settings(license_), progress=progress)
        return out / "prepared", source


@dataclass(frozen=True)
class Pretraining:
    """The [pretrain] table of a recipe: the DDPM DiT that experts start from (HDDM, section 3.5)."""

    checkpoint: str | None = None  # a published one; None: one is trained with the settings below
    data: str = "cifar-10"  # a data set by name, other than the experts' own
    num: int = 10_000  # maximum number of images
    steps: int = 2500
    batch: int = 64


@dataclass(frozen=True)
class Plan:
    """The [study] table of a recipe: the size of the comparisons, and their two sampling protocols."""

    num_experts: int = 8
    counts: tuple[int, ...] = (4, 8, 16)  # numbers of experts in the study `experts`
    times: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)  # of the study `threshold`
    seeds: int = 3
    balance: float | None = 1.3  # maximum size of a cluster as a multiple of their mean
    ddpm_weighting: str | None = None  # None: plain, as in the paper
    num: int = 1000  # images per model
    split: str | None = None  # split whose captions are the prompts: held_out, train or all
    reference: int = 10_000  # maximum number of images to compare with
    reference_split: str = "held_out"  # split of these images: held_out, as in the papers, or train
    originals: bool = True  # compare with original images, not with decoded latents
    features: tuple[str, ...] = ("efficientnet",)
    metrics: tuple[str, ...] = ()  # (): all that can be measured
    distance: str = "stlpips"  # for diversity; LPIPS itself is lpips:FILES
    clip: str | None = None
    varied: int = 50
    each: int = 4
    paired: int = 10_000  # maximum number of images whose pairwise distances are averaged
    guidance: float = 2.0  # HDDM: 7.5, with 50 steps
    steps: int = 20
    conversion_guidance: float | None = (
        None  # of Table 3 and half of Table 4, HDDM: 6, with 75 steps; 0.8 and 1.5 times
    )
    conversion_steps: int | None = None
    conversion_num: int | None = None  # images per model in Table 3, HDDM: 5,000
    solver: str = "multistep"  # HDDM: euler
    routing: str = "top1"  # in tables that do not compare policies
    router: str = "router"  # reads the text; HDDM's is a blind-router
    batch: int = 250  # images per sampling batch, shared by the experts
    student_steps: int | None = None  # of the student and the monoliths compared with it; None: an expert's

    def __post_init__(self) -> None:
        for name, such_as in (("features", "simple"), ("metrics", "frechet")):
            given = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(spec, str) for spec in given):
                raise InputError(f'{name} must be a list of names such as ["{such_as}"], but are {given!r}')
            object.__setattr__(self, name, tuple(given))
        for name, low, high in (("counts", 2, 2**16), ("times", 0.0, 1.0)):
            given = getattr(self, name)
            if isinstance(given, str | float | int) or not all(
                isinstance(value, float if name == "times" else int) and low <= value <= high for value in given
            ):
                raise InputError(f"{name} must be a list of numbers from {low} to {high}, but are {given!r}")
            object.__setattr__(self, name, tuple(given))
        check_choices(self, router=("router", "blind-router"))
        get_routing(self.routing)
        if self.num_experts < 2 or self.seeds < 1:
            raise InputError("a comparison needs num_experts of at least 2 and seeds of at least 1")

    @property
    def sampling(self) -> Sampling:
        """Returns the aligned protocol, used in all tables but the third."""
        return Sampling(self.steps, self.guidance, self.solver, self.routing, batch=self.batch)

    @property
    def conversion_sampling(self) -> Sampling:
        """Returns the protocol of Table 3, and of the middle rows of Table 4."""
        guidance, steps = self.conversion_guidance, self.conversion_steps
        guidance = 0.8 * self.guidance if guidance is None else guidance
        return replace(self.sampling, guidance=guidance, steps=steps or round(1.5 * self.steps))

    def metric_settings(self, device: str, originals: str | None = None) -> MetricSettings:
        return MetricSettings(
            num=self.num, split=self.split, num_reference=self.reference, features=self.features,
            varied=self.varied, each=self.each, device=device, reference_split=self.reference_split,
            originals=originals, distance=self.distance, clip=self.clip, metrics=self.metrics, paired=self.paired,
        )  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Settings of training and evaluation. `expert.batch` is the monolith's; experts have equal shares of it."""

    plan: Plan
    expert: ExpertSettings
    router: RouterSettings
    data: Data = Data()
    pretrain: Pretraining = Pretraining()

    @classmethod
    def read(cls, given: str | Path) -> "Recipe":
        """Reads a recipe that ships with atoll, by name, or a file."""
        content, where = read_toml(given), str(given)
        expert = read_settings(content, ExpertSettings, where)
        for name in ("objective", "schedule", "weighting"):
            if getattr(expert, name) != getattr(ExpertSettings(), name):
                raise InputError(f"{name} in {where} is chosen by each comparison: leave it out")
        kinds: dict[str, type[Any]] = {"study": Plan, "data": Data, "pretrain": Pretraining}
        plan, data, first = (build(kind, content.get(name, {}), f"[{name}] of {where}") for name, kind in kinds.items())
        return cls(plan, expert, read_settings(content, RouterSettings, where), data, first)

    def check(self) -> None:
        """Raises an InputError for invalid settings before any work is done."""
        for spec in self.plan.metric_settings(self.expert.device).features:
            make_features(spec)
        self.data.settings()


class Row(NamedTuple):
    """A row of a table."""

    label: str
    model: ModelNode
    sampling: Sampling
    hddm: str = ""  # the figure that the paper reports
    ddm: str = ""


class Study:
    """One table: its title, what the papers say of it, and its rows."""

    def __init__(
        self, title: str, claim: str, *rows: Row, cluster: int | None = None, num: int | None = None,
        correlated: bool = False,
    ) -> None:  # fmt: skip
        self.title, self.claim, self.rows = title, claim, rows
        self.cluster = cluster  # restricts prompts and reference to this cluster
        self.num = num  # images per model, if other than in the other tables
        self.correlated = correlated  # whether images are also correlated with the first row's, seed by seed
        self.data = rows[-1].model.data  # the last row's, since oracle routing needs its clusters


@dataclass(frozen=True)
class Lab:
    """Makes the parts and models of one training seed, and their folders."""

    out: Path
    recipe: Recipe
    seed: int = 0

    @property
    def pretrained(self) -> Part | Path:
        """Returns the experts' initial weights for all seeds: a DDPM DiT of other data, or a published one."""
        first, usual, folder = self.recipe.pretrain, self.recipe.expert, self.out / "pretrained"
        if first.checkpoint is not None:
            return folder / "converted"
        settings = replace(
            usual, model=f"{usual.model}:zero:blind", objective="ddpm", schedule="ddpm", steps=first.steps,
            batch=first.batch, seed=0,
        )  # fmt: skip
        return PretrainedPart("pretrained DiT", folder / "dit", settings, folder / "prepared")

    def part(
        self, kind: str, num: int, cluster: int | None = None, method: str = KMEANS, init: Part | Path | None = None,
        model: str = "",
    ) -> Part:  # fmt: skip
        """Returns an expert (fm, ddpm, fm-cosine), a monolith if `cluster` is None, or a router (router, blind-router).

        The budget is shared as in the papers: equal steps for all, and the monolith's batch divided among the experts.
        `model` are options appended to the size, such as :zero.
        """
        name, usual = f"{method}_{num}_{kind}", self.recipe.expert
        settings: ExpertSettings | RouterSettings
        if kind.endswith("router"):
            settings = replace(self.recipe.router, text=kind == "router", seed=self.seed)
        else:
            name += "_all" if cluster is None else f"_{cluster}"
            name += model.replace(":", "_")
            share = 1 if cluster is None else num
            if usual.batch % share:
                raise InputError(f"a batch of {usual.batch} cannot be shared by {share} experts: choose a multiple")
            objective, _, schedule = kind.partition("-")
            weighting = self.recipe.plan.ddpm_weighting if objective == "ddpm" else None
            settings = replace(
                usual, objective=objective, schedule=schedule or None, weighting=weighting, seed=self.seed,
                batch=usual.batch // share, model=usual.model + model,
            )  # fmt: skip
            _ = settings.resolved_objective  # fail now if it is invalid
        if init is not None:
            name += "_from_pretrained"
        folder, data = self.out / f"seed_{self.seed}" / "parts" / name, self.out / "data" / f"{method}_{num}"
        return Part(f"seed {self.seed} {name}", folder, settings, data, cluster, init)

    def model(self, name: str, *parts: Part) -> ModelNode:
        return ModelNode(self.out / f"seed_{self.seed}" / "models" / name, parts[0].data, parts)

    def ensemble(
        self, num: int, num_ddpm: int = 0, method: str = KMEANS, router: str = "", pretrained: bool = False
    ) -> ModelNode:
        """Returns an ensemble with `num_ddpm` DDPM experts: 0, 3, and then the others in order."""
        router = router or self.recipe.plan.router
        name = f"{method}-{num_ddpm}ddpm-{num - num_ddpm}fm{'-blind' if router == 'blind-router' else ''}"
        init = self.pretrained if pretrained else None
        ddpm = [k for k in dict.fromkeys((*PLACES, *range(num))) if k < num][:num_ddpm]
        experts = (self.part("ddpm" if k in ddpm else "fm", num, k, method, init) for k in range(num))
        return self.model(name + "-pretrained" * pretrained, *experts, self.part(router, num, method=method))

    def alone(self, *kinds: str, pretrained: bool = False, model: str = "") -> ModelNode:
        """Returns a model of experts that were all trained on the first cluster, without a router."""
        init = self.pretrained if pretrained else None
        parts = (self.part(kind, self.recipe.plan.num_experts, 0, init=init, model=model) for kind in kinds)
        name = "-".join(("cluster", *kinds)) + model.replace(":", "-")
        return self.model(name + "-pretrained" * pretrained, *parts)

    def on_the_way(self, model: ModelNode, share: int) -> ModelNode:
        """Returns the model with its experts' checkpoints after 1/`share` of their steps, and its final router."""

        def early(part: Part) -> Part:
            if isinstance(part.settings, RouterSettings):
                return part
            steps = part.settings.steps // share
            folder = part.folder.with_name(f"{part.folder.name}_at_{steps}")
            settings = replace(part.settings, steps=steps)
            return PartOnTheWay(f"{part.name} at {steps}", folder, settings, part.data, part.cluster, part)

        folder = model.folder.with_name(f"{model.folder.name}-1of{share}")
        return model._replace(folder=folder, parts=tuple(map(early, model.parts)))

    def student(self, teacher: ModelNode) -> ModelNode:
        """Returns a dense student of one expert's size and batch, distilled from the ensemble."""
        expert = teacher.parts[0].settings
        names = {f.name for f in fields(DistillSettings)} - {"objective", "teacher", "guidance"}
        own = {name: value for name, value in asdict(expert).items() if name in names}
        settings = DistillSettings(**own | {"steps": self.recipe.plan.student_steps or expert.steps})
        folder = self.out / f"seed_{self.seed}" / "parts" / f"student_of_{teacher.folder.name}"
        part = Part(f"seed {self.seed} student", folder, settings, teacher.data, teacher=teacher.folder)
        return self.model("student", part)


def studies_of(lab: Lab) -> dict[str, Callable[[], Study]]:
    """Returns functions that make the comparisons, by name."""
    plan = lab.recipe.plan
    num, usual, protocol = plan.num_experts, plan.sampling, plan.conversion_sampling
    homogeneous, quarter = lab.ensemble(num), max(2, num // 4)
    single = replace(usual, routing="top1")  # for models of one network
    monolith = lab.model("monolith-fm", lab.part("fm", num))  # with the batch of all experts together

    def by(routing: str, how: Sampling = usual) -> Sampling:
        return replace(how, routing=routing)

    def both(label: str, model: ModelNode, how: Sampling, hddm: str = "") -> list[Row]:
        """Returns a row per conversion of DDPM experts; the paper's figure is listed with the paper's conversion."""
        return [
            Row(f"{label}, the paper's conversion", model, replace(how, conversion=PAPER), hddm),
            Row(f"{label}, calibrated", model, how),
        ]

    def table3(pretrained: bool) -> Study:
        def of(*kinds: str) -> ModelNode:
            return lab.alone(*kinds, pretrained=pretrained)

        one, switch, ddpm = by("top1", protocol), by("by_time:0.5", protocol), of("ddpm")
        return Study(
            "Objectives on the same data, converted and combined (HDDM, Table 3)" + _from(pretrained),
            "FM is best; DDPM converted to FM is better than sampled natively; combined, diversity rises at a cost in "
            "FID.",
            Row("DDPM, native: ancestral, x0 clipped", ddpm, replace(one, solver="ancestral:table:clip"), "27.04"),
            Row("DDPM, native: DDIM, x0 clipped", ddpm, replace(one, solver="ddim:table:clip")),
            Row("DDPM, native: DDIM, dynamic thresholding", ddpm, replace(one, solver="ddim:table:dynamic")),
            Row("FM", of("fm"), one, "20.23"),
            Row("FM, cosine schedule", of("fm-cosine"), one),
            *both("DDPM to FM", ddpm, one, "25.61"),
            Row("DDPM to FM, the paper's conversion, damped", ddpm, replace(one, conversion="paper-damped")),
            Row("DDPM to FM, exact", ddpm, replace(one, conversion="exact")),
            *both("combined, same schedule", of("ddpm", "fm-cosine"), switch, "32.67"),
            *both("combined, two schedules", of("ddpm", "fm"), switch, "33.29"),
            cluster=0,
            num=plan.conversion_num,
        )

    def table4(pretrained: bool) -> Study:
        def mixed(num_ddpm: int) -> tuple[str, ModelNode]:
            return f"{num_ddpm} DDPM, {num - num_ddpm} FM", lab.ensemble(num, num_ddpm, pretrained=pretrained)

        other = f" at guidance {protocol.guidance:g}, {protocol.steps} steps"
        middle = ((1, "19.75"), (quarter, "15.09")) if pretrained else ()  # the paper's other protocol
        return Study(
            "Homogeneous and heterogeneous ensembles (HDDM, Table 4)" + _from(pretrained),
            "With a quarter of DDPM experts FID improves from 12.45 to 11.88, and diversity rises; in the protocol of "
            "Table 3 two are better than one.",
            Row(f"{num} FM", lab.ensemble(num, pretrained=pretrained), usual, "12.45"),
            *(row for n, figure in middle for label, model in [mixed(n)]
              for row in both(label + other, model, protocol, figure)),
            *both(*mixed(quarter), usual, "11.88"),
        )  # fmt: skip

    return {
        "table1": lambda: Study(
            "Monolith and ensemble with as many FLOPs of training (HDDM, Table 1; DDM, its table of policies)",
            "HDDM: top-2 beats the monolith by 24%, the full ensemble is worst. DDM: all policies beat it, top-1 is "
            "best, sampling one expert per step is useless.",
            Row("monolith", monolith, single, "29.64", "12.81"),
            Row("top-1", homogeneous, by("top1"), "30.60", "9.84"),
            Row("top-2", homogeneous, by("topk:2"), "22.60", "10.31"),
            *([Row("top-3", homogeneous, by("topk:3"), "", "10.37")] if num > 2 else []),
            Row("full", homogeneous, by("full"), "47.89", "10.52"),
            Row("threshold 0.01", homogeneous, by("threshold:0.01"), "", "10.46"),
            Row("threshold 0.05", homogeneous, by("threshold:0.05"), "", "10.37"),
            Row("threshold 0.1", homogeneous, by("threshold:0.1"), "", "10.15"),
            Row("sample-1", homogeneous, by("sample"), "", "157.05"),
            Row("sample-2", homogeneous, by("sample:2"), "", "10.27"),
            Row("oracle", homogeneous, by("oracle"), "", "10.46"),
        ),
        "table2": lambda: Study(
            "Compute and quality (HDDM, Table 2)",
            "DDM, as HDDM quotes it: 158M images, 1176 A100 days, FID 5.5 to 10.5 (estimated). HDDM: 11M images, 72 "
            "A100 days (120 of an A40), 16 times less compute and 14 times less data.",
            Row("monolith, from scratch", monolith, single),
            Row(f"{num} FM, pretrained", lab.ensemble(num, pretrained=True), usual, "12.45"),
            *both(
                f"{quarter} DDPM, {num - quarter} FM, pretrained",
                lab.ensemble(num, quarter, pretrained=True),
                usual,
                "11.88",
            ),
        ),
        "table3": lambda: table3(pretrained=True),
        "table3-scratch": lambda: table3(pretrained=False),
        "table4": lambda: table4(pretrained=True),
        "table4-scratch": lambda: table4(pretrained=False),
        "threshold": lambda: Study(
            "When FM hands over to DDPM: the threshold in time (HDDM, section 4.3 and supplement)",
            "Low thresholds (0.2 to 0.3), which mean more FM, favour FID, those in the middle (0.4 to 0.5) diversity.",
            Row("FM alone", lab.alone("fm", pretrained=True), by("top1", protocol)),
            *(
                row
                for t in plan.times
                for row in both(f"{t}", lab.alone("ddpm", "fm", pretrained=True), by(f"by_time:{t}", protocol))
            ),
            cluster=0,
            num=plan.conversion_num,
        ),
        "clusters": lambda: Study(
            "Clusters of like images, and random ones (DDM)",
            "Random clusters are clearly worse.",
            Row("k-means", homogeneous, usual),
            Row("random", lab.ensemble(num, method=RANDOM), usual),
            Row("monolith", monolith, single),
        ),
        "experts": lambda: Study(
            "How many experts, with as many FLOPs of training in all (DDM)",
            "8 are best of 4, 8 and 16.",
            Row("1", monolith, single),
            *(Row(str(count), lab.ensemble(count), usual) for count in plan.counts),
        ),
        "flops": lambda: Study(
            "Quality against FLOPs of training, from checkpoints on the way (DDM, Fig. 4)",
            "At each number of FLOPs the ensemble is better than the monolith.",
            *(
                Row(f"{label}, {name} of the steps", model if share == 1 else lab.on_the_way(model, share), how)
                for label, model, how in (("monolith", monolith, single), ("ensemble", homogeneous, usual))
                for name, share in ((f"1/{share}" if share > 1 else "all", share) for share in (*SHARES, 1))
            ),
        ),
        "correlation": lambda: Study(
            "Images of the same prompt and noise by monolith and ensemble (DDM, Fig. 5)",
            "They are highly correlated: both learn the same velocity.",
            Row("monolith", monolith, single),
            Row("top-1", homogeneous, by("top1")),
            Row("full", homogeneous, by("full")),
            *both(f"{quarter} DDPM, {num - quarter} FM", lab.ensemble(num, quarter), usual),
            correlated=True,
        ),
        "conversion": lambda: Study(
            "Conversions of DDPM experts (HDDM, section 3.2, and ours)",
            "The paper's conversion needs hand-tuned safeguards, and calls doing without them open.",
            *(
                Row(name or "calibrated", lab.ensemble(num, num // 2, pretrained=True), replace(usual, conversion=name))
                for name in (None, "exact", PAPER, "paper-damped")
            ),
        ),
        "init": lambda: Study(
            "Experts from scratch, and from a DDPM DiT of other data (HDDM, section 3.5)",
            "From ImageNet DDPM weights flow matching converges 1.2 times as fast. benchmarks/init.py counts steps.",
            *(
                Row(
                    f"{label}, {'from the DiT' if pretrained else 'from scratch'}",
                    lab.alone(kind, pretrained=pretrained),
                    by("top1"),
                )
                for label, kind in (("FM", "fm"), ("DDPM", "ddpm"))
                for pretrained in (False, True)
            ),
            cluster=0,
        ),
        "adaln": lambda: Study(
            "AdaLN-Single, AdaLN-Zero, and the norm of Eq. 17 (HDDM, section 3.4)",
            "AdaLN-Single has 30% fewer parameters (605M against 891M) at the same quality.",
            Row("AdaLN-Single", lab.alone("fm"), by("top1")),
            Row("AdaLN-Zero", lab.alone("fm", model=":zero"), by("top1")),
            Row("AdaLN-Single, norm before cross-attention", lab.alone("fm", model=":norm"), by("top1")),
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
        "student": lambda: Study(
            "One dense student of the ensemble, and a monolith with four times its batch (DDM)",
            "The student has FID 7.76, a monolith trained from scratch with four times the batch 7.82.",
            Row("ensemble, the teacher", homogeneous, usual),
            Row("student", lab.student(homogeneous), single, "", "7.76"),
            Row("monolith with four times the batch", _monolith_of_share(lab, num, 4), single, "", "7.82"),
            Row("monolith with the student's batch", _monolith_of_share(lab, num, 1), single),
        ),
    }


def _from(pretrained: bool) -> str:
    return ", from a pretrained DDPM DiT" if pretrained else ", from scratch"


def _monolith_of_share(lab: Lab, num: int, times: int) -> ModelNode:
    """Returns a monolith whose batch is `times` one expert's share, trained for the student's steps."""
    whole, usual = lab.part("fm", num), lab.recipe.expert
    batch, steps = times * usual.batch // num, lab.recipe.plan.student_steps or usual.steps
    name = f"{whole.folder.name}_batch_{batch}" + ("" if steps == usual.steps else f"_steps_{steps}")
    part = whole._replace(
        name=f"seed {lab.seed} {name}", folder=whole.folder.with_name(name),
        settings=replace(whole.settings, batch=batch, steps=steps),
    )  # fmt: skip
    same = (batch, steps) == (usual.batch, usual.steps)
    return lab.model(f"monolith-batch-{batch}", whole if same else part)


def get_studies(names: Sequence[str], lab: Lab) -> dict[str, Study]:
    """Returns the comparisons with these names."""
    studies = studies_of(lab)
    for name in names:
        if name not in studies:
            raise unknown("comparison", name, studies)
    return {name: studies[name]() for name in names}
