"""Muon: orthogonalises the momentum of a matrix before applying it (Jordan et al. 2024).

Every direction of a matrix is then updated at the same speed, whereas AdamW favours the few large ones. Muon updates
only the matrices within blocks; AdamW updates embeddings, the output layer, norms and biases.

torch.optim.Muon does the same, but always in bfloat16, which is slow on CPUs that emulate it, and cannot decide on the
device to skip an update.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

MOMENTUM = 0.95
ITERATIONS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration
STACKED = {"attention.qkv": 3, "cross.kv": 2}  # weights that stack this many matrices
IN_BLOCKS = re.compile(r"blocks\.\d+\.((?:attention|cross|mlp)\.\w+)\.weight")


class Muon:
    """Updates the matrices of a network's blocks, chosen by name; `momenta` is its state."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        matches = {name: IN_BLOCKS.fullmatch(name) for name in weights}
        self.weights = {name: weights[name] for name, match in matches.items() if match}
        self.parts = {name: STACKED.get(match[1], 1) for name, match in matches.items() if match}
        self.momenta = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    @torch.no_grad()
    def step(self, lr: float, skip: Tensor | None = None) -> None:
        """Applies the gradients; if `skip`, a tensor on the device, is 1, nothing changes."""
        for name, weight in self.weights.items():
            gradient, momentum = weight.grad, self.momenta[name]
            if gradient is None:
                continue
            averaged = momentum.lerp(gradient, 1 - MOMENTUM)
            # Nesterov momentum
            update = orthogonal(gradient.lerp(averaged, MOMENTUM).unflatten(0, (self.parts[name], -1))).flatten(0, 1)
            if skip is not None:
                is_skipped = skip.bool()
                averaged = torch.where(is_skipped, momentum, averaged)
                update = torch.where(is_skipped, 0, update)
            momentum.copy_(averaged)
            rows, columns = len(weight) / self.parts[name], weight.shape[1]
            weight.add_(update, alpha=-lr * max(1, rows / columns) ** 0.5)


def orthogonal(matrices: Tensor) -> Tensor:
    """Returns, for each of matrices[n, r, c] = U S V', nearly U V': its singular values are about 0.7 to 1.2."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)
