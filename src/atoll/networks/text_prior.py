"""Predicts the mean latent of a caption from the text alone, by ridge regression on its mean token.

Near pure noise an expert's own x0 is dominated by its error divided by alpha, and the best estimate is the mean of all
images that fit the text. This is that mean, as far as it is linear in the text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import InputError
from atoll.networks.centroid_router import mean_token
from atoll.tensors import check_finite, send

RIDGES = tuple(10.0**power for power in range(-5, 2))  # times the mean variance of the texts
EVERY = 5  # every fifth row validates the ridge
NEAR_NULL = 0.05  # of the distance between captions and the null text: closer texts have less effect


@dataclass(frozen=True, eq=False)
class TextPrior:
    """mean + weight (mean token - centre), with a smaller offset for texts further out than the cluster's captions."""

    mean: Tensor  # [C, S, S], of the cluster
    weight: Tensor  # [text_dim, C, S, S]
    centre: Tensor  # [text_dim], the mean of the captions' mean tokens
    null: Tensor  # [text_dim], the mean token of the null text
    limit: float  # the largest distance from `mean` over captions
    covariance: Tensor | None = None  # [text_dim, text_dim], of the captions' mean tokens, for routers from centroids

    def __post_init__(self) -> None:
        dim = len(self.centre)
        if self.weight.shape != (dim, *self.mean.shape) or self.null.shape != (dim,) or not self.limit >= 0:
            raise InputError(f"a text prior for texts {dim} wide and latents {list(self.mean.shape)} does not fit")
        if self.covariance is not None and self.covariance.shape != (dim, dim):
            raise InputError(f"a covariance {list(self.covariance.shape)} is not that of texts {dim} wide")
        if self.mean.device.type == "cpu":  # reading the values would stall a GPU
            check_finite({name: part for name, part in vars(self).items() if torch.is_tensor(part)}, "the text prior")

    @classmethod
    def fit(cls, batches: Iterable[tuple[Tensor, Tensor]], mean: Tensor, null: Tensor) -> "TextPrior":
        """Fits to (mean tokens[n, text_dim], latents[n, C, S, S]), choosing the ridge by every fifth row."""
        learned, judge = _Sums(), _Sums()
        tokens: list[Tensor] = []
        for pooled, latents in batches:
            off = (latents.double() - mean.double()).flatten(1)
            judges = torch.arange(len(pooled)) % EVERY == 0
            for part, rows in ((learned, ~judges), (judge, judges)):
                part.add(pooled[rows].double(), off[rows])
            tokens.append(pooled)
        everything = learned + judge
        centre = everything.centre
        weight = torch.zeros(null.shape[0], mean.numel(), dtype=torch.float64)
        if learned.num > 1:
            weight = everything.solve(min(RIDGES, key=lambda trial: judge.error(learned.solve(trial), learned.centre)))
        limit = max(float(((pooled.double() - centre) @ weight).norm(dim=1).max()) for pooled in tokens)
        weight, covariance = weight.float().view(-1, *mean.shape), everything.covariance.float()
        return cls(mean.float(), weight, centre.float(), null.float(), limit, covariance)

    def of(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the mean latent of texts tokens[B, L, text_dim] with mask[B, L]: [B, C, S, S]."""
        pooled = mean_token(tokens.to(self.centre), mask)
        off = torch.tensordot(pooled - self.centre, self.weight, 1)  # [B, C, S, S]
        # A text beyond all captions of the cluster is trusted less the further out it leads.
        length = off.flatten(1).norm(dim=1)
        scale = (self.limit / length.clamp_min(1e-12)).clamp(max=1) ** 2
        # The null text must have no effect, even after rounding.
        apart = (pooled - self.null).norm(dim=1) / (self.centre - self.null).norm().clamp_min(1e-12)
        scale = scale * (apart / NEAR_NULL).clamp(max=1)
        return self.mean + scale.view(-1, *[1] * self.mean.dim()) * off

    def to(self, device: torch.device) -> "TextPrior":
        mean, weight, centre, null = (send(part, device) for part in (self.mean, self.weight, self.centre, self.null))
        covariance = None if self.covariance is None else send(self.covariance, device)
        return TextPrior(mean, weight, centre, null, self.limit, covariance)


class _Sums:
    """The sufficient statistics of the regression: num, sums of p, p p^T, p x^T, x, x^2."""

    def __init__(self, num: int = 0, sums: Sequence[Tensor] = ()) -> None:
        self.num, self.sums = num, sums

    def add(self, pooled: Tensor, off: Tensor) -> None:
        rows = _Sums(len(pooled), [pooled.sum(0), pooled.T @ pooled, pooled.T @ off, off.sum(0), (off**2).sum()])
        both = self + rows if self.sums else rows
        self.num, self.sums = both.num, both.sums

    def __add__(self, other: "_Sums") -> "_Sums":
        return _Sums(self.num + other.num, [a + b for a, b in zip(self.sums, other.sums, strict=True)])

    @property
    def centre(self) -> Tensor:
        return self.sums[0] / max(self.num, 1)

    @property
    def covariance(self) -> Tensor:
        p, pp, *_ = self.sums
        return pp / self.num - torch.outer(p, p) / self.num**2

    def solve(self, ridge: float) -> Tensor:
        """Returns the weight[text_dim, D] of the ridge regression of x on p - centre; x has mean 0: no intercept."""
        p, _, px, x, _ = self.sums
        covariance = self.covariance
        cross = px / self.num - torch.outer(p, x) / self.num**2
        level = ridge * covariance.diagonal().mean().clamp_min(1e-12)
        return torch.linalg.solve(covariance + level * torch.eye(len(p), dtype=p.dtype), cross)

    def error(self, weight: Tensor, centre: Tensor) -> float:
        """Returns the sum of |x - weight (p - centre)|^2 over these rows."""
        p, pp, px, x, xx = self.sums
        moved = pp - torch.outer(p, centre) - torch.outer(centre, p) + self.num * torch.outer(centre, centre)
        cross = px - torch.outer(centre, x)
        return float(xx - 2 * (weight * cross).sum() + (weight * (moved @ weight)).sum())
