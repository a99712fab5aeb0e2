"""Class-conditional DiT and SiT: facebookresearch's .pt files, and diffusers' DiTTransformer2DModel.

They become experts that read text, to start training from (Eq. 19): per-block modulation is fitted by AdaLN-Single,
the class is fixed, the text silent at first. Or, as they are, experts without text that answer exactly as the source.
SiT's time runs the other way and its velocity has the other sign; both are folded into the weights, exactly.
"""

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from atoll.convert.common import Converted, Options, Sizes, build_network, keep_channels, take_positions
from atoll.convert.mapping import Layer, Ledger
from atoll.convert.modulation import NUM_TIMES, TimeMLP, fit_linear, fit_single
from atoll.convert.tables import DiTFormat
from atoll.diffusion.objective import Objective
from atoll.diffusion.prediction import Prediction
from atoll.errors import InputError, shown, unknown
from atoll.networks.dit import NUM_FREQUENCIES, DiT, DiTConfig, frequencies
from atoll.networks.published import Source

DIT_LICENSE, SIT_LICENSE = "CC-BY-NC-4.0", "mit"
DIT_OBJECTIVE = Objective(Prediction.EPS, "ddpm")
IMAGENET_CLASSES = 1000
TEXT_DIM = 768  # of CLIP ViT-L/14, which the paper uses
KINDS = ("dit", "sit")
SIT_SCHEDULES = {"Linear": "linear", "GVP": "cosine"}
SIT_PREDICTIONS = {"velocity": Prediction.VELOCITY, "noise": Prediction.EPS}


def convert_original(source: Source, options: Options, format: DiTFormat) -> Converted:
    """Converts a file with facebookresearch's keys, which DiT and SiT share."""
    if _kind(source, options) == "dit":
        return replace(convert_dit(source, options, format), format="facebookresearch DiT")
    path, prediction = source.args.get("path_type", "Linear"), source.args.get("prediction", "velocity")
    if path not in tuple(SIT_SCHEDULES) or prediction not in tuple(SIT_PREDICTIONS):  # they may be of any type
        raise InputError(
            f"{source.path} is a SiT that predicts {shown(prediction)} on the path {shown(path)}: only velocity "
            "and noise on the paths Linear and GVP can be converted"
        )
    objective = options.objective_or(Objective(SIT_PREDICTIONS[prediction], SIT_SCHEDULES[path]))
    converted = convert_dit(source, options, format, objective, backwards=True)
    return replace(converted, format="SiT", license=SIT_LICENSE)


def _kind(source: Source, options: Options) -> str:
    """Returns dit or sit: as asked for, as the file says of its training, or as its name does."""
    if options.kind is not None:
        if options.kind not in KINDS:
            raise unknown("kind", options.kind, KINDS)
        return options.kind
    if "path_type" in source.args:
        return "sit"
    words, model = re.split("[^a-z]+", source.path.name.lower()), source.args.get("model")
    prefix = model.lower() if isinstance(model, str) else ""
    kinds = {kind for kind in KINDS if kind in words or prefix.startswith(kind)}
    if len(kinds) != 1:
        raise InputError(
            f"{source.path} may be a DiT or a SiT, whose keys are the same: say which with --kind dit or --kind sit"
        )
    return kinds.pop()


def convert_dit(
    source: Source, options: Options, format: DiTFormat, objective: Objective | None = None, backwards: bool = False
) -> Converted:
    objective = objective or options.objective_or(DIT_OBJECTIVE)
    ledger = Ledger(source.weights, str(source.path))
    sizes = Sizes.of(source, options, ledger, ledger.apply(format.rules))
    keep_channels(ledger, sizes, negated=backwards and objective.prediction is Prediction.VELOCITY)
    take_positions(ledger, sizes)
    label, note = _label(source, options, ledger.take(f"{format.labels}.weight".replace("{i}", "0")).shape[:1].numel())
    notes = [note]
    config = sizes.config(
        DiTConfig, text_dim=None if options.as_is else options.text_dim or TEXT_DIM,
        adaln="block" if options.as_is else "single", time_scale=1.0 if backwards else 999.0,
        frequency_shift=format.frequency_shift,
    )  # fmt: skip
    modulation = _Modulation(ledger, format, config, label, backwards)
    if options.as_is:
        residual = modulation.keep()
        if residual is not None:
            notes.append("its blocks have time MLPs of their own, which are fitted to one, not copied")
    else:
        residual = modulation.fit(options.fit)
        _start_text(ledger, config, options.seed)
    network = build_network(DiT, config, ledger)
    if sizes.out_channels > config.in_channels:
        notes.append(f"{sizes.out_channels} output channels became {config.in_channels}: no learned sigma")
    eps = source.config.get("norm_eps", 1e-6)
    if eps != 1e-6:
        notes.append(f"norm_eps is {shown(eps)} in the MLPs of the source, and 1e-6 here")
    return Converted(network, source, format.name, DIT_LICENSE, ledger, objective, notes, residual, label)


