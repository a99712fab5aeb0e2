"""The one training loop: experts, the monolith, the router and a student each bring a task, all else is here.

Everything random is a function of (seed, step): the order of the data, noise, times and dropout. So a run that was
stopped, however, is resumed by the same command as if it had not been.
"""

import hashlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from atoll.errors import InputError, printable
from atoll.networks.dit import Trunk
from atoll.plots.contact_sheet import save_picture
from atoll.storage import open_regular, read_json, real_path, reason_of, write_json
from atoll.training import checkpoint as state
from atoll.training.checkpoint import Progress
from atoll.training.distributed import Team
from atoll.training.memory import Heap
from atoll.training.metrics_log import Journal
from atoll.training.settings import Settings, refuse_another

MOST_BAD_IN_A_ROW = 5
WILD = 1000.0  # times the first loss, which is that of answering nothing: no run that learns comes near it
PARTS = ("weights", "averaged", "moment1", "moment2")

Tensors = tuple[Tensor, ...]


class Task(Protocol):
    """What a run trains."""

    num_rows: int  # to train on

    @property
    def network(self) -> Trunk: ...

    @property
    def text_length(self) -> int:
        """The tokens of the longest text in a batch, or about so many."""

    @property
    def frozen_bytes(self) -> int:
        """What is in memory beside the network and never learns: the text encoder, the codec of sample grids."""

    def describe(self) -> dict[str, Any]:
        """What makes it this run and no other, beside the settings: the data above all."""

    def read(self, rows: NDArray[np.int64]) -> Tensors:
        """Rows of the training data, each tensor with one entry a row."""

    def draw(self, num: int, generator: torch.Generator) -> Tensors:
        """The random numbers of `num` samples."""

    def loss(self, network: nn.Module, batch: Tensors, drawn: Tensors) -> Tensor:
        """Of each sample: [B]."""

    def evaluate(self) -> Mapping[str, Any]:
        """Figures on held-out data; the network has the averaged weights meanwhile."""

    def picture(self) -> Image.Image | None:
        """What the averaged network makes of held-out captions, after `evaluate`."""

    def finish(self, folder: Path, training: Mapping[str, Any]) -> Sequence[str]:
        """Write the result, the network having the averaged weights; returns what to tell the user."""


def mixed_seed(*parts: object) -> int:
    """A seed from several numbers or names, all of which matter."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(*parts: object) -> Iterator[None]:
    """Torch's own random numbers from a seed, and afterwards as they were before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mixed_seed(*parts))
        yield


