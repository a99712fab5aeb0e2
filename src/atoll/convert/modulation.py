"""Fits AdaLN-Single (one map of the time for all blocks, and a table each) to DiT's modulation (a map for each block).

DiT:   M_b(t) = W_b SiLU(c(t)) + b_b in block b, and W_o SiLU(c(t)) + b_o at the output, where c is time plus class.
Ours:  W SiLU(tau(t)) + b + E_b, and tau(t) + O at the output, with the same tau(t) for its shift and its scale.

The time-varying part must be the same for all blocks, but each channel of a block can be rescaled: (1 + scale, shift)
by absorbing a factor into the columns of the layer after the norm, a gate by absorbing it into the rows of the layer
before it. So for each channel, the curves of all blocks are approximated by one curve times a factor per block; the
best factors are the first singular vector. And since the last shift only acts through the output layer L, which has
few rows, tau can follow the last scale and serve the shift as well. docs/convert.md has the figures.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from atoll.convert.ledger import Layer
from atoll.errors import InputError
from atoll.networks.dit import frequencies

NUM_TIMES = 500
LARGEST = 4.0  # bound on the factors and their inverses
ROUNDS = 6
RIDGES = tuple(10.0**-power for power in range(3, 13))  # of the largest singular value, squared
ALLOWED = 0.05  # relative error accepted in exchange for weights as small as the source's
KEEP = 0.01  # weight for keeping tau near the source's, relative to fitting the output layer
GROUPS = ((0, 1), (2,), (3, 4), (5,))  # shift and scale of attention, its gate, those of the MLP, its gate
SCALES = (1, 4)
PIXART_TIME = 500 / 999  # where PixArt-alpha matches the modulation of the DiT it starts from


class TimeMLP(NamedTuple):
    """Maps t to c(t); the class embedding is included in the last bias."""

    first: Layer
    second: Layer
    scale: float
    shift: int = 0

    def hidden(self, t: Tensor) -> Tensor:
        angle = self.scale * t.double()[:, None] * frequencies(self.shift).double()
        waves = torch.cat([torch.cos(angle), torch.sin(angle)], 1).to(self.first.weight.dtype)
        return F.silu(self.first(waves))

    def __call__(self, t: Tensor) -> Tensor:
        return self.second(self.hidden(t))

    def same_as(self, other: "TimeMLP") -> bool:
        return all(map(torch.equal, (*self.first, *self.second), (*other.first, *other.second)))


class Single(NamedTuple):
    """The fitted AdaLN-Single, and its residual."""

    second: Layer  # of the time's MLP
    shared: Layer
    tables: Tensor  # [blocks, 6, d]
    out: Tensor  # [2, d]
    factors: Tensor  # [blocks, 4, d]: of GROUPS
    residual: list[float]  # relative error of the modulation, per block


def fit_single(times: Sequence[TimeMLP], maps: Sequence[Layer], last: Layer, out: Tensor, how: str = "curve") -> Single:
    """Fits to each block's time MLP and map, and to the output's map, which acts through `out`[p p C, d].

    `how`: "curve" as above, "mean" without factors, "point" exact at t = 500/999, as for PixArt-alpha's initialisation.
    """
    t = torch.linspace(0, 1, NUM_TIMES, dtype=torch.float64)
    point = int(torch.argmin((t - PIXART_TIME).abs()))
    if how == "point":
        t[point] = PIXART_TIME  # the step 500 itself, not the nearest of these times

    def centre(curve: Tensor) -> Tensor:
        """Returns the part for the tables: the value at the point, or the mean over times (dimension 0)."""
        return curve[point].clone() if how == "point" else curve.mean(0)

    depth, width = len(times), len(times[0].second.bias)
    curves = torch.stack([layer(F.silu(mlp(t))) for mlp, layer in zip(times, maps, strict=True)])
    curves = curves.unflatten(2, (6, width))  # [blocks, T, 6, d]
    curves[:, :, SCALES] += 1  # factors apply to 1 + scale
    levels = torch.stack([centre(curve) for curve in curves])  # [blocks, 6, d]
    curves -= levels[:, None]  # the time-varying part
    factors = torch.ones(depth, 4, width)
    shared = torch.empty(NUM_TIMES, 6, width)
    for number, group in enumerate(GROUPS):
        if how == "curve":
            factors[:, number], shared[:, group] = best_factors(curves[:, :, group])
        else:
            shared[:, group] = curves[:, :, group].mean(0)
    wide = factors[:, [number for number, group in enumerate(GROUPS) for _ in group]]  # [blocks, 6, d]

    mlp = times[0]
    tau, second = mlp(t), mlp.second
    two = last(F.silu(tau)).unflatten(1, (2, width))  # [T, 2, d]
    if how == "curve":
        second = fit_linear(mlp.hidden(t), follow_output(two, out, tau))
        tau = second(mlp.hidden(t))
    layer = fit_linear(F.silu(tau), shared.flatten(1))
    ours = layer(F.silu(tau)).unflatten(1, (6, width))
    tables = levels / wide - centre(ours)
    residual = []
    for b in range(depth):
        off = wide[b] * (ours - centre(ours)) - curves[b]
        whole = curves[b] + levels[b]
        whole[:, SCALES] -= 1
        residual.append(math.sqrt(float((off**2).mean() / (whole**2).mean().clamp_min(1e-30))))
    tables[:, SCALES] -= 1
    end = centre(two) - centre(tau)  # [2, d]
    return Single(second, layer, tables, end, factors, residual)


def best_factors(curves: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each channel's factors[blocks, d] and curve[T, k, d] with the least squares between their product
    and the blocks' curves[blocks, T, k, d]; no factor beyond LARGEST."""
    depth = len(curves)
    by_channel = curves.permute(3, 0, 1, 2).flatten(2)  # [d, blocks, T k]
    gram = (by_channel @ by_channel.mT).double()  # sufficient for the factors
    factor = torch.linalg.eigh(gram)[1][..., -1] * math.sqrt(depth)  # [d, blocks]
    for _ in range(ROUNDS):
        factor = _bounded(torch.where(factor.sum(1, keepdim=True) < 0, -factor, factor))
        with_curve = torch.einsum("dbc,dc->db", gram, factor) / (factor**2).sum(1, keepdim=True)
        length = (with_curve * factor).sum(1, keepdim=True) / (factor**2).sum(1, keepdim=True)
        factor = with_curve / length.clamp_min(1e-30)
    factor = _bounded(factor)
    share = (factor / (factor**2).sum(1, keepdim=True)).to(curves.dtype)
    curve = (share[:, None] @ by_channel).squeeze(1).unflatten(1, curves.shape[1:3])  # [d, T, k]
    return factor.T.to(curves.dtype), curve.permute(1, 2, 0)