def _label(source: Source, options: Options, num: int) -> tuple[int, str]:
    """Returns the class to keep, and a note: by default none, whose embedding, if there is one, is the last of num."""
    label = num - 1 if options.label is None else options.label
    if not 0 <= label < num:
        raise InputError(f"--label must be a class from 0 to {num - 1} of {source.path}, but is {label}")
    which = f"class {label}"
    if options.label is None:
        classes = IMAGENET_CLASSES if num in (IMAGENET_CLASSES, IMAGENET_CLASSES + 1) else None
        for value in (source.config.get("num_embeds_ada_norm"), source.args.get("num_classes")):  # the last decides
            classes = value if type(value) is int and value in (num, num - 1) else classes
        if classes == num:
            raise InputError(
                f"{source.path} was trained on {num} classes and has no embedding of no class: "
                f"give --label, a class from 0 to {num - 1}"
            )
        sure = "that of no class" if classes is not None else "which is taken for that of no class, being the last"
        which = f"{which}, {sure},"
    return label, f"the embedding of {which} is part of the time's from now on"


def _start_text(ledger: Ledger, config: DiTConfig, seed: int) -> None:
    """Starts a text projection, N(0, 0.02), and cross-attention whose output is zero: the text is silent at first."""
    generator, width = torch.Generator().manual_seed(seed), config.hidden_size
    assert config.text_dim is not None
    weight = 0.02 * torch.randn(width, config.text_dim, generator=generator)
    ledger.start("text_embed.weight", weight, "N(0, 0.02), as in Eq. 19")
    ledger.start("text_embed.bias", torch.zeros(width), "zero")
    for i in range(config.depth):
        cross = f"blocks.{i}.cross"
        for name, rows in (("q", width), ("kv", 2 * width)):
            bound = math.sqrt(6 / (rows + width))
            weight = bound * (2 * torch.rand(rows, width, generator=generator) - 1)
            ledger.start(f"{cross}.{name}.weight", weight, "uniform (Xavier)")
            ledger.start(f"{cross}.{name}.bias", torch.zeros(rows), "zero")
        ledger.start(f"{cross}.out.weight", torch.zeros(width, width), "zero: the text is silent at first")
        ledger.start(f"{cross}.out.bias", torch.zeros(width), "zero: the text is silent at first")


