"""What all conversions share: options, results, and sizes that are read off the weights."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from atoll.convert.mapping import Ledger
from atoll.diffusion.objective import Objective, get_objective
from atoll.errors import InputError, shown
from atoll.networks.dit import DiT, TrunkConfig, sincos_positions
from atoll.networks.published import Source
from atoll.networks.router import Router

KNOWN_HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16}  # of the published sizes S, B, L and XL
MAX_POSITIONS = 2**27  # numbers in the table of positions, 0.5 GB: of PixArt-alpha at 1024 pixels it has 4.7 million
Network = TypeVar("Network", DiT, Router)
Config = TypeVar("Config", bound=TrunkConfig)


@dataclass(frozen=True)
class Options:
    """How to convert, where there is a choice."""

    label: int | None = None  # the class of a class-conditional source; None: no class
    as_is: bool = False  # DiT and SiT: per-block modulation and no text, exactly the source
    text_dim: int | None = None  # None: as the source reads, 768 if it reads none
    input_size: int | None = None  # of the latents; None: the source's
    num_heads: int | None = None  # None: as the source says, or by its width
    kind: str | None = None  # dit or sit, whose keys are the same
    fit: str = "curve"
    objective: str | None = None  # None: the source's own
    license: str | None = None  # None: the published one's
    seed: int = 0  # of what has no counterpart in the source

    def __post_init__(self) -> None:
        limits = {"text-dim": (self.text_dim, 65536), "size": (self.input_size, 4096), "heads": (self.num_heads, 1024)}
        for flag, (value, most) in limits.items():
            if value is not None and not 1 <= value <= most:
                raise InputError(f"--{flag} must be from 1 to {most}, but is {value}")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"--seed must be from 0 to 2**63 - 1, but is {self.seed}")
        if self.license is not None and not self.license.strip():
            raise InputError("--license is empty: name the licence, or leave it out")

    def objective_or(self, default: Objective) -> Objective:
        return default if self.objective is None else get_objective(self.objective)

    @property
    def chosen(self) -> dict[str, Any]:
        """Returns what was not left to the source; for the report."""
        default = asdict(Options())
        return {name: value for name, value in asdict(self).items() if value != default[name] or name == "seed"}


@dataclass(frozen=True, eq=False)
class Converted:
    """A network made of a checkpoint, and everything that is known of where it came from."""

    network: DiT | Router
    source: Source
    format: str
    license: str
    ledger: Ledger
    objective: Objective | None = None  # None: a router
    notes: Sequence[str] = ()
    residual: Mapping[str, Any] | None = None  # of the modulation, where it was fitted
    label: int | None = None
    options: Options = field(default_factory=Options)

    @property
    def init(self) -> dict[str, Any]:
        """Returns what travels with every expert that starts from it."""
        origin = {"source": self.source.path.name, "sha256": self.source.sha256, "format": self.format}
        return origin if self.label is None else {**origin, "label": self.label}

    @property
    def report(self) -> dict[str, Any]:
        """Returns the content of conversion.json."""
        objective, ledger = self.objective, self.ledger
        about = {"prediction": str(objective.prediction), "schedule": objective.schedule} if objective else None
        return {
            **self.init,
            "license": self.license,
            "asked_for": self.options.chosen,
            "weights_under": self.source.wrapper,
            "objective": about,
            "parameters": self.num_parameters,
            "notes": list(self.notes),
            "modulation": self.residual,
            "consumed": ledger.used,
            "dropped": ledger.dropped,
            "initialised": ledger.started,
        }

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.network.parameters())


@dataclass(frozen=True)
class Sizes:
    """Of a transformer over patches, read off the weights that its table of keys has filled."""

    trunk: TrunkConfig  # without text
    out_channels: int  # with those of a learned sigma
    source_size: int  # of the latents that the source was trained on

    @classmethod
    def of(
        cls, source: Source, options: Options, ledger: Ledger, depth: int,
        size_key: str = "sample_size", heads_key: str = "num_attention_heads",
    ) -> "Sizes":  # fmt: skip
        (patch,) = ledger.used["patch_embed.weight"]["from"]
        shape = source.weights[patch].shape
        if len(shape) != 4 or shape[2] != shape[3] or not all(shape):
            raise InputError(f"{patch} in {source.path} has shape {list(shape)}, not that of square patches")
        width, channels, side, _ = shape
        rows = len(ledger.filled["out.weight"]) if "out.weight" in ledger.filled else channels * side**2
        if rows % side**2 or rows // side**2 < channels:
            raise InputError(
                f"the output layer in {source.path} has {rows} rows, which are no {channels} channels of its patches"
            )
        heads = _num_heads(source, options, width, heads_key)
        size = _source_size(source, options, side, size_key)
        input_size = options.input_size or size
        if input_size % side:
            raise InputError(f"latents {input_size} a side cannot be cut into patches of {side}: give another --size")
        ratio = len(ledger.filled["blocks.0.mlp.0.weight"]) / width
        trunk = TrunkConfig(input_size, channels, side, width, depth, heads, ratio, text_dim=None)  # checks limits
        if (max(input_size, size) // side) ** 2 * width > MAX_POSITIONS:
            raise InputError(
                f"latents {shown(max(input_size, size))} a side have too many places for {source.path}, {width} wide: "
                "give another --size"
            )
        return cls(trunk, rows // side**2, size)

    @property
    def resized(self) -> bool:
        return self.trunk.input_size != self.source_size

    def config(self, kind: type[Config], **changes: Any) -> Config:
        return kind(**{**asdict(self.trunk), **changes})


def _num_heads(source: Source, options: Options, width: int, key: str) -> int:
    in_config = source.config.get(key)
    if options.num_heads is not None and in_config is not None and options.num_heads != in_config:
        raise InputError(
            f"--heads is {options.num_heads}, but the config of {source.path} says {shown(in_config)}: leave it out"
        )
    if options.num_heads is not None and width % options.num_heads:
        raise InputError(f"--heads must divide the width of {source.path}, {width}, but is {options.num_heads}")
    heads = options.num_heads or in_config or KNOWN_HEADS.get(width)
    if type(heads) is not int or heads < 1 or width % heads:
        raise InputError(f"{source.path} is {width} wide and does not say how many heads it has: give --heads")
    return heads


def _source_size(source: Source, options: Options, patch: int, key: str) -> int:
    """Returns the side of the source's latents: as its positions show, as its config says, or as the options do."""
    size, positions = source.config.get(key), source.weights.get("pos_embed")
    if positions is not None:
        if positions.dim() < 2:
            raise InputError(f"pos_embed in {source.path} has shape {list(positions.shape)}: it is damaged")
        num = positions.shape[-2]
        size = patch * math.isqrt(num)
        if (size // patch) ** 2 != num:
            raise InputError(f"pos_embed in {source.path} has {num} places, which are no square")
    if type(size) is not int:
        size = options.input_size
    if size is None or size < 1:
        raise InputError(f"{source.path} does not say the size of its latents: give --size, 32 for 256 pixels")
    return size


def keep_channels(ledger: Ledger, sizes: Sizes, negated: bool = False) -> None:
    """Keeps the rows of the last layer that make the prediction; those of the learned sigma come after."""
    trunk = sizes.trunk
    for target in ("out.weight", "out.bias"):
        rows, how = ledger.filled[target], ledger.used[target]["how"]
        if sizes.out_channels != trunk.in_channels:
            grid = rows.unflatten(0, (trunk.patch_size**2, sizes.out_channels))
            rows, how = grid[:, : trunk.in_channels].flatten(0, 1), "first channels"
        ledger.change(target, -rows if negated else rows, "first channels negated" if negated else how)


def take_positions(ledger: Ledger, sizes: Sizes, step: float | None = None) -> None:
    """Fills in the sines and cosines: the file's, or where it has none of this size, computed `step` apart."""
    positions = ledger.source.get("pos_embed")
    if positions is not None and not sizes.resized:
        ledger.fill("positions", positions.float().flatten(0, -2), "pos_embed")
        return
    trunk = sizes.trunk
    if positions is not None:
        ledger.drop("pos_embed", f"it is of latents {sizes.source_size} a side, not {trunk.input_size}")
    side = trunk.input_size // trunk.patch_size
    apart = "" if step is None else f", {step:g} apart"
    values = sincos_positions(trunk.hidden_size, side, 1.0 if step is None else step)
    ledger.start("positions", values, f"sines and cosines{apart}")


def build_network(kind: type[Network], config: Any, ledger: Ledger) -> Network:
    """Returns a network of the weights in the ledger, which must be all of them."""
    with torch.device("meta"):
        network = kind(config)
    network.load_state_dict(ledger.close(network.state_dict()), assign=True)
    return network.eval()


def spacing_of(positions: Tensor, within: float = 0.01) -> float | None:
    """Returns how far apart the places are whose sines and cosines positions[N, d] are; None if they are no such.

    The angle between neighbours is the spacing times a frequency. That of a slow wave tells it roughly and without
    doubt; that of the fastest wave, and then of the places farthest apart, tell it exactly, up to whole turns.
    """
    num, width = positions.shape
    side, quarter = math.isqrt(num), width // 4
    if side**2 != num or width % 4 or not width:
        return None
    waves = positions[:side, : 2 * quarter].double()  # those of the columns, along the first row
    turned = torch.complex(waves[:, quarter:], waves[:, :quarter])
    step = 0.0 if side > 1 else 1.0
    slow = min(quarter // 4, quarter - 1)  # a tenth as fast as the fastest
    for far, wave in ((1, slow), (1, 0), (side - 1, 0)) if side > 1 else ():
        pace = far / 10_000 ** (wave / quarter)
        angle = float(torch.angle((turned[far:, wave] * turned[:-far, wave].conj()).mean()))
        step = (angle + 2 * math.pi * round((step * pace - angle) / (2 * math.pi))) / pace
    rounded = torch.finfo(positions.dtype).eps  # half precision blurs what is a simple fraction
    whole = float(Fraction(step).limit_denominator(16))
    step = whole if abs(whole - step) < 4 * rounded / side else step
    same = step > 0 and torch.allclose(positions.float(), sincos_positions(width, side, step), rtol=0, atol=within)
    return step if same else None


def check_free(out: Path, ours: Collection[str], mark: str) -> None:
    """Refuses a folder unless it is new or an earlier conversion: with the file `mark` and none but `ours`."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file: choose a folder")
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    if names and (mark not in names or names - set(ours)):
        raise InputError(f"--out {out} holds something else than an earlier conversion: choose another folder")
