"""Shared by benchmarks: Atoll's expert and diffusers' PixArt transformer of the same shape, timed in turns.

The machine may be noisy, so each round runs every contestant once, in succession, and the report is the median over
rounds of the ratio within a round.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from diffusers import PixArtTransformer2DModel
from torch import Tensor
from torch.nn import functional as F

from atoll.networks.dit import DiT, DiTConfig

WIDTH, DEPTH, NUM_HEADS = 256, 6, 4
SIZE, CHANNELS, PATCH = 16, 4, 2  # 64 image tokens
TEXT_DIM, LENGTH, NUM_REAL = 768, 77, 12


@dataclass
class Inputs:
    x: Tensor
    t: Tensor
    text: Tensor
    mask: Tensor
    target: Tensor


def make_inputs(batch: int) -> Inputs:
    g = torch.Generator().manual_seed(0)
    shape = (batch, CHANNELS, SIZE, SIZE)
    return Inputs(
        x=torch.randn(shape, generator=g),
        t=torch.rand(batch, generator=g),
        text=torch.randn(batch, LENGTH, TEXT_DIM, generator=g),
        mask=(torch.arange(LENGTH) < NUM_REAL).expand(batch, -1),
        target=torch.randn(shape, generator=g),
    )


def make_atoll() -> DiT:
    return DiT(
        DiTConfig(
            input_size=SIZE,
            in_channels=CHANNELS,
            patch_size=PATCH,
            hidden_size=WIDTH,
            depth=DEPTH,
            num_heads=NUM_HEADS,
            text_dim=TEXT_DIM,
            text_projection="mlp",
        )
    )


def make_pixart() -> Any:
    return PixArtTransformer2DModel(
        num_attention_heads=NUM_HEADS,
        attention_head_dim=WIDTH // NUM_HEADS,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=DEPTH,
        cross_attention_dim=WIDTH,
        sample_size=SIZE,
        patch_size=PATCH,
        caption_channels=TEXT_DIM,
        use_additional_conditions=False,
    )


def call_pixart(model: Any, inputs: Inputs) -> Tensor:
    return model(
        inputs.x,
        encoder_hidden_states=inputs.text,
        timestep=999 * inputs.t,
        encoder_attention_mask=inputs.mask,
        return_dict=False,
    )[0]


def take_turns(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each contestant in each round."""
    for run in contestants.values():
        run()
        run()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(above: list[float], below: list[float]) -> str:
    """Returns the median of the ratios within rounds, with their interquartile range."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    if len(ratios) == 1:
        return f"{ratios[0]:.2f} (one round)"
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} (middle half of rounds {low:.2f} to {high:.2f})"


def matrix_products(run: Callable[[], object], backward: bool) -> Callable[[], None]:
    """Returns a function that does only the matrix products of `run`, with its shapes and in its order.

    These are linear layers and attention; with `backward`, also the products of their required gradients.
    """
    linears: list[tuple[int, int, int, bool]] = []
    attentions: list[tuple[torch.Size, torch.Size]] = []
    linear, attention = F.linear, F.scaled_dot_product_attention

    def watch_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out, width = weight.shape
        linears.append((x.numel() // width, out, width, x.requires_grad))
        return linear(x, weight, bias)

    def watch_attention(q: Tensor, k: Tensor, *args: object, **options: object) -> Tensor:
        attentions.append((q.flatten(0, 1).shape, k.flatten(0, 1).shape))
        return attention(q, k, *args, **options)  # type: ignore[arg-type]

    with patch.object(F, "linear", watch_linear), patch.object(F, "scaled_dot_product_attention", watch_attention):
        run()

    pairs: list[tuple[Tensor, Tensor]] = []
    for rows, out, width, needs_gradient in linears:
        x, w, y = torch.randn(rows, width), torch.randn(out, width), torch.randn(rows, out)
        pairs.append((x, w.T))
        if backward:
            pairs += [(y.T, x), (y, w)] if needs_gradient else [(y.T, x)]
    for q_shape, k_shape in attentions:
        q, k = torch.randn(q_shape), torch.randn(k_shape)
        scores = torch.randn(q_shape[0], q_shape[1], k_shape[1])
        pairs += [(q, k.mT), (scores, k)]
        if backward:
            pairs += [(q, k.mT), (scores, k), (scores.mT, q), (scores.mT, q)]
    products = [(a, b, torch.matmul(a, b)) for a, b in pairs]

    def multiply() -> None:
        for a, b, out in products:
            torch.matmul(a, b, out=out)

    return multiply
