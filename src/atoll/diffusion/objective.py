"""Training objectives: a prediction type, a schedule, a distribution of times and a loss weighting."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.diffusion.prediction import Prediction, output_for, x0_weight
from atoll.diffusion.schedules import Schedule, get_schedule
from atoll.diffusion.transfer import Predict
from atoll.errors import InputError, unknown

TIMES = ("uniform", "logit-normal")
WEIGHTINGS = ("plain", "min-snr")


@dataclass(frozen=True)
class Objective:
    """One expert's training objective; `OBJECTIVES` has the usual ones by name."""

    prediction: Prediction
    schedule: str
    time: str = "uniform"
    weighting: str = "plain"
    time_mean: float = 0.0  # of logit(t), for logit-normal times
    time_std: float = 1.0
    min_snr_gamma: float = 5.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "prediction", Prediction(self.prediction))
        get_schedule(self.schedule)
        if self.time not in TIMES:
            raise unknown("time sampling", self.time, TIMES)
        if self.weighting not in WEIGHTINGS:
            raise unknown("weighting", self.weighting, WEIGHTINGS)
        for name in ("time_std", "min_snr_gamma"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} must be above 0 and finite, but is {getattr(self, name)!r}")
        if not math.isfinite(self.time_mean):
            raise InputError(f"time_mean must be finite, but is {self.time_mean!r}")

    @property
    def path(self) -> Schedule:
        return get_schedule(self.schedule)

    def sample_times(self, num: int, generator: torch.Generator | None = None) -> Tensor:
        """Returns num times in [0, 1], drawn on the generator's device."""
        device = None if generator is None else generator.device
        if self.time == "uniform":
            return torch.rand(num, generator=generator, device=device)
        normal = torch.randn(num, generator=generator, device=device)
        return torch.sigmoid(self.time_mean + self.time_std * normal)

    def weight(self, t: Tensor) -> Tensor:
        """Returns the factor on the squared error at t; min-SNR makes the weight of the x0 error min(SNR, gamma)."""
        if self.weighting == "plain":
            return torch.ones_like(t)
        at = self.path(self.path.inside(t))
        snr = (at.alpha / at.sigma) ** 2
        return snr.clamp(max=self.min_snr_gamma) / x0_weight(self.prediction, at)

    def loss(self, predict: Predict, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Returns each sample's weighted mean squared error (Eq. 3 for DDPM, Eq. 4 for flow matching): [B]."""
        at = self.path(t)
        alpha, sigma, _, _ = at.broadcast(x0)
        output = predict(alpha * x0 + sigma * eps, t)
        assert output.shape == x0.shape
        # The tables' d_sigma is infinite only at clean data, outside [0, 1]: targets are finite everywhere.
        target = output_for(self.prediction, x0, eps, at)
        return self.weight(t) * ((output - target) ** 2).flatten(1).mean(1)


OBJECTIVES = {
    "fm": Objective(Prediction.VELOCITY, "linear"),
    "fm-logit-normal": Objective(Prediction.VELOCITY, "linear", time="logit-normal"),
    # Photographs take shape at high noise: their coarsest latent components are several times as large as the others.
    "fm-high-noise": Objective(Prediction.VELOCITY, "linear", time="logit-normal", time_mean=0.7, time_std=1.3),
    "ddpm": Objective(Prediction.EPS, "cosine"),
    "ddpm-min-snr": Objective(Prediction.EPS, "cosine", weighting="min-snr"),
    "x0": Objective(Prediction.X0, "cosine"),
    "v": Objective(Prediction.V, "cosine"),
}


def get_objective(name: str) -> Objective:
    if name not in OBJECTIVES:
        raise unknown("objective", name, OBJECTIVES)
    return OBJECTIVES[name]
