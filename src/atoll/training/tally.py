"""Counts losses and skipped updates on the device, so that the host need not wait for a GPU at every step."""

import math

import torch
from torch import Tensor

from atoll.tensors import send
from atoll.training.checkpoint import Progress

WILD = 1000.0  # multiple of the first loss, about that of predicting zeros: no run that learns comes near it


class Tally:
    """Decides on the device which updates to skip, as gradient scalers do, and sums losses and norms for the metrics.

    Only `look` makes the host wait for the device.
    """

    def __init__(self, progress: Progress, device: torch.device) -> None:
        self.device = device
        self.set(progress)

    def set(self, progress: Progress) -> None:
        """Starts from the counts in `progress`."""
        first = math.nan if progress.first_loss is None else progress.first_loss
        known = (progress.loss_sum, progress.norm_sum, progress.num_summed, first, progress.bad_in_a_row)
        state = send(torch.tensor(known, dtype=torch.float64), self.device)
        self._sums, self._first, self._bad_in_a_row = state[:3].clone(), state[3], state[4]
        self._longest = self._bad_in_a_row  # the longest run of bad steps since, and the step at which it ended
        self._end = torch.zeros_like(self._longest)
        self._num = 0  # steps counted since

    def count(self, loss_and_norm: Tensor) -> Tensor:
        """Counts a step by its loss and gradient norm; returns 1 if its update is to be skipped, else 0."""
        values = loss_and_norm.double()
        good = torch.isfinite(values).all() & ~(values[0] > WILD * self._first)  # NaN until there is a first loss
        self._sums += torch.where(good, torch.cat([values, torch.ones_like(values[:1])]), 0)
        self._first = torch.where(good & torch.isnan(self._first), values[0], self._first)
        self._bad_in_a_row = torch.where(good, 0, self._bad_in_a_row + 1)
        self._num += 1
        self._end = torch.where(self._bad_in_a_row > self._longest, self._num, self._end)
        self._longest = torch.maximum(self._longest, self._bad_in_a_row)
        return (~good).float()

    def look(self, progress: Progress) -> tuple[int, int]:
        """Updates `progress` from the device; returns the longest run of bad steps since `set`, and how long ago."""
        rest = torch.stack([self._first, self._bad_in_a_row, self._longest, self._end])
        loss_sum, norm_sum, num, first, bad_in_a_row, longest, end = torch.cat([self._sums, rest]).tolist()
        updates = int(num) - progress.num_summed
        progress.updates += updates
        progress.skipped += self._num - updates
        progress.loss_sum, progress.norm_sum, progress.num_summed = loss_sum, norm_sum, int(num)
        progress.first_loss = None if math.isnan(first) else first
        ago = self._num - int(end)
        progress.bad_in_a_row, self._num = int(bad_in_a_row), 0
        return int(longest), ago
