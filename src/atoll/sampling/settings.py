"""How images are made unless one says otherwise. Apart, so that `atoll sample --help` need not wait for torch.

benchmarks/quality.py is what the defaults were chosen by.
"""

import math
from dataclasses import dataclass

from atoll.errors import InputError

STEPS, GUIDANCE, SOLVER = 20, 2.0, "multistep"  # of models that were not made for others
MAX_STEPS = 10_000
MAX_IMAGES = 1_000_000


@dataclass(frozen=True)
class Sampling:
    """How a model makes images."""

    steps: int | None = None
    """Steps of the solver, at most 10,000. By default 20, or those that a student of few steps was made for."""
    guidance: float | None = None
    """How strongly images follow the prompt, at least 0; 1 is no guidance. By default 2, or 1 for a model that has
    learned its guidance."""
    solver: str | None = None
    """multistep (the default), euler, heun, midpoint or dpm2m; a student of few steps has its own.
    evaluate also knows ancestral and ddim, for a model of one expert, and with :table:clip or :table:dynamic after
    these, DDPM's 1000 steps with x0 clipped or thresholded."""
    routing: str = "top1"
    """Which experts make an image: top1; topk:2, the two most probable; full; threshold:0.1, those of at least this
    probability; sample, or sample:2 for two; or by_time:0.5, flow matching above this time and the others below.
    evaluate also knows oracle: the expert of the cluster that the caption's own image is in."""
    conversion: str | None = None
    """calibrated, exact, paper or paper-damped; by default calibrated for experts that predict noise and carry a
    calibration, and exact for all others."""
    batch: int = 16
    """Images at a time."""

    def __post_init__(self) -> None:
        for name, most in (("steps", MAX_STEPS), ("batch", MAX_IMAGES)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise InputError(f"{name} must be a whole number from 1 to {most}, but is {value}")
        if self.guidance is not None and not 0 <= self.guidance < math.inf:
            raise InputError(f"the guidance scale must be a finite number of at least 0, but is {self.guidance}")
