"""Extends a trained router to experts that it has never seen, with a centroid router over all experts.

With q from the centroids over all experts and p from the trained router over the known ones, a new expert m has
probability q(m), and the known ones share the rest, p(k) (1 - q(new)). This is Bayes' rule if the trained router is
right about the known experts, and the centroids about known against new. Without new experts it is p.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atoll.networks.centroid_router import CentroidRouter
from atoll.networks.dit import TextContext
from atoll.networks.router import Router


class CombinedText(NamedTuple):
    """The output of `read_text` of each of the two routers."""

    trained: TextContext | Tensor | None
    centroids: TextContext | Tensor | None


class CombinedRouter(nn.Module):
    """Computes log-probabilities[B, K] of all K experts, of which the trained router knows the first ones."""

    def __init__(self, trained: Router | CentroidRouter, centroids: CentroidRouter) -> None:
        super().__init__()
        self.trained, self.centroids = trained, centroids
        self.num_known, self.num_experts = trained.config.num_experts, centroids.config.num_experts
        assert self.num_known <= self.num_experts

    @property
    def card(self) -> Mapping[str, Any]:
        return {"temperature": 1.0}  # the two routers' own temperatures are applied in `forward`

    def forward(self, x: Tensor, t: Tensor, text: CombinedText | None = None) -> Tensor:
        text = text or CombinedText(None, None)
        q, p = (
            torch.log_softmax(router(x, t, own).double() / router.card.get("temperature", 1.0), 1)
            for router, own in ((self.centroids, text.centroids), (self.trained, text.trained))
        )
        known = q[:, : self.num_known].logsumexp(1, keepdim=True)
        return torch.cat([p + known, q[:, self.num_known :]], 1).float()
