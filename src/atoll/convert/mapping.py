"""A conversion as a table: what of the source became what of the network, with nothing left over on either side."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.errors import InputError, printable


class Rule(NamedTuple):
    """A weight of the network from weights of the source, joined by rows; {i} stands for the number of a block."""

    target: str
    sources: tuple[str, ...]
    change: Callable[[Tensor], Tensor] | None = None


def linear(target: str, *sources: str, change: Callable[[Tensor], Tensor] | None = None) -> tuple[Rule, Rule]:
    """The rules for weight and bias of a linear layer."""
    weight, bias = (
        Rule(f"{target}.{part}", tuple(f"{source}.{part}" for source in sources), change) for part in ("weight", "bias")
    )
    return weight, bias


def flat(weight: Tensor) -> Tensor:
    """A convolution over patches as a linear layer: its kernels are (C, p, p), as our patches are."""
    return weight.flatten(1) if weight.dim() == 4 else weight


@dataclass
class Ledger:
    """Books of one conversion. What is taken is marked; `close` finds what was forgotten."""

    source: Mapping[str, Tensor]
    name: str  # of the source, for messages
    filled: dict[str, Tensor] = field(default_factory=dict)
    used: dict[str, dict[str, Any]] = field(default_factory=dict)  # target: sources and how
    dropped: dict[str, str] = field(default_factory=dict)  # source: why
    started: dict[str, str] = field(default_factory=dict)  # target: how

    def take(self, key: str) -> Tensor:
        """A weight of the source in single precision."""
        if key not in self.source:
            raise InputError(f"{self.name} lacks {key}: it is of another architecture, or not all of it is there")
        return self.source[key].float()

    def fill(self, target: str, value: Tensor, *sources: str, how: str = "copied") -> None:
        assert target not in self.filled, target
        self.filled[target] = value
        self.used[target] = {"from": list(sources), "how": how}

    def start(self, target: str, value: Tensor, how: str) -> None:
        """A weight that has no counterpart in the source."""
        assert target not in self.filled, target
        self.filled[target] = value
        self.started[target] = how

    def drop(self, key: str, why: str) -> None:
        self.take(key)
        self.dropped[key] = why

    def apply(self, rules: Iterable[Rule], depth: int) -> None:
        for rule in rules:
            for i in range(depth if "{i}" in rule.target else 1):
                sources = [key.replace("{i}", str(i)) for key in rule.sources]
                parts = [self.take(key) for key in sources]
                if len({part.shape[1:] for part in parts}) > 1 or not all(part.dim() for part in parts):
                    raise InputError(f"{' and '.join(sources)} in {self.name} do not fit together")
                value = parts[0] if len(parts) == 1 else torch.cat(parts)
                changed = value if rule.change is None else rule.change(value)
                how = "copied" if rule.change is None or changed is value else rule.change.__name__.replace("_", " ")
                self.fill(rule.target.replace("{i}", str(i)), changed, *sources, how=how)

    def close(self, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All weights of the network, if every key on both sides is accounted for and every shape is right."""
        used = {key for entry in self.used.values() for key in entry["from"]}
        left = sorted(set(self.source) - used - set(self.dropped))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise InputError(
                f"{self.name} has {printable(left[0], 100)}{more}, which this architecture does not know: it is another"
            )
        assert self.filled.keys() == expected.keys(), sorted(self.filled.keys() ^ expected.keys())
        for target, value in self.filled.items():
            if value.shape != expected[target].shape:
                where = ", ".join(self.used.get(target, {}).get("from", [])) or target
                wanted = list(expected[target].shape)
                raise InputError(f"{where} of {self.name} gives shape {list(value.shape)}, not {wanted}: it is damaged")
        return {target: self.filled[target].contiguous() for target in expected}

    def table(self) -> dict[str, Any]:
        """For the report."""
        return {"consumed": self.used, "dropped": self.dropped, "initialised": self.started}
