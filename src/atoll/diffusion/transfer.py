"""Converts experts of any prediction type and schedule to one velocity field on the canonical path.

The canonical path is the linear one. To evaluate an expert trained on another schedule S at canonical (x, t):
its native time is the s at which S has the signal-to-noise ratio of (x, t), its native input is x scaled to
S's magnitude there, and the (x0, eps) it predicts are the same on both paths. For exact experts this is exact.
A trained EPS expert is not exact, and where alpha is small its x0 is dominated by its error divided by alpha;
`calibrated` corrects this.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch
from torch import Tensor

from atoll.diffusion.prediction import Estimate, Prediction, estimate
from atoll.diffusion.schedules import LINEAR, Schedule, broadcast, check_times, interior
from atoll.errors import InputError, unknown
from atoll.tensors import send

Predict = Callable[[Tensor, Tensor], Tensor]
"""A network on its own schedule: (x, t) -> its prediction, with text already bound."""


class Conversion(StrEnum):
    EXACT = "exact"  # transfer by signal-to-noise ratio, nothing else
    CALIBRATED = "calibrated"  # exact, then the measured shrinkage of x0 towards the cluster's mean
    PAPER = "paper"  # Eq. 5-8 at the canonical (x, t), with the paper's safeguards
    PAPER_DAMPED = "paper-damped"  # the same, with an interpretation of the paper's damping that has an effect

    @classmethod
    def _missing_(cls, value: object) -> "Conversion":
        raise unknown("conversion", value, [c.value for c in cls])


@dataclass(frozen=True, eq=False)
class Calibration:
    """How far an expert's x0 can be trusted at each noise level, measured on held-out data of its cluster.

    gain[i] is the regression coefficient g = E<x0 - m, x0_hat - m> / E|x0_hat - m|^2 at log_snr[i], m the mean.
    """

    log_snr: Tensor  # [bins], rising
    gain: Tensor  # [bins], in [0, 1]
    mean: Tensor  # the shape of one sample

    def __post_init__(self) -> None:
        levels, gains = self.log_snr, self.gain
        if levels.device.type != "cpu":  # sent there by `to` after being checked
            return
        finite = all(bool(torch.isfinite(values).all()) for values in (levels, gains, self.mean))
        rise = levels.dim() == 1 and len(levels) > 0 and bool((levels.diff() > 0).all())
        if not finite or not rise or levels.shape != gains.shape or bool((gains.clamp(0, 1) != gains).any()):
            raise InputError("a calibration must have a gain in [0, 1] for each of its rising levels: measure it again")

    @classmethod
    def fit(cls, dots: Tensor, squares: Tensor, log_snr: Tensor, mean: Tensor, num_bins: int = 32) -> "Calibration":
        """Regresses x0 on an expert's x0_hat from each sample's `products`, in bins of equal count along log_snr[N]."""
        levels, gains = [], []
        for rows in torch.argsort(log_snr).tensor_split(num_bins):
            gain = dots[rows].sum() / squares[rows].sum().clamp_min(1e-30)
            levels.append(log_snr[rows].double().mean())
            gains.append(gain.clamp(0, 1))
        return cls(torch.stack(levels).float(), torch.stack(gains).float(), mean)

    def to(self, device: torch.device) -> "Calibration":
        return Calibration(*(send(values, device) for values in (self.log_snr, self.gain, self.mean)))

    def gain_at(self, log_snr: Tensor) -> Tensor:
        """Returns g, interpolated linearly in log-SNR between the measured levels.

        Beyond the noisiest level, where x0_hat is dominated by error divided by alpha, the best gain falls as alpha^2,
        that is, as the SNR: it is 0 at pure noise, where x0 is then the cluster's mean. Beyond the cleanest level,
        1 - g falls as sigma^2 in the same way.
        """
        levels, gains = (values.to(log_snr.device, log_snr.dtype) for values in (self.log_snr, self.gain))
        inside = log_snr.clamp(levels[0], levels[-1])
        if len(levels) == 1:
            known = gains[0].expand_as(inside)
        else:
            right = torch.searchsorted(levels, inside.contiguous()).clamp(1, len(levels) - 1)
            # `take`, since indexing with a 0-d tensor reads its value, which stalls a GPU.
            share = (inside - levels.take(right - 1)) / (levels.take(right) - levels.take(right - 1))
            known = torch.lerp(gains.take(right - 1), gains.take(right), share)
        noisier, cleaner = torch.exp((log_snr - levels[0]).clamp(max=0)), torch.exp((levels[-1] - log_snr).clamp(max=0))
        return (1 - (1 - known) * cleaner) * noisier


def products(x0: Tensor, x0_hat: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each sample's <x0 - m, x0_hat - m> and |x0_hat - m|^2, in float64: sufficient for the regression."""
    truth, guess = ((values.double() - centre).flatten(1) for values in (x0, x0_hat))
    return (truth * guess).sum(1), (guess**2).sum(1)


