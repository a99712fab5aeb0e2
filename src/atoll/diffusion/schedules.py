"""Noise schedules: x_t = alpha_t x0 + sigma_t eps, where t = 0 is data and t = 1 is noise.

A schedule turns times into named coefficients with their derivatives, and into the log signal-to-noise
ratio log(alpha^2 / sigma^2), which is the quantity two schedules have in common: `time_of` inverts it.
Times keep their dtype, and every formula is written so that it stays accurate where alpha or sigma vanish.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from atoll.errors import InputError, unknown
from atoll.tensors import send


class Coefficients(NamedTuple):
    """alpha, sigma and their derivatives in t, each of the shape of t."""

    alpha: Tensor
    sigma: Tensor
    d_alpha: Tensor
    d_sigma: Tensor

    def broadcast(self, x: Tensor) -> "Coefficients":
        """Returns the same, shaped and typed to multiply a batch x[B, ...]."""
        return Coefficients(*(broadcast(c, x) for c in self))


def broadcast(values: Tensor, x: Tensor) -> Tensor:
    """Returns one value for the batch (0-d), or one per sample ([B]), shaped and typed to multiply x[B, ...]."""
    if values.dim() == 0:
        return values.to(x.device, x.dtype)
    return values.to(x.device, x.dtype).view(-1, *[1] * (x.dim() - 1))


def check_times(t: Tensor) -> None:
    """Raises InputError for times that are not floats in [0, 1]. Values are checked only on the CPU: reading them would
    stall a GPU."""
    if t.dtype not in (torch.float32, torch.float64):
        raise InputError(f"t has dtype {t.dtype}: times are float32 or float64 fractions in [0, 1], not step numbers")
    if t.device.type != "cpu" or torch.compiler.is_compiling() or t.numel() == 0:
        return
    least, most = (float(end) for end in torch.aminmax(t.detach()))
    if not (least >= 0 and most <= 1):
        span = f"{least:g}" if least == most else f"values from {least:g} to {most:g}"
        raise InputError(f"t must lie in [0, 1] but is {span}: times are fractions (0 data, 1 noise), not step numbers")


def interior(t: Tensor) -> Tensor:
    """Returns t clamped to stay sqrt(machine epsilon) away from the ends.

    Where alpha or sigma vanishes, an estimate divided by it is 0/0. A step of size d away from the end costs
    an error of order d, and rounding costs epsilon / d: the sum is least at d = sqrt(epsilon).
    """
    d = math.sqrt(torch.finfo(t.dtype).eps)
    return t.clamp(d, 1 - d)


class Schedule(ABC):
    """t -> (alpha, sigma), for t in [0, 1]."""

    data_time: float = 0.0
    """The time at which alpha = 1 and sigma = 0; below 0 for a table whose first step has noise."""

    def __call__(self, t: Tensor) -> Coefficients:
        check_times(t)
        return self.coefficients(t)

    @abstractmethod
    def coefficients(self, t: Tensor) -> Coefficients:
        """Returns alpha, sigma and their derivatives, without checking t: `time_of` may return times outside [0, 1]."""

    @abstractmethod
    def log_snr(self, t: Tensor) -> Tensor:
        """Returns log(alpha^2 / sigma^2), which falls from data to noise."""

    @abstractmethod
    def time_of(self, log_snr: Tensor) -> Tensor:
        """Returns the time with this log-SNR: the inverse of `log_snr`."""

    def inside(self, t: Tensor) -> Tensor:
        """Returns t clamped away from ends where alpha or sigma vanishes; a table has no such ends."""
        return interior(t) if math.isinf(self.log_snr_range[0]) else t

    @cached_property
    def log_snr_range(self) -> tuple[float, float]:
        """Returns the log-SNR at t = 1 and at t = 0: the range seen by a network trained on this schedule."""
        noise, data = self.log_snr(torch.tensor([1.0, 0.0], dtype=torch.float64)).tolist()
        return noise, data


@dataclass(frozen=True)
class Linear(Schedule):
    """alpha = 1 - t, sigma = t: flow matching's straight path, and Atoll's canonical one (Eq. 4)."""

    def coefficients(self, t: Tensor) -> Coefficients:
        one = torch.ones_like(t)
        return Coefficients(1 - t, t, -one, one)

    def log_snr(self, t: Tensor) -> Tensor:
        return 2 * (torch.log1p(-t) - torch.log(t))

    def time_of(self, log_snr: Tensor) -> Tensor:
        return torch.sigmoid(-log_snr / 2)


@dataclass(frozen=True)
class Cosine(Schedule):
    """alpha = cos(pi t / 2), sigma = sin(pi t / 2): the DDPM experts' schedule (Eq. 3)."""

    def coefficients(self, t: Tensor) -> Coefficients:
        # The sine of the distance to each end: cos(pi t / 2) would lose precision as t -> 1.
        alpha, sigma = torch.sin(math.pi / 2 * (1 - t)), torch.sin(math.pi / 2 * t)
        return Coefficients(alpha, sigma, -math.pi / 2 * sigma, math.pi / 2 * alpha)

    def log_snr(self, t: Tensor) -> Tensor:
        alpha, sigma, _, _ = self.coefficients(t)
        return 2 * (torch.log(alpha) - torch.log(sigma))

    def time_of(self, log_snr: Tensor) -> Tensor:
        return 2 / math.pi * torch.atan(torch.exp(-log_snr / 2))


