"""One conversion: applies a table of keys to a checkpoint, with sizes inferred from its weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from atoll.convert.tables import Format, Table, expand
from atoll.diffusion.objective import Objective, get_objective
from atoll.errors import InputError, printable
from atoll.networks.dit import DiT, TrunkConfig, sincos_positions
from atoll.networks.published import Source
from atoll.networks.router import Router

KNOWN_HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16}  # of the published sizes S, B, L and XL
Network = TypeVar("Network", DiT, Router)


@dataclass(frozen=True)
class Options:
    """The options of a conversion."""

    label: int | None = None  # the class of a class-conditional source; None: no class
    as_is: bool = False  # DiT and SiT: per-block modulation and no text, exactly the source
    text_dim: int | None = None  # None: the source's, or 768 if it has no text
    input_size: int | None = None  # of the latents; None: the source's
    num_heads: int | None = None  # None: from the source's config, or by its width
    kind: str | None = None  # dit or sit, which have the same keys
    fit: str = "curve"
    objective: str | None = None  # None: the source's own
    license: str | None = None  # None: the published one's
    seed: int = 0  # for weights without a counterpart in the source

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise InputError(f"--seed must be from 0 to 2**63 - 1, but is {self.seed}")

    @property
    def chosen(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults."""
        return {name: value for name, value in asdict(self).items() if value != getattr(Options, name)}

    def objective_or(self, default: Objective) -> Objective:
        return default if self.objective is None else get_objective(self.objective)


class Layer(NamedTuple):
    """A linear layer's weights."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass
class Ledger:
    """The new network's weights, and a record of what became of the source's. `build` raises if any are left over."""

    source: Source
    weights: dict[str, Tensor] = field(default_factory=dict)  # of the network
    consumed: set[str] = field(default_factory=set)  # keys of the source
    dropped: dict[str, str] = field(default_factory=dict)  # key of the source: reason
    initialised: dict[str, str] = field(default_factory=dict)  # key of the network: method
    source_size: int = 0  # side of the latents that the source was trained on
    out_channels: int = 0  # of the source, including those of a learned sigma

    def take(self, key: str) -> Tensor:
        """Returns a weight of the source in float32, and marks it as consumed."""
        if key not in self.source.weights:
            raise InputError(f"{self.source.path} lacks {key}: it is incomplete, or of another architecture")
        self.consumed.add(key)
        return self.source.weights[key].float()

    def apply(self, table: Table, depth: int = 1) -> None:
        """Copies the weights named in the table, for all blocks."""
        for target, keys in expand(table, depth):
            parts = [self.take(key) for key in keys]
            self.weights[target] = parts[0] if len(parts) == 1 else torch.cat(parts)

    def pop_layer(self, name: str) -> Layer:
        """Removes a layer from the weights and returns it."""
        layer = Layer(self.weights.pop(f"{name}.weight"), self.weights.pop(f"{name}.bias"))
        if layer.weight.dim() != 2 or layer.bias.shape != layer.weight.shape[:1]:
            raise ValueError(f"{name} has a weight {list(layer.weight.shape)} and a bias {list(layer.bias.shape)}")
        return layer

    def put_layer(self, name: str, layer: Layer) -> None:
        self.weights |= {f"{name}.weight": layer.weight, f"{name}.bias": layer.bias}

    def build(self, kind: type[Network], config: Any, seed: int = 0) -> Network:
        """Returns the network, if every key on both sides is accounted for and every shape is right.

        Text weights that the source lacks are initialised as in a new network (Eq. 19), without effect if all are new.
        """
        left = sorted(self.source.weights.keys() - self.consumed - self.dropped.keys())
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            keys = f"{printable(left[0], 100)}{more}"
            raise InputError(f"{self.source.path} has {keys}, which this architecture does not know")
        with torch.device("meta"):
            network = kind(config)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in network.state_dict().items():
            if name not in self.weights and ("text_embed" in name or ".cross." in name):
                how, self.weights[name] = _new_weight(name, weight.shape, generator)
                self.initialised[name] = how
        network.load_state_dict({name: weight.contiguous() for name, weight in self.weights.items()}, assign=True)
        return network.eval()


def _new_weight(name: str, shape: torch.Size, generator: torch.Generator) -> tuple[str, Tensor]:
    if name.endswith("bias") or name.endswith("cross.out.weight"):
        return "zero", torch.zeros(shape)
    if name.startswith("text_embed"):
        return "N(0, 0.02)", 0.02 * torch.randn(shape, generator=generator)
    bound = math.sqrt(6 / sum(shape))
    return "uniform (Xavier)", bound * (2 * torch.rand(shape, generator=generator) - 1)


@dataclass(frozen=True, eq=False)
class Converted:
    """A network converted from a checkpoint, and its full provenance."""

    network: DiT | Router
    ledger: Ledger
    format: str
    license: str
    objective: Objective | None = None  # None: a router
    notes: Sequence[str] = ()
    residual: Mapping[str, Any] | None = None  # of the modulation, where it was fitted
    label: int | None = None
    options: Options = Options()

    @property
    def init(self) -> dict[str, Any]:
        """Returns the provenance that is recorded in every expert initialised from it."""
        source = self.ledger.source
        origin = {"source": source.path.name, "sha256": source.sha256, "format": self.format}
        return origin if self.label is None else {**origin, "label": self.label}

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.network.parameters())

    @property
    def report(self) -> dict[str, Any]:
        """Returns the content of conversion.json."""
        objective, ledger = self.objective, self.ledger
        return {
            **self.init,
            "license": self.license,
            "asked_for": self.options.chosen,
            "weights_under": ledger.source.wrapper,
            "objective": objective and {"prediction": str(objective.prediction), "schedule": objective.schedule},
            "parameters": self.num_parameters,
            "notes": list(self.notes),
            "modulation": self.residual,
            "consumed": sorted(ledger.consumed - ledger.dropped.keys()),
            "dropped": ledger.dropped,
            "initialised": ledger.initialised,
        }


# --- sizes and positions ------------------------------------------------------------------------------------------


def start(source: Source, options: Options, format: Format) -> tuple[Ledger, TrunkConfig]:
    """Applies the format's table; infers sizes from the weights, and the rest from the config."""
    ledger, config = Ledger(source), source.config
    depth = next(i for i in count(1) if format.marks[1].replace(".0.", f".{i}.") not in source.weights)
    ledger.apply(format.table, depth)
    kernel = ledger.weights["patch_embed.weight"]
    if kernel.dim() != 4 or kernel.shape[2] != kernel.shape[3] or not kernel.numel():
        raise ValueError(f"its patches have shape {list(kernel.shape)}")
    width, channels, patch, _ = kernel.shape
    ledger.weights["patch_embed.weight"] = kernel.flatten(1)  # [d, C p p]: a convolution as a linear layer
    heads = _first(
        options.num_heads, config.get("num_attention_heads"), config.get("num_heads"), KNOWN_HEADS.get(width)
    )
    if heads is None:
        raise InputError(f"{source.path} is {width} wide and does not say how many heads it has: give --heads")
    size = _first(config.get("sample_size"), config.get("image_size"), options.input_size)
    if "pos_embed" in source.weights:
        size = patch * math.isqrt(source.weights["pos_embed"].shape[-2])
    if type(size) is not int or size < 1:
        raise InputError(f"{source.path} does not say the size of its latents: give --size, 32 for 256 pixels")
    ratio = ledger.weights["blocks.0.mlp.0.weight"].shape[0] / width
    trunk = TrunkConfig(_first(options.input_size, size), channels, patch, width, depth, heads, ratio, text_dim=None)
    if "out.weight" in ledger.weights:  # keep the rows that make the prediction; those of a learned sigma come after
        for target in ("out.weight", "out.bias"):
            grid = ledger.weights[target].unflatten(0, (patch**2, -1))
            ledger.weights[target], ledger.out_channels = grid[:, :channels].flatten(0, 1), grid.shape[1]
    ledger.source_size = size
    return ledger, trunk


