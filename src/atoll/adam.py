"""AdamW on torch's functional API: torch's class would import torch's compiler, which takes seconds per process."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class AdamW:
    """Bit-identical to torch.optim.AdamW; `first` and `second` are the moments."""

    def __init__(
        self, weights: Iterable[Tensor], betas: tuple[float, float], weight_decay: float = 0.0, fused: bool = False
    ) -> None:
        self.weights, self.betas, self.weight_decay, self.fused = list(weights), betas, weight_decay, fused
        self.first, self.second = ([torch.zeros_like(p) for p in self.weights] for _ in range(2))
        self.steps = [torch.zeros((), device=p.device if fused and p.is_cuda else None) for p in self.weights]

    @torch.no_grad()
    def step(self, lr: float, skip: Tensor | None = None) -> None:
        """Applies the gradients; if the device tensor `skip` is 1, nothing changes, without a sync (fused only)."""
        columns = zip(self.weights, self.first, self.second, self.steps, strict=True)
        rows = [(p, p.grad, *rest) for p, *rest in columns if p.grad is not None]
        if not rows:
            return
        weights, gradients, first, second, steps = map(list, zip(*rows, strict=True))
        adamw(
            weights, gradients, first, second, [], steps, foreach=False, fused=self.fused, found_inf=skip,
            amsgrad=False, beta1=self.betas[0], beta2=self.betas[1], lr=lr, weight_decay=self.weight_decay, eps=1e-8,
            maximize=False,
        )  # fmt: skip

    def clear_gradients(self) -> None:
        for p in self.weights:
            p.grad = None
