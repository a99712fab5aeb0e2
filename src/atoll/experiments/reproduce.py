"""`atoll reproduce`: the papers' comparisons, at equal budget and with several training seeds.

OUT/pictures/, OUT/prepared/   the data, if it is given by name
OUT/pretrained/                a DDPM DiT of other data, and the experts' initial weights converted from it
OUT/data/PARTITION/            the data, partitioned into clusters
OUT/seed_0/parts/              experts, monoliths and routers, each trained by a process of its own
OUT/seed_0/models/             models assembled from them
OUT/evaluation/                their images, the features of these, and all figures
OUT/results.json, results.md, and two plots per comparison: figures, and samples of the first seed

Parts that several comparisons need are trained once. Rerun the command to resume.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from atoll.cards import CONFIG, DATASET, DatasetCard, ModelIndex, hash_of
from atoll.data.builtin import NAMES as BUILT_IN
from atoll.data.download import PACKAGES
from atoll.data.view import refuse_inside
from atoll.engines.engine import Engine
from atoll.engines.local import Local
from atoll.errors import InputError
from atoll.experiments.cache import Snapshot
from atoll.experiments.evaluate import ON_A_SHEET, REAL, Contender, open_evaluation
from atoll.experiments.flops import training_figures, training_flops
from atoll.experiments.graph import PretrainedPart, assemble_all, begun, convert_dit_file, parts_of, train
from atoll.experiments.images import Images
from atoll.experiments.settings import MetricSettings
from atoll.experiments.studies import RANDOM, Data, Lab, Recipe, Row, Study, get_studies
from atoll.experiments.tables import SHOWN, draw_metrics, over_seeds, render_results
from atoll.partition.partition import partition
from atoll.plots.canvas import save_image
from atoll.plots.contact_sheet import draw_samples
from atoll.storage import reason_of, write_json, write_text


def reproduce(
    names: Sequence[str],
    data: str,
    out: Path,
    recipe: Recipe,
    engine: Engine | None = None,
    progress: bool = True,
    originals: str | None = None,
) -> dict[str, Any]:
    """Trains, assembles, evaluates and writes results; returns the content of results.json.

    `data` is a folder that `atoll prepare` made from `originals`, or the name of a data set, which is then fetched and
    prepared in `out`. For a folder without originals, images are compared with its decoded latents.
    """
    torch.set_num_threads(1)
    seeds = [get_studies(names, Lab(out, recipe, seed)) for seed in range(recipe.plan.seeds)]
    recipe.check()
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
            folder, source = recipe.data.make(data, out, progress)
            originals = source.place
        _pretrain(seeds, data, folder, out, recipe, progress)
        originals = originals if recipe.plan.originals else None
        return _run(seeds, folder, originals, out, recipe, engine or Local(recipe.expert.device), progress)


def _pretrain(
    seeds: Sequence[Mapping[str, Study]], name: str, data: Path, out: Path, recipe: Recipe, progress: bool
) -> None:
    """Prepares the experts' initial weights, if any part needs them: converts a published DiT, or prepares data for
    training one."""
    inits = {part.init for studies in seeds for study in studies.values() for row in study.rows
             for part in parts_of([row.model])} - {None}  # fmt: skip
    first, folder = recipe.pretrain, out / "pretrained"
    if folder / "converted" in inits and not (folder / "converted" / CONFIG).exists():
        assert first.checkpoint is not None
        convert_dit_file(Path(first.checkpoint), folder / "converted", data)
    if any(isinstance(init, PretrainedPart) for init in inits):
        if first.data == name:
            raise InputError(f"the DiT is to be trained on other data than {name}: name some in [pretrain]")
        card = DatasetCard.read(data)
        other = Data(first.num, card.settings.size, f"saved:{data}", card.settings.text)
        other.make(first.data, folder, progress)


Node = tuple[Path, int | None, int | None, Contender | None, Contender | None]
"""A measurement: data, its cluster (None: all), the number of images, and a model (None: real images). With a second
model, correlations with its images from the same noise are measured too."""
Figures = tuple[dict[str, Any], Images]
"""The result of a measurement: figures as in results.json, and the first images."""


def _run(
    seeds: Sequence[Mapping[str, Study]],
    data: Path,
    originals: str | None,
    out: Path,
    recipe: Recipe,
    engine: Engine,
    progress: bool,
) -> dict[str, Any]:
    """Runs the studies of all seeds: trains, assembles, measures, and writes the results."""
    rows = [row for studies in seeds for study in studies.values() for row in study.rows]
    models = list(dict.fromkeys(row.model for row in rows))
    for folder in sorted({model.data for model in models}):
        _partition(data, folder, recipe.plan.balance, progress)
    train(models, engine, progress)
    assemble_all(models)
    measured = _measure(
        [study for studies in seeds for study in studies.values()], out, recipe, originals, engine, progress
    )
    card, lab, num = DatasetCard.read(data), Lab(out, recipe), recipe.plan.num_experts
    parts = {
        "monolith": lab.part("fm", num),
        "router": lab.part(recipe.plan.router, num),
    }  # experts have the monolith's FLOPs
    results = {
        "data": {"name": card.source.name, "pictures": card.counts.rows, "license": card.license},
        "seeds": len(seeds),
        "reference": {
            "split": recipe.plan.reference_split,
            "pictures": "decoded latents" if originals is None else "original images",
        },
        "recipe": json.loads(json.dumps(asdict(recipe))),
        "training_flops": {name: training_flops(part.settings, part.data) for name, part in parts.items()},
        "studies": {name: _describe([studies[name] for studies in seeds], measured) for name in seeds[0]},
    }
    write_json(out / "results.json", results)
    write_text(out / "results.md", render_results(results))
    for name, study in seeds[0].items():
        save_image(draw_metrics(results["studies"][name]["rows"], SHOWN), out / f"{name}.png")
        about, images = measured[_node(study)]
        samples = {row.label: measured[_node(study, row)][1] for row in study.rows}
        save_image(draw_samples({REAL: images, **samples}, about["captions"]), out / f"{name}_samples.png")
    return results


def _partition(data: Path, folder: Path, balance: float | None, progress: bool) -> None:
    """Copies the data to `folder` and partitions the copy by the method and number in the folder's name."""
    if folder.exists():
        return
    staged = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    # Rows are in shards, or, if the data is partitioned already, in its clusters.
    left_out = ("clusters", ".*") if (data / "shards").exists() else (".*",)
    try:  # links stay links, which readers refuse, because they may point anywhere
        shutil.copytree(data, staged, symlinks=True, ignore=shutil.ignore_patterns(*left_out))
    except OSError as error:
        raise InputError(f"cannot copy {data} to {folder} ({reason_of(error)}): free the disk") from error
    method, num = folder.name.split("_")
    partition(staged, int(num), method=method, cap=None if method == RANDOM else balance, progress=progress)
    staged.rename(folder)


