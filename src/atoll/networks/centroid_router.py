"""A router without training: models each cluster as a Gaussian around its mean latent, and one around its mean text.

p(k | x_t, t [, text]) by Bayes: the share of cluster k, times the density of x_t = alpha x0 + sigma eps for x0 from
N(m_k, s_k I), times that of the text's mean token, from N(m_k, S) with one S for all clusters (LDA).
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from atoll.cards import RouterCard
from atoll.config import check_counts
from atoll.diffusion.schedules import LINEAR
from atoll.errors import InputError
from atoll.networks.stored import Stored

LEAST_VARIANCE = 1e-6  # a cluster of equal images would have variance 0, and no density


@dataclass(frozen=True)
class CentroidRouterConfig:
    """A centroid router's sizes."""

    num_experts: int
    in_channels: int = 4
    input_size: int = 32
    text_dim: int | None = None  # None: ignores the text
    image_scale: float = 1.0
    """Factor on the log-density of the latent. Latents have fewer independent dimensions than elements, so that at 1
    the router is overconfident; unlike a temperature, this does not affect shares and text."""

    def __post_init__(self) -> None:
        check_counts(self, num_experts=65536, in_channels=65536, input_size=65536, text_dim=65536)
        if not 0 < self.image_scale <= 1:
            raise InputError(f"image_scale must lie in (0, 1], but is {self.image_scale!r}")


class CentroidRouter(Stored):
    """Computes logits from means and variances alone. Takes canonical (x_t, t); at t = 1 it gives the shares."""

    config: CentroidRouterConfig
    config_class = CentroidRouterConfig
    card_keys = frozenset(RouterCard.model_fields)
    means: Tensor
    variances: Tensor
    shares: Tensor
    text_weight: Tensor
    text_bias: Tensor

    def __init__(self, config: CentroidRouterConfig) -> None:
        super().__init__()
        self.config = config
        k, size = config.num_experts, config.input_size
        self.register_buffer("means", torch.zeros(k, config.in_channels, size, size))
        self.register_buffer("variances", torch.ones(k))
        self.register_buffer("shares", torch.full((k,), 1 / k))
        if config.text_dim is not None:
            self.register_buffer("text_weight", torch.zeros(k, config.text_dim))
            self.register_buffer("text_bias", torch.zeros(k))

    @classmethod
    def fit(
        cls,
        means: Tensor,
        variances: Tensor,
        counts: Tensor,
        text_means: Tensor | None = None,
        text_covariance: Tensor | None = None,
        *,
        shrinkage: float = 0.1,
        image_scale: float = 1.0,
    ) -> Self:
        """Returns the router given each cluster's mean latent[K, C, S, S], variance around it[K] and size[K].

        For the text it needs each cluster's mean of the texts' mean tokens[K, D], and their covariance[D, D] within
        clusters, which is mixed with its mean variance by `shrinkage`, so that it can be inverted.
        """
        num, channels, size, _ = means.shape
        dim = None if text_means is None else text_means.shape[1]
        router = cls(CentroidRouterConfig(num, channels, size, dim, image_scale)).to(means.dtype)
        router.means.copy_(means)
        router.variances.copy_(variances.clamp_min(LEAST_VARIANCE))  # a mean over dimensions
        router.shares.copy_(counts.double() / counts.sum())
        if text_means is not None:
            assert text_covariance is not None
            covariance = text_covariance.double()
            level = covariance.diagonal().mean().clamp_min(LEAST_VARIANCE)
            eye = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
            shrunk = (1 - shrinkage) * covariance + shrinkage * level * eye  # [D, D]
            weight = torch.linalg.solve(shrunk, text_means.double().T).T  # [K, D]
            router.text_weight.copy_(weight)
            router.text_bias.copy_(-0.5 * (weight * text_means).sum(1))
        return router.eval()

    def read_text(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the text's contribution to the logits[B, K], from tokens[B, L, text_dim] with mask[B, L]."""
        assert self.config.text_dim is not None, (
            "this router was built without text (text_dim is None): pass none to it"
        )
        return mean_token(tokens.to(self.means), mask) @ self.text_weight.T + self.text_bias

    def forward(self, x: Tensor, t: Tensor, text: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Returns logits[B, K] for x[B, C, S, S], t[B] or 0-d, and text[B, L, text_dim] with mask[B, L], or the output
        of `read_text`[B, K].

        The text is optional; without it, only the latent is used.
        """
        right = x.dim() == 4 and x.shape[1:] == self.means.shape[1:]
        assert right, f"x must have shape [batch, *{list(self.means.shape[1:])}], but has {list(x.shape)}"
        alpha, sigma, _, _ = LINEAR(t).broadcast(x)
        off = x[:, None] - alpha.reshape(-1, 1, 1, 1, 1) * self.means  # [B, K, C, S, S]
        variance = alpha.reshape(-1, 1) ** 2 * self.variances + sigma.reshape(-1, 1) ** 2  # [B or 1, K]
        square = (off**2).flatten(2).sum(2)  # [B, K]
        density = -0.5 * (square / variance + self.means[0].numel() * torch.log(variance))
        logits = torch.log(self.shares) + self.config.image_scale * density
        if text is None:
            return logits
        return logits + (self.read_text(text, mask) if text.dim() == 3 else text)


def mean_token(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns the mean of each text's real tokens: [B, D]."""
    if mask is None:
        return tokens.mean(1)
    real = mask.to(tokens)
    return (tokens * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp_min(1)
