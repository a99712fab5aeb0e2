"""Class-conditional DiT and SiT: facebookresearch's .pt files, and diffusers' DiTTransformer2DModel.

They become experts that read text, for training to go on from (Eq. 19): per-block modulation is fitted by AdaLN-Single,
the class is fixed, the text silent at first. Or, as they are, experts without text that answer exactly as the source.
SiT's time runs the other way and its velocity has the other sign; both are folded into the weights, exactly.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from atoll.convert.common import TEXT_DIM, Converted, Sizes, Start, Wanted, build_network, objective_of
from atoll.convert.mapping import Ledger, Rule, flat, linear
from atoll.convert.modulation import NUM_TIMES, Layer, Single, TimeMLP, fit_linear, fit_single
from atoll.diffusion.objective import Objective
from atoll.diffusion.prediction import Prediction
from atoll.errors import InputError, shown
from atoll.networks.dit import NUM_FREQUENCIES, DiT, DiTConfig, frequencies, sincos_positions
from atoll.networks.published import Source

DIT_LICENSE, SIT_LICENSE = "CC-BY-NC-4.0", "mit"
DIT_OBJECTIVE = Objective(Prediction.EPS, "ddpm")
IMAGENET_CLASSES = 1000
SIT_SCHEDULES = {"Linear": "linear", "GVP": "cosine"}
SIT_PREDICTIONS = {"velocity": Prediction.VELOCITY, "noise": Prediction.EPS}


class Layout(NamedTuple):
    """Where a format has what is not simply copied."""

    rules: tuple[Rule, ...]
    patch: str
    mlp: str
    time: tuple[str, str]  # both layers of the time's MLP
    labels: str
    block: str  # a block's map of time and class
    last: str  # the output's
    out: str
    frequency_shift: int


ORIGINAL = Layout(
    rules=(
        *linear("patch_embed", "x_embedder.proj", change=flat),
        *linear("blocks.{i}.attention.qkv", "blocks.{i}.attn.qkv"),
        *linear("blocks.{i}.attention.out", "blocks.{i}.attn.proj"),
        *linear("blocks.{i}.mlp.0", "blocks.{i}.mlp.fc1"),
        *linear("blocks.{i}.mlp.2", "blocks.{i}.mlp.fc2"),
    ),
    patch="x_embedder.proj.weight",
    mlp="blocks.{i}.mlp.fc1.weight",
    time=("t_embedder.mlp.0", "t_embedder.mlp.2"),
    labels="y_embedder.embedding_table.weight",
    block="blocks.{i}.adaLN_modulation.1",
    last="final_layer.adaLN_modulation.1",
    out="final_layer.linear",
    frequency_shift=0,
)
_BLOCK = "transformer_blocks.{i}"
DIFFUSERS = Layout(
    rules=(
        *linear("patch_embed", "pos_embed.proj", change=flat),
        *linear("blocks.{i}.attention.qkv", *(f"{_BLOCK}.attn1.to_{part}" for part in "qkv")),
        *linear("blocks.{i}.attention.out", f"{_BLOCK}.attn1.to_out.0"),
        *linear("blocks.{i}.mlp.0", f"{_BLOCK}.ff.net.0.proj"),
        *linear("blocks.{i}.mlp.2", f"{_BLOCK}.ff.net.2"),
    ),
    patch="pos_embed.proj.weight",
    mlp=f"{_BLOCK}.ff.net.0.proj.weight",
    time=(f"{_BLOCK}.norm1.emb.timestep_embedder.linear_1", f"{_BLOCK}.norm1.emb.timestep_embedder.linear_2"),
    labels=f"{_BLOCK}.norm1.emb.class_embedder.embedding_table.weight",
    block=f"{_BLOCK}.norm1.linear",
    last="proj_out_1",
    out="proj_out_2",
    frequency_shift=1,
)


def convert_dit(source: Source, wanted: Wanted, layout: Layout) -> Converted:
    what = "facebookresearch DiT" if layout is ORIGINAL else "diffusers DiTTransformer2DModel"
    return _Conversion(source, wanted, layout).finish(what, DIT_LICENSE, objective_of(wanted, DIT_OBJECTIVE))


def convert_sit(source: Source, wanted: Wanted) -> Converted:
    objective = objective_of(wanted, _sit_objective(source.args, source))
    made = _Conversion(source, wanted, ORIGINAL, backwards=True)
    made.negated = objective.prediction is Prediction.VELOCITY
    return made.finish("SiT", SIT_LICENSE, objective)


def _sit_objective(args: Mapping[str, Any], source: Source) -> Objective:
    """As its training command says; the published checkpoint's where nothing is said."""
    path, prediction = args.get("path_type", "Linear"), args.get("prediction", "velocity")
    if path not in tuple(SIT_SCHEDULES) or prediction not in tuple(SIT_PREDICTIONS):  # they may be of any type
        raise InputError(
            f"{source.path} is a SiT that predicts {shown(prediction)} on the path {shown(path)}: only velocity "
            "and noise on the paths Linear and GVP can be converted"
        )
    return Objective(SIT_PREDICTIONS[prediction], SIT_SCHEDULES[path])


