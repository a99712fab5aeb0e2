"""The papers' comparisons as data: which parts each needs, which models are made of them, and what the papers report.

HDDM is *Heterogeneous Decentralized Diffusion Models*, DDM its predecessor. Their figures are Inception FID on data of
another size and kind: they stand beside ours to compare the order of the rows, never the numbers.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from atoll.errors import InputError, unknown
from atoll.experiments.evaluate import Sampling

KMEANS, RANDOM = "kmeans", "random"
TAUS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
COUNTS = (2, 4, 8, 16)
NATIVE = "ancestral"
NATIVE_STEPS = 4  # times as many as usual, for the random steps of DDPM need more


class Clusters(NamedTuple):
    """A partition of the data."""

    method: str
    num: int

    @property
    def name(self) -> str:
        return f"{self.method}_{self.num}"


class Part(NamedTuple):
    """What is trained: an expert, the monolith or a router, of one partition."""

    kind: str  # fm, ddpm, fm-cosine; router, blind-router
    clusters: Clusters
    cluster: int | None = None  # None: all of the data
    first: "Part | None" = None  # whose weights it starts from

    @property
    def where(self) -> str:
        """What it is trained on, as `--cluster` is told."""
        return "all" if self.cluster is None else str(self.cluster)

    @property
    def is_router(self) -> bool:
        return self.kind.endswith("router")

    @property
    def name(self) -> str:
        if self.is_router:
            return f"{self.clusters.name}_{self.kind}"
        begun = "" if self.first is None else f"_from_{self.first.kind}_{self.first.cluster}"
        return f"{self.clusters.name}_{self.kind}_{self.where}{begun}"


class Model(NamedTuple):
    """Parts that are sampled as one."""

    name: str
    experts: tuple[Part, ...]
    router: Part | None = None


class Row(NamedTuple):
    """A line of a table."""

    label: str
    model: Model
    sampling: Sampling
    hddm: str = ""  # what the paper reports
    ddm: str = ""


@dataclass(frozen=True)
class Study:
    """One table."""

    title: str
    claim: str  # what the papers say of it
    rows: tuple[Row, ...]
    cluster: int | None = None  # prompts and reference are of this one alone

    @property
    def clusters(self) -> Clusters:
        """Of the data that it is judged on: of the last row, for oracle routing asks for the clusters of prompts."""
        return self.rows[-1].model.experts[0].clusters

    @property
    def parts(self) -> list[Part]:
        """Each once, in the order in which they are needed."""
        found: list[Part] = []
        for row in self.rows:
            found += [part.first for part in row.model.experts if part.first]
            found += [*row.model.experts, *((row.model.router,) if row.model.router else ())]
        return list(dict.fromkeys(found))


NAMES = ("table1", "table3", "table4", "threshold", "clusters", "experts", "conversion", "init", "router")


def get_study(name: str, num: int, usual: Sampling) -> Study:
    """One of NAMES for so many experts, images being made as usual."""
    if num < 2:
        raise InputError(f"a comparison needs at least 2 experts, but num_experts is {num}")
    makers = {
        "table1": _table1, "table3": _table3, "table4": _table4, "threshold": _threshold, "clusters": _clusters,
        "experts": _experts, "conversion": _conversion, "init": _init, "router": _router,
    }  # fmt: skip
    if name not in makers:
        raise unknown("comparison", name, NAMES)
    return makers[name](num, usual)


# --- models -------------------------------------------------------------------------------------------------------


def mixed(num: int, num_ddpm: int, method: str = KMEANS, router: str = "router") -> Model:
    """An ensemble whose first experts are of DDPM."""
    clusters = Clusters(method, num)
    kinds = ["ddpm"] * num_ddpm + ["fm"] * (num - num_ddpm)
    blind = "-blind" if router == "blind-router" else ""
    return Model(
        f"{method}-{num_ddpm}ddpm-{num - num_ddpm}fm{blind}",
        tuple(Part(kind, clusters, k) for k, kind in enumerate(kinds)),
        Part(router, clusters),
    )


def monolith(num: int, kind: str = "fm") -> Model:
    """One model of all data, with the batch of `num` experts."""
    return Model(f"monolith-{kind}", (Part(kind, Clusters(KMEANS, num)),))


def _alone(num: int, *kinds: str) -> Model:
    """Experts of one cluster, the first, without a router."""
    return Model("-".join(("cluster", *kinds)), tuple(Part(kind, Clusters(KMEANS, num), 0) for kind in kinds))


# --- tables -------------------------------------------------------------------------------------------------------


def _table1(num: int, usual: Sampling) -> Study:
    ours = mixed(num, 0)
    return Study(
        "Monolith and ensemble with as many FLOPs of training (HDDM, Table 1; DDM, its table of policies)",
        "HDDM: top-2 beats the monolith by 24%, the full ensemble is worst. DDM: all policies beat it, top-1 is best, "
        "sampling one expert a step is useless.",
        (
            Row("monolith", monolith(num), usual, "29.64", "12.81"),
            Row("top-1", ours, replace(usual, routing="top1"), "30.60", "9.84"),
            Row("top-2", ours, replace(usual, routing="topk:2"), "22.60", "10.31"),
            Row("full", ours, replace(usual, routing="full"), "47.89", "10.52"),
            Row("threshold 0.1", ours, replace(usual, routing="threshold:0.1"), "", "10.15"),
            Row("sample", ours, replace(usual, routing="sample"), "", "157.05"),
            Row("oracle", ours, replace(usual, routing="oracle"), "", "10.46"),
        ),
    )


def _table3(num: int, usual: Sampling) -> Study:
    top1, switch = replace(usual, routing="top1"), replace(usual, routing="by_time:0.5")
    native = replace(top1, solver=NATIVE, steps=NATIVE_STEPS * usual.steps)
    return Study(
        "Objectives on the same data, converted and combined (HDDM, Table 3)",
        "FM is best; DDPM converted to FM is better than sampled natively; combined, diversity rises at a cost in FID.",
        (
            Row("DDPM, native", _alone(num, "ddpm"), native, "27.04"),
            Row("FM", _alone(num, "fm"), top1, "20.23"),
            Row("FM, cosine schedule", _alone(num, "fm-cosine"), top1),
            Row("DDPM to FM, calibrated", _alone(num, "ddpm"), top1, "25.61"),
            Row("DDPM to FM, exact", _alone(num, "ddpm"), replace(top1, conversion="exact")),
            Row("DDPM to FM, the paper's", _alone(num, "ddpm"), replace(top1, conversion="paper")),
            Row("combined, same schedule", _alone(num, "ddpm", "fm-cosine"), switch, "32.67"),
            Row("combined, two schedules", _alone(num, "ddpm", "fm"), switch, "33.29"),
        ),
        cluster=0,
    )


def _table4(num: int, usual: Sampling) -> Study:
    quarter, half = max(1, num // 4), num // 2
    more = () if half == quarter else (Row(f"{half} DDPM, {num - half} FM", mixed(num, half), usual),)
    return Study(
        "Homogeneous and heterogeneous ensembles (HDDM, Table 4)",
        "With a quarter of DDPM experts FID improves from 12.45 to 11.88, and diversity rises.",
        (
            Row(f"{num} FM", mixed(num, 0), usual, "12.45"),
            Row(f"{quarter} DDPM, {num - quarter} FM", mixed(num, quarter), usual, "11.88"),
            *more,
        ),
    )


def _threshold(num: int, usual: Sampling) -> Study:
    ours = mixed(num, max(1, num // 4))
    return Study(
        "Which experts have a say: the threshold (HDDM, supplement)",
        "A threshold of 0.2 has the best FID, 0.5 the most diversity.",
        tuple(Row(f"threshold {tau}", ours, replace(usual, routing=f"threshold:{tau}")) for tau in TAUS),
    )


def _clusters(num: int, usual: Sampling) -> Study:
    return Study(
        "Clusters of like images, and random ones (DDM)",
        "Random clusters are clearly worse.",
        (
            Row("k-means", mixed(num, 0), usual),
            Row("random", mixed(num, 0, RANDOM), usual),
            Row("monolith", monolith(num), usual),
        ),
    )


def _experts(num: int, usual: Sampling) -> Study:
    return Study(
        "How many experts, with as many FLOPs of training in all (DDM)",
        "8 are best of 4, 8 and 16.",
        (Row("1", monolith(num), usual), *(Row(str(k), mixed(k, 0), usual) for k in COUNTS)),
    )


def _conversion(num: int, usual: Sampling) -> Study:
    ours = mixed(num, num // 2)
    return Study(
        "Conversions of DDPM experts (HDDM, section 3.2, and ours)",
        "The paper's conversion needs hand-tuned safeguards, and calls doing without them open.",
        tuple(Row(how, ours, replace(usual, conversion=how)) for how in ("calibrated", "exact", "paper")),
    )


def _init(num: int, usual: Sampling) -> Study:
    clusters = Clusters(KMEANS, num)
    other = Part("ddpm", clusters, 1)
    top1 = replace(usual, routing="top1")
    begun = Model("cluster-fm-from-ddpm", (Part("fm", clusters, 0, other),))
    return Study(
        "An expert from scratch, and from the weights of a DDPM expert of other data (HDDM, section 3.5)",
        "From ImageNet DDPM weights flow matching converges 1.2 times as fast. benchmarks/init.py counts steps.",
        (Row("from scratch", _alone(num, "fm"), top1), Row("from DDPM weights", begun, top1)),
        cluster=0,
    )


def _router(num: int, usual: Sampling) -> Study:
    reads, blind = mixed(num, 0), mixed(num, 0, router="blind-router")
    return Study(
        "A router that reads the text, and one that does not",
        "HDDM's router sees only the noisy image, DDM's the text too; neither compares them.",
        tuple(
            Row(f"{label}, {name}", model, replace(usual, routing=routing))
            for name, model in (("reads the text", reads), ("blind", blind))
            for label, routing in (("top-1", "top1"), ("top-2", "topk:2"))
        ),
    )


def parts_of(studies: Iterable[Study]) -> list[Part]:
    return list(dict.fromkeys(part for study in studies for part in study.parts))
