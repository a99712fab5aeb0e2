"""PixArt-alpha, whose architecture ours is: its own .pth files, and diffusers' PixArtTransformer2DModel."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from atoll.convert.common import Converted, Sizes, Start, Wanted, build_network, objective_of, spacing_of
from atoll.convert.mapping import Ledger, Rule, flat, linear
from atoll.diffusion.objective import Objective
from atoll.diffusion.prediction import Prediction
from atoll.errors import InputError, shown
from atoll.networks.dit import DiT, DiTConfig, frequencies, sincos_positions
from atoll.networks.published import Source

LICENSE = "openrail++ (CreativeML Open RAIL++-M)"
PIXELS = 8  # of the autoencoder, a side of a latent's place
TRAINED_SIDE = 32  # units: 32 x 32 places for 512 pixels, and 64 x 64 that are half a unit apart for 1024
OBJECTIVE = Objective(Prediction.EPS, "ddpm")


class Layout(NamedTuple):
    """Where a format has what is not simply copied."""

    format: str
    rules: tuple[Rule, ...]
    patch: str
    block: str
    mlp: str
    out: str
    text: str
    time: str  # the last layer of the time's MLP
    sizes: tuple[str, str]  # resolution and aspect ratio, which the 1024-pixel model sees beside the time
    layers: tuple[str, str]  # of these two
    null: str | None = None


ORIGINAL = Layout(
    format="PixArt-alpha",
    rules=(
        *linear("patch_embed", "x_embedder.proj", change=flat),
        *linear("time_embed.mlp.0", "t_embedder.mlp.0"),
        *linear("time_block", "t_block.1"),
        *linear("text_embed.2", "y_embedder.y_proj.fc2"),
        Rule("blocks.{i}.modulation", ("blocks.{i}.scale_shift_table",)),
        *linear("blocks.{i}.attention.qkv", "blocks.{i}.attn.qkv"),
        *linear("blocks.{i}.attention.out", "blocks.{i}.attn.proj"),
        *linear("blocks.{i}.cross.q", "blocks.{i}.cross_attn.q_linear"),
        *linear("blocks.{i}.cross.kv", "blocks.{i}.cross_attn.kv_linear"),
        *linear("blocks.{i}.cross.out", "blocks.{i}.cross_attn.proj"),
        *linear("blocks.{i}.mlp.0", "blocks.{i}.mlp.fc1"),
        *linear("blocks.{i}.mlp.2", "blocks.{i}.mlp.fc2"),
        Rule("out_modulation", ("final_layer.scale_shift_table",)),
    ),
    patch="x_embedder.proj.weight",
    block="blocks.{i}.scale_shift_table",
    mlp="blocks.{i}.mlp.fc1.weight",
    out="final_layer.linear",
    text="y_embedder.y_proj.fc1",
    time="t_embedder.mlp.2",
    sizes=("csize_embedder.mlp", "ar_embedder.mlp"),
    layers=("0", "2"),
    null="y_embedder.y_embedding",
)
_TIME = "adaln_single.emb"
DIFFUSERS = Layout(
    format="diffusers PixArtTransformer2DModel",
    rules=(
        *linear("patch_embed", "pos_embed.proj", change=flat),
        *linear("time_embed.mlp.0", f"{_TIME}.timestep_embedder.linear_1"),
        *linear("time_block", "adaln_single.linear"),
        *linear("text_embed.2", "caption_projection.linear_2"),
        Rule("blocks.{i}.modulation", ("transformer_blocks.{i}.scale_shift_table",)),
        *linear("blocks.{i}.attention.qkv", *(f"transformer_blocks.{{i}}.attn1.to_{part}" for part in "qkv")),
        *linear("blocks.{i}.attention.out", "transformer_blocks.{i}.attn1.to_out.0"),
        *linear("blocks.{i}.cross.q", "transformer_blocks.{i}.attn2.to_q"),
        *linear("blocks.{i}.cross.kv", "transformer_blocks.{i}.attn2.to_k", "transformer_blocks.{i}.attn2.to_v"),
        *linear("blocks.{i}.cross.out", "transformer_blocks.{i}.attn2.to_out.0"),
        *linear("blocks.{i}.mlp.0", "transformer_blocks.{i}.ff.net.0.proj"),
        *linear("blocks.{i}.mlp.2", "transformer_blocks.{i}.ff.net.2"),
        Rule("out_modulation", ("scale_shift_table",)),
    ),
    patch="pos_embed.proj.weight",
    block="transformer_blocks.{i}.scale_shift_table",
    mlp="transformer_blocks.{i}.ff.net.0.proj.weight",
    out="proj_out",
    text="caption_projection.linear_1",
    time=f"{_TIME}.timestep_embedder.linear_2",
    sizes=(f"{_TIME}.resolution_embedder", f"{_TIME}.aspect_ratio_embedder"),
    layers=("linear_1", "linear_2"),
)


def convert_pixart(source: Source, wanted: Wanted, layout: Layout) -> Converted:
    """An expert with an MLP for the text, exactly the source."""
    sizes = Sizes.of(
        source, wanted, patch=layout.patch, block=layout.block, mlp=layout.mlp, out=f"{layout.out}.weight",
        positions="pos_embed",
    )  # fmt: skip
    ledger = Ledger(source.weights, str(source.path))
    notes: list[str] = []
    ledger.apply(layout.rules, sizes.depth)
    ledger.apply(linear("out", layout.out, change=sizes.keep_channels), sizes.depth)
    first = ledger.take(f"{layout.text}.weight")
    if first.dim() != 2:
        raise InputError(f"{layout.text}.weight in {source.path} has shape {list(first.shape)}: it is damaged")
    theirs = first.shape[1]
    text_dim = wanted.text_dim or theirs
    if text_dim == theirs:
        ledger.apply(linear("text_embed.0", layout.text), sizes.depth)
    else:
        why = f"it reads texts {theirs} wide, and {text_dim} were asked for"
        ledger.drop(f"{layout.text}.weight", why)
        ledger.apply(linear("text_embed.0", layout.text)[1:], sizes.depth)
        ledger.start("text_embed.0.weight", Start(wanted.seed).normal(sizes.hidden_size, text_dim), "N(0, 0.02)")
        notes.append(f"the text's first layer is new: {why}")
    if layout.null is not None and layout.null in source.weights:
        ledger.drop(layout.null, "the null text is the encoded empty string")
    _take_time(ledger, layout, sizes, notes)
    _take_positions(ledger, source, sizes, notes)
    config = DiTConfig(**sizes.trunk(), text_dim=text_dim, text_projection="mlp")
    with torch.device("meta"):
        network = DiT(config)
    build_network(network, ledger)
    return Converted(network, source, layout.format, LICENSE, ledger, objective_of(wanted, OBJECTIVE), tuple(notes))


def _take_time(ledger: Ledger, layout: Layout, sizes: Sizes, notes: list[str]) -> None:
    """The last layer of the time's MLP; what a model sees of the picture's size is a constant, added to its bias."""
    names = tuple(f"{name}.{layer}" for name in layout.sizes for layer in layout.layers)
    keys = [f"{name}.{part}" for name in names for part in ("weight", "bias")]
    weight, bias = f"{layout.time}.weight", f"{layout.time}.bias"
    ledger.fill("time_embed.mlp.2.weight", ledger.take(weight), weight)
    if keys[0] not in ledger.source:
        ledger.fill("time_embed.mlp.2.bias", ledger.take(bias), bias)
        return
    pixels = float(PIXELS * sizes.input_size)
    seen = []
    for i, values in enumerate(([pixels, pixels], [1.0])):
        first, second = (
            (ledger.take(f"{name}.weight"), ledger.take(f"{name}.bias")) for name in names[2 * i : 2 * i + 2]
        )
        angle = torch.tensor(values)[:, None] * frequencies()
        waves = torch.cat([torch.cos(angle), torch.sin(angle)], 1)
        seen.append(F.linear(F.silu(F.linear(waves, *first)), *second).flatten())
    both = ledger.take(bias) + torch.cat(seen)
    ledger.fill("time_embed.mlp.2.bias", both, bias, *keys, how="with its answer to this size added")
    notes.append(f"its sight of sizes is fixed to square pictures of {pixels:.0f} pixels")


def _take_positions(ledger: Ledger, source: Source, sizes: Sizes, notes: list[str]) -> None:
    """As they are in the file; computed where it has none, or where another size is asked for."""
    found: Tensor | None = None
    if "pos_embed" in source.weights:
        found = source.weights["pos_embed"].flatten(0, -2)
    if found is not None and sizes.input_size == sizes.source_size:
        ledger.fill("positions", found.float(), "pos_embed")
        return
    if found is not None:
        ledger.drop("pos_embed", f"it is of latents {sizes.source_size} a side, not {sizes.input_size}")
    step = _spacing(source, sizes, found)
    ledger.start(
        "positions", sincos_positions(sizes.hidden_size, sizes.side, step), f"sines and cosines, {step:g} apart"
    )


def _spacing(source: Source, sizes: Sizes, found: Tensor | None) -> float:
    """Returns how far apart places are: those of training, drawn out or pressed together to the size asked for."""
    drawn_out = sizes.source_size / sizes.input_size
    if source.config:  # as diffusers has it
        scale = source.config.get("interpolation_scale") or max(sizes.source_size // 64, 1)
        if type(scale) not in (int, float) or not 1e-3 <= scale <= 1e3:
            raise InputError(
                f"interpolation_scale in the config of {source.path} is {shown(scale)}, not a number from 0.001 to 1000"
            )
        return drawn_out / scale
    if found is None:
        # The models for many sizes, which see the size, were trained on 32 units a side; the others on whole units.
        many = f"{ORIGINAL.sizes[0]}.{ORIGINAL.layers[0]}.weight" in source.weights
        return TRAINED_SIDE / sizes.side if many else 1.0
    step = spacing_of(found)
    if step is None:
        raise InputError(
            f"pos_embed in {source.path} is not the sines and cosines of a grid, so it cannot be computed for another "
            f"size: leave out --size, or give {sizes.source_size}"
        )
    return drawn_out * step