def _measure(
    studies: Sequence[Study], out: Path, recipe: Recipe, originals: str | None, engine: Engine, progress: bool
) -> dict[Node, Figures]:
    """Measures each row of each seed once, even if it is in several tables."""
    real = dict.fromkeys(map(_node, studies))
    rows = dict.fromkeys(_node(study, row) for study in studies for row in study.rows)
    usual = recipe.plan.metric_settings(recipe.expert.device, originals=originals)
    measure = partial(_measure_node, out / "evaluation", usual)
    measured: dict[Node, Figures] = {}
    for nodes in (real, rows):  # first the real images, whose cached features all others need
        figures = tqdm(engine.map(measure, nodes), "judging", len(nodes), disable=not progress)
        measured |= zip(nodes, figures, strict=True)
    return measured


def _node(study: Study, row: Row | None = None) -> Node:
    contenders = [
        one and Contender(one.model.folder.name, one.model.folder, one.sampling) for one in (row, study.rows[0])
    ]
    return study.data, study.cluster, study.num, contenders[0], contenders[1] if row and study.correlated else None


def _describe(studies: Sequence[Study], measured: Mapping[Node, Figures]) -> dict[str, Any]:
    """Returns a study's entry in results.json, over its seeds."""
    study = studies[0]
    rows: list[dict[str, Any]] = [{"name": REAL, "figures": measured[_node(study)][0]["figures"]}]
    for row, *others in zip(*(one.rows for one in studies), strict=True):
        seeds = [measured[_node(*own)][0] for own in zip(studies, (row, *others), strict=True)]
        rows.append({
            "name": row.label, "hddm": row.hddm, "ddm": row.ddm, "hash": [one["hash"] for one in seeds],
            "sampling": asdict(row.sampling),
            "figures": over_seeds([one["figures"] for one in seeds]) | training_figures(row.model),
        })  # fmt: skip
    return {"title": study.title, "claim": study.claim, "cluster": study.cluster, "rows": rows}


# --- processes that measure ------------------------------------------------------------------------------------------


def _measure_node(out: Path, settings: MetricSettings, node: Node) -> Figures:
    """Measures a node, or returns the cached result, so that more seeds or comparisons cost only what is new."""
    data, cluster, num, contender, other = node
    evaluation = open_evaluation(data, out, settings if num is None else replace(settings, num=num), cluster)
    key = json.loads(json.dumps({
        **{part: about for part, about in evaluation.describe().items() if part not in ("left_out", "notes")},
        "device": evaluation.suite.device.type,
        "models": [one and [one.name, ModelIndex.read(one.model).hash, asdict(one.sampling)]
                   for one in (contender, other)],
    }))  # fmt: skip
    name = hash_of(key)[:32]
    if (kept := Snapshot.read(out / "figures", name, key)) and "images" in kept.arrays:
        return dict(kept.about), kept.arrays["images"]
    if contender:
        about, images = evaluation.judge(contender), evaluation.first_images(contender)
        if other:
            about["figures"] |= evaluation.correlate(contender, other)
    else:
        (real, *_) = evaluation.real() or [{"figures": {}}]
        about, images = {**real, "captions": evaluation.prompts[:ON_A_SHEET]}, evaluation.first_real_images()
    Snapshot(key, about, {"images": images}).write(out / "figures", name)
    return about, images
