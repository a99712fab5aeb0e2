"""Key mappings from published checkpoints to the network's weights: one table per format.

A table maps a linear layer (or a parameter) of the network to layers of the source, which are concatenated by rows;
{i} is a block's number. Weights that are not simply copied get names that no network has (a time MLP in each block,
`classes`, `cross.qkv`, `resolution`); the format's converter removes these.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Table = Mapping[str, str | tuple[str, ...]]
PARAMETERS = {"positions", "class_token", "out_modulation", "blocks.{i}.modulation", "blocks.{i}.classes"}


@dataclass(frozen=True, eq=False)
class Format:
    """How a checkpoint format is recognised, and which of its weights are copied."""

    name: str
    marks: tuple[str, str]  # keys that only this format has together; the second, of block 0, is used to count blocks
    table: Table
    sizes: Table = field(default_factory=dict)  # the image size embedding of the 1024-pixel PixArt-alpha
    frequency_shift: int = 0


def expand(table: Table, depth: int) -> Iterator[tuple[str, list[str]]]:
    """Yields each weight of the network with its sources, for every block if it belongs to one."""
    for target, names in table.items():
        for part in ("",) if target in PARAMETERS else (".weight", ".bias"):
            # torch's nn.MultiheadAttention has in_proj_weight and in_proj_bias.
            keys = [name + part.lstrip("." if name.endswith("_") else "") for name in _as_tuple(names)]
            for i in map(str, range(depth if "{i}" in target else 1)):
                yield f"{target}{part}".replace("{i}", i), [key.replace("{i}", i) for key in keys]


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


_ORIGINAL_TRUNK = {  # facebookresearch's DiT, from which SiT and PixArt-alpha descend
    "patch_embed": "x_embedder.proj",
    "blocks.{i}.attention.qkv": "blocks.{i}.attn.qkv",
    "blocks.{i}.attention.out": "blocks.{i}.attn.proj",
    "blocks.{i}.mlp.0": "blocks.{i}.mlp.fc1",
    "blocks.{i}.mlp.2": "blocks.{i}.mlp.fc2",
    "out": "final_layer.linear",
}
_BLOCK = "transformer_blocks.{i}"
_DIFFUSERS_TRUNK: Table = {
    "patch_embed": "pos_embed.proj",
    "blocks.{i}.attention.qkv": (f"{_BLOCK}.attn1.to_q", f"{_BLOCK}.attn1.to_k", f"{_BLOCK}.attn1.to_v"),
    "blocks.{i}.attention.out": f"{_BLOCK}.attn1.to_out.0",
    "blocks.{i}.mlp.0": f"{_BLOCK}.ff.net.0.proj",
    "blocks.{i}.mlp.2": f"{_BLOCK}.ff.net.2",
}
_PARIS_TRUNK = {
    "patch_embed": "patch_embed",
    "positions": "pos_embed",
    "time_embed.mlp.0": "time_embed.mlp.0",
    "time_embed.mlp.2": "time_embed.mlp.2",
    "blocks.{i}.attention.qkv": "layers.{i}.attn.in_proj_",
    "blocks.{i}.attention.out": "layers.{i}.attn.out_proj",
    "blocks.{i}.mlp.0": "layers.{i}.mlp.0",
    "blocks.{i}.mlp.2": "layers.{i}.mlp.2",
}
DIT = Format(
    "DiT or SiT",
    ("x_embedder.proj.weight", "blocks.0.adaLN_modulation.1.weight"),
    {
        **_ORIGINAL_TRUNK,
        "blocks.{i}.time_embed.mlp.0": "t_embedder.mlp.0",
        "blocks.{i}.time_embed.mlp.2": "t_embedder.mlp.2",
        "blocks.{i}.classes": "y_embedder.embedding_table.weight",
        "blocks.{i}.time_block": "blocks.{i}.adaLN_modulation.1",
        "out_time_block": "final_layer.adaLN_modulation.1",
    },
)
DIFFUSERS_DIT = Format(
    "diffusers DiTTransformer2DModel",
    ("pos_embed.proj.weight", "transformer_blocks.0.norm1.linear.weight"),
    {
        **_DIFFUSERS_TRUNK,
        "blocks.{i}.time_embed.mlp.0": f"{_BLOCK}.norm1.emb.timestep_embedder.linear_1",
        "blocks.{i}.time_embed.mlp.2": f"{_BLOCK}.norm1.emb.timestep_embedder.linear_2",
        "blocks.{i}.classes": f"{_BLOCK}.norm1.emb.class_embedder.embedding_table.weight",
        "blocks.{i}.time_block": f"{_BLOCK}.norm1.linear",
        "out_time_block": "proj_out_1",
        "out": "proj_out_2",
    },
    frequency_shift=1,
)
PIXART = Format(
    "PixArt-alpha",
    ("t_block.1.weight", "blocks.0.scale_shift_table"),
    {
        **_ORIGINAL_TRUNK,
        "time_embed.mlp.0": "t_embedder.mlp.0",
        "time_embed.mlp.2": "t_embedder.mlp.2",
        "time_block": "t_block.1",
        "text_embed.0": "y_embedder.y_proj.fc1",
        "text_embed.2": "y_embedder.y_proj.fc2",
        "blocks.{i}.modulation": "blocks.{i}.scale_shift_table",
        "blocks.{i}.cross.q": "blocks.{i}.cross_attn.q_linear",
        "blocks.{i}.cross.kv": "blocks.{i}.cross_attn.kv_linear",
        "blocks.{i}.cross.out": "blocks.{i}.cross_attn.proj",
        "out_modulation": "final_layer.scale_shift_table",
    },
    sizes={
        "resolution.0": "csize_embedder.mlp.0",
        "resolution.2": "csize_embedder.mlp.2",
        "aspect_ratio.0": "ar_embedder.mlp.0",
        "aspect_ratio.2": "ar_embedder.mlp.2",
    },
)
DIFFUSERS_PIXART = Format(
    "diffusers PixArtTransformer2DModel",
    ("adaln_single.linear.weight", "transformer_blocks.0.scale_shift_table"),
    {
        **_DIFFUSERS_TRUNK,
        "time_embed.mlp.0": "adaln_single.emb.timestep_embedder.linear_1",
        "time_embed.mlp.2": "adaln_single.emb.timestep_embedder.linear_2",
        "time_block": "adaln_single.linear",
        "text_embed.0": "caption_projection.linear_1",
        "text_embed.2": "caption_projection.linear_2",
        "blocks.{i}.modulation": f"{_BLOCK}.scale_shift_table",
        "blocks.{i}.cross.q": f"{_BLOCK}.attn2.to_q",
        "blocks.{i}.cross.kv": (f"{_BLOCK}.attn2.to_k", f"{_BLOCK}.attn2.to_v"),
        "blocks.{i}.cross.out": f"{_BLOCK}.attn2.to_out.0",
        "out_modulation": "scale_shift_table",
        "out": "proj_out",
    },
    sizes={
        "resolution.0": "adaln_single.emb.resolution_embedder.linear_1",
        "resolution.2": "adaln_single.emb.resolution_embedder.linear_2",
        "aspect_ratio.0": "adaln_single.emb.aspect_ratio_embedder.linear_1",
        "aspect_ratio.2": "adaln_single.emb.aspect_ratio_embedder.linear_2",
    },
)
PARIS_EXPERT = Format(
    "Paris expert",
    ("t_block.1.weight", "layers.0.cross_attn.in_proj_weight"),
    {
        **_PARIS_TRUNK,
        "time_block": "t_block.1",
        "text_embed": "text_proj",
        "blocks.{i}.modulation": "layers.{i}.scale_shift_table",
        "blocks.{i}.cross.qkv": "layers.{i}.cross_attn.in_proj_",
        "blocks.{i}.cross.out": "layers.{i}.cross_attn.out_proj",
        "out_modulation": "final_layer.scale_shift_table",
        "out": "final_layer.linear",
    },
)
PARIS_ROUTER = Format(
    "Paris router",
    ("cls_token", "layers.0.adaLN_modulation.1.weight"),
    {
        **_PARIS_TRUNK,
        "class_token": "cls_token",
        "blocks.{i}.time_block": "layers.{i}.adaLN_modulation.1",
        "head.0": "head.0",
        "head.2": "head.2",
        "head.4": "head.4",
    },
)
