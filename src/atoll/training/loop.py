"""The training loop, in one function: experts, the monolith, the router and a student each supply a `Task`.

Everything random is a function of (seed, step): the order of the data, noise, times and dropout. So a run that was
interrupted in any way continues, when the command is rerun, as if it had not been.

The host queues steps on a GPU without synchronising: the GPU itself decides which updates to skip, and the host reads
results back only when something is due. On the CPU, where that costs nothing, it does so at every step.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from atoll.adam import AdamW
from atoll.errors import InputError, printable
from atoll.networks.dit import Trunk
from atoll.plots.canvas import save_image
from atoll.processes import stop_signals
from atoll.tensors import check_bf16
from atoll.training import checkpoint
from atoll.training.checkpoint import Progress
from atoll.training.distributed import Distributed
from atoll.training.memory import Heap
from atoll.training.metrics_log import MetricsLog
from atoll.training.mirror import Mirror
from atoll.training.muon import Muon
from atoll.training.settings import Settings
from atoll.training.sharding import Shard, shard
from atoll.training.tally import Tally
from atoll.training.task import Batch, Batches, Task

MAX_BAD_STEPS = 5  # in a row
T = TypeVar("T", bound=Task)


def train(  # noqa: PLR0915 - to be read from top to bottom
    make_task: Callable[[torch.device], Task],
    settings: Settings,
    folder: Path,
    progress_bar: bool = True,
    mirror_url: str | None = None,
) -> Sequence[str]:
    """Trains to settings.steps from the last checkpoint in the folder or its mirror; returns lines for the user."""
    distributed = Distributed(settings)
    if settings.uses_bf16:
        check_bf16(distributed.device)
    is_main = distributed.is_main  # the process that writes files
    mirror = Mirror(mirror_url, folder) if mirror_url and is_main else None
    with distributed.locked(folder):
        if is_main:
            if mirror:
                mirror.restore()
            checkpoint.check_folder(folder)
        distributed.barrier()
        task = build_task(make_task, distributed.device)

        # --- Check that the folder holds this run, and resume it. ---

        about = {"format": checkpoint.FORMAT, "settings": asdict(settings), **task.describe()}
        before = checkpoint.read_run(folder, about, settings)
        steps_done = before.get("steps_done")
        if before.get("complete") is True and type(steps_done) is int and steps_done >= settings.steps:
            return [f"{folder} is trained already, to step {steps_done}"]
        # The default warmup depends on the number of steps; extending a run must not restart it.
        warmup = before.get("warmup_steps")
        settings = replace(settings, warmup=warmup if type(warmup) is int else settings.resolved_warmup)
        about["warmup_steps"] = settings.warmup

        learner = Learner(task, settings, distributed)
        checkpoints = folder / "state"
        resumed = checkpoint.resume(checkpoints, learner.tensors())
        progress = resumed or Progress()
        learner.set_updates(progress.updates)
        tally = Tally(progress, distributed.device)
        distributed.barrier()  # all have read before the first writes
        if is_main:
            checkpoint.write_run(folder, {**about, "complete": False})
        task.begin(folder, slice(distributed.rank, None, distributed.size), progress_bar and is_main)
        distributed.barrier()
        task.ready(folder)

        is_sharded = distributed.is_sharded  # if so, all processes save and evaluate together

        def save() -> None:
            if not (is_main or is_sharded) or progress.bad_in_a_row or not learner.is_finite():
                return  # so that every checkpoint is good to roll back to
            checkpoint.save(checkpoints, learner.tensors(), progress, settings, writes=is_main)
            if mirror:
                mirror.push()

        if resumed is None:
            save()  # fails early on an unwritable or full disk, and gives a checkpoint to roll back to

        # --- Train. ---

        stop, on_cpu = False, distributed.device.type == "cpu"
        with (
            stop_signals(interruptible=True) as signals,
            closing(Batches(task, settings.batch, settings.seed, distributed.share, distributed.device)) as batches,
            closing(MetricsLog(folder, progress.step, enabled=is_main)) as log,
            tqdm(
                total=settings.steps,
                initial=progress.step,
                desc=folder.name,
                unit="step",
                disable=not (progress_bar and is_main),
                dynamic_ncols=True,
            ) as bar,
        ):
            try:
                while progress.step < settings.steps and not stop:
                    start, cpu_start = time.perf_counter(), time.process_time()

                    lr = learner.advance(progress, batches, tally)
                    step, last = progress.step, progress.step == settings.steps
                    looks = on_cpu or last or any(step % every == 0 for every in settings.intervals)
                    bad_steps, ago = tally.look(progress) if looks else (0, 0)
                    progress.seconds_summed += time.perf_counter() - start

                    if bad_steps >= MAX_BAD_STEPS:
                        # Roll back to the last good checkpoint once; a second time there is no point in continuing.
                        last_bad = step - 1 - ago  # on a GPU several steps are looked at together
                        first_bad = last_bad + 1 - bad_steps
                        problem = (
                            f"the loss of {folder} was not finite, or a thousand times the first, in steps "
                            f"{first_bad} to {last_bad}, at a learning rate of {lr:.3g}"
                        )
                        if progress.rollbacks:
                            raise InputError(f"{problem}, also after going back once: begin again with a lower --lr")
                        paths = checkpoint.saved(checkpoints)
                        if len(paths) > 1 and int(paths[-1].stem) == first_bad:
                            paths.pop()  # it failed at once, so it was already broken when saved
                        distributed.barrier()
                        skipped = progress.skipped
                        progress = checkpoint.load(paths[-1], learner.tensors())
                        learner.set_updates(progress.updates)
                        progress.rollbacks, progress.skipped, progress.bad_in_a_row = 1, skipped, 0
                        tally.set(progress)
                        distributed.barrier()
                        if is_main:
                            for path in checkpoint.saved(checkpoints):
                                if int(path.stem) > progress.step:
                                    path.unlink()
                        save()
                        if is_main:
                            log.rewind(progress.step)
                            log.write({"step": progress.step, "rolled_back_from": step, "skipped": skipped})
                            print(printable(f"atoll: {problem}: going back to step {progress.step}"), file=sys.stderr)
                    elif looks:
                        # Metrics, evaluation and checkpoints, each when due; the checkpoint last, to cover the others.
                        if (step % settings.log_every == 0 or last) and progress.num_summed:
                            line = progress.summary(settings.batch, lr)
                            tally.set(progress)
                            log.write(line)
                            speed = f"{line['samples_per_second']:.0f} samples/s"
                            bar.set_postfix_str(f"loss {line['loss']:.4f}, {speed}", refresh=False)
                        sample = settings.sample_every > 0 and (step % settings.sample_every == 0 or last)
                        if (is_main or is_sharded) and (step % settings.eval_every == 0 or sample or last):
                            with learner.using_ema():
                                metrics, grid = task.evaluate(sample)
                            log.write({"step": step, **metrics})
                            if grid is not None and is_main:
                                save_image(grid, folder / "samples" / f"{step:09d}.png")
                                log.show("samples", grid, step)
                        if step % settings.save_every == 0 or last:
                            save()

                    progress.seconds += time.perf_counter() - start
                    progress.cpu_seconds += time.process_time() - cpu_start
                    bar.n = progress.step - 1
                    bar.update(1)
                    stop = distributed.any(bool(signals), asks=looks)  # all processes stop at one step
            except InputError:
                tally.look(progress)
                if not is_sharded:  # saving would wait for the other processes, which may not fail here
                    save()
                raise
            except torch.OutOfMemoryError as error:
                raise InputError(
                    "the device has too little memory: halve --micro-batch, or switch --checkpointing on"
                ) from error

        # --- Stop or finish. ---

        if stop:
            tally.look(progress)
            save()
            if signals and signals[-1].signal is signal.SIGINT:
                raise KeyboardInterrupt
            end = f"stopped at step {progress.step} of {settings.steps}, rerun the same command to resume"
            return [f"{folder}: {end}"] if is_main else []
        if is_sharded:
            task.network = learner.gather_ema()
        if not is_main:
            return []
        training = describe_training(settings, progress, task.network, distributed.size)
        with nullcontext() if is_sharded else learner.using_ema(), torch.no_grad():
            lines = task.finish(folder, training)
        checkpoint.write_run(folder, {**about, "complete": True, "steps_done": progress.step})
        if mirror:
            mirror.push(last=True)
        minutes, seconds = divmod(round(progress.seconds), 60)
        return [f"{folder}: {progress.step} steps in {minutes} min {seconds} s", *lines]


def describe_training(settings: Settings, progress: Progress, network: nn.Module, processes: int) -> dict[str, Any]:
    """Returns the card's entry on the run that trained a network."""
    return {
        "settings": asdict(settings),
        "steps": progress.step,
        "samples": progress.updates * settings.batch,
        "skipped": progress.skipped,
        "rollbacks": progress.rollbacks,
        "processes": processes,
        "parameters": sum(p.numel() for p in network.parameters() if p.requires_grad),
    }