def _first(*values: Any) -> Any:
    """Returns the first value that is not None."""
    return next((value for value in values if value is not None), None)


def take_positions(ledger: Ledger, trunk: TrunkConfig, step: float | None = None) -> None:
    """Sets the position embeddings: the file's, or if it has none of this size, sines and cosines `step` apart."""
    positions = ledger.source.weights.get("pos_embed")
    if positions is not None and trunk.input_size == ledger.source_size:
        ledger.weights["positions"] = ledger.take("pos_embed").flatten(0, -2)
        return
    if positions is not None:
        ledger.dropped["pos_embed"] = f"it is of latents {ledger.source_size} a side, not {trunk.input_size}"
    apart = "" if step is None else f", {step:g} apart"
    values = sincos_positions(trunk.hidden_size, trunk.input_size // trunk.patch_size, _first(step, 1.0))
    ledger.weights["positions"], ledger.initialised["positions"] = values, f"sines and cosines{apart}"


def spacing_of(positions: Tensor, within: float = 0.01) -> float | None:
    """Returns the grid spacing of sinusoidal position embeddings[N, d]; None if they are not sinusoidal.

    The angle between neighbours is the spacing times a frequency. A slow wave gives a rough but unambiguous estimate;
    the fastest wave, and then the positions farthest apart, give precise ones up to whole turns.
    """
    num, width = positions.shape
    side, quarter = math.isqrt(num), width // 4
    if side**2 != num or width % 4 or not width:
        return None
    waves = positions[:side, : 2 * quarter].double()  # the column embeddings along the first row
    turned = torch.complex(waves[:, quarter:], waves[:, :quarter])
    step = 0.0 if side > 1 else 1.0
    slow = min(quarter // 4, quarter - 1)  # a tenth as fast as the fastest
    for far, wave in ((1, slow), (1, 0), (side - 1, 0)) if side > 1 else ():
        pace = far / 10_000 ** (wave / quarter)
        angle = float(torch.angle((turned[far:, wave] * turned[:-far, wave].conj()).mean()))
        step = (angle + 2 * math.pi * round((step * pace - angle) / (2 * math.pi))) / pace
    rounded = torch.finfo(positions.dtype).eps  # half precision hides that it is a simple fraction
    whole = float(Fraction(step).limit_denominator(16))
    step = whole if abs(whole - step) < 4 * rounded / side else step
    same = step > 0 and torch.allclose(positions.float(), sincos_positions(width, side, step), rtol=0, atol=within)
    return step if same else None
