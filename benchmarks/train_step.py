"""Training throughput against diffusers' PixArtTransformer2DModel of the same shape, on one thread.

    python benchmarks/train_step.py [--batch 32] [--rounds 15]

A step is forward, loss, backward, gradient clipping and AdamW. Captions are 12 real tokens padded to 77, with a mask.
"""

from side_by_side import call_pixart, make_atoll, make_inputs, make_pixart, matrix_products, ratio, take_turns  # isort: skip

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn


def make_step(model: nn.Module, forward: Callable[[], Tensor], target: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss = ((forward() - target) ** 2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    inputs = make_inputs(args.batch)
    atoll, pixart = make_atoll(), make_pixart()

    def forward() -> Tensor:
        return atoll(inputs.x, inputs.t, inputs.text, inputs.mask)

    seconds = take_turns(
        {
            "atoll": make_step(atoll, forward, inputs.target),
            "diffusers": make_step(pixart, lambda: call_pixart(pixart, inputs), inputs.target),
            "bare matrix products": matrix_products(forward, backward=True),
        },
        args.rounds,
    )
    for name, times in seconds.items():
        step = statistics.median(times)
        print(f"{name:22} {1000 * step:7.1f} ms, {args.batch / step:6.1f} samples/s")
    print(f"training throughput, atoll / diffusers: {ratio(seconds['diffusers'], seconds['atoll'])}")
    print(f"fraction of the matrix-product peak:    {ratio(seconds['bare matrix products'], seconds['atoll'])}")


if __name__ == "__main__":
    main()
