"""A router for experts that a trained one has never seen: it knows the others, and centroids tell all of them apart.

With q by centroids over all experts and p by the trained router over those that it knows, a new expert m has q(m), and
those that are known share what is left, p(k) (1 - q(new)). That is Bayes' rule where the trained router is right
about the known ones, and the centroids about known against new. With no new expert it is p.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atoll.networks.centroid_router import CentroidRouter
from atoll.networks.dit import TextContext
from atoll.networks.router import Router


class CombinedText(NamedTuple):
    """A text as each of the two routers has read it."""

    trained: TextContext | Tensor | None
    centroids: TextContext | Tensor | None


class CombinedRouter(nn.Module):
    """Log-probabilities[B, K] of all K experts, of which the trained router knows the first ones."""

    def __init__(self, trained: Router | CentroidRouter, centroids: CentroidRouter) -> None:
        super().__init__()
        self.trained, self.centroids = trained, centroids
        self.num_known, self.num_experts = trained.config.num_experts, centroids.config.num_experts
        assert self.num_known <= self.num_experts

    @property
    def card(self) -> Mapping[str, Any]:
        return {"temperature": 1.0}  # those of the two are applied here

    def forward(self, x: Tensor, t: Tensor, text: CombinedText | None = None) -> Tensor:
        text = text or CombinedText(None, None)
        q, p = (
            torch.log_softmax(router(x, t, own).double() / router.card.get("temperature", 1.0), 1)
            for router, own in ((self.centroids, text.centroids), (self.trained, text.trained))
        )
        known = q[:, : self.num_known].logsumexp(1, keepdim=True)
        return torch.cat([p + known, q[:, self.num_known :]], 1).float()
