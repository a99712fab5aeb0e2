"""Who has done how much of a model: the share of steps that each expert leads, and the FLOPs of its training."""

from collections.abc import Sequence
from pathlib import Path


def lead_shares(model: Path, prompts: Sequence[str], *, steps: int = 10, seed: int = 0) -> dict[int, float]:
    """Returns by its number the share of all steps that each expert leads, over images of the prompts."""
    raise NotImplementedError


def training_flops(expert: Path) -> float:
    """Returns the FLOPs of an expert's training by its card: an upper bound, all captions as long as they may be."""
    return 0.0