class Order:
    """Which rows each step trains on: every epoch a new permutation, a function of (seed, epoch)."""

    def __init__(self, num_rows: int, batch: int) -> None:
        self.num_rows, self.batch = num_rows, batch
        self._epochs: dict[tuple[str, int], NDArray[np.int64]] = {}

    def rows(self, seed: str, step: int) -> NDArray[np.int64]:
        first = step * self.batch
        places = np.arange(first, first + self.batch)
        out = np.empty(self.batch, np.int64)
        for epoch in range(first // self.num_rows, (first + self.batch - 1) // self.num_rows + 1):
            here = places // self.num_rows == epoch
            out[here] = self._epoch(seed, epoch)[places[here] % self.num_rows]
        return out

    def _epoch(self, seed: str, epoch: int) -> NDArray[np.int64]:
        if (seed, epoch) not in self._epochs:
            while len(self._epochs) > 1:  # 11 million rows are 88 MB
                self._epochs.pop(next(iter(self._epochs)))
            rng = np.random.default_rng(mixed_seed("order", seed, epoch))
            self._epochs[seed, epoch] = rng.permutation(self.num_rows)
        return self._epochs[seed, epoch]


class Run:
    """A task in training: its network, the averaged weights, AdamW, and where it is."""

    def __init__(self, task: Task, settings: Settings, team: Team) -> None:
        self.task, self.settings, self.team = task, settings, team
        self.network = task.network.to(team.device).train()
        self.network.gradient_checkpointing = settings.checkpointing
        if settings.compile:
            for block in self.network.blocks:
                block.compile()
        named = [(name, p) for name, p in self.network.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.weights: list[Tensor] = [p for _, p in named]
        self.averaged = [p.detach().clone() for p in self.weights]
        self.optimizer = torch.optim.AdamW(
            self.weights,
            lr=0.0,
            betas=(0.9, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=team.device.type in ("cpu", "cuda"),
        )
        for p in self.weights:
            self.optimizer.state[p] = {
                "step": torch.zeros((), device=p.device if p.is_cuda else None),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        self.progress = Progress()
        self.wrapped = team.wrap(self.network)
        self.order = Order(task.num_rows, settings.batch)
        self.ahead = ThreadPoolExecutor(1, "batches")
        self.coming: tuple[tuple[int, int], Future[tuple[Tensors, Tensors]]] | None = None
        self.width = self.network.config.hidden_size
        self.heap = Heap(settings.checkpointing) if team.device.type == "cpu" else None

    # --- one step -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One update, or none if the loss or the gradient is not finite."""
        progress, settings = self.progress, self.settings
        batch, drawn = self._batch()
        loss = self._backward(batch, drawn)
        norm = nn.utils.clip_grad_norm_(self.weights, settings.clip)
        figures = self.team.mean(torch.stack([loss, norm.detach()]))
        mean_loss, mean_norm = figures.tolist()
        limit = math.inf if progress.first_loss is None else WILD * progress.first_loss
        good = math.isfinite(mean_loss) and math.isfinite(mean_norm) and mean_loss <= limit
        if good:
            if progress.first_loss is None:
                progress.first_loss = mean_loss
            for group in self.optimizer.param_groups:
                group["lr"] = settings.lr_at(progress.step, self.width)
            self.optimizer.step()
            torch._foreach_lerp_(self.averaged, self.weights, 1 - settings.ema_at(progress.updates))
            progress.updates += 1
            progress.bad_in_a_row = 0
            progress.loss_sum += mean_loss
            progress.norm_sum += mean_norm
            progress.num_summed += 1
        else:
            progress.skipped += 1
            progress.bad_in_a_row += 1
        self.optimizer.zero_grad()
        if self.heap is not None:
            self.heap.tidy()
        progress.step += 1

    def _backward(self, batch: Tensors, drawn: Tensors) -> Tensor:
        """Gradients of the mean loss over this process's share, a micro-batch at a time; that loss."""
        share = len(batch[0])
        size = min(self.settings.micro_batch or share, share)
        total = torch.zeros((), device=self.team.device)
        for first in range(0, share, size):
            part = slice(first, first + size)
            mine = tuple(tensor[part].to(self.team.device, non_blocking=True) for tensor in batch)
            random = tuple(tensor[part].to(self.team.device, non_blocking=True) for tensor in drawn)
            with self.team.adding_up(self.wrapped, first + size >= share):
                with torch.autocast(self.team.device.type, torch.bfloat16, enabled=self.settings.uses_bf16):
                    loss = self.task.loss(self.wrapped, mine, random).sum() / share
                loss.backward()
            total += loss.detach()
        return total

    def _batch(self) -> tuple[Tensors, Tensors]:
        """This step's batch, which was read while the one before was trained on."""
        wanted = (self.progress.step, self.progress.rollbacks)
        if self.coming is None or self.coming[0] != wanted:
            self.coming = (wanted, self.ahead.submit(self._read, *wanted))
        found = self.coming[1].result()
        following = (wanted[0] + 1, wanted[1])
        self.coming = (following, self.ahead.submit(self._read, *following))
        return found

    def _read(self, step: int, rollbacks: int) -> tuple[Tensors, Tensors]:
        # After a rollback the same numbers would lead to the same end, so it has a share in the seed.
        seed = f"{self.settings.seed}.{rollbacks}"
        rows = self.order.rows(seed, step)
        generator = torch.Generator().manual_seed(mixed_seed("step", seed, step))
        drawn = self.task.draw(len(rows), generator)
        mine = self.team.mine
        return self.task.read(rows[mine]), tuple(tensor[mine] for tensor in drawn)

    # --- the state ------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """All that is learned, by part and name."""
        moments = [[self.optimizer.state[p][key] for p in self.weights] for key in ("exp_avg", "exp_avg_sq")]
        lists: list[Sequence[Tensor]] = [[p.detach() for p in self.weights], self.averaged, *moments]
        return {
            f"{part}.{name}": tensor
            for part, tensors in zip(PARTS, lists, strict=True)
            for name, tensor in zip(self.names, tensors, strict=True)
        }

    def save(self, folder: Path) -> None:
        if self.team.leads:
            state.save(folder, self.tensors(), self.progress)
            state.prune(folder, self.settings.keep_last, self.settings.keep_every)

    def is_sound(self) -> bool:
        """Whether this is a state to come back to."""
        return self.progress.bad_in_a_row == 0 and all(bool(torch.isfinite(w).all()) for w in self.weights)

    def load(self, path: Path) -> None:
        self.progress = state.load(path, self.tensors())
        for p in self.weights:
            self.optimizer.state[p]["step"].fill_(self.progress.updates)

    @contextmanager
    def using_averaged(self) -> Iterator[None]:
        """The averaged weights in the place of the others."""
        self._swap()
        self.network.eval()
        checkpointing, self.network.gradient_checkpointing = self.network.gradient_checkpointing, False
        try:
            with torch.no_grad():
                yield
        finally:
            self.network.gradient_checkpointing = checkpointing
            self.network.train()
            self._swap()

    def _swap(self) -> None:
        for i, p in enumerate(self.weights):
            p.data, self.averaged[i] = self.averaged[i], p.data

    def give_back(self) -> None:
        """Before anything but an update is done, whose memory would come on top of the holes that updates leave."""
        if self.heap is not None:
            self.heap.give_back()

    def close(self) -> None:
        self.ahead.shutdown(wait=False, cancel_futures=True)


def train(
    make_task: Callable[[torch.device], Task], settings: Settings, folder: Path, progress: bool = True
) -> Sequence[str]:
    """Train until settings.steps, from where the folder's last state is; returns what to tell the user."""
    team = Team(settings)
    with team.holding(folder):
        if team.leads:
            refuse_links(folder)
            if not (folder / "run.json").exists():
                refuse_foreign(folder)
        return Session(made(make_task, team.device), settings, folder, team, progress).go()


def made(make_task: Callable[[torch.device], Task], device: torch.device) -> Task:
    """The task; a network that is too large for this machine is a sentence."""
    try:
        return make_task(device)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "alloc" in str(error):
            raise InputError("this machine has too little memory for the model: choose a smaller --model") from error
        raise


def refuse_foreign(folder: Path) -> None:
    """A run begins in a folder of its own."""
    for path in sorted(folder.iterdir()):
        if path.name != "log.txt" and not path.name.startswith("."):
            raise InputError(f"{folder} holds {path.name} and is not a run of atoll: choose another --out")


def refuse_links(folder: Path) -> None:
    """A run writes to files of its folder alone, also if somebody else has begun it and put links or FIFOs there."""
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(where, name)
            try:
                if real_path(path, folder).is_dir():
                    continue
                open_regular(path, folder).close()
            except OSError as error:
                raise InputError(
                    f"{path} is not one of a run's own files ({reason_of(error)}): remove it, or choose another --out"
                ) from error


class Session:
    """One process's part of a run: from the last state to the end, or to a signal."""

    def __init__(self, task: Task, settings: Settings, folder: Path, team: Team, progress: bool) -> None:
        self.task, self.folder, self.team = task, folder, team
        self.states = folder / "state"
        self.about = {"format": state.FORMAT, "settings": asdict(settings), **task.describe()}
        self.before: Mapping[str, Any] = {}
        if (folder / "run.json").exists():
            self.before = read_json(folder / "run.json", "remove the folder, or choose another --out")
            self._check_same(settings)
        # The default depends on the number of steps; more of them must not bring the warm-up back.
        warmup = self.before.get("warmup_steps")
        self.settings = replace(settings, warmup=warmup if type(warmup) is int else settings.resolved_warmup)
        self.about["warmup_steps"] = self.settings.warmup
        self.run = Run(task, self.settings, team)
        self.shows = progress and team.leads
        self.journal: Journal | None = None
        self.told: signal.Signals | None = None  # by a signal
        self.stop: signal.Signals | None = None  # as the whole team has agreed

    # --- coming and going -----------------------------------------------------------------------------------------

    def _check_same(self, settings: Settings) -> None:
        """Refuse to resume a run that was another."""
        refuse_another(self.folder, self.before.get("settings"), settings)
        for name in self.about.keys() - {"settings"}:
            if self.before.get(name) != self.about[name]:
                raise InputError(f"{self.folder} was begun with another {name.replace('_', ' ')}: choose another --out")

    @property
    def finished_at(self) -> int | None:
        """The step to which the run has been finished before, if that is far enough."""
        done = self.before.get("steps_done")
        complete = self.before.get("complete") is True and type(done) is int and done >= self.settings.steps
        return done if complete else None

    def _resume(self) -> bool:
        """Go on from the latest state that can be read."""
        found = state.saved(self.states)
        for path in reversed(found):
            try:
                self.run.load(path)
                return True
            except InputError as error:
                if path == found[0]:
                    raise InputError(f"{error}, and there is no other: remove {self.states} to begin again") from error
                print(printable(f"atoll: {error}, so the one before it is taken"), file=sys.stderr)
        return False

    def go(self) -> Sequence[str]:
        if self.finished_at is not None:
            self.run.close()
            return [f"{self.folder} is trained already, to step {self.finished_at}"]
        try:
            return self._go()
        finally:
            self.run.close()
            if self.journal is not None:
                self.journal.close()

    def _go(self) -> Sequence[str]:
        run, settings = self.run, self.settings
        resumed = self._resume()
        if self.team.leads:
            state.tidy(self.states)
            write_json(self.folder / "run.json", {**self.about, "complete": False})
            self.journal = Journal(self.folder, run.progress.step)
        if not resumed:
            run.save(self.states)  # an unwritable place or a full disk shows now, and there is a state to roll back to
        bar = tqdm(
            total=settings.steps,
            initial=run.progress.step,
            desc=self.folder.name,
            unit="step",
            disable=not self.shows,
            mininterval=0.2 if sys.stderr.isatty() else 30,
            dynamic_ncols=True,
        )
        with bar, self._listening():
            while run.progress.step < settings.steps and self.stop is None:
                self.advance(bar)
                self._agree_to_stop()
        if self.stop is not None:
            return self._leave()
        return self._finish()

    def advance(self, bar: Any) -> None:
        """One step, and the books."""
        run = self.run
        begun = time.perf_counter()
        try:
            run.step()
            run.progress.seconds_summed += time.perf_counter() - begun
            if run.progress.bad_in_a_row >= MOST_BAD_IN_A_ROW:
                self._roll_back()
            else:
                self._keep_books(bar)
        except InputError:
            if run.progress.bad_in_a_row < MOST_BAD_IN_A_ROW:
                run.save(self.states)
            raise
        except torch.OutOfMemoryError as error:
            raise InputError(
                "the device has too little memory: halve --micro-batch, or switch --checkpointing on"
            ) from error
        run.progress.seconds += time.perf_counter() - begun
        bar.n = run.progress.step - 1
        bar.update(1)

    def _keep_books(self, bar: Any) -> None:
        """Metrics, held-out figures, pictures and states, each when it is due; states last, so they cover the rest."""
        step, settings = self.run.progress.step, self.settings
        last = step == settings.steps
        if step % settings.log_every == 0 or last:
            self._log(bar)
        draws = settings.sample_every > 0 and (step % settings.sample_every == 0 or last)
        if step % settings.eval_every == 0 or draws or last:
            self._evaluate(draws)
        if (step % settings.save_every == 0 or last) and self.run.is_sound():
            self.run.save(self.states)

    def _log(self, bar: Any) -> None:
        progress = self.run.progress
        if progress.num_summed == 0:
            return
        spent = max(progress.seconds_summed, 1e-9)
        done = progress.num_summed * self.settings.batch
        line = {
            "step": progress.step,
            "loss": progress.loss_sum / progress.num_summed,
            "grad_norm": progress.norm_sum / progress.num_summed,
            "lr": self.settings.lr_at(progress.step - 1, self.run.width),
            "skipped": progress.skipped,
            "samples_per_second": round(done / spent, 2),
            "seconds": round(progress.seconds, 3),
        }
        progress.loss_sum = progress.norm_sum = progress.seconds_summed = 0.0
        progress.num_summed = 0
        bar.set_postfix_str(f"loss {line['loss']:.4f}, {done / spent:.0f} samples/s", refresh=False)
        if self.journal is not None:
            self.journal.write(line)

    def _evaluate(self, draws: bool) -> None:
        if self.journal is None:
            return
        step = self.run.progress.step
        self.run.give_back()
        with self.run.using_averaged():
            self.journal.write({"step": step, **self.task.evaluate()})
            picture = self.task.picture() if draws else None
        if picture is not None:
            save_picture(picture, self.folder / "samples" / f"{step:09d}.png")
            self.journal.show("samples", picture, step)

    # --- when things go wrong -------------------------------------------------------------------------------------

    def _roll_back(self) -> None:
        """Once, to the last good state; the second time there is no use in going on."""
        run, progress = self.run, self.run.progress
        rate = self.settings.lr_at(progress.step - 1, run.width)
        first_bad = progress.step - MOST_BAD_IN_A_ROW
        told = (
            f"the loss of {self.folder} was not finite, or a thousand times the first, in steps "
            f"{first_bad} to {progress.step - 1}, at a learning rate of {rate:.3g}"
        )
        good = [path for path in state.saved(self.states) if state.was_good(path)]
        if len(good) > 1 and int(good[-1].stem) == first_bad:
            good.pop()  # what fails at once was broken when it was saved
        if progress.rollbacks or not good:
            where = f"; the last good state is {good[-1]}" if good else ""
            raise InputError(f"{told}, also after going back once: begin again with a lower --lr{where}")
        reached, skipped = progress.step, progress.skipped
        self.team.wait()
        run.load(good[-1])
        run.progress.rollbacks, run.progress.skipped, run.progress.bad_in_a_row = 1, skipped, 0
        self.team.wait()
        if self.team.leads:
            for path in state.saved(self.states):
                if int(path.stem) > run.progress.step:
                    path.unlink()
        run.save(self.states)
        if self.journal is not None:
            self.journal.close()
            self.journal = Journal(self.folder, run.progress.step)
            self.journal.write({"step": run.progress.step, "rolled_back_from": reached, "skipped": skipped})
            print(printable(f"atoll: {told}: going back to step {run.progress.step}"), file=sys.stderr)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C end the run after the step at hand; a second Ctrl-C ends it at once."""

        def note(number: int, _: Any) -> None:
            self.told = signal.Signals(number)
            signal.signal(signal.SIGINT, signal.default_int_handler)

        try:
            before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:  # not the main thread: whoever runs this listens
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _agree_to_stop(self) -> None:
        """All processes of an island stop at one step, whichever of them was told to."""
        told = self.told
        if self.team.size > 1:
            share = self.team.mean(torch.tensor(float(told is not None), device=self.team.device))
            told = told or (signal.SIGTERM if float(share) > 0 else None)
        self.stop = told

    def _leave(self) -> Sequence[str]:
        self.run.save(self.states)
        if self.stop is signal.SIGINT:
            raise KeyboardInterrupt
        step, goal = self.run.progress.step, self.settings.steps
        told = f"{self.folder}: told to stop, saved at step {step} of {goal}; rerun the same command to resume"
        return [told] if self.team.leads else []

    def _finish(self) -> Sequence[str]:
        progress = self.run.progress
        if not self.team.leads:
            return []
        training = {
            "settings": asdict(self.settings),
            "steps": progress.step,
            "samples": progress.updates * self.settings.batch,
            "skipped": progress.skipped,
            "rollbacks": progress.rollbacks,
            "processes": self.team.size,
            "parameters": sum(p.numel() for p in self.run.weights),
        }
        self.run.give_back()
        with self.run.using_averaged():
            lines = self.task.finish(self.folder, training)
        write_json(self.folder / "run.json", {**self.about, "complete": True, "steps_done": progress.step})
        minutes, seconds = divmod(round(progress.seconds), 60)
        return [f"{self.folder}: {progress.step} steps in {minutes} min {seconds} s", *lines]
