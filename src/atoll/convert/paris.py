"""Converts Paris: expert folders, which have Atoll's architecture, and its router. Key names are from a public port;
layer norms are assumed to have Atoll's epsilon, and the router's head to be linear, GELU, norm, GELU, linear."""

from dataclasses import asdict

from atoll.convert.ledger import Converted, Options, start
from atoll.convert.tables import PARIS_ROUTER, Format
from atoll.diffusion.objective import Objective, get_objective
from atoll.errors import InputError, shown
from atoll.networks.dit import DiT, DiTConfig
from atoll.networks.published import Source
from atoll.networks.router import Router, RouterConfig

LICENSE = "mit"
OBJECTIVES = {"flow_matching": "fm", "flow": "fm", "fm": "fm", "velocity": "fm", "ddpm": "ddpm", "epsilon": "ddpm"}


def convert_paris(source: Source, options: Options, format: Format) -> Converted:
    ledger, trunk = start(source, options, format)
    if trunk.input_size != ledger.source_size:
        side, asked = ledger.source_size, trunk.input_size
        raise InputError(f"{source.path} has learned its positions, for latents {side} a side: they cannot be {asked}")
    weights = ledger.weights
    weights["positions"] = weights["positions"].flatten(0, -2)
    if format is PARIS_ROUTER:
        weights["class_token"] = weights["class_token"].flatten()
        num = weights["head.4.weight"].shape[0]
        config = RouterConfig(**{**asdict(trunk), "adaln": "block"}, head="mlp", num_experts=num)
        note = "what lies between the layers of its head is taken from a port, and not verified"
        return Converted(ledger.build(Router, config), ledger, format.name, LICENSE, notes=(note,))
    text_dim = weights["text_embed.weight"].shape[-1]
    if options.text_dim not in (None, text_dim):
        raise InputError(f"{source.path} reads text {text_dim} wide, which cannot be changed to {options.text_dim}")
    for cross in (f"blocks.{i}.cross" for i in range(trunk.depth)):
        for part in ("weight", "bias"):  # nn.MultiheadAttention fuses queries, keys and values
            q, k_v = weights.pop(f"{cross}.qkv.{part}").tensor_split([trunk.hidden_size])
            weights |= {f"{cross}.q.{part}": q, f"{cross}.kv.{part}": k_v}
    network = ledger.build(DiT, DiTConfig(**{**asdict(trunk), "text_dim": text_dim}))
    objective, note = _objective(source, options)
    return Converted(network, ledger, format.name, LICENSE, objective, (note,))


def _objective(source: Source, options: Options) -> tuple[Objective, str]:
    """Returns the objective and a note: from the options, from its config, or flow matching, as Paris is sampled."""
    if options.objective is not None:
        return get_objective(options.objective), f"objective {options.objective}, as asked for"
    keys = ("objective", "training_objective", "prediction_type", "objective_type")
    key = next((key for key in keys if source.config.get(key) is not None), None)
    if key is None:
        return get_objective("fm"), "its config names no objective: taken as flow matching, else give --objective ddpm"
    value = source.config[key]
    name = OBJECTIVES.get(value.lower().replace("-", "_")) if isinstance(value, str) else None
    if name is None:
        raise InputError(f"{key} in the config of {source.path} is {shown(value)}, not a known one: give --objective")
    return get_objective(name), f"objective {name}, as {key} in its config says"
