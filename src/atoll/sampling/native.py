"""One expert sampled as it was trained, on its own schedule: what conversions are set beside."""

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.diffusion.guidance import guided
from atoll.diffusion.prediction import Estimate, estimate
from atoll.diffusion.solvers import ddim
from atoll.errors import unknown
from atoll.networks.dit import TextContext
from atoll.networks.expert import Expert
from atoll.sampling.ensemble import draw_noise, image_generators
from atoll.sampling.expert import Prompts, TextCache

SAMPLERS = {"ancestral": 1.0, "ddim": 0.0}
"""How much of the posterior's noise each step adds: all of it is DDPM's own sampling."""


@torch.no_grad()
def generate_native(
    expert: Expert, prompts: Prompts, seeds: Sequence[int], sampler: str, times: Tensor, guidance: float
) -> Tensor:
    """Latents [B, C, S, S], one a seed, by ancestral DDPM sampling or DDIM, guided in what the network predicts."""
    if sampler not in SAMPLERS:
        raise unknown("sampler", sampler, SAMPLERS)
    network, schedule, prediction = expert.network, expert.objective.path, expert.objective.prediction
    generators = image_generators(seeds)
    weight = network.patch_embed.weight
    config = network.config
    x = draw_noise(generators, (config.in_channels, config.input_size, config.input_size)).to(weight.device)
    rows = range(len(x))
    texts = TextCache(lambda tokens: network.read_text(tokens.to(weight.device, weight.dtype)), prompts)

    def predict(x: Tensor, t: Tensor, text: TextContext) -> Tensor:
        return network(x.to(weight.dtype), t, text).to(x.dtype)

    output = guided(predict, guidance, lambda both: texts.context(rows, both))

    def denoise(x: Tensor, t: Tensor) -> Estimate:
        return estimate(prediction, output(x, t), x, schedule(t))

    return ddim(denoise, schedule, x, times, SAMPLERS[sampler], generators)