@dataclass(frozen=True, eq=False)
class _Modulation:
    """How the source sees time and class, put into the network's weights."""

    ledger: Ledger
    format: DiTFormat
    config: DiTConfig
    label: int
    backwards: bool

    @cached_property
    def mlps(self) -> list[TimeMLP]:
        return [self._mlp(i) for i in range(self.config.depth)]

    def _layer(self, name: str, i: int = 0, *, rows: int = 1, columns: int | None = None) -> Layer:
        """Returns a linear layer of the source, `rows` times as high as the network is wide, and by default as wide."""
        width = self.config.hidden_size
        return self.ledger.take_layer(name.replace("{i}", str(i)), rows * width, columns or width)

    def _map(self, i: int) -> Layer:
        return self._layer(self.format.block, i, rows=6)

    def _mlp(self, i: int) -> TimeMLP:
        """Returns a block's time MLP with the class in its last bias; SiT's is seen from the other end of time."""
        first = self._layer(self.format.time[0], i, columns=NUM_FREQUENCIES)
        second = self._layer(self.format.time[1], i)
        key = f"{self.format.labels}.weight".replace("{i}", str(i))
        labels = self.ledger.take(key)
        if labels.shape[1:] != second.bias.shape or len(labels) <= self.label:
            raise InputError(f"{key} in {self.ledger.name} has shape {list(labels.shape)}: it is damaged")
        second = second._replace(bias=second.bias + labels[self.label])
        if self.backwards:
            # cos f(1-t) = cos f cos ft + sin f sin ft, and sin f(1-t) = sin f cos ft - cos f sin ft
            cos, sin = torch.cos(frequencies().double()), torch.sin(frequencies().double())
            of_cos, of_sin = first.weight.double().chunk(2, 1)
            turned = torch.cat([of_cos * cos + of_sin * sin, of_cos * sin - of_sin * cos], 1).float()
            first = first._replace(weight=turned)
        return TimeMLP(first, second, self.config.time_scale, self.config.frequency_shift)

    def _sources(self, *names: str) -> list[str]:
        """Returns the keys of these layers, of all blocks where a name holds {i}."""
        depth = range(self.config.depth)
        keys = (f"{name}.{part}".replace("{i}", str(i)) for name in names for i in depth for part in Layer._fields)
        return [key for key in dict.fromkeys(keys) if key in self.ledger.source]

    def _fill(self, target: str, layer: Layer, *names: str, how: str) -> None:
        for part, value in layer._asdict().items():
            self.ledger.fill(f"{target}.{part}", value, *self._sources(*names), how=how)

    def _fill_time(self, second: Layer, how: str, of: str = "") -> None:
        format, turn = self.format, "seen from the other end of time" if self.backwards else "copied"
        self._fill("time_embed.mlp.0", self.mlps[0].first, format.time[0], how=turn + of)
        self._fill("time_embed.mlp.2", second, format.time[1], format.labels, how=how + of)

    def keep(self) -> dict[str, Any] | None:
        """Keeps the modulation of each block: exactly, where all blocks share one time MLP, as in the original."""
        mlp = self.mlps[0]
        shared = all(other.same_as(mlp) for other in self.mlps)
        self._fill_time(mlp.second, "with the class", "" if shared else ", of the first block")
        self._fill("out_time_block", self._layer(self.format.last, rows=2), self.format.last, how="copied")
        t = torch.linspace(0, 1, NUM_TIMES, dtype=torch.float64)
        seen = F.silu(mlp(t))
        residuals = []
        for i, own in enumerate(self.mlps):
            layer, off, how = self._map(i), 0.0, "copied"
            if not own.same_as(mlp):
                target = layer(F.silu(own(t)))
                layer, how = fit_linear(seen, target, allowed=1e-3), "fitted"
                off = float((layer(seen) - target).norm() / target.norm().clamp_min(1e-30))
            residuals.append(off)
            self._fill(f"blocks.{i}.time_block", layer, self.format.block.replace("{i}", str(i)), how=how)
        return None if shared else {"fit": "least squares", "by_block": residuals}

    def fit(self, how: str) -> dict[str, Any]:
        """Puts AdaLN-Single in the place of per-block maps; returns how far off it is."""
        format, ledger = self.format, self.ledger
        last = self._layer(format.last, rows=2)
        fitted = fit_single(self.mlps, self._map, last, ledger.filled["out.weight"], how)
        self._fill_time(fitted.second, "fitted, with the class" if how == "curve" else "with the class")
        self._fill("time_block", fitted.shared, format.block, how="fitted")
        for i, table in enumerate(fitted.tables):
            ledger.fill(f"blocks.{i}.modulation", table, *self._sources(format.block), how="fitted")
        ledger.fill("out_modulation", fitted.out, *self._sources(format.last), how="fitted")
        for i, (qkv, out, first, second) in enumerate(fitted.factors if how == "curve" else ()):
            # The layers beside the modulation take the factors that were taken out of it.
            for name, factor in (("attention.qkv", qkv), ("mlp.0", first)):
                self._scale(f"blocks.{i}.{name}.weight", factor, "its columns scaled")
            for name, factor in (("attention.out", out), ("mlp.2", second)):
                self._scale(f"blocks.{i}.{name}.weight", factor[:, None], "its rows scaled")
                self._scale(f"blocks.{i}.{name}.bias", factor, "scaled")
        return {
            "fit": how,
            "by_block": list(fitted.residual),
            "by_block_of_what_varies": list(fitted.varying),
            "output": fitted.out_residual,
        }

    def _scale(self, target: str, factor: Tensor, how: str) -> None:
        value = self.ledger.filled[target]
        # In place of a product that broadcasts: one of another shape is an error.
        self.ledger.change(target, value.clone().mul_(factor), how)
