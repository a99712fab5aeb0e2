"""A student that makes an image in a few steps: `atoll distill --steps-out 4`.

N even steps lead from noise to data. At the start t of a step the student learns the *mean* velocity of its teacher
over the step, (x_t - x_s) / (t - s), where the teacher's own ODE leads from x_t to x_s in several evaluations, guidance
included. Euler's method with N steps then ends where the teacher does: nothing else has to know that the student is
special, but for its card, which says how many steps it was made for.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.data.shards import Dataset
from atoll.errors import plural
from atoll.networks.expert import Expert
from atoll.sampling.expert import Prompts
from atoll.training.distill import DistillTask, Teacher, squared_error
from atoll.training.held_out import held_out_batches
from atoll.training.settings import DistillSettings
from atoll.training.task import Batch, Tensors, on_linear_path


class FewStepTask(DistillTask):
    """(x_t, t, text) -> the teacher's mean velocity over the step that begins at t."""

    def __init__(
        self,
        data: Dataset,
        settings: DistillSettings,
        device: torch.device,
        teacher: Teacher,
        init: Path | None = None,
        allow_missing: bool = False,
    ) -> None:
        super().__init__(data, settings, device, teacher, init, allow_missing)
        assert settings.steps_out is not None
        self.num_steps = settings.steps_out
        self.substeps = -(-settings.teacher_steps // self.num_steps)  # of the teacher, in one of the student's
        self.grid_steps = self.num_steps
        self.guidance = 1.0  # of the images that a run shows

    def draw(self, num: int, generator: torch.Generator) -> Tensors:
        t, *others = super().draw(num, generator)
        return self.start_of_step(t), *others

    def start_of_step(self, t: Tensor) -> Tensor:
        """Returns where the step begins in which t lies."""
        return ((t * self.num_steps).floor() + 1).clamp(max=self.num_steps) / self.num_steps

    def loss(self, network: nn.Module, batch: Batch, host: Batch) -> Tensor:
        tokens, mask = self.encode(batch, host)
        x = on_linear_path(batch.latents.float(), batch.eps, batch.t)
        target = self.mean_velocity(x, batch.t, self._prompts(tokens, host.ids), host.labels)
        return squared_error(network(x, batch.t, tokens, mask), target)

    def mean_velocity(self, x: Tensor, t: Tensor, prompts: Prompts | None, experts: Tensor | None) -> Tensor:
        """Returns the teacher's over the step that begins at t[B]."""
        end = t - 1 / self.num_steps
        return (x - self.teacher.walk(x, t, end, self.substeps, prompts, experts)) * self.num_steps

    @torch.no_grad()
    def losses_to_teacher(self, num: int) -> list[float]:
        """Returns how far the student is from its teacher in each of its steps, the first one first, on held-out rows,
        always at the same noise."""
        targets, losses, starts = self._targets.setdefault(num, []), [], []
        batches = held_out_batches(self.view, self.text, self.device, num, self.at_a_time, self.experts)
        for i, (rows, x0, eps, times, text) in enumerate(batches):
            t = self.start_of_step(times.float())
            x, at = on_linear_path(x0, eps, t).to(self.device), t.to(self.device)
            if i == len(targets):  # the teacher says the same each time
                prompts = self._prompts(text[0], self.view.tokens(rows))
                targets.append(self.mean_velocity(x, at, prompts, self.experts[rows]).cpu())
            losses.append(squared_error(self.network(x, at, *text).float().cpu(), targets[i]))
            starts.append(t)
        by_start, loss = torch.cat(starts), torch.cat(losses)
        return [float(loss[by_start == start].mean()) for start in by_start.unique().flip(0)]

    def loss_to_teacher(self, num: int) -> float:
        losses = self.losses_to_teacher(num)
        return sum(losses) / len(losses)

    def _evaluate(self, num: int) -> tuple[float, list[float | None]]:
        """Measures against the teacher alone: at the times between its steps the student has learned nothing."""
        losses = self.losses_to_teacher(num)
        return sum(losses) / len(losses), list(losses)

    def as_expert(self, training: Mapping[str, Any]) -> Expert:
        expert = super().as_expert(training)
        self.network.card = {**self.network.card, "steps": self.num_steps}
        return expert

    def describe_result(self, apart: float) -> Sequence[str]:
        steps = plural(self.num_steps, "step")
        return [f"a student that makes an image in {steps}: {apart:.4f} from its teacher, on {self.view.measured_on}"]
