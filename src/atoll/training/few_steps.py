"""`atoll distill --steps-out 4`: trains a student that samples in a few steps.

N even steps lead from noise to data. At the start t of a step the student learns the *mean* velocity of its teacher
over the step, (x_t - x_s) / (t - s). Euler's method with N steps then ends where the teacher does, so no other code
treats the student specially; only its card says how many steps it was made for.

The x_t and x_s come from trajectories that the teacher samples once, from noise and captions and with its guidance,
before the student's training starts. They are kept, because one costs as much as dozens of updates, and students of 4,
2 and 1 steps can train on the same ones. Only the captions of the data are used, not the images.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from atoll.data.shards import Dataset
from atoll.diffusion.solvers import Step, uniform_times
from atoll.errors import InputError, plural, shown
from atoll.networks.expert import Expert
from atoll.sampling.ensemble import draw_noise, generate, image_generators
from atoll.storage import exists, make_folder, read_json, write_json, write_whole
from atoll.tensors import check_memory, read_tensors
from atoll.training.distill import DistillTask, Teacher, squared_error
from atoll.training.settings import BOUNDS, DistillSettings
from atoll.training.task import Batch, Tensors, mixed_seed

FOLDER, INDEX = "trajectories", "trajectories.json"
IN_A_FILE = 256  # trajectories
EVALUATED = 128  # held-out captions; trajectories are expensive
ADVICE = "remove it, and the command that has made it makes it again"


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
        reuse: Path | None = None,
    ) -> None:
        super().__init__(data, settings, device, teacher, init, allow_missing)
        assert settings.steps_out is not None
        self.num_steps = self.grid_steps = settings.steps_out
        self.guidance = 1.0  # of sample grids
        self.teacher_steps = -(-settings.teacher_steps // self.num_steps) * self.num_steps
        self.num_rows = settings.trajectories
        self.made_from = {
            **{key: value for key, value in self.teacher.about.items() if key != "name"},
            "data": self.view.identity(),
            "steps": self.teacher_steps,
            "num": settings.trajectories,
            "null": self.text_dropout,
            "seed": settings.seed,
            "ends": self.num_steps,
        }
        self.reuse = None if reuse is None else reuse / FOLDER
        if self.reuse is not None:
            self.made_from = self._read_index(self.reuse)
        check_memory(4 * self.num_rows * (self.num_steps + 1) * self.view.mean.numel(), "the teacher's trajectories")
        self.states: Tensor | None = None  # [n, N + 1, C, S, S], from noise to data
        self._held_out: Tensor | None = None

    def _read_index(self, folder: Path) -> dict[str, Any]:
        """Returns the index of another run's trajectories; raises an InputError if they do not fit this student."""
        if not exists(folder / INDEX):
            raise InputError(f"{folder.parent} has no {FOLDER}: give a student that was made with --steps-out")
        made = read_json(folder / INDEX, ADVICE)
        for key, value in self.made_from.items():
            if key not in ("seed", "ends", "steps") and made.get(key) != value:
                raise InputError(f"the {FOLDER} in {folder.parent} have {key} {made.get(key)}, not {value}")
        ends, steps, seed = (made.get(key) for key in ("ends", "steps", "seed"))
        if type(ends) is not int or not 1 <= ends <= BOUNDS["steps_out"][1] or ends % self.num_steps:
            raise InputError(f"{folder.parent} was made for {shown(ends)} steps, in which {self.num_steps} do not end")
        if type(steps) is not int or not 1 <= steps <= 2 * BOUNDS["teacher_steps"][1] or steps % ends:
            raise InputError(f"{folder / INDEX} says that the teacher took {shown(steps)} steps: {ADVICE}")
        if type(seed) is not int:
            raise InputError(f"{folder / INDEX} has the seed {shown(seed)}: {ADVICE}")
        return made

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "trajectories": self.made_from}

    # --- the teacher's trajectories -------------------------------------------------------------------------------

    def begin(self, folder: Path, share: slice, progress: bool) -> None:
        """Samples the missing trajectories of this process's share."""
        if self.reuse is not None:
            return
        files = self._files(folder / FOLDER)
        mine = list(files)[share]
        missing = [numbers for numbers in mine if not exists(files[numbers])]
        if not missing:
            return
        make_folder(folder / FOLDER)
        with tqdm(
            total=sum(map(len, mine)),
            initial=sum(map(len, mine)) - sum(map(len, missing)),
            desc=f"{FOLDER} of the teacher",
            unit="image",
            disable=not progress,
        ) as bar:
            for numbers in missing:
                parts = []
                for first in range(0, len(numbers), self.at_a_time):
                    parts.append(self.trajectories(self.view.train, numbers[first : first + self.at_a_time]))
                    bar.update(len(parts[-1]))
                write_whole(files[numbers], partial(save_file, {"states": torch.cat(parts)}))

    def ready(self, folder: Path) -> None:
        """Reads all trajectories, once every process has written its own."""
        place = self.reuse or folder / FOLDER
        ends, shape = int(self.made_from["ends"]), tuple(self.view.shape)
        parts = []
        for numbers, path in self._files(place).items():
            states = read_tensors(path, ADVICE).get("states")
            if states is None or states.shape != (len(numbers), ends + 1, *shape) or states.dtype != torch.float32:
                raise InputError(
                    f"{path} does not hold {len(numbers)} trajectories of {plural(ends, 'step')}: {ADVICE}"
                )
            parts.append(states[:, :: ends // self.num_steps].clone())
        self.states = torch.cat(parts)
        if self.reuse is None and not exists(place / INDEX):
            write_json(place / INDEX, self.made_from)

    def _files(self, folder: Path) -> dict[range, Path]:
        parts = [range(i, min(i + IN_A_FILE, self.num_rows)) for i in range(0, self.num_rows, IN_A_FILE)]
        return {numbers: folder / f"{place:05d}.safetensors" for place, numbers in enumerate(parts)}

    def prompt_of(self, rows: NDArray[np.int64], number: int) -> tuple[int, Tensor, int]:
        """Returns a trajectory's row, tokens and noise seed, which are functions of its number."""
        seed = mixed_seed("trajectory", self.made_from["seed"], number)
        generator = torch.Generator().manual_seed(seed)
        row = rows[[int(torch.randint(len(rows), (), generator=generator))]]
        dropped, choice = torch.rand(2, 1, generator=generator)
        if float(dropped) < float(self.made_from["null"]):
            return int(row[0]), self.null_ids, seed
        several = self.view.num_captions > 1
        return int(row[0]), self.view.tokens(row, self.text, choice if several else None), seed

    def trajectories(self, rows: NDArray[np.int64], numbers: Sequence[int]) -> Tensor:
        """Samples these trajectories; returns their latents at the ends of steps, [n, ends + 1, C, S, S]."""
        places, ids, seeds = zip(*(self.prompt_of(rows, number) for number in numbers), strict=True)
        tokens = torch.cat(ids)
        prompts = self._prompts(self.text.encode(tokens.to(self.device))[0], tokens)
        ensemble, ends, num = self.teacher.ensemble, int(self.made_from["ends"]), int(self.made_from["steps"])
        states = [draw_noise(image_generators(seeds), ensemble.shape)]

        def keep(step: Step) -> None:
            if (step.number + 1) % (num // ends) == 0:
                states.append(step.x.float().cpu())

        generate(
            ensemble, prompts, seeds, times=uniform_times(num), solver="multistep", routing=self.teacher.routing,
            guidance=self.teacher.guidance, labels=self.experts[list(places)], on_step=keep,
        )  # fmt: skip
        return torch.stack([states[0], *states[-ends:]], 1)  # the last ones: `generate` may have sampled twice

    def preparation(self) -> Sequence[str]:
        """Returns a line on the time of all trajectories, measured on a few; the dry run trains on noise instead."""
        self.states = torch.randn(self.num_rows, self.num_steps + 1, *self.view.shape)
        if self.reuse is not None:
            return []
        start, few = time.perf_counter(), min(self.at_a_time, 16)
        self.trajectories(self.view.train, range(few))
        minutes = (time.perf_counter() - start) / few * self.num_rows / 60
        return [f"  {FOLDER:14} {self.num_rows} of the teacher in {minutes:.1f} minutes, before the first step"]

    # --- learning from them ---------------------------------------------------------------------------------------

    def draw(self, num: int, generator: torch.Generator) -> Tensors:
        """Returns the sampling step that each sample trains, from 0."""
        return (torch.randint(self.num_steps, (num,), generator=generator),)

    def read(self, rows: NDArray[np.int64], drawn: Tensors) -> Batch:
        """Returns a batch with the ends of steps as its latents and their starts as its noise."""
        assert self.states is not None
        (step,), at = drawn, torch.from_numpy(rows)
        ids = torch.cat([self.prompt_of(self.view.train, int(number))[1] for number in rows])
        begin, end = self.states[at, step], self.states[at, step + 1]
        return Batch(end, self.cut(ids), 1 - step / self.num_steps, begin, torch.zeros_like(step))

    def loss(self, network: nn.Module, batch: Batch, host: Batch) -> Tensor:
        target = (batch.eps - batch.latents) * self.num_steps
        return squared_error(network(batch.eps, batch.t, *self.encode(batch, host)), target)

    @torch.no_grad()
    def losses_to_teacher(self) -> list[float]:
        """Returns the mean squared error to the teacher in each step, in order, on a fixed set of trajectories from
        held-out captions."""
        rows = self.view.evaluation_rows(EVALUATED)
        numbers = range(self.num_rows, self.num_rows + EVALUATED)  # none of them is trained on
        parts = [numbers[first : first + self.at_a_time] for first in range(0, EVALUATED, self.at_a_time)]
        if self._held_out is None:  # cached: the teacher does not change
            stride = int(self.made_from["ends"]) // self.num_steps
            self._held_out = torch.cat([self.trajectories(rows, part) for part in parts])[:, ::stride]
        losses = []
        for part, states in zip(parts, self._held_out.split(self.at_a_time), strict=True):
            ids = torch.cat([self.prompt_of(rows, number)[1] for number in part])
            text = self.text.encode(ids.to(self.device))
            for i in range(self.num_steps):
                t = torch.full((len(states),), 1 - i / self.num_steps, device=self.device)
                found = self.network(states[:, i].to(self.device), t, *text).float().cpu()
                losses.append(squared_error(found, (states[:, i] - states[:, i + 1]) * self.num_steps))
        by_step = [torch.cat(losses[i :: self.num_steps]) for i in range(self.num_steps)]
        return [float(loss.mean()) for loss in by_step]

    def loss_to_teacher(self, num: int) -> float:
        del num  # always EVALUATED: trajectories are expensive
        losses = self.losses_to_teacher()
        return sum(losses) / len(losses)

    def _evaluate(self, num: int) -> tuple[float, list[float | None]]:
        """Returns errors to the teacher alone, since the student has learned nothing at times between its steps."""
        losses = self.losses_to_teacher()
        return sum(losses) / len(losses), list(losses)

    def as_expert(self, training: Mapping[str, Any]) -> Expert:
        expert = super().as_expert(training)
        self.network.card = {**self.network.card, "steps": self.num_steps}
        return expert

    def describe_result(self, apart: float) -> Sequence[str]:
        steps = plural(self.num_steps, "step")
        return [f"a student that makes an image in {steps}: {apart:.4f} from its teacher, on {self.view.measured_on}"]
