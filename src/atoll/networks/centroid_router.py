"""The router that needs no training: each cluster as one Gaussian around its mean latent, and one around its mean text.

p(k | x_t, t [, text]) by Bayes: the share of cluster k, times the density of x_t = alpha x0 + sigma eps if x0 is
N(m_k, s_k I), times that of the text's mean token if those of a cluster are N(m_k, S) with one S for all (LDA).
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from atoll.diffusion.schedules import LINEAR
from atoll.errors import InputError
from atoll.networks.stored import Stored

LEAST_VARIANCE = 1e-6  # a cluster of equal pictures has none, and no density


@dataclass(frozen=True)
class CentroidRouterConfig:
    """A centroid router's sizes."""

    num_experts: int
    in_channels: int = 4
    input_size: int = 32
    text_dim: int | None = None  # None: it does not look at the text
    image_scale: float = 1.0
    """Factor on the log-density of the latent. Latents have fewer independent dimensions than numbers, so that at 1 the
    router is too sure of itself; unlike a temperature, this leaves shares and text as they are."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "in_channels", "input_size", "text_dim"):
            value = getattr(self, name)
            if not (name == "text_dim" and value is None) and (type(value) is not int or not 1 <= value <= 65536):
                raise InputError(f"{name} must be a whole number from 1 to 65536, but is {value!r}")
        if not 0 < self.image_scale <= 1:
            raise InputError(f"image_scale must lie in (0, 1], but is {self.image_scale!r}")


class CentroidRouter(Stored):
    """Logits from means and variances alone. It sees canonical (x_t, t); at t = 1 it gives the shares."""

    config: CentroidRouterConfig
    config_class = CentroidRouterConfig
    card_keys = frozenset(("temperature", "latent_space", "text_encoder", "data", "training", "license"))
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
        """From each cluster's mean latent[K, C, S, S], variance around it[K] (the mean over dimensions) and size[K].

        For the text, each cluster's mean of the texts' mean tokens[K, D], and their covariance within clusters: [D] or
        [D, D], of which `shrinkage` is replaced by its mean variance, so that it can be inverted.
        """
        if means.dim() != 4 or means.shape[2] != means.shape[3]:
            raise InputError(f"the mean latents must have shape [clusters, C, S, S], but have {list(means.shape)}")
        num = len(means)
        if variances.shape != (num,) or counts.shape != (num,) or (text_means is not None and len(text_means) != num):
            raise InputError(f"there are {num} mean latents: give as many variances, counts and mean texts")
        if not bool((variances >= 0).all()) or not bool((counts >= 0).all()) or not bool(counts.sum() > 0):
            raise InputError("variances and counts must not be negative, and some cluster must have a picture")
        dim = None if text_means is None else text_means.shape[1]
        router = cls(CentroidRouterConfig(num, means.shape[1], means.shape[2], dim, image_scale)).to(means.dtype)
        router.means.copy_(means)
        router.variances.copy_(variances.clamp_min(LEAST_VARIANCE))
        router.shares.copy_(counts.double() / counts.sum())
        if text_means is not None:
            if text_covariance is None or text_covariance.shape not in ((dim,), (dim, dim)):
                raise InputError(f"mean texts of width {dim} need a covariance of shape [{dim}] or [{dim}, {dim}]")
            try:
                weight = torch.linalg.solve(_shrunk(text_covariance.double(), shrinkage), text_means.double().T).T
            except RuntimeError as error:  # torch.linalg.LinAlgError, which torch does not export
                raise InputError("the texts' covariance has no inverse: give more shrinkage") from error
            router.text_weight.copy_(weight)
            router.text_bias.copy_(-0.5 * (weight * text_means).sum(1))
        for name, values in router.named_buffers():
            if not bool(torch.isfinite(values).all()):
                raise InputError(f"the {name} hold values that are not finite: measure the clusters again")
        return router.eval()

    def read_text(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """The text's part of the logits[B, K], from tokens[B, L, text_dim] with mask[B, L]."""
        if self.config.text_dim is None:
            raise InputError("this router was built without text (text_dim is None): pass no text to it")
        if tokens.dim() != 3 or tokens.shape[2] != self.config.text_dim:
            raise InputError(
                f"text must have shape [batch, length, {self.config.text_dim}], but has {list(tokens.shape)}"
            )
        return mean_token(tokens.to(self.means), mask) @ self.text_weight.T + self.text_bias

    def forward(self, x: Tensor, t: Tensor, text: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits[B, K]; x[B, C, S, S], t[B] or 0-d, text[B, L, text_dim] with mask[B, L], or read already [B, K].

        A router that knows texts can do without one: then it judges by the latent alone.
        """
        config = self.config
        if x.dim() != 4 or x.shape[1:] != self.means.shape[1:]:
            shape = [config.in_channels, config.input_size, config.input_size]
            raise InputError(f"x must have shape [batch, {str(shape)[1:]}, but has {list(x.shape)}")
        alpha, sigma, _, _ = LINEAR(t).broadcast(x)
        off = x[:, None] - alpha.reshape(-1, 1, 1, 1, 1) * self.means  # [B, K, C, S, S]
        variance = alpha.reshape(-1, 1) ** 2 * self.variances + sigma.reshape(-1, 1) ** 2  # [B or 1, K]
        square = (off**2).flatten(2).sum(2)
        density = -0.5 * (square / variance + self.means[0].numel() * torch.log(variance))
        logits = torch.log(self.shares) + config.image_scale * density
        if text is None:
            return logits
        return logits + (self.read_text(text, mask) if text.dim() == 3 else text)


def mean_token(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean of each text's real tokens: [B, D]."""
    if mask is None:
        return tokens.mean(1)
    real = mask.to(tokens)
    return (tokens * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp_min(1)


def _shrunk(covariance: Tensor, shrinkage: float) -> Tensor:
    """[D, D], part of it replaced by its mean variance."""
    if not 0 <= shrinkage <= 1:
        raise InputError(f"shrinkage must lie in [0, 1], but is {shrinkage!r}")
    whole = torch.diag(covariance) if covariance.dim() == 1 else covariance
    level = whole.diagonal().mean().clamp_min(LEAST_VARIANCE)
    return (1 - shrinkage) * whole + shrinkage * level * torch.eye(len(whole), dtype=whole.dtype, device=whole.device)
