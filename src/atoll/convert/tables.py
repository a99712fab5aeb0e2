"""Which weights of the network are which of a published checkpoint's, format by format."""

from dataclasses import dataclass

from torch import Tensor

from atoll.convert.mapping import Rule, layers, patches


@dataclass(frozen=True)
class Format:
    """How a kind of checkpoint is recognised, and what of it is copied."""

    name: str
    marks: tuple[str, str]  # keys that no other format has together
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class DiTFormat(Format):
    """Of a class, not of a prompt; the modulation, which is not simply copied, has the rest of these keys."""

    time: tuple[str, str]  # both layers of the time MLP
    labels: str  # the classes' embeddings
    block: str  # a block's map of time and class
    last: str  # the output's
    frequency_shift: int


@dataclass(frozen=True)
class PixArtFormat(Format):
    """Of a prompt; what the 1024-pixel model sees of the image's size are both layers of two MLPs."""

    resolution: tuple[str, str]
    aspect_ratio: tuple[str, str]
    null: str = ""  # the embedding of no text


_ORIGINAL_TRUNK = (  # facebookresearch's DiT, from which SiT and PixArt-alpha descend
    *patches("x_embedder.proj"),
    *layers({
        "blocks.{i}.attention.qkv": "blocks.{i}.attn.qkv",
        "blocks.{i}.attention.out": "blocks.{i}.attn.proj",
        "blocks.{i}.mlp.0": "blocks.{i}.mlp.fc1",
        "blocks.{i}.mlp.2": "blocks.{i}.mlp.fc2",
        "out": "final_layer.linear",
    }),
)  # fmt: skip
_BLOCK = "transformer_blocks.{i}"
_DIFFUSERS_TRUNK = (
    *patches("pos_embed.proj"),
    *layers({
        "blocks.{i}.attention.qkv": (f"{_BLOCK}.attn1.to_q", f"{_BLOCK}.attn1.to_k", f"{_BLOCK}.attn1.to_v"),
        "blocks.{i}.attention.out": f"{_BLOCK}.attn1.to_out.0",
        "blocks.{i}.mlp.0": f"{_BLOCK}.ff.net.0.proj",
        "blocks.{i}.mlp.2": f"{_BLOCK}.ff.net.2",
    }),
)  # fmt: skip


DIT = DiTFormat(
    name="DiT or SiT",
    marks=("x_embedder.proj.weight", "blocks.0.adaLN_modulation.1.weight"),
    rules=_ORIGINAL_TRUNK,
    time=("t_embedder.mlp.0", "t_embedder.mlp.2"),
    labels="y_embedder.embedding_table",
    block="blocks.{i}.adaLN_modulation.1",
    last="final_layer.adaLN_modulation.1",
    frequency_shift=0,
)
_CLASS_TIME = f"{_BLOCK}.norm1.emb"
DIFFUSERS_DIT = DiTFormat(
    name="diffusers DiTTransformer2DModel",
    marks=("pos_embed.proj.weight", "transformer_blocks.0.norm1.linear.weight"),
    rules=(*_DIFFUSERS_TRUNK, *layers({"out": "proj_out_2"})),
    time=(f"{_CLASS_TIME}.timestep_embedder.linear_1", f"{_CLASS_TIME}.timestep_embedder.linear_2"),
    labels=f"{_CLASS_TIME}.class_embedder.embedding_table",
    block=f"{_BLOCK}.norm1.linear",
    last="proj_out_1",
    frequency_shift=1,
)
PIXART = PixArtFormat(
    name="PixArt-alpha",
    marks=("x_embedder.proj.weight", "t_block.1.weight"),
    rules=(
        *_ORIGINAL_TRUNK,
        *layers({
            "time_embed.mlp.0": "t_embedder.mlp.0",
            "time_embed.mlp.2": "t_embedder.mlp.2",
            "time_block": "t_block.1",
            "text_embed.0": "y_embedder.y_proj.fc1",
            "text_embed.2": "y_embedder.y_proj.fc2",
            "blocks.{i}.cross.q": "blocks.{i}.cross_attn.q_linear",
            "blocks.{i}.cross.kv": "blocks.{i}.cross_attn.kv_linear",
            "blocks.{i}.cross.out": "blocks.{i}.cross_attn.proj",
        }),
        Rule("blocks.{i}.modulation", ("blocks.{i}.scale_shift_table",)),
        Rule("out_modulation", ("final_layer.scale_shift_table",)),
    ),
    resolution=("csize_embedder.mlp.0", "csize_embedder.mlp.2"),
    aspect_ratio=("ar_embedder.mlp.0", "ar_embedder.mlp.2"),
    null="y_embedder.y_embedding",
)  # fmt: skip
_TIME = "adaln_single.emb"
DIFFUSERS_PIXART = PixArtFormat(
    name="diffusers PixArtTransformer2DModel",
    marks=("pos_embed.proj.weight", "adaln_single.linear.weight"),
    rules=(
        *_DIFFUSERS_TRUNK,
        *layers({
            "time_embed.mlp.0": f"{_TIME}.timestep_embedder.linear_1",
            "time_embed.mlp.2": f"{_TIME}.timestep_embedder.linear_2",
            "time_block": "adaln_single.linear",
            "text_embed.0": "caption_projection.linear_1",
            "text_embed.2": "caption_projection.linear_2",
            "blocks.{i}.cross.q": f"{_BLOCK}.attn2.to_q",
            "blocks.{i}.cross.kv": (f"{_BLOCK}.attn2.to_k", f"{_BLOCK}.attn2.to_v"),
            "blocks.{i}.cross.out": f"{_BLOCK}.attn2.to_out.0",
            "out": "proj_out",
        }),
        Rule("blocks.{i}.modulation", (f"{_BLOCK}.scale_shift_table",)),
        Rule("out_modulation", ("scale_shift_table",)),
    ),
    resolution=(f"{_TIME}.resolution_embedder.linear_1", f"{_TIME}.resolution_embedder.linear_2"),
    aspect_ratio=(f"{_TIME}.aspect_ratio_embedder.linear_1", f"{_TIME}.aspect_ratio_embedder.linear_2"),
)  # fmt: skip


