"""Sampling settings. In a module of their own, so that `atoll sample --help` need not import torch.

The defaults were chosen with benchmarks/quality.py.
"""

import math
from dataclasses import dataclass

from atoll.errors import InputError

STEPS, GUIDANCE, SOLVER = 20, 2.0, "multistep"  # of models that were not distilled for others
MAX_STEPS = 10_000
MAX_IMAGES = 1_000_000


@dataclass(frozen=True)
class Sampling:
    """How images are sampled."""

    steps: int | None = None
    """Solver steps, at most 10,000. By default 20; a few-step student has its own number."""
    guidance: float | None = None
    """Guidance scale, at least 0; 1 is no guidance. By default 2, or 1 for a model that has learned guidance."""
    solver: str | None = None
    """multistep (the default), euler, heun, midpoint or dpm2m; a few-step student always uses euler.
    evaluate also accepts ancestral and ddim for a model of one expert; followed by :table:clip or :table:dynamic, they
    take DDPM's 1000 steps with x0 clipped or dynamically thresholded."""
    routing: str = "top1"
    """Which experts sample an image: top1, the most probable; topk:2, the two most probable; full, all; threshold:0.1,
    all of at least this probability; sample, one drawn at random (sample:2 for two); or by_time:0.5, flow-matching
    experts above this t and the others below. evaluate also accepts oracle: the expert of the cluster of the caption's
    own image."""
    conversion: str | None = None
    """Conversion to velocity: calibrated, exact, paper or paper-damped. By default calibrated for noise-predicting
    experts that have a calibration, and exact for all others."""
    batch: int = 16
    """Images per batch."""

    def __post_init__(self) -> None:
        for name, most in (("steps", MAX_STEPS), ("batch", MAX_IMAGES)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise InputError(f"{name} must be a whole number from 1 to {most}, but is {value}")
        if self.guidance is not None and not 0 <= self.guidance < math.inf:
            raise InputError(f"the guidance scale must be a finite number of at least 0, but is {self.guidance}")
