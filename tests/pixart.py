"""A tiny random PixArt transformer of diffusers, and an Atoll expert with the same weights."""

from pathlib import Path

import torch
from diffusers import PixArtTransformer2DModel
from torch import nn

from atoll.convert.ledger import Ledger
from atoll.convert.tables import DIFFUSERS_PIXART
from atoll.networks.dit import DiT, DiTConfig, sincos_positions
from atoll.networks.published import Source

WIDTH, DEPTH, NUM_HEADS, SIZE, TEXT_DIM = 32, 3, 4, 8, 24


def make_pair() -> tuple[nn.Module, DiT]:
    """Returns a PixArtTransformer2DModel with no weight left at zero, and a DiT with the same weights."""
    torch.manual_seed(0)
    pixart = PixArtTransformer2DModel(
        num_attention_heads=NUM_HEADS,
        attention_head_dim=WIDTH // NUM_HEADS,
        in_channels=4,
        out_channels=8,
        num_layers=DEPTH,
        cross_attention_dim=WIDTH,
        sample_size=SIZE,
        patch_size=2,
        caption_channels=TEXT_DIM,
        use_additional_conditions=False,
    )
    for parameter in pixart.parameters():
        nn.init.normal_(parameter, std=0.15)
    dit = DiT(
        DiTConfig(
            input_size=SIZE,
            hidden_size=WIDTH,
            depth=DEPTH,
            num_heads=NUM_HEADS,
            text_dim=TEXT_DIM,
            text_projection="mlp",
            out_channels=8,
        )
    )
    ledger = Ledger(Source(Path("PixArt"), pixart.state_dict(), ""))
    ledger.apply(DIFFUSERS_PIXART.table, DEPTH)
    kernel = ledger.weights["patch_embed.weight"]
    ours = {"patch_embed.weight": kernel.flatten(1), "positions": sincos_positions(WIDTH, SIZE // 2)}  # not saved
    dit.load_state_dict({**ledger.weights, **ours})
    return pixart.eval(), dit.eval()