@dataclass(frozen=True)
class Safeguards:
    """The paper's three safeguards (section 3.2), and which of its two velocities they apply to.

    The paper gives no formula for its damping "at elevated noise levels where schedule derivatives become large", and
    t > 0.85 is second-hand. It is interpreted here as: past that time, no derivative may exceed the linear path's.
    Eq. 8 has the linear path's own derivatives, so this affects only Eq. 7. With `damped` the whole velocity is divided
    by the steepest derivative of the expert's own schedule there, pi/2 for cosine, which affects both.
    """

    clamp: float = 20.0  # |x0| at most this
    alpha_floor: float = 0.01  # alpha in Eq. 5 at least this
    damping_start: float = 0.85
    equation: int = 8  # 7: derivatives of the expert's schedule; 8: of the linear path
    damped: bool = False


@dataclass(frozen=True)
class Transfer:
    """Converts the outputs of one expert to canonical velocities."""

    prediction: Prediction
    schedule: Schedule
    conversion: Conversion | None = None  # None: calibrated for EPS where there is a calibration, else exact
    calibration: Calibration | None = None
    safeguards: Safeguards = field(default_factory=Safeguards)
    log_snr_range: tuple[float, float] | None = None
    """The range seen in training; None: the schedule's range between t = 0 and 1. Beyond the noisy end, the expert's
    x0 at that end is used, beyond the clean end its eps. `paper` ignores it."""

    def __post_init__(self) -> None:
        if self.log_snr_range is None:
            object.__setattr__(self, "log_snr_range", self.schedule.log_snr_range)
        # Only EPS divides its error by alpha to get x0; the others gain little, and shrinking costs diversity.
        needs_it = self.prediction is Prediction.EPS and self.calibration is not None
        default = Conversion.CALIBRATED if needs_it else Conversion.EXACT
        object.__setattr__(self, "conversion", Conversion(self.conversion or default))
        if self.conversion is Conversion.PAPER_DAMPED:
            object.__setattr__(self, "safeguards", replace(self.safeguards, damped=True))
        if self.conversion is Conversion.CALIBRATED and self.calibration is None:
            raise InputError("conversion 'calibrated' needs an expert that carries a calibration: use 'exact'")

    def to(self, device: torch.device) -> "Transfer":
        """Returns the same with the calibration on the device."""
        return self if self.calibration is None else replace(self, calibration=self.calibration.to(device))

    def velocity(self, predict: Predict, x: Tensor, t: Tensor, prior_mean: Tensor | None = None) -> Tensor:
        """Returns dx/dt = eps - x0 at canonical (x, t). `t` is one time for the batch (0-d) or one per sample.

        A calibrated x0 is shrunk towards `prior_mean`[B or 1, ...], by default the cluster's mean.
        """
        if self._is_canonical:
            check_times(t)
            return predict(x, t)
        if self.conversion in (Conversion.PAPER, Conversion.PAPER_DAMPED):
            return self._paper(predict, x, _time_for(x, t))
        x0, eps = self.estimate(predict, x, t, prior_mean)
        return eps - x0

    def estimate(self, predict: Predict, x: Tensor, t: Tensor, prior_mean: Tensor | None = None) -> Estimate:
        """Returns the (x0, eps) at canonical (x, t), by exact transfer and, if so configured, calibrated."""
        check_times(t)
        t = _time_for(x, t)
        assert self.log_snr_range is not None
        noisiest, cleanest = self.log_snr_range
        here, log_snr = LINEAR(interior(t)), LINEAR.log_snr(interior(t))
        native_t = self.schedule.time_of(log_snr.clamp(noisiest, cleanest))
        at = self.schedule.coefficients(native_t)
        # At equal SNR this equals both sigma_S / sigma and alpha_S / alpha, but never divides by zero.
        scale = torch.hypot(at.alpha, at.sigma) / torch.hypot(here.alpha, here.sigma)
        native_x = broadcast(scale, x) * x
        x0, eps = estimate(self.prediction, predict(native_x, native_t), native_x, at)

        alpha, sigma, _, _ = here.broadcast(x)
        if math.isfinite(noisiest):
            eps = torch.where(broadcast(log_snr < noisiest, x).bool(), (x - alpha * x0) / sigma, eps)
        if math.isfinite(cleanest):
            x0 = torch.where(broadcast(log_snr > cleanest, x).bool(), (x - sigma * eps) / alpha, x0)
        if self.conversion is Conversion.CALIBRATED:
            assert self.calibration is not None
            mean = (self.calibration.mean if prior_mean is None else prior_mean).to(x.device, x.dtype)
            gain = broadcast(self.calibration.gain_at(LINEAR.log_snr(t)), x)
            shrunk = mean + gain * (x0 - mean)
            x0, eps = shrunk, eps + alpha / sigma * (x0 - shrunk)  # x = alpha x0 + sigma eps still holds
        return Estimate(x0, eps)

    @property
    def _is_canonical(self) -> bool:
        """Returns whether the expert's output already is the canonical velocity."""
        return (
            self.prediction is Prediction.VELOCITY
            and self.schedule == LINEAR
            and self.conversion is not Conversion.CALIBRATED
            and self.log_snr_range == LINEAR.log_snr_range
        )

    def _paper(self, predict: Predict, x: Tensor, t: Tensor) -> Tensor:
        """Returns Eq. 5-8, with the expert evaluated at the canonical (x, t), though its own marginal there differs."""
        guard = self.safeguards
        check_times(t)
        at = self.schedule(self.schedule.inside(t))
        if self.prediction is Prediction.EPS:
            at = at._replace(alpha=at.alpha.clamp_min(guard.alpha_floor))
        x0, eps = estimate(self.prediction, predict(x, t), x, at)
        x0 = x0.clamp(-guard.clamp, guard.clamp)
        path = self.schedule if guard.equation == 7 else LINEAR
        _, _, d_alpha, d_sigma = path(path.inside(t))
        own = self.schedule(self.schedule.inside(t)) if guard.damped else path(path.inside(t))
        steepest = torch.maximum(own.d_alpha.abs(), own.d_sigma.abs()).clamp_min(1)
        scale = torch.where(t > guard.damping_start, 1 / steepest, torch.ones_like(steepest))
        return broadcast(d_alpha * scale, x) * x0 + broadcast(d_sigma * scale, x) * eps


def _time_for(x: Tensor, t: Tensor) -> Tensor:
    """Returns t in the precision of x."""
    if x.dtype not in (torch.float32, torch.float64):
        raise InputError(f"x has dtype {x.dtype}: keep latents in float32, and let the network alone run in less")
    return t.to(x.dtype)
