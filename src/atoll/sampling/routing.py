"""Which experts a sample is made by: from p(k | x_t, t [, text]) to weights whose rows sum to 1.

Each policy is a pure function of probabilities p[B, K]; experts of weight 0 are not run. `Routing` names one of them
with its settings, and says how often the router is asked.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.errors import InputError, plural, unknown

POLICIES = ("top1", "topk", "full", "threshold", "sample", "by_time", "oracle")
NEED_NO_ROUTER = ("by_time", "oracle")
OPTIONS = {"topk": "k", "threshold": "tau", "by_time": "switch"}
SPOKEN = {
    "k": "the K of topk:K",
    "tau": "the P of threshold:P",
    "switch": "the T of by_time:T",
    "every": "route_every",
}  # what those who sample call them


@dataclass(frozen=True)
class Routing:
    """A policy, and how often the router is asked; between times its last answer stands, and the policy uses that."""

    name: str = "top1"
    k: int = 2  # of topk
    tau: float = 0.1  # of threshold
    switch: float = 0.5  # of by_time
    every: int = 1  # ask the router at every so many evaluations of the velocity
    confident: float | None = None  # ask no more about a sample once its largest probability has reached this

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise unknown("routing", self.name, POLICIES)
        for name in ("k", "every"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise InputError(f"{SPOKEN[name]} must be a whole number of at least 1, but is {getattr(self, name)!r}")
        for name in ("tau", "switch"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{SPOKEN[name]} must lie in [0, 1], but is {getattr(self, name)!r}")
        if self.confident is not None and not 0 < self.confident <= 1:
            raise InputError(f"confident must lie above 0 and be at most 1, but is {self.confident!r}")

    def weights(
        self,
        p: Tensor,
        t: Tensor,
        *,
        labels: Tensor | None = None,
        generators: Sequence[torch.Generator] | None = None,
        is_flow: Tensor | None = None,
    ) -> Tensor:
        """w[B, K]. `oracle` needs labels[B], `sample` a generator per image, `by_time` is_flow[K]."""
        if self.name == "top1":
            return top1(p)
        if self.name == "topk":
            return topk(p, self.k)
        if self.name == "full":
            return full(p)
        if self.name == "threshold":
            return threshold(p, self.tau)
        if self.name == "sample":
            return sample(p, _given(generators, "sample", "a generator for each image"))
        if self.name == "by_time":
            return by_time(p, t, _given(is_flow, "by_time", "to know which experts are of flow matching"), self.switch)
        return oracle(p, _given(labels, "oracle", "the label of each sample"))


def get_routing(spec: str, **settings: Any) -> Routing:
    """top1, topk:2, full, threshold:0.1, sample, by_time:0.5 or oracle, with `every` and `confident` as keywords."""
    name, colon, value = spec.partition(":")
    if colon and name in POLICIES:
        if name not in OPTIONS:
            raise InputError(f"routing {name!r} takes no number, but {spec!r} has one: leave it out")
        try:
            settings[OPTIONS[name]] = int(value) if name == "topk" else float(value)
        except ValueError as error:
            raise InputError(f"routing {spec!r} must have a number after the colon, as in topk:2") from error
    return Routing(name, **settings)


def probabilities(logits: Tensor, temperature: float = 1.0, present: Tensor | None = None) -> Tensor:
    """softmax(logits / temperature) over the experts that are present[K] or [B, K].

    Absent experts leave before the softmax: were the router sure of one of them, nothing would be left after it.
    """
    if not 0 < temperature < math.inf:
        raise InputError(f"the router's temperature must be above 0 and finite, but is {temperature!r}")
    if bool(torch.isnan(logits).any()):
        raise InputError("the router's logits hold NaN: its weights are damaged, or x is not finite")
    if present is not None:
        logits = logits.masked_fill(~present.to(logits.device), -math.inf)
    return torch.softmax(logits / temperature, 1, dtype=torch.promote_types(logits.dtype, torch.float32))


def mask_missing(p: Tensor, present: Tensor) -> Tensor:
    """p without the experts that are not present[K] or [B, K], renormalised; equal shares where that leaves nothing."""
    if not bool(present.any(-1).all()):
        raise InputError("no expert is left: give at least one")
    left = _checked(p) * present.to(p.device)
    total = left.sum(1, keepdim=True)
    return torch.where(total > 0, left / total, present.to(p) / present.sum(-1, keepdim=True).to(p))


def top1(p: Tensor) -> Tensor:
    """All weight on the most probable expert; on the first of equals."""
    p = _checked(p)
    return torch.zeros_like(p).scatter_(1, p.argmax(1, keepdim=True), 1)


def topk(p: Tensor, k: int) -> Tensor:
    """The k most probable, in proportion."""
    p = _checked(p)
    if type(k) is not int or not 1 <= k <= p.shape[1]:
        raise InputError(f"{SPOKEN['k']} must be a whole number from 1 to the {p.shape[1]} experts, but is {k!r}")
    values, experts = p.topk(k, dim=1)
    return _normalised(torch.zeros_like(p).scatter_(1, experts, values))


def full(p: Tensor) -> Tensor:
    """All experts, as Eq. 1 has it."""
    return _normalised(_checked(p))


def threshold(p: Tensor, tau: float) -> Tensor:
    """Those of at least tau, in proportion; the most probable always stays."""
    p = _checked(p)
    if not 0 <= tau <= 1:
        raise InputError(f"{SPOKEN['tau']} must lie in [0, 1], but is {tau!r}")
    return _normalised(torch.where((p >= tau) | (top1(p) > 0), p, 0))


def sample(p: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """One expert per sample, drawn from p; each image draws from its own generator, so the batch does not matter."""
    p = _checked(p)
    if len(generators) != len(p):
        raise InputError(
            f"there are {plural(len(generators), 'generator')} for {plural(len(p), 'sample')}: give one for each"
        )
    draws = torch.stack([torch.rand((), generator=g, dtype=torch.float64, device=g.device).cpu() for g in generators])
    ends = p.double().cumsum(1)
    # An expert of p = 0 has an empty interval and is never drawn; rounding may lead one past the last.
    chosen = torch.searchsorted(ends, draws[:, None].to(p.device) * ends[:, -1:], right=True)
    return torch.zeros_like(p).scatter_(1, chosen.clamp(max=p.shape[1] - 1), 1)


def by_time(p: Tensor, t: Tensor, is_flow: Tensor, switch: float = 0.5) -> Tensor:
    """The paper's deterministic switch (section 4.3): flow-matching experts at t > switch, the others below.

    The paper has one expert of each kind on one cluster. Here there may be several, and the most probable of those
    whose turn it is gets all weight; if it is the turn of none, the most probable of all. The paper's t is the
    expert's own: a cosine schedule has alpha = sigma at 0.5 as the canonical path does, so the two agree there.
    """
    p = _checked(p)
    late = (t > switch).reshape(-1, 1).to(p.device)  # [B or 1, 1]
    turn = p * (is_flow.to(p.device) == late)
    return top1(torch.where(turn.sum(1, keepdim=True) > 0, turn, p))


def oracle(p: Tensor, labels: Tensor) -> Tensor:
    """The expert of each sample's own cluster."""
    p = _checked(p)
    if labels.shape != p.shape[:1] or labels.is_floating_point():
        raise InputError(f"labels must be {len(p)} whole numbers, one per sample, but have shape {list(labels.shape)}")
    if not bool(((labels >= 0) & (labels < p.shape[1])).all()):
        raise InputError(f"labels must lie from 0 to {p.shape[1] - 1}, one for each expert")
    return torch.zeros_like(p).scatter_(1, labels.to(p.device, torch.long)[:, None], 1)


def _given(value: Any, policy: str, what: str) -> Any:
    if value is None:
        raise InputError(f"routing {policy!r} needs {what}: give it, or choose another routing")
    return value


def _checked(p: Tensor) -> Tensor:
    if p.dim() != 2 or p.shape[1] < 1 or not p.is_floating_point():
        raise InputError(f"probabilities must be numbers of shape [batch, experts], but have {list(p.shape)}")
    if not bool(((p >= 0) & (p < math.inf)).all()) or not bool((p.sum(1) > 0).all()):
        raise InputError("probabilities must be finite, not negative and not all zero for a sample: check the router")
    return p


def _normalised(w: Tensor) -> Tensor:
    return w / w.sum(1, keepdim=True)
