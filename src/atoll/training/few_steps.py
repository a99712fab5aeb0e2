"""A student that makes an image in a few steps: `atoll distill --steps-out 4`.

N even steps lead from noise to data. At the start t of a step the student learns the *mean* velocity of its teacher
over the step, (x_t - x_s) / (t - s). Euler's method with N steps then ends where the teacher does: nothing else has to
know that the student is special, but for its card, which says how many steps it was made for.

The x_t and x_s are of trajectories that the teacher makes once, from noise and captions, guidance included, before the
student begins. They are kept: making one costs as much as dozens of updates, and students of 4, 2 and 1 steps can learn
from the same ones. Images of the data are not needed, only their captions.
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
EVALUATED = 128  # held-out captions; a trajectory is dear
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
        self.guidance = 1.0  # of the images that a run shows
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
        """Returns what is known of trajectories that another run has made; those of another teacher are refused."""
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
        """Makes the trajectories that are missing, or this process's share of them."""
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
        """Reads them all, when all processes have made theirs."""
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
        """Returns the row, the tokens and the noise's seed of a trajectory: functions of its number."""
        seed = mixed_seed("trajectory", self.made_from["seed"], number)
        generator = torch.Generator().manual_seed(seed)
        row = rows[[int(torch.randint(len(rows), (), generator=generator))]]
        dropped, choice = torch.rand(2, 1, generator=generator)
        if float(dropped) < float(self.made_from["null"]):
            return int(row[0]), self.null_ids, seed
        several = self.view.num_captions > 1
        return int(row[0]), self.view.tokens(row, self.text, choice if several else None), seed

    def trajectories(self, rows: NDArray[np.int64], numbers: Sequence[int]) -> Tensor:
        """Returns where the teacher's images of these numbers are at the ends of steps: [n, ends + 1, C, S, S]."""
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
        return torch.stack([states[0], *states[-ends:]], 1)  # those of a second attempt, if there was one

    def preparation(self) -> Sequence[str]:
        """Returns how long the trajectories take, measured on a few; a dry run trains on noise in their place."""
        self.states = torch.randn(self.num_rows, self.num_steps + 1, *self.view.shape)
        if self.reuse is not None:
            return []
        start, few = time.perf_counter(), min(self.at_a_time, 16)
        self.trajectories(self.view.train, range(few))
        minutes = (time.perf_counter() - start) / few * self.num_rows / 60
        return [f"  {FOLDER:14} {self.num_rows} of the teacher in {minutes:.1f} minutes, before the first step"]

    # --- learning from them ---------------------------------------------------------------------------------------

    def draw(self, num: int, generator: torch.Generator) -> Tensors:
        """Returns the step that each sample learns, from 0."""
        return (torch.randint(self.num_steps, (num,), generator=generator),)

    def read(self, rows: NDArray[np.int64], drawn: Tensors) -> Batch:
        """Returns where steps end in place of images, and where they begin in place of noise."""
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
        """Returns how far the student is from its teacher in each of its steps, the first one first, on trajectories of
        held-out captions, always the same ones."""
        rows = self.view.evaluation_rows(EVALUATED)
        numbers = range(self.num_rows, self.num_rows + EVALUATED)  # none that is learned from
        parts = [numbers[first : first + self.at_a_time] for first in range(0, EVALUATED, self.at_a_time)]
        if self._held_out is None:  # the teacher says the same each time
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
        del num  # a trajectory is dear
        losses = self.losses_to_teacher()
        return sum(losses) / len(losses)

    def _evaluate(self, num: int) -> tuple[float, list[float | None]]:
        """Measures against the teacher alone: at the times between its steps the student has learned nothing."""
        losses = self.losses_to_teacher()
        return sum(losses) / len(losses), list(losses)

    def as_expert(self, training: Mapping[str, Any]) -> Expert:
        expert = super().as_expert(training)
        self.network.card = {**self.network.card, "steps": self.num_steps}
        return expert

    def describe_result(self, apart: float) -> Sequence[str]:
        steps = plural(self.num_steps, "step")
        return [f"a student that makes an image in {steps}: {apart:.4f} from its teacher, on {self.view.measured_on}"]
