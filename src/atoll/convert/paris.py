"""Paris: expert folders, whose architecture ours is, and its router. The key names are those that a public port reads;
its layer norms are taken to have our epsilon, and the router's head to be linear, GELU, norm, GELU, linear."""

import torch

from atoll.convert.common import Converted, Sizes, Wanted, build_network
from atoll.convert.mapping import Ledger, Rule, flat, linear
from atoll.diffusion.objective import Objective, get_objective
from atoll.errors import InputError, shown
from atoll.networks.dit import DiT, DiTConfig
from atoll.networks.published import Source
from atoll.networks.router import Router, RouterConfig

LICENSE = "mit"
OBJECTIVES = {"flow_matching": "fm", "flow": "fm", "fm": "fm", "velocity": "fm", "ddpm": "ddpm", "epsilon": "ddpm"}


def _attention(target: str, source: str) -> tuple[Rule, ...]:
    """torch's nn.MultiheadAttention: queries, keys and values in one weight, as ours."""
    joined = (Rule(f"{target}.qkv.{part}", (f"{source}.in_proj_{part}",)) for part in ("weight", "bias"))
    return (*joined, *linear(f"{target}.out", f"{source}.out_proj"))


TRUNK = (
    *linear("patch_embed", "patch_embed", change=flat),
    *linear("time_embed.mlp.0", "time_embed.mlp.0"),
    *linear("time_embed.mlp.2", "time_embed.mlp.2"),
    *_attention("blocks.{i}.attention", "layers.{i}.attn"),
    *linear("blocks.{i}.mlp.0", "layers.{i}.mlp.0"),
    *linear("blocks.{i}.mlp.2", "layers.{i}.mlp.2"),
)
EXPERT = (
    *TRUNK,
    *linear("time_block", "t_block.1"),
    *linear("text_embed", "text_proj"),
    Rule("blocks.{i}.modulation", ("layers.{i}.scale_shift_table",)),
    *linear("blocks.{i}.cross.out", "layers.{i}.cross_attn.out_proj"),
    Rule("out_modulation", ("final_layer.scale_shift_table",)),
)
ROUTER = (
    *TRUNK,
    *linear("blocks.{i}.time_block", "layers.{i}.adaLN_modulation.1"),
    *linear("head.0", "head.0"),
    *linear("head.2", "head.2"),
    *linear("head.4", "head.4"),
)


def convert_paris_expert(source: Source, wanted: Wanted) -> Converted:
    sizes = Sizes.of(
        source, wanted, patch="patch_embed.weight", block="layers.{i}.scale_shift_table", mlp="layers.{i}.mlp.0.weight",
        out="final_layer.linear.weight", positions="pos_embed", size_key="image_size", heads_key="num_heads",
    )  # fmt: skip
    ledger = Ledger(source.weights, str(source.path))
    ledger.apply(EXPERT, sizes.depth)
    ledger.apply(linear("out", "final_layer.linear", change=sizes.keep_channels), sizes.depth)
    width = sizes.hidden_size
    for i in range(sizes.depth):
        for part in ("weight", "bias"):
            key = f"layers.{i}.cross_attn.in_proj_{part}"
            joined = ledger.take(key)
            q, kv = joined[:width], joined[width:]
            ledger.fill(f"blocks.{i}.cross.q.{part}", q, key, how="its first third")
            ledger.fill(f"blocks.{i}.cross.kv.{part}", kv, key, how="its last two thirds")
    ledger.fill("positions", ledger.take("pos_embed").flatten(0, -2), "pos_embed")
    text_dim = source.weights["text_proj.weight"].shape[-1]
    if wanted.text_dim not in (None, text_dim):
        raise InputError(
            f"{source.path} reads text {text_dim} wide, not {wanted.text_dim}: its texts cannot be changed"
        )
    _check_size(sizes, source)
    with torch.device("meta"):
        network = DiT(DiTConfig(**sizes.trunk(), text_dim=text_dim))
    build_network(network, ledger)
    objective, note = _objective(source, wanted)
    return Converted(network, source, "Paris expert", LICENSE, ledger, objective, (note,))


def convert_paris_router(source: Source, wanted: Wanted) -> Converted:
    sizes = Sizes.of(
        source, wanted, patch="patch_embed.weight", block="layers.{i}.adaLN_modulation.1.weight",
        mlp="layers.{i}.mlp.0.weight", positions="pos_embed", size_key="image_size", heads_key="num_heads",
    )  # fmt: skip
    ledger = Ledger(source.weights, str(source.path))
    ledger.apply(ROUTER, sizes.depth)
    ledger.fill("class_token", ledger.take("cls_token").flatten(), "cls_token")
    ledger.fill("positions", ledger.take("pos_embed").flatten(0, -2), "pos_embed")
    _check_size(sizes, source)
    num = len(source.weights["head.4.weight"])
    with torch.device("meta"):
        config = RouterConfig(**sizes.trunk(), text_dim=None, adaln="block", head="mlp", num_experts=num)
        network = Router(config)
    build_network(network, ledger)
    note = "what lies between the layers of its head is taken from a port, and not verified"
    return Converted(network, source, "Paris router", LICENSE, ledger, None, (note,))


def _check_size(sizes: Sizes, source: Source) -> None:
    if sizes.input_size != sizes.source_size:
        raise InputError(
            f"{source.path} has learned its positions, for latents {sizes.source_size} a side: they cannot be "
            f"{sizes.input_size}"
        )


def _objective(source: Source, wanted: Wanted) -> tuple[Objective, str]:
    """As asked for, as its config says, or flow matching, which the release is sampled with."""
    if wanted.objective is not None:
        return get_objective(wanted.objective), f"objective {wanted.objective}, as asked for"
    for key in ("objective", "training_objective", "prediction_type", "objective_type"):
        if source.config.get(key) is None:
            continue
        told = source.config[key]
        said = told.lower().replace("-", "_") if isinstance(told, str) else ""
        if said not in OBJECTIVES:
            raise InputError(
                f"{key} in the config of {source.path} is {shown(told)}, which is not known: give --objective"
            )
        return get_objective(OBJECTIVES[said]), f"objective {OBJECTIVES[said]}, as {key} in its config says"
    return get_objective("fm"), "its config names no objective: taken as flow matching, else give --objective ddpm"
