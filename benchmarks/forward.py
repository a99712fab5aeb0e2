"""A forward pass in sampling against diffusers' PixArtTransformer2DModel of the same shape, on one thread.

    python benchmarks/forward.py [--batch 16] [--rounds 30]

As in sampling, all samples are at the same t, and the text does not change between steps: Atoll has read it beforehand,
diffusers reads it each time. Captions are 12 real tokens padded to 77, with a mask.
"""

from side_by_side import call_pixart, make_atoll, make_inputs, make_pixart, matrix_products, ratio, take_turns  # isort: skip

import argparse
import statistics

import torch
from torch import Tensor


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    inputs = make_inputs(args.batch)
    inputs.t = torch.full_like(inputs.t, 0.5)
    atoll, pixart = make_atoll().eval(), make_pixart().eval()
    text, t = atoll.read_text(inputs.text, inputs.mask), inputs.t[0]

    def cached() -> Tensor:
        return atoll(inputs.x, t, text)

    seconds = take_turns(
        {
            "atoll, text read once": cached,
            "atoll, text read anew": lambda: atoll(inputs.x, t, inputs.text, inputs.mask),
            "diffusers": lambda: call_pixart(pixart, inputs),
            "bare matrix products": matrix_products(cached, backward=False),
        },
        args.rounds,
    )
    for name, times in seconds.items():
        print(f"{name:22} {1000 * statistics.median(times):7.1f} ms")
    fast = seconds["atoll, text read once"]
    print(f"speed of a forward pass, atoll / diffusers: {ratio(seconds['diffusers'], fast)}")
    print(
        f"the same, text read anew:                   {ratio(seconds['diffusers'], seconds['atoll, text read anew'])}"
    )
    print(f"fraction of the matrix-product peak:        {ratio(seconds['bare matrix products'], fast)}")


if __name__ == "__main__":
    main()
