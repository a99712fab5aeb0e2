"""diffusers' PixArt transformer, tiny and random, and the same weights as an Atoll expert."""

import torch
from diffusers import PixArtTransformer2DModel
from torch import Tensor, nn

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
    dit.load_state_dict(translate(pixart.state_dict()))
    return pixart.eval(), dit.eval()


def translate(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """PixArtTransformer2DModel's state dict under our names."""
    ours = {"positions": sincos_positions(WIDTH, SIZE // 2)}  # theirs are not saved

    def linear(name: str, *sources: str) -> None:
        for part in ("weight", "bias"):
            ours[f"{name}.{part}"] = torch.cat([theirs[f"{source}.{part}"] for source in sources])

    ours["patch_embed.weight"] = theirs["pos_embed.proj.weight"].flatten(1)
    ours["patch_embed.bias"] = theirs["pos_embed.proj.bias"]
    linear("time_embed.mlp.0", "adaln_single.emb.timestep_embedder.linear_1")
    linear("time_embed.mlp.2", "adaln_single.emb.timestep_embedder.linear_2")
    linear("time_block", "adaln_single.linear")
    linear("text_embed.0", "caption_projection.linear_1")
    linear("text_embed.2", "caption_projection.linear_2")
    for i in range(DEPTH):
        block, source = f"blocks.{i}", f"transformer_blocks.{i}"
        ours[f"{block}.modulation"] = theirs[f"{source}.scale_shift_table"]
        linear(f"{block}.attention.qkv", *(f"{source}.attn1.to_{part}" for part in "qkv"))
        linear(f"{block}.attention.out", f"{source}.attn1.to_out.0")
        linear(f"{block}.cross.q", f"{source}.attn2.to_q")
        linear(f"{block}.cross.kv", f"{source}.attn2.to_k", f"{source}.attn2.to_v")
        linear(f"{block}.cross.out", f"{source}.attn2.to_out.0")
        linear(f"{block}.mlp.0", f"{source}.ff.net.0.proj")
        linear(f"{block}.mlp.2", f"{source}.ff.net.2")
    ours["out_modulation"] = theirs["scale_shift_table"]
    linear("out", "proj_out")
    return ours
