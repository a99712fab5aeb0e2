"""The papers' comparisons as data: which parts each needs, which models are made of them, and what the papers report.

HDDM is *Heterogeneous Decentralized Diffusion Models*, DDM its predecessor. Their figures are Inception FID on data of
another size and kind: they stand beside ours to compare the order of the rows, never the numbers.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from atoll.errors import unknown
from atoll.sampling.settings import Sampling

KMEANS, RANDOM = "kmeans", "random"
TAUS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
COUNTS = (2, 4, 8, 16)


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
    def is_router(self) -> bool:
        return self.kind.endswith("router")

    @property
    def name(self) -> str:
        where = "" if self.is_router else "_all" if self.cluster is None else f"_{self.cluster}"
        origin = f"_from_{self.first.kind}_{self.first.cluster}" if self.first else ""
        return f"{self.clusters.name}_{self.kind}{where}{origin}"


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


class Study:
    """One table: its title, what the papers say of it, and its rows."""

    def __init__(self, title: str, claim: str, *rows: Row, cluster: int | None = None) -> None:
        self.title, self.claim, self.rows = title, claim, rows
        self.cluster = cluster  # prompts and reference are of this one alone
        # Of the data that it is judged on: of the last row, for oracle routing asks for the clusters of prompts.
        self.clusters = rows[-1].model.experts[0].clusters


def parts_of(studies: Iterable[Study]) -> list[Part]:
    """Returns all parts, each once, in the order in which they are needed."""
    models = [row.model for study in studies for row in study.rows]
    groups = (([part.first for part in model.experts], model.experts, [model.router]) for model in models)
    return list(dict.fromkeys(part for group in groups for parts in group for part in parts if part))


def mixed(num: int, num_ddpm: int, method: str = KMEANS, router: str = "router") -> Model:
    """Returns an ensemble whose first experts are of DDPM."""
    clusters = Clusters(method, num)
    kinds = ["ddpm"] * num_ddpm + ["fm"] * (num - num_ddpm)
    name = f"{method}-{num_ddpm}ddpm-{num - num_ddpm}fm{'-blind' if router == 'blind-router' else ''}"
    return Model(name, tuple(Part(kind, clusters, k) for k, kind in enumerate(kinds)), Part(router, clusters))


def monolith(num: int) -> Model:
    """Returns one model of all data, with the batch of `num` experts."""
    return Model("monolith-fm", (Part("fm", Clusters(KMEANS, num)),))


def _alone(num: int, *kinds: str) -> Model:
    """Returns experts of one cluster, the first, without a router."""
    return Model("-".join(("cluster", *kinds)), tuple(Part(kind, Clusters(KMEANS, num), 0) for kind in kinds))


def all_studies(num: int, usual: Sampling) -> dict[str, Study]:
    """Returns every comparison for so many experts, images being made as usual."""
    homogeneous, quarter, clusters = mixed(num, 0), max(1, num // 4), Clusters(KMEANS, num)
    ddpm, fm = _alone(num, "ddpm"), _alone(num, "fm")
    from_ddpm = Model("cluster-fm-from-ddpm", (Part("fm", clusters, 0, first=Part("ddpm", clusters, 1)),))

    def by(routing: str) -> Sampling:
        return replace(usual, routing=routing)

    top1, switch = by("top1"), by("by_time:0.5")
    native = replace(top1, solver="ancestral", steps=4 * usual.steps)  # the random steps of DDPM need more
    return {
        "table1": Study(
            "Monolith and ensemble with as many FLOPs of training (HDDM, Table 1; DDM, its table of policies)",
            "HDDM: top-2 beats the monolith by 24%, the full ensemble is worst. DDM: all policies beat it, top-1 is "
            "best, sampling one expert a step is useless.",
            Row("monolith", monolith(num), usual, "29.64", "12.81"),
            Row("top-1", homogeneous, top1, "30.60", "9.84"),
            Row("top-2", homogeneous, by("topk:2"), "22.60", "10.31"),
            Row("full", homogeneous, by("full"), "47.89", "10.52"),
            Row("threshold 0.1", homogeneous, by("threshold:0.1"), "", "10.15"),
            Row("sample", homogeneous, by("sample"), "", "157.05"),
            Row("oracle", homogeneous, by("oracle"), "", "10.46"),
        ),
        "table3": Study(
            "Objectives on the same data, converted and combined (HDDM, Table 3)",
            "FM is best; DDPM converted to FM is better than sampled natively; combined, diversity rises at a cost in "
            "FID.",
            Row("DDPM, native", ddpm, native, "27.04"),
            Row("FM", fm, top1, "20.23"),
            Row("FM, cosine schedule", _alone(num, "fm-cosine"), top1),
            Row("DDPM to FM, calibrated", ddpm, top1, "25.61"),
            Row("DDPM to FM, exact", ddpm, replace(top1, conversion="exact")),
            Row("DDPM to FM, the paper's", ddpm, replace(top1, conversion="paper")),
            Row("combined, same schedule", _alone(num, "ddpm", "fm-cosine"), switch, "32.67"),
            Row("combined, two schedules", _alone(num, "ddpm", "fm"), switch, "33.29"),
            cluster=0,
        ),
        "table4": Study(
            "Homogeneous and heterogeneous ensembles (HDDM, Table 4)",
            "With a quarter of DDPM experts FID improves from 12.45 to 11.88, and diversity rises.",
            Row(f"{num} FM", homogeneous, usual, "12.45"),
            Row(f"{quarter} DDPM, {num - quarter} FM", mixed(num, quarter), usual, "11.88"),
            *(Row(f"{half} DDPM, {num - half} FM", mixed(num, half), usual) for half in {num // 2} - {quarter}),
        ),
        "threshold": Study(
            "Which experts have a say: the threshold (HDDM, supplement)",
            "A threshold of 0.2 has the best FID, 0.5 the most diversity.",
            *(Row(f"threshold {tau}", mixed(num, quarter), by(f"threshold:{tau}")) for tau in TAUS),
        ),
        "clusters": Study(
            "Clusters of like images, and random ones (DDM)",
            "Random clusters are clearly worse.",
            Row("k-means", homogeneous, usual),
            Row("random", mixed(num, 0, RANDOM), usual),
            Row("monolith", monolith(num), usual),
        ),
        "experts": Study(
            "How many experts, with as many FLOPs of training in all (DDM)",
            "8 are best of 4, 8 and 16.",
            Row("1", monolith(num), usual),
            *(Row(str(count), mixed(count, 0), usual) for count in COUNTS),
        ),
        "conversion": Study(
            "Conversions of DDPM experts (HDDM, section 3.2, and ours)",
            "The paper's conversion needs hand-tuned safeguards, and calls doing without them open.",
            *(
                Row(name, mixed(num, num // 2), replace(usual, conversion=name))
                for name in ("calibrated", "exact", "paper")
            ),
        ),
        "init": Study(
            "An expert from scratch, and from the weights of a DDPM expert of other data (HDDM, section 3.5)",
            "From ImageNet DDPM weights flow matching converges 1.2 times as fast. benchmarks/init.py counts steps.",
            Row("from scratch", fm, top1),
            Row("from DDPM weights", from_ddpm, top1),
            cluster=0,
        ),
        "router": Study(
            "A router that reads the text, and one that does not",
            "HDDM's router sees only the noisy image, DDM's the text too; neither compares them.",
            *(
                Row(f"{label}, {name}", mixed(num, 0, router=router), by(routing))
                for name, router in (("reads the text", "router"), ("blind", "blind-router"))
                for label, routing in (("top-1", "top1"), ("top-2", "topk:2"))
            ),
        ),
    }


def get_studies(names: Iterable[str], num: int, usual: Sampling) -> dict[str, Study]:
    """Returns those of these names."""
    studies = all_studies(num, usual)
    for name in names:
        if name not in studies:
            raise unknown("comparison", name, studies)
    return {name: studies[name] for name in names}
