"""`atoll reproduce --dry-run`: lists the parts, models and rows of a plan, with the FLOPs and memory of its parts.

Nothing is run. Memory is predicted as by `atoll train --dry-run`; FLOPs are counted on networks without weights.
"""

import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from atoll.diffusion.solvers import EVALUATIONS
from atoll.engines.train_all import Part
from atoll.experiments.flops import counting
from atoll.experiments.graph import PartOnTheWay, PretrainedPart, parts_of, stage_of
from atoll.experiments.settings import MetricSettings
from atoll.experiments.studies import RANDOM, Lab, Recipe, Row, Study, get_studies
from atoll.networks.dit import DiTConfig
from atoll.networks.presets import preset
from atoll.networks.router import RouterConfig
from atoll.sampling.settings import SOLVER, STEPS, Sampling
from atoll.training.memory import in_words, inputs_of, micro_batch_of, network_of, predict
from atoll.training.settings import RouterSettings, Settings, as_flags

LATENTS = {"pca": (48, 8), "conv": (48, 8), "vae": (4, 8)}  # codec -> channels, pixels per latent
TEXTS = {"words": (64, 32), "wordllama": (256, 48), "clip": (768, 77)}  # text encoder -> width, tokens
MOST_TIMED, TIMED_BATCH = 20_000_000, 16  # networks with fewer parameters are timed here, with this batch
A100_DAY = 312e12 * 0.4 * 86_400  # FLOPs in dense bf16 at 40% utilisation


def describe_plan(names: Sequence[str], recipe: Recipe) -> list[str]:
    """Returns lines to print: parts with their steps, FLOPs and time, models, rows, and the equivalent commands."""
    lab = Lab(Path("OUT"), recipe)
    studies, total = get_studies(names, lab), 0.0
    models = list(dict.fromkeys(row.model for study in studies.values() for row in study.rows))
    lines = [f"{'part':34}{'batch':>7}{'steps':>9}{'parameters':>12}{'GPU memory':>12}{'FLOPs':>10}{'A100 days':>11}"]
    seeds, trained = recipe.plan.seeds, [part for part in parts_of(models) if not isinstance(part, PartOnTheWay)]
    for part in trained:
        settings = part.settings
        parameters, memory, flops = _count(*_network_of(part, recipe), micro_batch_of(settings), settings.checkpointing)
        flops *= settings.batch * settings.steps
        total += flops * (1 if isinstance(part, PretrainedPart) else seeds)
        lines.append(
            f"{part.folder.name:34}{settings.batch:>7}{settings.steps:>9}{parameters / 1e6:>11.1f}M"
            f"{in_words(memory):>12}{flops:>10.2g}{flops / A100_DAY:>11.1f}"
        )
    sampled = sum(_sampling_flops(row, study.num or recipe.plan.num, recipe) for study in studies.values()
                  for row in study.rows) * seeds  # fmt: skip
    lines += [
        f"in all, {seeds} of each: {total:.2g} FLOPs, {total / A100_DAY:,.1f} days of an A100 at 40% of "
        f"its bf16 FLOPS; memory is for micro-batches of at most {micro_batch_of(recipe.expert)}, bf16",
        f"sampling, at least: {sampled:.2g} FLOPs, {sampled / A100_DAY:,.1f} days of an A100",
    ]
    config, length = _network_of(lab.part("fm", recipe.plan.num_experts), recipe)
    if sum(math.prod(p.shape) for p in _on_meta(config, 1, length)[0].parameters()) < MOST_TIMED:
        speed = _speed(config, length)
        lines.append(
            f"on one core of this machine, which trains at {speed:.2g} FLOPS: {total / speed / 60:.0f} minutes of "
            f"training, {sampled / speed / 60:.0f} of sampling; measuring images comes on top"
        )
    lines += ["", *(f"model {one.folder.name}: {', '.join(part.folder.name for part in one.parts)}" for one in models)]
    for name, study in studies.items():
        lines += ["", f"{name}: {study.title}"]
        for row in study.rows:
            how, conversion = row.sampling, f", {row.sampling.conversion}" if row.sampling.conversion else ""
            how_many = f"{how.solver}, {how.steps} steps, guidance {how.guidance:g}{conversion}"
            lines.append(f"  {row.label}: {row.model.folder.name}, {how.routing}, {how_many}")
    return [*lines, "", "the same by hand:", *(f"  {shlex.join(words)}" for words in commands_of(studies, recipe))]