_PARTS = ("weight", "bias")
_THIRDS = (  # of torch's nn.MultiheadAttention, which has queries, keys and values in one weight
    ("q", lambda rows: rows[: len(rows) // 3], "its first third"),
    ("kv", lambda rows: rows[len(rows) // 3 :], "its last two thirds"),
)
_PARIS_TRUNK = (
    *patches("patch_embed"),
    Rule("positions", ("pos_embed",), lambda table: table.flatten(0, -2)),
    *layers({
        "time_embed.mlp.0": "time_embed.mlp.0",
        "time_embed.mlp.2": "time_embed.mlp.2",
        "blocks.{i}.attention.out": "layers.{i}.attn.out_proj",
        "blocks.{i}.mlp.0": "layers.{i}.mlp.0",
        "blocks.{i}.mlp.2": "layers.{i}.mlp.2",
    }),
    *(Rule(f"blocks.{{i}}.attention.qkv.{part}", (f"layers.{{i}}.attn.in_proj_{part}",)) for part in _PARTS),
)  # fmt: skip
PARIS_EXPERT = Format(
    name="Paris expert",
    marks=("layers.0.cross_attn.in_proj_weight", "t_block.1.weight"),
    rules=(
        *_PARIS_TRUNK,
        *layers({
            "time_block": "t_block.1",
            "text_embed": "text_proj",
            "blocks.{i}.cross.out": "layers.{i}.cross_attn.out_proj",
            "out": "final_layer.linear",
        }),
        *(Rule(f"blocks.{{i}}.cross.{name}.{part}", (f"layers.{{i}}.cross_attn.in_proj_{part}",), cut, how)
          for part in _PARTS for name, cut, how in _THIRDS),
        Rule("blocks.{i}.modulation", ("layers.{i}.scale_shift_table",)),
        Rule("out_modulation", ("final_layer.scale_shift_table",)),
    ),
)  # fmt: skip
PARIS_ROUTER = Format(
    name="Paris router",
    marks=("cls_token", "layers.0.adaLN_modulation.1.weight"),
    rules=(
        *_PARIS_TRUNK,
        *layers({
            "blocks.{i}.time_block": "layers.{i}.adaLN_modulation.1",
            "head.0": "head.0",
            "head.2": "head.2",
            "head.4": "head.4",
        }),
        Rule("class_token", ("cls_token",), Tensor.flatten),
    ),
)  # fmt: skip
