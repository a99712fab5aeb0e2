"""Paris: expert folders, whose architecture ours is, and its router. The key names are those that a public port reads;
its layer norms are taken to have our epsilon, and the router's head to be linear, GELU, norm, GELU, linear."""

from atoll.convert.common import Converted, Options, Sizes, build_network, keep_channels
from atoll.convert.mapping import Ledger
from atoll.convert.tables import Format
from atoll.diffusion.objective import Objective, get_objective
from atoll.errors import InputError, shown
from atoll.networks.dit import DiT, DiTConfig
from atoll.networks.published import Source
from atoll.networks.router import Router, RouterConfig

LICENSE = "mit"
OBJECTIVES = {"flow_matching": "fm", "flow": "fm", "fm": "fm", "velocity": "fm", "ddpm": "ddpm", "epsilon": "ddpm"}


def convert_expert(source: Source, options: Options, format: Format) -> Converted:
    ledger, sizes = _read(source, options, format)
    keep_channels(ledger, sizes)
    text_dim = ledger.filled["text_embed.weight"].shape[-1]
    if options.text_dim not in (None, text_dim):
        raise InputError(
            f"{source.path} reads text {text_dim} wide, not {options.text_dim}: its text encoder cannot be changed"
        )
    network = build_network(DiT, sizes.config(DiTConfig, text_dim=text_dim), ledger)
    objective, note = _objective(source, options)
    return Converted(network, source, format.name, LICENSE, ledger, objective, (note,))


def convert_router(source: Source, options: Options, format: Format) -> Converted:
    ledger, sizes = _read(source, options, format)
    num = len(ledger.filled["head.4.weight"])
    config = sizes.config(RouterConfig, adaln="block", head="mlp", num_experts=num)
    note = "what lies between the layers of its head is taken from a port, and not verified"
    return Converted(build_network(Router, config, ledger), source, format.name, LICENSE, ledger, notes=(note,))


def _read(source: Source, options: Options, format: Format) -> tuple[Ledger, Sizes]:
    ledger = Ledger(source.weights, str(source.path))
    sizes = Sizes.of(source, options, ledger, ledger.apply(format.rules), size_key="image_size", heads_key="num_heads")
    if sizes.resized:
        raise InputError(
            f"{source.path} has learned its positions, for latents {sizes.source_size} a side: they cannot be "
            f"{sizes.trunk.input_size}"
        )
    return ledger, sizes


def _objective(source: Source, options: Options) -> tuple[Objective, str]:
    """Returns the objective and a note: as asked for, as its config says, or flow matching, as it is sampled."""
    if options.objective is not None:
        return get_objective(options.objective), f"objective {options.objective}, as asked for"
    for key in ("objective", "training_objective", "prediction_type", "objective_type"):
        value = source.config.get(key)
        if value is None:
            continue
        name = OBJECTIVES.get(value.lower().replace("-", "_")) if isinstance(value, str) else None
        if name is None:
            raise InputError(
                f"{key} in the config of {source.path} is {shown(value)}, which is not known: give --objective"
            )
        return get_objective(name), f"objective {name}, as {key} in its config says"
    return get_objective("fm"), "its config names no objective: taken as flow matching, else give --objective ddpm"
