"""`atoll reproduce --scale paper`: the commands of a comparison at the papers' scale, and the hardware they need.

Nothing is run. Memory is predicted as `--dry-run` does, FLOPs are counted by torch on networks without weights.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from atoll.experiments.evaluate import Sampling
from atoll.experiments.judge import counting
from atoll.experiments.reproduce import Recipe
from atoll.experiments.studies import Clusters, Model, Part, Row, Study, get_study, parts_of
from atoll.networks.dit import DiTConfig
from atoll.networks.presets import preset
from atoll.networks.router import RouterConfig
from atoll.training.memory import in_words, inputs_of, micro_batch_of, on_meta, predict
from atoll.training.settings import ExpertSettings, Settings

SOURCE = "PICTURES"  # the user's folder, tar or parquet file
CHANNELS, FACTOR = 4, 8  # of Stable Diffusion's autoencoder
TEXT_DIM, TEXT_LENGTH = 768, 77  # of CLIP ViT-L/14
A100, SHARE = 312e12, 0.4  # dense bf16 FLOPS, and how much of it training gets
DAY = 86_400
STATE, FINAL = 16, 4  # bytes a parameter: weights, their average and two moments, fp32; what is left of them
FEATURE_DIM = 1024  # of DINOv2 large


def tell_commands(names: Sequence[str], recipe: Recipe, name: str, data: str) -> list[str]:
    """What to type, and below it what it takes."""
    plan = recipe.plan
    studies = [get_study(name, plan.num_experts, plan.sampling) for name in names]
    parts = parts_of(studies)
    lines = [
        f"# {', '.join(names)} at the papers' scale: {plan.num_experts} experts of {recipe.expert.model}.",
        "# Nothing is run here. Each of the training commands may run on a machine of its own, which needs no other.",
        "",
        "# data",
        *_prepare(recipe, data, dict.fromkeys(part.clusters for part in parts)),
    ]
    for seed in range(plan.seeds):
        lines += ["", f"# training, seed {seed}"]
        lines += [_train(part, recipe, name, data, seed) for part in parts if part.first is None]
        lines += [_train(part, recipe, name, data, seed) for part in parts if part.first is not None]
        lines += ["", f"# models, seed {seed}"]
        lines += dict.fromkeys(_assemble(row.model, data, seed) for study in studies for row in study.rows)
        lines += ["", f"# figures, seed {seed}"]
        lines += dict.fromkeys(_evaluate(study, row, recipe, data, seed) for study in studies for row in study.rows)
    return [*lines, "", *_resources(parts, recipe)]


# --- commands --------------------------------------------------------------------------------------------------------


def _written(*words: object) -> str:
    return shlex.join(["atoll", *map(str, words)])


def _flags(values: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name, value in values.items():
        if value is not None:
            found += [f"--{name}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return found


def _data_of(data: str, clusters: Clusters) -> str:
    return f"{data}_{clusters.name}"


def _prepare(recipe: Recipe, data: str, partitions: Iterable[Clusters]) -> list[str]:
    how = recipe.data
    flags = _flags(
        {
            "size": how.size, "codec": how.codec, "text": how.text, "features": how.features, "holdout": how.holdout,
            "out": data,
        }
    )  # fmt: skip
    lines = [_written("prepare", SOURCE, *flags)]
    for clusters in partitions:
        folder = _data_of(data, clusters)
        balance = recipe.plan.balance if clusters.method == "kmeans" else None
        flags = _flags({"experts": clusters.num, "method": clusters.method, "balance": balance})
        lines += [f"cp -rT {shlex.quote(data)} {shlex.quote(folder)}", _written("partition", folder, *flags)]
    return lines


def _place(part: Part, seed: int) -> str:
    return f"seed_{seed}/parts/{part.name}"


def _train(part: Part, recipe: Recipe, name: str, data: str, seed: int) -> str:
    """With the recipe, and what differs from it as flags."""
    settings = recipe.settings_of(part, seed)
    usual: Settings = recipe.router if part.is_router else recipe.expert
    changed = {
        field.name.replace("_", "-"): getattr(settings, field.name)
        for field in fields(settings)
        if getattr(settings, field.name) != getattr(usual, field.name) and field.name != "text"
    }
    folder = _data_of(data, part.clusters)
    end = _flags({"out": _place(part, seed)})
    if part.is_router:
        blind = [] if getattr(settings, "text", True) else ["--no-text"]
        return _written("train-router", folder, *_flags({"recipe": name, **changed}), *blind, *end)
    first = None if part.first is None else _place(part.first, seed)
    return _written("train", folder, *_flags({"cluster": part.where, "recipe": name, **changed, "init": first}), *end)


def _assemble(model: Model, data: str, seed: int) -> str:
    flags = _flags(
        {
            "router": None if model.router is None else _place(model.router, seed),
            "data": _data_of(data, model.experts[0].clusters),
            "out": f"seed_{seed}/models/{model.name}",
        }
    )
    alone = ["--without-router"] if model.router is None and len(model.experts) > 1 else []
    return _written("assemble", *(_place(part, seed) for part in model.experts), *flags, *alone)


def _evaluate(study: Study, row: Row, recipe: Recipe, data: str, seed: int) -> str:
    plan, how = recipe.plan, row.sampling
    folder = _data_of(data, study.clusters)
    where = "" if study.cluster is None else f"_cluster_{study.cluster}"
    name = f"{row.model.name}_{how.routing}_{how.conversion or how.solver}_{folder}{where}".replace(":", "")
    flags = _flags(
        {
            "num": plan.num, "split": plan.split, "reference": plan.reference, "features": plan.features,
            "varied": plan.varied, "each": plan.each, "cluster": study.cluster, **_sampling(how),
            "out": f"seed_{seed}/figures/{name}",
        }
    )  # fmt: skip
    return _written("evaluate", f"seed_{seed}/models/{row.model.name}", folder, *flags)


def _sampling(how: Sampling) -> dict[str, Any]:
    """What differs from what `atoll evaluate` does by itself."""
    usual = Sampling()
    return {
        field.name: getattr(how, field.name)
        for field in fields(how)
        if getattr(how, field.name) != getattr(usual, field.name)
    }


# --- resources -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """Of training one part."""

    kind: str
    batch: int
    parameters: int
    memory: int
    flops: float

    @property
    def days(self) -> float:
        return self.flops / (A100 * SHARE) / DAY


def need_of(part: Part, recipe: Recipe) -> Need:
    settings = recipe.settings_of(part, 0)
    shape = {"input_size": recipe.data.size // FACTOR, "in_channels": CHANNELS}
    config: DiTConfig | RouterConfig
    if isinstance(settings, ExpertSettings):
        config = DiTConfig(**preset(settings.model, **shape, text_dim=TEXT_DIM))
    else:
        text_dim = TEXT_DIM if settings.text else None
        config = RouterConfig(**preset(settings.model, **shape, text_dim=text_dim), num_experts=part.clusters.num)
    kind = "router" if part.is_router else "monolith" if part.cluster is None else "expert"
    parameters, memory, flops = _count(config, micro_batch_of(settings), settings.checkpointing)
    return Need(kind, settings.batch, parameters, memory, flops * settings.batch * settings.steps)


@cache
def _count(config: DiTConfig | RouterConfig, at_a_time: int, checkpointing: bool) -> tuple[int, int, float]:
    """The parameters, the bytes on a GPU, and the FLOPs of one sample's loss and gradient."""
    settings = Settings(batch=at_a_time, checkpointing=checkpointing)
    memory = predict(config, settings, text_length=TEXT_LENGTH, device_type="cuda", bf16=True)
    network, arguments = on_meta(config), inputs_of(config, 1, TEXT_LENGTH)
    with counting() as total:
        result = network(*arguments)
        again = total() if checkpointing else 0  # the forward pass is computed twice
        result.float().square().mean().backward()
        return sum(p.numel() for p in network.parameters()), memory.total, float(total() + again)


