"""How much each expert contributes to a model: the share of steps that it leads, and its training FLOPs."""

from collections.abc import Sequence
from pathlib import Path

import torch

from atoll.cards import CONFIG, ExpertCard
from atoll.config import build
from atoll.errors import InputError
from atoll.experiments.flops import counting
from atoll.networks.dit import DiT, DiTConfig
from atoll.sampling.pipeline import AtollPipeline
from atoll.storage import read_json

BATCH = 32


def lead_shares(model: Path, prompts: Sequence[str], *, steps: int = 10, seed: int = 0) -> dict[int, float]:
    """Returns the share of all steps that each expert leads, by expert number, over one image per prompt."""
    if not prompts:
        raise InputError("shares are counted over prompts: give at least one")
    pipe = AtollPipeline(model)
    made = pipe(prompts, seed=seed, num_inference_steps=steps, output_type="latent", batch_size=BATCH, progress=False)
    shares = torch.tensor([trace.shares for trace in made.trace], dtype=torch.float64).mean(0)
    return {k: float(share) for k, share in enumerate(shares) if pipe.ensemble.experts[k] is not None}


def training_flops(expert: Path) -> float:
    """Returns an upper bound on the FLOPs of an expert's training, by its card, with all captions at full length.

    Nothing is computed: torch counts the operations of a step of one sample on the meta device.
    """
    about, card = read_json(expert / CONFIG, "give the folder of an expert"), ExpertCard.read(expert)
    config = build(DiTConfig, about.get("architecture"), f"the architecture in {expert / CONFIG}")
    with torch.device("meta"):
        network = DiT(config)
        x, t = torch.empty(1, *card.latent_space.shape), torch.empty(1)
        text = (
            () if card.text_encoder is None else (torch.empty(1, card.text_encoder.max_length, config.text_dim or 1),)
        )
        with counting() as total:
            network(x, t, *text).sum().backward()
    samples = (card.training or {}).get("samples")
    if type(samples) is not int or samples < 0:
        raise InputError(f"{expert / CONFIG} does not say on how many samples it was trained")
    return float(total()) * samples