@dataclass(frozen=True)
class DDPMTable(Schedule):
    """A discrete DDPM table of betas in continuous time: t = i / (num_steps - 1) is step i of the table.

    log alpha^2 is the running sum of log(1 - beta_i), interpolated linearly between steps: a process whose noise
    rate is constant within a step, equal to the table at every step and invertible in closed form. A table
    neither starts at pure data nor ends at pure noise, so `time_of` may lead outside [0, 1]: clean data (alpha = 1)
    lies one step before t = 0, and the last rate continues past t = 1.
    """

    beta_start: float
    beta_end: float
    power: int = 1  # betas are evenly spaced in beta ** (1 / power)
    num_steps: int = 1000

    @property
    def data_time(self) -> float:  # type: ignore[override]
        return -1 / (self.num_steps - 1)

    @cached_property
    def betas(self) -> Tensor:
        root = 1 / self.power
        return (
            torch.linspace(self.beta_start**root, self.beta_end**root, self.num_steps, dtype=torch.float64)
            ** self.power
        )

    def coefficients(self, t: Tensor) -> Coefficients:
        log_alpha2, rate = self._log_alpha2(t)
        alpha, sigma = torch.exp(log_alpha2 / 2), torch.sqrt(-torch.expm1(log_alpha2))
        return Coefficients(alpha, sigma, alpha * rate / 2, -(alpha**2) * rate / (2 * sigma))

    def log_snr(self, t: Tensor) -> Tensor:
        log_alpha2, _ = self._log_alpha2(t)
        return log_alpha2 - torch.log(-torch.expm1(log_alpha2))

    def time_of(self, log_snr: Tensor) -> Tensor:
        log_alpha2 = F.logsigmoid(log_snr)
        start, rate = _table(self, log_snr.dtype, log_snr.device)
        step = torch.searchsorted(-start, -log_alpha2.contiguous(), right=True).sub(1).clamp(0, self.num_steps - 1)
        # `take`, since indexing with a 0-d tensor reads its value, which stalls a GPU.
        return (step - 1 + (log_alpha2 - start.take(step)) / rate.take(step)) / (self.num_steps - 1)

    def _log_alpha2(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log alpha^2 and its derivative in t."""
        start, rate = _table(self, t.dtype, t.device)
        position = t * (self.num_steps - 1) + 1  # 0 is data, i + 1 is step i of the table
        step = position.detach().long().clamp(0, self.num_steps - 1)
        within = rate.take(step)
        return (start.take(step) + within * (position - step)).clamp(max=0), within * (self.num_steps - 1)


@dataclass(frozen=True)
class CosineTable(DDPMTable):
    """Nichol and Dhariwal's 1000 betas, clipped at 0.999: the cosine schedule of DDPM samplers, whose last alpha is
    not 0."""

    beta_start: float = 0.0
    beta_end: float = 0.999

    @cached_property
    def betas(self) -> Tensor:
        t = torch.arange(self.num_steps + 1, dtype=torch.float64) / self.num_steps
        alpha2 = torch.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2
        return (1 - alpha2[1:] / alpha2[:-1]).clamp(max=self.beta_end)


@lru_cache
def _table(schedule: DDPMTable, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns log alpha^2 at the start of each step, and its rate within the step."""
    rate = torch.log1p(-schedule.betas)
    start = F.pad(torch.cumsum(rate, 0), (1, 0))[:-1]
    return send(start.to(dtype), device), send(rate.to(dtype), device)


LINEAR = Linear()

SCHEDULES: dict[str, Schedule] = {
    "linear": LINEAR,
    "cosine": Cosine(),
    "ddpm": DDPMTable(1e-4, 2e-2),  # DiT, and DDPM itself
    "ddpm-scaled": DDPMTable(0.00085, 0.012, power=2),  # Stable Diffusion
    "ddpm-cosine": CosineTable(),
}


def get_schedule(name: str) -> Schedule:
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    return SCHEDULES[name]
