"""A conversion as a table: what of the source became what of the network, with nothing left over on either side."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from atoll.errors import InputError, printable


class Rule(NamedTuple):
    """A weight of the network from weights of the source, joined by rows; {i} stands for the number of a block."""

    target: str
    sources: tuple[str, ...]
    change: Callable[[Tensor], Tensor] | None = None
    how: str = "copied"

    def at(self, depth: int) -> Iterator[tuple[str, list[str]]]:
        """Yields the target and its sources, for every block if the target is a part of one."""
        for i in range(depth if "{i}" in self.target else 1):
            yield self.target.replace("{i}", str(i)), [key.replace("{i}", str(i)) for key in self.sources]


class Layer(NamedTuple):
    """A linear layer's weights."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def layers(table: Mapping[str, str | tuple[str, ...]]) -> tuple[Rule, ...]:
    """Returns the rules for linear layers, from a table of the network's names and the source's."""
    pairs = [(target, (names,) if isinstance(names, str) else names) for target, names in table.items()]
    return tuple(
        Rule(f"{target}.{part}", tuple(f"{name}.{part}" for name in names))
        for target, names in pairs
        for part in ("weight", "bias")
    )


def patches(source: str) -> tuple[Rule, Rule]:
    """Returns the rules for a convolution over patches as a linear layer: its kernels are (C, p, p), as our patches."""
    weight, bias = layers({"patch_embed": source})
    return weight._replace(change=lambda kernel: kernel.flatten(1) if kernel.dim() == 4 else kernel, how="flat"), bias


@dataclass
class Ledger:
    """The record of one conversion. What is taken is marked; `close` finds what was forgotten."""

    source: Mapping[str, Tensor]
    name: str  # of the source, for messages
    filled: dict[str, Tensor] = field(default_factory=dict)
    used: dict[str, dict[str, Any]] = field(default_factory=dict)  # target: sources and how
    dropped: dict[str, str] = field(default_factory=dict)  # source: why
    started: dict[str, str] = field(default_factory=dict)  # target: how

    def take(self, key: str, *shape: int) -> Tensor:
        """Returns a weight of the source in single precision; refuses one of another shape, if one is given."""
        if key not in self.source:
            raise InputError(f"{self.name} lacks {key}: it is of another architecture, or not all of it is there")
        weight = self.source[key]
        if shape and weight.shape != shape:
            raise InputError(f"{key} in {self.name} has shape {list(weight.shape)}, not {list(shape)}: it is damaged")
        return weight.float()

    def take_layer(self, name: str, rows: int, columns: int) -> Layer:
        return Layer(self.take(f"{name}.weight", rows, columns), self.take(f"{name}.bias", rows))

    def fill(self, target: str, value: Tensor, *sources: str, how: str = "copied") -> None:
        assert target not in self.filled, target
        self.filled[target] = value
        self.used[target] = {"from": list(sources), "how": how}

    def start(self, target: str, value: Tensor, how: str) -> None:
        """Fills in a weight that has no counterpart in the source."""
        assert target not in self.filled, target
        self.filled[target] = value
        self.started[target] = how

    def drop(self, key: str, why: str) -> None:
        self.take(key)
        self.dropped[key] = why

    def change(self, target: str, value: Tensor, how: str, *sources: str) -> None:
        """Replaces what a rule has filled in, with these sources in addition."""
        self.filled[target] = value
        self.used[target] = {"from": [*self.used[target]["from"], *sources], "how": how}

    def apply(self, rules: Sequence[Rule]) -> int:
        """Fills in what the rules are for, in all blocks; returns how many blocks the source has."""
        block = next(rule.sources[0] for rule in rules if "{i}" in rule.target)
        depth = max(1, next(i for i in count() if block.replace("{i}", str(i)) not in self.source))
        for rule in rules:
            for target, keys in rule.at(depth):
                parts = [self.take(key) for key in keys]
                if len({part.shape[1:] for part in parts}) > 1 or not all(part.dim() for part in parts):
                    raise InputError(f"{' and '.join(keys)} in {self.name} do not fit together")
                value = parts[0] if len(parts) == 1 else torch.cat(parts)
                self.fill(target, value if rule.change is None else rule.change(value), *keys, how=rule.how)
        return depth

    def close(self, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns all weights of the network, if every key on both sides is accounted for and every shape is right."""
        left = sorted(set(self.source) - self.consumed - set(self.dropped))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise InputError(
                f"{self.name} has {printable(left[0], 100)}{more}, which this architecture does not know: it is another"
            )
        assert self.filled.keys() == expected.keys(), sorted(self.filled.keys() ^ expected.keys())
        for target, value in self.filled.items():
            if value.shape != expected[target].shape:
                where = ", ".join(self.used.get(target, {}).get("from", [])) or target
                shape = list(expected[target].shape)
                raise InputError(f"{where} of {self.name} gives shape {list(value.shape)}, not {shape}: it is damaged")
        return {target: self.filled[target].contiguous() for target in expected}

    @property
    def consumed(self) -> set[str]:
        return {key for entry in self.used.values() for key in entry["from"]}
