"""Class-conditional DiT and SiT: facebookresearch's .pt files, and diffusers' DiTTransformer2DModel.

They become text-conditional experts as initial weights for training (Eq. 19): AdaLN-Single is fitted to the per-block
modulation, the class is fixed, and text has no effect at first. Or, with `as_is`, experts without text whose outputs
equal the source's. SiT's time runs the other way and its velocity has the opposite sign; both are folded into the
weights, exactly.
"""

import re
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from atoll.convert.ledger import Converted, Ledger, Options, start, take_positions
from atoll.convert.modulation import NUM_TIMES, TimeMLP, fit_linear, fit_single
from atoll.convert.tables import DIT, Format, expand
from atoll.diffusion.objective import Objective
from atoll.diffusion.prediction import Prediction
from atoll.errors import InputError, shown
from atoll.networks.dit import DiT, DiTConfig, frequencies
from atoll.networks.published import Source

DIT_LICENSE, SIT_LICENSE = "CC-BY-NC-4.0", "mit"
DIT_OBJECTIVE = Objective(Prediction.EPS, "ddpm")
IMAGENET_CLASSES = 1000
TEXT_DIM = 768  # of CLIP ViT-L/14, which the paper uses
SIT_SCHEDULES = {"Linear": "linear", "GVP": "cosine"}
SIT_PREDICTIONS = {"velocity": Prediction.VELOCITY, "noise": Prediction.EPS}


def convert_dit(source: Source, options: Options, format: Format) -> Converted:
    kind = _kind(source, options) if format is DIT else "dit"
    backwards, name = kind == "sit", format.name
    if format is DIT:
        name = "SiT" if backwards else "facebookresearch DiT"
    objective = options.objective_or(_sit_objective(source) if backwards else DIT_OBJECTIVE)
    ledger, trunk = start(source, options, format)
    if backwards and objective.prediction is Prediction.VELOCITY:
        for target in ("out.weight", "out.bias"):
            ledger.weights[target] = -ledger.weights[target]
    take_positions(ledger, trunk)
    text_dim = TEXT_DIM if options.text_dim is None else options.text_dim
    changes = {"text_dim": None, "adaln": "block"} if options.as_is else {"text_dim": text_dim}
    time = {"time_scale": 1.0 if backwards else 999.0, "frequency_shift": format.frequency_shift}
    config = DiTConfig(**{**asdict(trunk), **changes, **time})
    label, note = _label(source, options, ledger.weights["blocks.0.classes"].shape[0])
    notes = [note]
    mlps = [_time_mlp(ledger, i, label, config, backwards) for i in range(config.depth)]
    if options.as_is:
        residual = _keep_modulation(ledger, mlps)
        if residual is not None:
            notes.append("its blocks have time MLPs of their own, which are fitted to one, not copied")
    else:
        residual = _fit_modulation(ledger, mlps, options.fit)
    if ledger.out_channels > config.in_channels:
        notes.append(f"{ledger.out_channels} output channels became {config.in_channels}: no learned sigma")
    license = SIT_LICENSE if backwards else DIT_LICENSE
    return Converted(ledger.build(DiT, config, options.seed), ledger, name, license, objective, notes, residual, label)


def dit_weights(network: DiT) -> dict[str, Tensor]:
    """Returns the weights of a network with AdaLN-Zero and no text under DiT's own keys, with a zero class embedding.

    A network pretrained with Atoll is thus converted in the same way as a published one.
    """
    config, ours, weights = network.config, network.state_dict(), {}
    assert (config.adaln, config.text_dim) == ("block", None)
    patch = (config.in_channels, config.patch_size, config.patch_size)
    for target, (key,) in expand(DIT.table, config.depth):
        if target.endswith(".classes"):
            weights[key] = torch.zeros(1, config.hidden_size)
        else:
            weights[key] = ours[re.sub(r"^blocks\.\d+\.(?=time_embed)", "", target)]
    weights["x_embedder.proj.weight"] = weights["x_embedder.proj.weight"].unflatten(1, patch)
    return {**weights, "pos_embed": ours["positions"][None]}


def _kind(source: Source, options: Options) -> str:
    """Returns dit or sit: from the options, from the file's training arguments, or from its name."""
    if options.kind is not None:
        return options.kind
    if "path_type" in source.args:
        return "sit"
    words = re.split("[^a-z]+", f"{source.path.name} {shown(source.args.get('model'))}".lower())
    kinds = {"dit", "sit"}.intersection(words)
    if len(kinds) != 1:
        raise InputError(
            f"{source.path} may be a DiT or a SiT, whose keys are the same: say which with --kind dit or --kind sit"
        )
    return kinds.pop()


def _sit_objective(source: Source) -> Objective:
    path, prediction = source.args.get("path_type", "Linear"), source.args.get("prediction", "velocity")
    if path not in tuple(SIT_SCHEDULES) or prediction not in tuple(SIT_PREDICTIONS):  # they may be of any type
        raise InputError(
            f"{source.path} is a SiT that predicts {shown(prediction)} on the path {shown(path)}: only velocity "
            "and noise on the paths Linear and GVP can be converted"
        )
    return Objective(SIT_PREDICTIONS[prediction], SIT_SCHEDULES[path])


