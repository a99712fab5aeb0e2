"""What all conversions share: what they are asked for, what they give, and sizes that are read off the weights."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.convert.mapping import Ledger
from atoll.diffusion.objective import Objective, get_objective
from atoll.errors import InputError, shown
from atoll.networks.dit import DiT, TrunkConfig, sincos_positions
from atoll.networks.published import Source
from atoll.networks.router import Router

KNOWN_HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16}  # of the published sizes S, B, L and XL
TEXT_DIM = 768  # of CLIP ViT-L/14, which the paper uses
MAX_POSITIONS = 2**27  # numbers in the table of positions, 0.5 GB: of PixArt-alpha at 1024 pixels it has 4.7 million


@dataclass(frozen=True)
class Wanted:
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
        for name, flag, most in (
            ("text_dim", "text-dim", 65536),
            ("input_size", "size", 4096),
            ("num_heads", "heads", 1024),
        ):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise InputError(f"--{flag} must be from 1 to {most}, but is {value}")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"--seed must be from 0 to 2**63 - 1, but is {self.seed}")
        if self.license is not None and not self.license.strip():
            raise InputError("--license is empty: name the licence, or leave it out")


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
    asked: Mapping[str, Any] = field(default_factory=dict)  # what of Wanted was not left to the source

    @property
    def init(self) -> dict[str, Any]:
        """What travels with every expert that starts from it."""
        found = {"source": self.source.path.name, "sha256": self.source.sha256, "format": self.format}
        return found if self.label is None else {**found, "label": self.label}

    @property
    def report(self) -> dict[str, Any]:
        """conversion.json."""
        objective = self.objective
        about = {"prediction": str(objective.prediction), "schedule": objective.schedule} if objective else None
        return {
            **self.init,
            "license": self.license,
            "asked_for": dict(self.asked),
            "weights_under": self.source.wrapper,
            "objective": about,
            "parameters": self.num_parameters,
            "notes": list(self.notes),
            "modulation": self.residual,
            **self.ledger.table(),
        }

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.network.parameters())


@dataclass(frozen=True)
class Sizes:
    """Of a transformer over patches, read off its weights."""

    in_channels: int
    out_channels: int
    patch_size: int
    hidden_size: int
    depth: int
    mlp_ratio: float
    num_heads: int
    input_size: int
    source_size: int  # what the source was trained on

    @classmethod
    def of(
        cls,
        source: Source,
        wanted: Wanted,
        *,
        patch: str,
        block: str,
        mlp: str,
        out: str | None = None,
        positions: str | None = None,
        size_key: str = "sample_size",
        heads_key: str = "num_attention_heads",
    ) -> "Sizes":
        weights = source.weights
        depth = 0
        while block.replace("{i}", str(depth)) in weights:
            depth += 1
        for key in (patch, mlp.replace("{i}", "0"), *([] if out is None else [out])):
            if key not in weights:
                raise InputError(f"{source.path} lacks {key}: it is of another architecture, or not all is there")
        shape = weights[patch].shape
        if len(shape) != 4 or shape[2] != shape[3] or not all(shape) or depth == 0:
            raise InputError(f"{patch} in {source.path} has shape {list(shape)}, not that of square patches")
        width, channels, side, _ = shape
        for key in (mlp.replace("{i}", "0"), *([] if out is None else [out])):
            if weights[key].shape[1:] != (width,):
                raise InputError(f"{key} in {source.path} has shape {list(weights[key].shape)}, not {width} columns")
        rows = len(weights[out]) if out else channels * side**2
        if rows % side**2 or rows // side**2 < channels:
            raise InputError(f"{out} in {source.path} has {rows} rows, which are no {channels} channels of its patches")
        said = source.config.get(heads_key)
        if wanted.num_heads is not None and said is not None and wanted.num_heads != said:
            raise InputError(
                f"--heads is {wanted.num_heads}, but the config of {source.path} says {shown(said)}: leave it out"
            )
        heads = wanted.num_heads or said or KNOWN_HEADS.get(width)
        if wanted.num_heads is not None and width % wanted.num_heads:
            raise InputError(f"--heads must divide the width of {source.path}, {width}, but is {wanted.num_heads}")
        if type(heads) is not int or heads < 1 or width % heads:
            raise InputError(f"{source.path} is {width} wide and does not say how many heads it has: give --heads")
        size = source.config.get(size_key)
        if positions is not None and positions in weights:
            if weights[positions].dim() < 2:
                raise InputError(
                    f"{positions} in {source.path} has shape {list(weights[positions].shape)}: it is damaged"
                )
            num = weights[positions].shape[-2]
            size = side * math.isqrt(num)
            if (size // side) ** 2 != num:
                raise InputError(f"{positions} in {source.path} has {num} places, which are no square")
        if type(size) is not int:
            size = wanted.input_size
        if size is None or size < 1:
            raise InputError(f"{source.path} does not say the size of its latents: give --size, 32 for 256 pixels")
        ratio = len(weights[mlp.replace("{i}", "0")]) / width
        input_size = wanted.input_size or size
        if input_size % side:
            raise InputError(f"latents {input_size} a side cannot be cut into patches of {side}: give another --size")
        found = cls(channels, rows // side**2, side, width, depth, ratio, heads, input_size, size)
        TrunkConfig(**found.trunk(), text_dim=None)  # its limits, before anything of these sizes is made
        if max(found.side, size // side) ** 2 * width > MAX_POSITIONS:
            raise InputError(
                f"latents {shown(max(input_size, size))} a side have too many places for {source.path}, {width} wide: "
                "give another --size"
            )
        return found

    @property
    def side(self) -> int:
        return self.input_size // self.patch_size

    def trunk(self) -> dict[str, Any]:
        """The arguments of a config."""
        names = ("input_size", "in_channels", "patch_size", "hidden_size", "depth", "num_heads", "mlp_ratio")
        return {name: getattr(self, name) for name in names}

    @property
    def keep_channels(self) -> Callable[[Tensor], Tensor]:
        """The rows of the last layer that make the prediction; those of the learned sigma come after."""

        def first_channels(rows: Tensor) -> Tensor:
            if self.out_channels == self.in_channels:
                return rows
            grid = rows.view(self.patch_size**2, self.out_channels, *rows.shape[1:])
            return grid[:, : self.in_channels].reshape(-1, *rows.shape[1:])

        return first_channels


def spacing_of(positions: Tensor) -> float | None:
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
    same = step > 0 and torch.allclose(positions.float(), sincos_positions(width, side, step), rtol=0, atol=0.01)
    return step if same else None


def check_free(out: Path, ours: Collection[str], mark: str) -> None:
    """A folder that an earlier conversion made may be replaced, and only that; `mark` is what tells it."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file: choose a folder")
    found = {path.name for path in out.iterdir()} if out.exists() else set()
    if found and (mark not in found or found - set(ours)):
        raise InputError(f"--out {out} holds something else than an earlier conversion: choose another folder")


