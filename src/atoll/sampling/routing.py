"""Routing policies: from the router's p(k | x_t, t [, text]) to weights over experts, whose rows sum to 1.

Each policy is a pure function of probabilities p[B, K]; experts of weight 0 are not run. `Routing` is a policy by name,
with its number, and says how often the router is run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import InputError, unknown
from atoll.tensors import send

POLICIES = ("top1", "topk", "full", "threshold", "sample", "by_time", "oracle")
NEED_NO_ROUTER = ("by_time", "oracle")
NUMBERS: dict[str, float] = {"topk": 2, "threshold": 0.1, "by_time": 0.5}  # defaults of policies that need a number
WHOLE = ("topk", "sample")  # policies whose number is a count


@dataclass(frozen=True)
class Routing:
    """A policy, and how often the router is run; in between, the policy uses the router's last answer."""

    name: str = "top1"
    number: float | None = None  # the K of topk:K, the P of threshold:P, the T of by_time:T, the N of sample:N
    every: int = 1  # run the router at every so many evaluations of the velocity
    confident: float | None = None  # stop running it for a sample once its largest probability has reached this

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise unknown("routing", self.name, POLICIES)
        if self.number is None:
            object.__setattr__(self, "number", NUMBERS.get(self.name))
        elif self.name not in (*NUMBERS, "sample"):
            raise InputError(f"routing {self.name!r} takes no number: leave it out")
        if self.name in WHOLE and self.number is not None and (type(self.number) is not int or self.number < 1):
            raise InputError(f"the K of {self.name}:K must be a whole number of at least 1, but is {self.number}")
        if self.name not in WHOLE and self.number is not None and not 0 <= self.number <= 1:
            raise InputError(f"the number in routing {self} must lie in [0, 1]")
        if self.every < 1:
            raise InputError(f"route_every must be a whole number of at least 1, but is {self.every}")
        if self.confident is not None and not 0 < self.confident <= 1:
            raise InputError(f"confident must lie above 0 and be at most 1, but is {self.confident}")

    def __str__(self) -> str:
        """Returns the form that `get_routing` parses."""
        return self.name if self.number is None else f"{self.name}:{self.number}"

    def weights(
        self,
        p: Tensor,
        t: Tensor,
        *,
        labels: Tensor | None = None,
        generators: Sequence[torch.Generator] | None = None,
        is_flow: Tensor | None = None,
    ) -> Tensor:
        """Returns w[B, K]. `oracle` needs labels[B], `sample` a generator per image, `by_time` is_flow[K]."""
        number = self.number or 0
        match self.name:
            case "topk":
                return topk(p, int(number))
            case "full":
                return _normalised(p)  # all experts, as Eq. 1 has it
            case "threshold":
                return threshold(p, number)
            case "sample":
                assert generators is not None
                return sample(p, generators, int(number) or 1)
            case "by_time":
                assert is_flow is not None
                return by_time(p, t, is_flow, number)
            case "oracle":
                assert labels is not None
                return torch.zeros_like(p).scatter_(1, send(labels, p.device)[:, None], 1)
        return top1(p)


def get_routing(spec: str, every: int = 1, confident: float | None = None) -> Routing:
    """Parses a routing such as top1, topk:2, full, threshold:0.1, sample, by_time:0.5 or oracle."""
    name, colon, value = str(spec).partition(":")
    if not colon:
        return Routing(name, None, every, confident)
    try:
        number = int(value) if name in WHOLE else float(value)
    except ValueError as error:
        raise InputError(f"routing {spec!r} must have a number after the colon, as in topk:2") from error
    return Routing(name, number, every, confident)


def probabilities(logits: Tensor, temperature: float, present: Tensor) -> Tensor:
    """Returns softmax(logits / temperature) over the experts that are present[K] or [B, K].

    Absent experts are masked before the softmax: if the router were sure of one of them, nothing would remain after it.
    """
    logits = logits.masked_fill(~present, -math.inf)
    return torch.softmax(logits / temperature, 1, dtype=torch.promote_types(logits.dtype, torch.float32))


def mask_missing(p: Tensor, present: Tensor) -> Tensor:
    """Returns p without the experts that are not present[K] or [B, K], renormalised; equal shares if none is left."""
    left = p * present
    total = left.sum(1, keepdim=True)
    return torch.where(total > 0, left / total, present.to(p) / present.sum(-1, keepdim=True).to(p))


def top1(p: Tensor) -> Tensor:
    """Returns weights with all weight on the most probable expert, in ties the first."""
    return torch.zeros_like(p).scatter_(1, p.argmax(1, keepdim=True), 1)


def topk(p: Tensor, k: int) -> Tensor:
    """Returns weights of the k most probable experts, in proportion to p."""
    if k > p.shape[1]:
        raise InputError(f"routing topk:{k} asks for more than the {p.shape[1]} experts of the model")
    values, experts = p.topk(k, dim=1)
    return _normalised(torch.zeros_like(p).scatter_(1, experts, values))


def threshold(p: Tensor, tau: float) -> Tensor:
    """Returns weights of the experts with p of at least tau, in proportion; always of the most probable one."""
    return _normalised(torch.where((p >= tau) | (top1(p) > 0), p, 0))


def sample(p: Tensor, generators: Sequence[torch.Generator], num: int = 1) -> Tensor:
    """Returns weights of `num` experts per sample, drawn from p without replacement, in proportion (DDM's sample-2).

    Each image draws from its own generator, so the result does not depend on the batch.
    """
    if num > p.shape[1]:
        raise InputError(f"routing sample:{num} asks for more than the {p.shape[1]} experts of the model")
    left, chosen = p.double(), torch.zeros_like(p)
    for _ in range(num):
        draws = torch.stack(
            [torch.rand((), generator=g, dtype=torch.float64, device=g.device).cpu() for g in generators]
        )
        ends = left.cumsum(1)
        # An expert of p = 0 has an empty interval and is never drawn; rounding may give an index past the last.
        drawn = torch.searchsorted(ends, send(draws[:, None], p.device) * ends[:, -1:], right=True)
        drawn = drawn.clamp(max=p.shape[1] - 1)
        chosen.scatter_(1, drawn, 1)
        left = left.scatter(1, drawn, 0)
    return chosen if num == 1 else _normalised(torch.where(chosen > 0, p.clamp_min(torch.finfo(p.dtype).tiny), 0))


def by_time(p: Tensor, t: Tensor, is_flow: Tensor, switch: float) -> Tensor:
    """Returns weights by the paper's deterministic switch (section 4.3): flow matching at t > switch, others below.

    The paper has one expert of each kind on one cluster. Here there may be several: the most probable of the active
    kind gets all weight, or, if there is none of that kind, the most probable of all. The paper's t is the expert's
    own, but a cosine schedule has alpha = sigma at 0.5 as the canonical path does, so the two agree there.
    """
    late = (t > switch).reshape(-1, 1).to(p.device)  # [B or 1, 1]
    turn = p * (is_flow == late)
    return top1(torch.where(turn.sum(1, keepdim=True) > 0, turn, p))


def _normalised(w: Tensor) -> Tensor:
    return w / w.sum(1, keepdim=True)