def _bounded(factor: Tensor) -> Tensor:
    return torch.where(factor < 0, -1.0, 1.0) * factor.abs().clamp(1 / LARGEST, LARGEST)


def follow_output(two: Tensor, out: Tensor, tau: Tensor) -> Tensor:
    """Returns the tau(t)[T, d] that best serves as the output's shift and scale, two[T, 2, d], near the given tau.

    A shift acts only through L shift, a scale in channel j about in proportion to |L_j|; so this minimises
    |L (x - shift)|^2 + sum_j |L_j|^2 (x_j - scale_j)^2 + k (x_j - tau_j)^2, without the means, which table O absorbs.
    """
    shift, scale = (part - part.mean(0) for part in two.double().unbind(1))
    off, rows = tau.double() - tau.double().mean(0), out.double()
    seen = (rows**2).sum(0)
    held = KEEP * seen.mean() + torch.finfo(torch.float32).tiny
    weight = seen + held
    start = (seen * scale + held * off) / weight
    inner = torch.eye(len(rows), dtype=torch.float64) + (rows / weight) @ rows.T
    step = torch.linalg.solve(inner, rows @ (shift - start).T).T @ rows / weight
    return (start + step + tau.double().mean(0)).to(tau.dtype)


def fit_linear(x: Tensor, y: Tensor, allowed: float = ALLOWED) -> Layer:
    """Returns the layer that maps x[T, d] to y[T, n], by ridge regression with the smallest sufficient weights."""
    if not (bool(torch.isfinite(x).all()) and bool(torch.isfinite(y).all())):
        raise InputError("the checkpoint's modulation is not finite: its weights are far too large, give another")
    centre, level = x.double().mean(0), y.double().mean(0)
    target = y.double() - level
    u, s, v = torch.linalg.svd(x.double() - centre, full_matrices=False)
    along = u.T @ target  # [d, n]
    power = (along**2).sum(1)

    def lost(ridge: float) -> float:
        held = ridge * s[0] ** 2
        return math.sqrt(float((power * (held / (s**2 + held).clamp_min(1e-300)) ** 2).sum()))

    enough = lost(RIDGES[-1]) + allowed * float(target.norm())
    ridge = next(ridge for ridge in RIDGES if lost(ridge) <= enough)
    weight = (along.T * (s / (s**2 + ridge * s[0] ** 2).clamp_min(1e-300))) @ v
    return Layer(weight.to(x.dtype), (level - weight @ centre).to(x.dtype))