def objective_of(wanted: Wanted, own: Objective) -> Objective:
    return own if wanted.objective is None else get_objective(wanted.objective)


def build_network(network: DiT | Router, ledger: Ledger) -> None:
    """Give a network that has no memory yet its weights."""
    network.load_state_dict(ledger.close(network.state_dict()), assign=True)
    network.eval()


@dataclass(frozen=True)
class Start:
    """Weights that have no counterpart in a source, drawn as a new expert's are."""

    seed: int
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "generator", torch.Generator().manual_seed(self.seed))

    def normal(self, *shape: int, std: float = 0.02) -> Tensor:
        return std * torch.randn(*shape, generator=self.generator)

    def xavier(self, rows: int, columns: int) -> Tensor:
        bound = math.sqrt(6 / (rows + columns))
        return bound * (2 * torch.rand(rows, columns, generator=self.generator) - 1)

    def silent_text(self, ledger: Ledger, text_dim: int, width: int, depth: int) -> None:
        """A text projection N(0, 0.02) and cross-attention whose output is zero: the text is not heard at first."""
        ledger.start("text_embed.weight", self.normal(width, text_dim), "N(0, 0.02), as in Eq. 19")
        ledger.start("text_embed.bias", torch.zeros(width), "zero")
        for i in range(depth):
            for name, rows in (("q", width), ("kv", 2 * width)):
                ledger.start(f"blocks.{i}.cross.{name}.weight", self.xavier(rows, width), "uniform (Xavier)")
                ledger.start(f"blocks.{i}.cross.{name}.bias", torch.zeros(rows), "zero")
            ledger.start(f"blocks.{i}.cross.out.weight", torch.zeros(width, width), "zero: the text is silent at first")
            ledger.start(f"blocks.{i}.cross.out.bias", torch.zeros(width), "zero: the text is silent at first")
