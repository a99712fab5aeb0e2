"""`atoll reproduce --dry-run`: the parts, models and rows of a plan, and the FLOPs and memory that its parts need.

Nothing is run. Memory is predicted as `atoll train --dry-run` does; FLOPs are counted on networks without weights.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from atoll.engines.train_all import Part
from atoll.experiments.flops import counting
from atoll.experiments.graph import parts_of
from atoll.experiments.studies import Lab, Recipe, get_studies
from atoll.networks.dit import DiTConfig
from atoll.networks.presets import preset
from atoll.networks.router import RouterConfig
from atoll.training.memory import in_words, inputs_of, micro_batch_of, network_of, predict
from atoll.training.settings import RouterSettings, Settings

# Of each kind of codec and text encoder: channels and pixels per latent; dimensions and tokens.
LATENTS = {"pca": (48, 8), "conv": (48, 8), "vae": (4, 8)}
TEXTS = {"words": (64, 32), "wordllama": (256, 48), "clip": (768, 77)}
A100_DAY = 312e12 * 0.4 * 86_400  # FLOPs: dense bf16, of which training gets 40%


def describe_plan(names: Sequence[str], recipe: Recipe) -> list[str]:
    """Returns the lines to print."""
    studies, total = get_studies(names, Lab(Path(), recipe)), 0.0
    models = dict.fromkeys(row.model for study in studies.values() for row in study.rows)
    lines = [f"{'part':34}{'batch':>7}{'steps':>9}{'parameters':>12}{'GPU memory':>12}{'FLOPs':>10}{'A100 days':>11}"]
    for part in parts_of(models):
        settings = part.settings
        parameters, memory, flops = _count(*_network_of(part, recipe), micro_batch_of(settings), settings.checkpointing)
        flops *= settings.batch * settings.steps
        total += recipe.plan.seeds * flops
        lines.append(
            f"{part.folder.name:34}{settings.batch:>7}{settings.steps:>9}{parameters / 1e6:>11.1f}M"
            f"{in_words(memory):>12}{flops:>10.2g}{flops / A100_DAY:>11.1f}"
        )
    lines += [
        f"in all, {recipe.plan.seeds} of each: {total:.2g} FLOPs, {total / A100_DAY:,.1f} days of an A100 at 40% of "
        f"its bf16 FLOPS; memory is for micro-batches of at most {micro_batch_of(recipe.expert)}, bf16",
        "",
    ]
    lines += [f"model {model.folder.name}: {', '.join(part.folder.name for part in model.parts)}" for model in models]
    for name, study in studies.items():
        lines += ["", f"{name}: {study.title}"]
        for row in study.rows:
            how, conversion = row.sampling, f", {row.sampling.conversion}" if row.sampling.conversion else ""
            model = row.model.folder.name
            lines.append(f"  {row.label}: {model}, {how.routing}, {how.solver}, {how.steps} steps{conversion}")
    return lines


def _network_of(part: Part, recipe: Recipe) -> tuple[DiTConfig | RouterConfig, int]:
    """Returns the network of a part, and how long its texts are."""
    channels, factor = LATENTS.get(recipe.data.codec.partition(":")[0], LATENTS["vae"])
    text_dim, text_length = TEXTS.get(recipe.data.text.partition(":")[0], TEXTS["clip"])
    shape = {"input_size": recipe.data.size // factor, "in_channels": channels}
    if not isinstance(part.settings, RouterSettings):
        return DiTConfig(**preset(part.settings.model, **shape, text_dim=text_dim)), text_length
    num_experts, reads = int(part.data.name.split("_")[1]), text_dim if part.settings.text else None
    return RouterConfig(**preset(part.settings.model, **shape, text_dim=reads), num_experts=num_experts), text_length


@cache
def _count(
    config: DiTConfig | RouterConfig, text_length: int, micro_batch: int, checkpointing: bool
) -> tuple[int, int, float]:
    """Returns the parameters, the bytes on a GPU, and the FLOPs of one sample's loss and gradient."""
    settings = Settings(batch=micro_batch, checkpointing=checkpointing)
    memory = predict(config, settings, text_length=text_length, device_type="cuda", bf16=True)
    with torch.device("meta"):
        network, arguments = network_of(config), inputs_of(config, 1, text_length)
    with counting() as total:
        result = network(*arguments)
        again = total() if checkpointing else 0  # the forward pass is computed twice
        result.float().square().mean().backward()
        return sum(p.numel() for p in network.parameters()), memory.total, float(total() + again)
