"""Sampling from 8 experts against one monolith of an expert's size, on one thread.

    python benchmarks/sample.py [--batch 16] [--steps 2] [--rounds 7]

All use guidance and read 12 real tokens padded to 77; the router is a quarter as wide as an expert. Its network is run,
but its decisions are fixed and spread over all experts, as for the prompts of a mixed batch. The naive loop runs every
expert on every sample, one pass for each half of guidance, and multiplies by the weights.
"""

from side_by_side import CHANNELS, DEPTH, NUM_HEADS, PATCH, SIZE, TEXT_DIM, WIDTH  # isort: skip
from side_by_side import make_atoll, make_inputs, ratio, take_turns  # isort: skip

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from atoll.diffusion.prediction import Prediction
from atoll.diffusion.schedules import LINEAR
from atoll.diffusion.solvers import euler, uniform_times
from atoll.diffusion.transfer import Transfer
from atoll.networks.dit import TextContext
from atoll.networks.router import Router, RouterConfig
from atoll.sampling.ensemble import Ensemble, draw_noise, generate, image_generators
from atoll.sampling.expert import Prompts, VelocityExpert
from atoll.sampling.routing import Routing, get_routing

NUM_EXPERTS, SCALE = 8, 4.0


class SpreadRouter(Router):
    """Does a router's work, but returns table[i] as the logits of sample i of the batch."""

    def __init__(self, config: RouterConfig, table: Tensor) -> None:
        super().__init__(config)
        self.table = table

    def forward(
        self, x: Tensor, t: Tensor, text: Tensor | TextContext | None = None, mask: Tensor | None = None
    ) -> Tensor:
        return 0 * super().forward(x, t, text, mask) + self.table


def make_router(batch: int) -> SpreadRouter:
    """Returns a router that prefers expert i mod 8 for sample i, with some weight on all others."""
    g = torch.Generator().manual_seed(0)
    table = torch.randn(batch, NUM_EXPERTS, generator=g)
    table[torch.arange(batch), torch.arange(batch) % NUM_EXPERTS] = 4.0
    config = RouterConfig(
        input_size=SIZE,
        in_channels=CHANNELS,
        patch_size=PATCH,
        hidden_size=WIDTH // 4,
        depth=DEPTH,
        num_heads=NUM_HEADS // 4,
        text_dim=TEXT_DIM,
        num_experts=NUM_EXPERTS,
    )
    return SpreadRouter(config, table).eval()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    inputs = make_inputs(args.batch)
    null = torch.randn(1, 2, TEXT_DIM, generator=torch.Generator().manual_seed(1))
    lengths = inputs.mask.sum(1).tolist()
    texts = (*(text[None, :length].clone() for text, length in zip(inputs.text, lengths, strict=True)), null)
    prompts = Prompts(texts, tuple(range(args.batch)), (args.batch,) * args.batch)
    experts = [VelocityExpert(make_atoll().eval(), Transfer(Prediction.VELOCITY, LINEAR)) for _ in range(NUM_EXPERTS)]
    router = make_router(args.batch)
    monolith, ensemble = Ensemble(experts[:1]), Ensemble(experts, router)
    times, seeds = uniform_times(args.steps), range(args.batch)

    def sampling(ensemble: Ensemble, routing: str = "top1") -> Callable[[], object]:
        chosen, guidance = get_routing(routing), SCALE
        return lambda: generate(ensemble, prompts, seeds, times=times, routing=chosen, guidance=guidance)

    def naive() -> Tensor:
        def velocity(x: Tensor, t: Tensor) -> Tensor:
            weights = Routing("top1").weights(torch.softmax(router(x, t, inputs.text, inputs.mask), 1), t)
            total = torch.zeros_like(x)
            for k, expert in enumerate(experts):
                cond = expert.network(x, t, inputs.text, inputs.mask)
                uncond = expert.network(x, t, null.expand(len(x), -1, -1))
                total = total + weights[:, k, None, None, None] * torch.lerp(uncond, cond, SCALE)
            return total

        return euler(velocity, draw_noise(image_generators(seeds), (CHANNELS, SIZE, SIZE)), times)

    def router_alone() -> None:
        x = draw_noise(image_generators(seeds), (CHANNELS, SIZE, SIZE))
        text = router.read_text(inputs.text, inputs.mask)
        for t in times[:-1].float():
            router(x, t, text)

    seconds = take_turns(
        {
            "monolith": sampling(monolith),
            "top-1": sampling(ensemble),
            "top-2": sampling(ensemble, "topk:2"),
            "full": sampling(ensemble, "full"),
            "naive loop": naive,
            "router alone": router_alone,
        },
        args.rounds,
    )
    for name, taken in seconds.items():
        one = statistics.median(taken) / args.steps
        print(f"{name:13} {1000 * one:7.0f} ms a step of {args.batch}, {args.batch / one:6.1f} sample steps/s")
    for name in ("top-1", "top-2", "full", "naive loop", "router alone"):
        print(f"{name:13} / monolith: {ratio(seconds[name], seconds['monolith'])}")


if __name__ == "__main__":
    main()
