"""diffusers' PixArt transformer, tiny and random, and the same weights as an Atoll expert."""

import torch
from diffusers import PixArtTransformer2DModel
from torch import nn

from atoll.convert.mapping import Ledger
from atoll.convert.tables import DIFFUSERS_PIXART
from atoll.networks.dit import DiT, DiTConfig, sincos_positions

WIDTH, DEPTH, NUM_HEADS, SIZE, TEXT_DIM = 32, 3, 4, 8, 24


def make_pair() -> tuple[nn.Module, DiT]:
    """A PixArtTransformer2DModel with no weight left at zero, and a DiT that has the same weights."""
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
    ledger = Ledger(pixart.state_dict(), "PixArt")
    ledger.apply(DIFFUSERS_PIXART.rules)
    dit.load_state_dict({**ledger.filled, "positions": sincos_positions(WIDTH, SIZE // 2)})  # theirs are not saved
    return pixart.eval(), dit.eval()