def commands_of(studies: Mapping[str, Study], recipe: Recipe) -> Iterator[list[str]]:
    """Yields the commands that are equivalent to the first seed of the studies, in an order in which they can run."""
    plan, data, first = recipe.plan, recipe.data, recipe.pretrain
    models = list(dict.fromkeys(row.model for study in studies.values() for row in study.rows))
    sizes = ["--size", str(data.size), "--text", data.text, "--features", data.features]
    kept = ["--holdout", str(data.holdout), "--near-duplicates", "keep"]
    yield ["atoll", "prepare", "IMAGES", "--codec", data.codec, *sizes, *kept, "--out", "OUT/prepared"]
    for folder in sorted({str(model.data) for model in models}):
        method, num = Path(folder).name.split("_")
        yield ["cp", "-r", "OUT/prepared", folder]
        balance = [] if method == RANDOM or plan.balance is None else ["--balance", str(plan.balance)]
        yield ["atoll", "partition", folder, "--experts", num, "--method", method, *balance]
    parts = parts_of(models)
    if any(isinstance(part.init, Path) for part in parts):
        yield ["atoll", "convert", str(first.checkpoint), "--text-dim", str(_text_of(recipe)[0]), "--out",
               "OUT/pretrained/converted"]  # fmt: skip
    if any(isinstance(part, PretrainedPart) for part in parts):
        yield ["atoll", "prepare", "OTHER_IMAGES", "--codec", "saved:OUT/prepared", *sizes, "--out",
               "OUT/pretrained/prepared"]  # fmt: skip
    for part in sorted((part for part in parts if not isinstance(part, PartOnTheWay)), key=stage_of):
        flags = as_flags(part.settings, type(part.settings)())
        yield ["atoll", *part.verb, *flags, "--out", str(part.folder)]
    for model in models:
        if not any(isinstance(part, PartOnTheWay) for part in model.parts):
            router = [str(part.folder) for part in model.parts if isinstance(part.settings, RouterSettings)]
            experts = [str(part.folder) for part in model.parts if str(part.folder) not in router]
            how = ["--router", *router] if router else ["--without-router"] if len(experts) > 1 else []
            yield ["atoll", "assemble", *experts, *how, "--data", str(model.data), "--out", str(model.folder)]
    usual = plan.metric_settings("auto", originals="IMAGES" if plan.originals else None)
    for study in studies.values():
        for row in study.rows:
            if any(isinstance(part, PartOnTheWay) for part in row.model.parts):
                continue
            settings = replace(usual, num=study.num or plan.num)
            cluster = [] if study.cluster is None else ["--cluster", str(study.cluster)]
            yield ["atoll", "evaluate", str(row.model.folder), str(study.data), *cluster, *_metric_flags(settings),
                   *as_flags(row.sampling, Sampling(batch=50)), "--out", "OUT/evaluation"]  # fmt: skip


def _metric_flags(settings: MetricSettings) -> list[str]:
    names = {"num_reference": "reference", "first_seed": "seed"}
    flags: list[str] = []
    for key, value in asdict(settings).items():
        if value not in (None, (), getattr(MetricSettings(), key)):
            values = value if isinstance(value, tuple) else (value,)
            flags += [f"--{names.get(key, key).replace('_', '-')}", *map(str, values)]
    return flags


def _sampling_flops(row: Row, num: int, recipe: Recipe) -> float:
    """Returns the FLOPs of `num` guided images with one expert per step, the minimum over routing policies."""
    config, length = _network_of(row.model.parts[0], recipe)
    network, arguments = _on_meta(config, 2, length)
    with torch.no_grad(), counting() as total:
        network(*arguments)
        steps, solver = row.sampling.steps or STEPS, row.sampling.solver or SOLVER
        return float(num * steps * EVALUATIONS.get(solver, 1) * total())


def _speed(config: DiTConfig | RouterConfig, text_length: int) -> float:
    """Returns the training FLOPs per second of one core, measured for about a second."""
    network, arguments = network_of(config), [torch.rand_like(x) for x in inputs_of(config, TIMED_BATCH, text_length)]
    flops = TIMED_BATCH * _count(config, text_length, 1, False)[2]
    begun, num, threads = time.perf_counter(), 0, torch.get_num_threads()
    torch.set_num_threads(1)
    while num < 2 or time.perf_counter() - begun < 1:
        network(*arguments).square().mean().backward()
        num += 1
    torch.set_num_threads(threads)
    return num * flops / (time.perf_counter() - begun)


def _on_meta(config: DiTConfig | RouterConfig, num: int, text_length: int) -> tuple[torch.nn.Module, list[Tensor]]:
    with torch.device("meta"):
        return network_of(config), inputs_of(config, num, text_length)


def _text_of(recipe: Recipe) -> tuple[int, int]:
    return TEXTS.get(recipe.data.text.partition(":")[0], TEXTS["clip"])


def _network_of(part: Part, recipe: Recipe) -> tuple[DiTConfig | RouterConfig, int]:
    """Returns the configuration of a part's network, and the length of its texts."""
    channels, factor = LATENTS.get(recipe.data.codec.partition(":")[0], LATENTS["vae"])
    text_dim, text_length = _text_of(recipe)
    shape = {"input_size": recipe.data.size // factor, "in_channels": channels}
    if not isinstance(part.settings, RouterSettings):
        return DiTConfig(**preset(part.settings.model, **shape, text_dim=text_dim)), text_length
    num_experts, reads = int(part.data.name.split("_")[1]), text_dim if part.settings.text else None
    sizes = preset(part.settings.model, **shape, text_dim=reads, num_experts=num_experts)
    return RouterConfig(**sizes), text_length


@cache
def _count(
    config: DiTConfig | RouterConfig, text_length: int, micro_batch: int, checkpointing: bool
) -> tuple[int, int, float]:
    """Returns the number of parameters, the bytes on a GPU, and the FLOPs of one sample's loss and gradient."""
    settings = Settings(batch=micro_batch, checkpointing=checkpointing)
    memory = predict(config, settings, text_length=text_length, device_type="cuda", bf16=True)
    network, arguments = _on_meta(config, 1, text_length)
    with counting() as total:
        result = network(*arguments)
        again = total() if checkpointing else 0  # the forward pass is recomputed
        result.float().square().mean().backward()
        return sum(p.numel() for p in network.parameters()), memory.total, float(total() + again)