def build_task(make_task: Callable[[torch.device], T], device: torch.device) -> T:
    """Returns the task; raises an InputError if its network is too large for this machine."""
    try:
        return make_task(device)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "alloc" in str(error):
            raise InputError("this machine has too little memory for the model: choose a smaller --model") from error
        raise


class Learner:
    """A network in training: its weights, their EMA, AdamW and, for the matrices in blocks, optionally Muon."""

    def __init__(self, task: Task, settings: Settings, distributed: Distributed) -> None:
        self.task, self.settings, self.distributed = task, settings, distributed
        device = distributed.device
        if distributed.is_sharded:
            shard(task.network, device, distributed.size)
        self.network = task.network.to(device).train()
        self.network.gradient_checkpointing = settings.checkpointing
        named = [(name, p) for name, p in self.network.named_parameters() if p.requires_grad]
        self.shared: list[Any] = [p for _, p in named] if distributed.is_sharded else []  # DTensors, if sharded
        if self.shared:
            named = [(name, p.to_local().detach()) for name, p in named]  # type: ignore[attr-defined]
        self.names = [name for name, _ in named]
        self.weights: list[Tensor] = [p for _, p in named]  # or this process's rows of them
        self.ema = [p.detach().clone() for p in self.weights]
        self.muon = Muon(dict(named) if settings.optimizer == "muon" else {})
        self.by_adamw = {name: p for name, p in named if name not in self.muon.weights}
        betas = (0.9, settings.beta2)
        self.adamw = AdamW(self.by_adamw.values(), betas, settings.weight_decay, fused=True)
        # One graph per text length; evaluation on held-out data is not compiled.
        network: Any = torch.compile(self.network, fullgraph=True, dynamic=False) if settings.compile else self.network
        self.wrapped = distributed.wrap(network)
        self.heap = Heap(settings.checkpointing or distributed.is_sharded, enabled=device.type == "cpu")

    def advance(self, progress: Progress, batches: Batches, tally: Tally) -> float:
        """Does one update, skipped if the loss or gradient is not finite or is wild; returns the learning rate."""
        lr = self.settings.lr_at(progress.step, self.network.config.hidden_size)
        losses = self.backward(*batches.get(progress.step, progress.rollbacks))
        self.update(lr, self.settings.ema_at(progress.step), skip=tally.count(losses))
        progress.step += 1
        return lr

    def backward(self, batch: Batch, host: Batch) -> Tensor:
        """Computes gradients one micro-batch at a time; returns the mean loss and gradient norm over processes."""
        device, num = self.distributed.device, len(batch.latents)
        size = min(self.settings.micro_batch or num, num)
        total = torch.zeros((), device=device)
        for first in range(0, num, size):
            part = slice(first, first + size)
            with self.distributed.no_sync(self.wrapped, unless=first + size >= num):
                with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.uses_bf16):
                    loss = self.task.loss(self.wrapped, batch.part(part), host.part(part)).sum() / num
                loss.backward()
            total += loss.detach()
        for rows, p in zip(self.weights, self.shared, strict=False):
            rows.grad = p.grad.to_local()
        norm = self.distributed.norm(nn.utils.get_total_norm([p.grad for p in self.weights if p.grad is not None]))
        nn.utils.clip_grads_with_norm_(self.weights, self.settings.clip, norm)
        return self.distributed.mean(torch.stack([total, norm.detach()]))

    def update(self, lr: float, decay: float, skip: Tensor | None = None) -> None:
        """Updates weights and EMA; if `skip`, a tensor on the device, is 1, the weights do not change."""
        self.muon.step(self.settings.muon_lr * lr / self.settings.peak_lr(self.network.config.hidden_size), skip)
        self.adamw.step(lr, skip)
        torch._foreach_lerp_(self.ema, self.weights, 1 - decay)
        for p in (*self.weights, *self.shared):
            p.grad = None
        self.heap.tidy()

    def tensors(self) -> dict[str, Tensor | Shard]:
        """Returns weights, EMA and moments by their names in a checkpoint."""
        laid_out = dict(zip(self.names, self.shared, strict=False))
        first, second = (
            dict(zip(self.by_adamw, moments, strict=True)) for moments in (self.adamw.first, self.adamw.second)
        )
        weights = {name: p.detach() for name, p in zip(self.names, self.weights, strict=True)}
        parts = (weights, dict(zip(self.names, self.ema, strict=True)), first | self.muon.momenta, second)
        return {
            f"{part}.{name}": Shard(tensors[name], laid_out[name]) if laid_out else tensors[name]
            for part, tensors in zip(checkpoint.PARTS, parts, strict=True)
            for name in self.names
            if name in tensors
        }

    def set_updates(self, num: int) -> None:
        """Sets the number of updates by which AdamW corrects the bias of its moments."""
        for steps in self.adamw.steps:
            steps.fill_(num)

    def is_finite(self) -> bool:
        finite = bool(torch.stack([torch.isfinite(w).all() for w in self.weights]).all())
        return not self.distributed.any(not finite) if self.shared else finite

    def gather_ema(self) -> Trunk:
        """Returns the unsharded network with its EMA weights; frees the moments, so training cannot continue."""
        self.adamw.first.clear()
        self.adamw.second.clear()
        rows = dict(zip(self.names, self.ema, strict=True))
        laid_out: dict[str, Any] = dict(self.network.named_parameters())
        with torch.device("meta"):
            network = type(self.network)(self.network.config)
        for name, p in laid_out.items():
            tensor = Shard(rows.get(name, p.to_local()), p).whole().detach()
            if self.distributed.is_main:
                network.load_state_dict({name: tensor}, strict=False, assign=True)
        network.card = self.network.card
        return network.eval()

    @contextmanager
    def using_ema(self) -> Iterator[None]:
        """Swaps the EMA weights into the network; first returns memory that updates left free to the system."""

        def swap() -> None:
            for i, p in enumerate(self.weights):
                if self.shared:  # FSDP needs its weights to stay at their addresses
                    ema = self.ema[i].clone()
                    self.ema[i].copy_(p)
                    p.copy_(ema)
                else:
                    p.data, self.ema[i] = self.ema[i], p.data

        self.heap.give_back()
        swap()
        self.network.eval()
        try:
            with torch.no_grad():  # also switches gradient checkpointing off
                yield
        finally:
            self.network.train()
            swap()