def _resources(parts: Sequence[Part], recipe: Recipe) -> list[str]:
    seeds, num = recipe.plan.seeds, recipe.data.num
    needs = [need_of(part, recipe) for part in parts]
    lines = [f"# what it takes, {seeds} seed{'s' if seeds > 1 else ''} of training"]
    heads = f"{'number':>8}{'batch':>7}{'parameters':>12}{'GPU memory':>12}{'FLOPs each':>12}{'A100 days each':>16}"
    lines.append(f"# {'':10}{heads}")
    for need in dict.fromkeys(needs):
        lines.append(
            f"# {need.kind:10}{needs.count(need) * seeds:>8}{need.batch:>7}{need.parameters / 1e6:>11.0f}M"
            f"{in_words(need.memory):>12}{need.flops:>12.2g}{need.days:>16.1f}"
        )
    row = 2 * (CHANNELS * (recipe.data.size // FACTOR) ** 2 + FEATURE_DIM)  # half precision
    states = sum(need.parameters for need in needs) * (recipe.expert.keep_last * STATE + FINAL) * seeds
    partitions = len({part.clusters for part in parts})
    lines += [
        f"# in all {seeds * sum(need.days for need in needs):,.0f} days of an A100 at {SHARE:.0%} of its bf16 FLOPS "
        f"({A100 / 1e12:.0f}e12), beside preparing {num:,} pictures and sampling",
        f"# memory is for micro-batches of at most {micro_batch_of(recipe.expert)}, bf16"
        + (", with checkpointing, whose second forward pass is counted" if recipe.expert.checkpointing else ""),
        f"# disk: about {in_words(num * row)} of latents and features for each of {partitions + 1} copies, "
        f"{in_words(states)} of weights and states",
    ]
    return lines
