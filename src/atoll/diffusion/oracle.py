"""Perfect experts in closed form, on data with known conditional means: the ground truth for testing conversions.

The data are K clusters, each a mixture of Gaussians with diagonal covariance. For x = alpha x0 + sigma eps, the
means of x0 and eps given x, for one cluster or for all, are sums over components, and so is p(cluster | x).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.diffusion.prediction import Estimate, Prediction, output_for
from atoll.diffusion.schedules import LINEAR, Coefficients, Schedule
from atoll.diffusion.transfer import Predict, Transfer


@dataclass(frozen=True, eq=False)
class ClusteredGaussians:
    """K clusters of M Gaussians in D dimensions."""

    means: Tensor  # [K, M, D]
    variances: Tensor  # [K, M, D]
    weights: Tensor  # [K, M], summing to 1 over both

    @classmethod
    def random(cls, num_clusters: int, num_components: int, dim: int, seed: int = 0) -> "ClusteredGaussians":
        """Returns clusters around random centres, in float64."""
        g = torch.Generator().manual_seed(seed)
        shape = (num_clusters, num_components, dim)
        centres = 2 * torch.randn(num_clusters, 1, dim, generator=g, dtype=torch.float64)
        means = centres + 0.5 * torch.randn(shape, generator=g, dtype=torch.float64)
        variances = 0.05 + 0.2 * torch.rand(shape, generator=g, dtype=torch.float64)
        weights = 0.5 + torch.rand(shape[:2], generator=g, dtype=torch.float64)
        return cls(means, variances, weights / weights.sum())

    @classmethod
    def islands(cls, num_clusters: int = 4, num_components: int = 12) -> "ClusteredGaussians":
        """Returns a ring of islands around a lagoon, in two dimensions, for the figures in the docs."""
        k, m = num_clusters, num_components
        arc = torch.linspace(0.12, 0.88, m, dtype=torch.float64)
        angle = 2 * torch.pi * (torch.arange(k, dtype=torch.float64)[:, None] + arc) / k  # [K, M]
        radius = 2 + 0.12 * torch.cos(5 * angle)
        means = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], -1)
        spread = 0.02 * torch.sin(torch.pi * (arc - 0.12) / 0.76) + 0.002  # wide in the middle of an island
        return cls(means, spread[None, :, None].expand(k, m, 2), torch.full((k, m), 1 / (k * m), dtype=torch.float64))

    def sample(self, num: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Returns num points [num, D] and the cluster of each [num]."""
        k, m, d = self.means.shape
        component = torch.multinomial(self.weights.flatten(), num, replacement=True, generator=generator)
        noise = torch.randn(num, d, generator=generator, dtype=self.means.dtype)
        x = self.means.view(k * m, d)[component] + self.variances.reshape(k * m, d)[component].sqrt() * noise
        return x, component // m

    def estimate(self, x: Tensor, at: Coefficients, cluster: int | None = None) -> Estimate:
        """Returns E[x0 | x] and E[eps | x], over one cluster or over all data."""
        log_joint, x0, eps = self._components(x, at)
        if cluster is not None:
            log_joint, x0, eps = (part[:, cluster : cluster + 1] for part in (log_joint, x0, eps))
        share = torch.softmax(log_joint.flatten(1), 1)[..., None]  # [B, K * M, 1]
        return Estimate((share * x0.flatten(1, 2)).sum(1), (share * eps.flatten(1, 2)).sum(1))

    def posterior(self, x: Tensor, at: Coefficients) -> Tensor:
        """Returns p(cluster | x), the perfect router: [B, K]."""
        log_joint, _, _ = self._components(x, at)
        return torch.softmax(torch.logsumexp(log_joint, 2), 1)

    def expert(self, cluster: int, prediction: Prediction, schedule: Schedule) -> Predict:
        """Returns the network that perfect training on a cluster would give, on its own schedule and times."""

        def predict(x: Tensor, t: Tensor) -> Tensor:
            at = schedule.coefficients(t)
            return output_for(prediction, *self.estimate(x, at, cluster), at)

        return predict

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """Returns the true marginal velocity of all data on the canonical path, which Eq. 1 must reproduce."""
        x0, eps = self.estimate(x, LINEAR.coefficients(t))
        return eps - x0

    def ensemble_velocity(self, transfers: Sequence[Transfer], x: Tensor, t: Tensor) -> Tensor:
        """Returns the same by Eq. 1: the sum over clusters of p(k | x) times the converted velocity of expert k."""
        velocities = [
            transfer.velocity(self.expert(k, transfer.prediction, transfer.schedule), x, t)
            for k, transfer in enumerate(transfers)
        ]
        return torch.einsum("bk,kbd->bd", self.posterior(x, LINEAR(t)), torch.stack(velocities))

    def _components(self, x: Tensor, at: Coefficients) -> tuple[Tensor, Tensor, Tensor]:
        """Returns log p(component, x) up to a constant [B, K, M], and E[x0], E[eps] given both [B, K, M, D]."""
        alpha, sigma = (c.reshape(-1, 1, 1, 1) for c in at[:2])
        off = x[:, None, None] - alpha * self.means  # [B, K, M, D]
        variance = alpha**2 * self.variances + sigma**2
        log_density = -0.5 * (off**2 / variance + torch.log(variance)).sum(-1)
        x0 = self.means + alpha * self.variances / variance * off
        return torch.log(self.weights) + log_density, x0, sigma / variance * off