class _Conversion:
    """One DiT or SiT on its way."""

    def __init__(self, source: Source, wanted: Wanted, layout: Layout, backwards: bool = False) -> None:
        self.source, self.wanted, self.layout = source, wanted, layout
        self.backwards, self.negated = backwards, False
        self.sizes = Sizes.of(
            source, wanted, patch=layout.patch, block=f"{layout.block}.weight", mlp=layout.mlp,
            out=f"{layout.out}.weight", positions="pos_embed",
        )  # fmt: skip
        self.ledger = Ledger(source.weights, str(source.path))
        self.notes: list[str] = []
        self.label = self._label()

    def finish(self, what: str, license: str, objective: Objective) -> Converted:
        sizes, wanted, ledger = self.sizes, self.wanted, self.ledger
        ledger.apply(self.layout.rules, sizes.depth)
        self._take_out()
        self._take_positions()
        mlps = [self._time_mlp(i) for i in range(sizes.depth)]
        text_dim = None if wanted.as_is else wanted.text_dim or TEXT_DIM
        if wanted.as_is:
            residual = self._keep_maps(mlps)
        else:
            residual = self._fit_maps(mlps)
            assert text_dim is not None
            Start(wanted.seed).silent_text(ledger, text_dim, sizes.hidden_size, sizes.depth)
        config = DiTConfig(
            **sizes.trunk(), text_dim=text_dim, time_scale=mlps[0].scale, adaln="block" if wanted.as_is else "single",
            frequency_shift=self.layout.frequency_shift,
        )  # fmt: skip
        with torch.device("meta"):
            network = DiT(config)
        build_network(network, ledger)
        if sizes.out_channels > sizes.in_channels:
            self.notes.append(f"{sizes.out_channels} output channels became {sizes.in_channels}: no learned sigma")
        eps = self.source.config.get("norm_eps", 1e-6)
        if eps != 1e-6:
            self.notes.append(f"norm_eps is {shown(eps)} in the MLPs of the source, and 1e-6 here")
        return Converted(
            network, self.source, what, license, ledger, objective, tuple(self.notes), residual, self.label
        )

    # --- what is copied -------------------------------------------------------------------------------------------

    def _label(self) -> int:
        """The class it is made for: by default none, whose embedding is for guidance, and the last, if there is one."""
        key = self.layout.labels.replace("{i}", "0")
        table = self.ledger.take(key)
        num = len(table) if table.dim() else 0
        label = num - 1 if self.wanted.label is None else self.wanted.label
        if not 0 <= label < num:
            raise InputError(f"--label must be a class from 0 to {num - 1} of {self.source.path}, but is {label}")
        which = f"class {label}"
        if self.wanted.label is None:
            classes = self._num_classes(num)
            if classes == num:
                raise InputError(
                    f"{self.source.path} was trained on {num} classes and has no embedding of no class: "
                    f"give --label, a class from 0 to {num - 1}"
                )
            sure = "that of no class" if classes is not None else "which is taken for that of no class, being the last"
            which = f"{which}, {sure},"
        self.notes.append(f"the embedding of {which} is part of the time's from now on")
        return label

    def _num_classes(self, num: int) -> int | None:
        """Returns how many classes there are, where the file, its config or ImageNet's number tells."""
        for said in (self.source.args.get("num_classes"), self.source.config.get("num_embeds_ada_norm")):
            if type(said) is int and said in (num, num - 1):
                return said
        return IMAGENET_CLASSES if num in (IMAGENET_CLASSES, IMAGENET_CLASSES + 1) else None

    def _take_out(self) -> None:
        keep = self.sizes.keep_channels

        def first_channels_negated(rows: Tensor) -> Tensor:
            return -keep(rows)

        change = first_channels_negated if self.negated else keep
        self.ledger.apply(linear("out", self.layout.out, change=change), self.sizes.depth)

    def _take_positions(self) -> None:
        """Sines and cosines, in the file or not; for another size of latents they are computed."""
        sizes, key = self.sizes, "pos_embed"
        if key in self.source.weights and sizes.input_size == sizes.source_size:
            self.ledger.fill("positions", self.ledger.take(key).flatten(0, -2), key)
            return
        if key in self.source.weights:
            self.ledger.drop(key, f"it is of latents {sizes.source_size} a side, not {sizes.input_size}")
        self.ledger.start("positions", sincos_positions(sizes.hidden_size, sizes.side), "sines and cosines")

    # --- time and class -------------------------------------------------------------------------------------------

    def _layer(self, name: str, i: int = 0, *, rows: int = 1, columns: int | None = None) -> Layer:
        """A linear layer of the source, `rows` times as high as the network is wide, and as wide if nothing is said."""
        key, width = name.replace("{i}", str(i)), self.sizes.hidden_size
        layer = Layer(self.ledger.take(f"{key}.weight"), self.ledger.take(f"{key}.bias"))
        wanted = (rows * width, columns or width)
        for part, value, shape in (("weight", layer.weight, wanted), ("bias", layer.bias, wanted[:1])):
            if value.shape != shape:
                found = list(value.shape)
                raise InputError(
                    f"{key}.{part} in {self.source.path} has shape {found}, not {list(shape)}: it is damaged"
                )
        return layer

    def _keys(self, *names: str) -> list[str]:
        """Of weights and biases of layers, or of a weight itself; of all blocks where a name holds {i}."""
        every = [n.replace("{i}", str(i)) for n in names for i in range(self.sizes.depth if "{i}" in n else 1)]
        suffixes = [("",) if name.endswith(".weight") else (".weight", ".bias") for name in every]
        return [name + part for name, parts in zip(every, suffixes, strict=True) for part in parts]

    def _time_mlp(self, i: int) -> TimeMLP:
        """A block's, with the class in its last bias; SiT's seen from the other end of time."""
        first = self._layer(self.layout.time[0], i, columns=NUM_FREQUENCIES)
        second = self._layer(self.layout.time[1], i)
        key = self.layout.labels.replace("{i}", str(i))
        labels = self.ledger.take(key)
        if labels.shape[1:] != second.bias.shape or len(labels) <= self.label:
            raise InputError(f"{key} in {self.source.path} has shape {list(labels.shape)}: it is damaged")
        second = second._replace(bias=second.bias + labels[self.label])
        if not self.backwards:
            return TimeMLP(first, second, 999.0, self.layout.frequency_shift)
        # cos f(1-t) = cos f cos ft + sin f sin ft, and sin f(1-t) = sin f cos ft - cos f sin ft
        cos, sin = torch.cos(frequencies().double()), torch.sin(frequencies().double())
        of_cos, of_sin = first.weight.double().chunk(2, 1)
        turned = torch.cat([of_cos * cos + of_sin * sin, of_cos * sin - of_sin * cos], 1).float()
        return TimeMLP(Layer(turned, first.bias), second, 1.0)

    @property
    def _turn(self) -> str:
        return "seen from the other end of time" if self.backwards else "copied"

    def _fill_layer(self, target: str, layer: Layer, keys: list[str], how: str) -> None:
        self.ledger.fill(f"{target}.weight", layer.weight, *keys, how=how)
        self.ledger.fill(f"{target}.bias", layer.bias, *keys, how=how)

    def _keep_maps(self, mlps: list[TimeMLP]) -> dict[str, Any] | None:
        """Per-block modulation as in the source: exact where all blocks share one time MLP, as in the original."""
        first, second = self.layout.time
        shared = all(mlp.same_as(mlps[0]) for mlp in mlps)
        turn, first_of = self._turn, "" if shared else ", of the first block"
        self._fill_layer("time_embed.mlp.0", mlps[0].first, self._keys(first), turn + first_of)
        self._fill_layer(
            "time_embed.mlp.2", mlps[0].second, self._keys(second, self.layout.labels), "with the class" + first_of
        )
        last = self._layer(self.layout.last, rows=2)
        self._fill_layer("out_time_block", last, self._keys(self.layout.last), "copied")
        t = torch.linspace(0, 1, NUM_TIMES, dtype=torch.float64)
        seen = F.silu(mlps[0](t))
        residuals = []
        for i in range(self.sizes.depth):
            layer, name = self._layer(self.layout.block, i, rows=6), self.layout.block.replace("{i}", str(i))
            same, off = mlps[i].same_as(mlps[0]), 0.0
            if not same:
                told = layer(F.silu(mlps[i](t)))
                layer = fit_linear(seen, told, allowed=1e-3)
                off = float((layer(seen) - told).norm() / told.norm().clamp_min(1e-30))
            residuals.append(off)
            self._fill_layer(f"blocks.{i}.time_block", layer, self._keys(name), "copied" if same else "fitted")
        if shared:
            return None
        self.notes.append("its blocks have time MLPs of their own, which are fitted to one, not copied")
        return {"fit": "least squares", "by_block": residuals}

    def _fit_maps(self, mlps: list[TimeMLP]) -> dict[str, Any]:
        """AdaLN-Single in the place of per-block maps."""
        layout, ledger = self.layout, self.ledger
        fitted = fit_single(
            mlps, lambda i: self._layer(layout.block, i, rows=6), self._layer(layout.last, rows=2),
            ledger.filled["out.weight"], self.wanted.fit,
        )  # fmt: skip
        first, second = layout.time
        self._fill_layer("time_embed.mlp.0", mlps[0].first, self._keys(first), self._turn)
        how = "with the class" if self.wanted.fit != "curve" else "fitted, with the class"
        self._fill_layer("time_embed.mlp.2", fitted.second, self._keys(second, layout.labels), how)
        maps = self._keys(layout.block)
        self._fill_layer("time_block", fitted.shared, maps, "fitted")
        for i, table in enumerate(fitted.tables):
            ledger.fill(f"blocks.{i}.modulation", table, *maps, how="fitted")
        ledger.fill("out_modulation", fitted.out, *self._keys(layout.last), how="fitted")
        self._scale(fitted)
        return {
            "fit": self.wanted.fit,
            "by_block": list(fitted.residual),
            "by_block_of_what_varies": list(fitted.varying),
            "output": fitted.out_residual,
        }

    def _scale(self, fitted: Single) -> None:
        """Give the layers beside the modulation the factors that were taken out of it."""
        if self.wanted.fit != "curve":
            return
        for i, (qkv, out, first, second) in enumerate(fitted.factors):
            block = f"blocks.{i}"
            for name, factor in (("attention.qkv", qkv), ("mlp.0", first)):
                self._multiply(f"{block}.{name}.weight", factor, "its columns scaled")
            for name, factor in (("attention.out", out), ("mlp.2", second)):
                self._multiply(f"{block}.{name}.weight", factor[:, None], "its rows scaled")
                self._multiply(f"{block}.{name}.bias", factor, "scaled")

    def _multiply(self, target: str, factor: Tensor, how: str) -> None:
        self.ledger.filled[target] = self.ledger.filled[target] * factor
        self.ledger.used[target]["how"] = how