def _label(source: Source, options: Options, num: int) -> tuple[int, str]:
    """Returns the class to keep, and a note; by default the null class, the last of `num` embeddings if present."""
    label, which = options.label, f"class {options.label}"
    if label is None:
        counts = (source.args.get("num_classes"), source.config.get("num_embeds_ada_norm"), IMAGENET_CLASSES)
        if next((count for count in counts if type(count) is int and count in (num, num - 1)), None) == num:
            raise InputError(
                f"{source.path} was trained on {num} classes and has no embedding of no class: "
                f"give --label, a class from 0 to {num - 1}"
            )
        label, which = num - 1, f"class {num - 1}, the last, taken for that of no class,"
    if not 0 <= label < num:
        raise InputError(f"--label must be a class from 0 to {num - 1} of {source.path}, but is {label}")
    return label, f"the embedding of {which} is part of the time's from now on"


# --- modulation: the source's conditioning on time and class, folded into the network's weights -------------------


def _time_mlp(ledger: Ledger, i: int, label: int, config: DiTConfig, backwards: bool) -> TimeMLP:
    """Removes and returns a block's time MLP, with the class added to its last bias; SiT's with time reversed."""
    first, second = (ledger.pop_layer(f"blocks.{i}.time_embed.mlp.{part}") for part in (0, 2))
    classes = ledger.weights.pop(f"blocks.{i}.classes")
    if classes.shape[1:] != second.bias.shape:
        raise ValueError(f"its embeddings of classes have shape {list(classes.shape)}")
    second = second._replace(bias=second.bias + classes[label])
    if backwards:
        # cos f(1-t) = cos f cos ft + sin f sin ft, and sin f(1-t) = sin f cos ft - cos f sin ft
        cos, sin = torch.cos(frequencies().double()), torch.sin(frequencies().double())
        of_cos, of_sin = first.weight.double().chunk(2, 1)
        turned = torch.cat([of_cos * cos + of_sin * sin, of_cos * sin - of_sin * cos], 1).float()
        first = first._replace(weight=turned)
    return TimeMLP(first, second, config.time_scale, config.frequency_shift)


def _keep_modulation(ledger: Ledger, mlps: list[TimeMLP]) -> dict[str, Any] | None:
    """Keeps each block's own map: exactly if all blocks share one time MLP, as in the original, else by least squares.

    Returns the residuals of the fit, if any.
    """
    shared = mlps[0]
    ledger.put_layer("time_embed.mlp.0", shared.first)
    ledger.put_layer("time_embed.mlp.2", shared.second)
    t = torch.linspace(0, 1, NUM_TIMES, dtype=torch.float64)
    seen = F.silu(shared(t))
    own = [i for i, mlp in enumerate(mlps) if not mlp.same_as(shared)]
    residuals = [0.0] * len(mlps)
    for i in own:
        target = ledger.pop_layer(f"blocks.{i}.time_block")(F.silu(mlps[i](t)))
        layer = fit_linear(seen, target, allowed=1e-3)
        residuals[i] = float((layer(seen) - target).norm() / target.norm().clamp_min(1e-30))
        ledger.put_layer(f"blocks.{i}.time_block", layer)
    return {"fit": "least squares", "by_block": residuals} if own else None


def _fit_modulation(ledger: Ledger, mlps: list[TimeMLP], how: str) -> dict[str, Any]:
    """Replaces per-block maps by AdaLN-Single; returns the residual of the fit."""
    maps = [ledger.pop_layer(f"blocks.{i}.time_block") for i in range(len(mlps))]
    single = fit_single(mlps, maps, ledger.pop_layer("out_time_block"), ledger.weights["out.weight"], how)
    ledger.put_layer("time_embed.mlp.0", mlps[0].first)
    ledger.put_layer("time_embed.mlp.2", single.second)
    ledger.put_layer("time_block", single.shared)
    ledger.weights["out_modulation"] = single.out

    def scale(target: str, factor: Tensor) -> None:
        # In place, unlike a product that broadcasts: a weight of another shape is an error.
        ledger.weights[target] = ledger.weights[target].clone().mul_(factor)

    for i, (table, (qkv, out, first, second)) in enumerate(zip(single.tables, single.factors, strict=True)):
        ledger.weights[f"blocks.{i}.modulation"] = table
        # The layers next to the modulation absorb its factors.
        for name, factor in (("attention.qkv", qkv), ("mlp.0", first)):
            scale(f"blocks.{i}.{name}.weight", factor)  # its columns
        for name, factor in (("attention.out", out), ("mlp.2", second)):
            scale(f"blocks.{i}.{name}.weight", factor[:, None])  # its rows
            scale(f"blocks.{i}.{name}.bias", factor)
    return {"fit": how, "by_block": single.residual}
