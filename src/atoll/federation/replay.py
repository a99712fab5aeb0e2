"""Replays training from one published checkpoint to the next by the loop's own steps, and compares the two updates.

Randomness is a function of (seed, step), so anyone with the data can replay any part of a run. On another kind of CPU
the replayed update differs by rounding, about 1e-4 of its length; weights that were not trained like this differ by
about all of it (docs/federation_verification.md has both distributions).
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.config import build
from atoll.errors import InputError, shown
from atoll.storage import parse_json
from atoll.tensors import DTYPES, TensorFile, check_finite
from atoll.training import checkpoint
from atoll.training.checkpoint import PARTS, Progress
from atoll.training.distributed import Distributed
from atoll.training.expert import ExpertTask
from atoll.training.loop import Learner
from atoll.training.settings import ExpertSettings
from atoll.training.tally import Tally
from atoll.training.task import Batches

ADVICE = "submit the checkpoints as training has written them"
SAME_START = 1e-3  # relative: random numbers also differ by rounding between CPUs


class Segment(NamedTuple):
    """The steps between two published checkpoints."""

    start: Path
    end: Path

    @property
    def steps(self) -> tuple[int, int]:
        return int(self.start.stem), int(self.end.stem)

    def __str__(self) -> str:
        return "steps {} to {}".format(*self.steps)


def for_replay(settings: ExpertSettings) -> ExpertSettings:
    """Returns settings that take the same steps on this machine, whatever the run's own were."""
    return replace(settings, device="cpu", compile=False, shard=False, checkpointing=False, threads=1, sample_every=0)


def segments_of(folder: Path, settings: ExpertSettings, longest: int) -> list[Segment]:
    """Returns all segments of a run; raises InputError unless the published checkpoints cover it without a gap."""
    paths = checkpoint.saved(folder)
    steps = [int(path.stem) for path in paths]
    if not steps or steps[0] != 0 or steps[-1] != settings.steps:
        raise InputError(
            f"the checkpoints are of steps {shown(steps)}, but the run has 0 to {settings.steps}: publish them all"
        )
    for before, after in pairwise(steps):
        if after - before > longest:
            raise InputError(
                f"between steps {before} and {after} there is no checkpoint, and the gate asks for one every {longest}"
            )
    return [Segment(*pair) for pair in pairwise(paths)]


def read_progress(path: Path) -> Progress:
    """Returns the progress that a checkpoint records, without reading its tensors."""
    with TensorFile(path, ADVICE, path.parent) as file:
        try:
            return build(Progress, parse_json(file.metadata["progress"].encode()), "its progress")
        except (KeyError, ValueError) as error:
            raise InputError(f"{path} does not say how far its run is: {ADVICE}") from error


def choose(segments: Sequence[Segment], settings: ExpertSettings, width: int, num: int, seed: int) -> list[Segment]:
    """Returns the segments to replay: the one with the longest update for its learning rates, and others at random.

    Foreign weights inserted at one point make that segment's update the longest; a forgery spread over the run is
    caught by chance. Nobody can know the seed before the checkpoints are published.
    """
    if num >= len(segments):
        return list(segments)
    lengths = [
        _length(segment) / sum(settings.lr_at(step, width) for step in range(*segment.steps)) for segment in segments
    ]
    first = int(np.argmax(lengths))
    rest = [k for k in range(len(segments)) if k != first]
    drawn = np.random.default_rng(seed).choice(rest, num - 1, replace=False).tolist()
    return [segments[k] for k in (first, *sorted(drawn))][:num]


def _length(segment: Segment) -> float:
    """Returns the length of the update of the weights."""
    total = 0.0
    with TensorFile(segment.start, ADVICE) as start, TensorFile(segment.end, ADVICE) as end:
        for name in (name for name in start.entries if name.startswith("weights.")):
            if name not in end.entries or start.entries[name].shape != end.entries[name].shape:
                raise InputError(f"{segment.end} is of another network than {segment.start}: {ADVICE}")
            before, after = (file.read([name]) for file in (start, end))
            for weights, path in ((before, segment.start), (after, segment.end)):
                check_finite(weights, path)
            total += float((after[name].double() - before[name].double()).square().sum())
    return math.sqrt(total)


class Replay:
    """Replays parts of a run, by a task on the same data."""

    def __init__(self, task: ExpertTask, settings: ExpertSettings) -> None:
        self.task, self.settings = task, settings
        self.first = {name: p.detach().clone() for name, p in task.network.named_parameters() if p.requires_grad}
        self.distributed = Distributed(settings)
        self.learner = Learner(task, settings, self.distributed)

    def check_kind(self, segments: Sequence[Segment]) -> None:
        """Refuses checkpoints of another network, by their headers."""
        own = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors_of(self.learner).items()}
        for path in (segments[0].start, *(segment.end for segment in segments)):
            with TensorFile(path, ADVICE, path.parent) as file:
                if {name: (DTYPES[entry.dtype], entry.shape) for name, entry in file.entries.items()} != own:
                    raise InputError(f"the checkpoint {path} is of another network: {ADVICE}")

    def check_start(self, path: Path) -> None:
        """Refuses a first checkpoint other than what the run's seed, or the initial weights, give."""
        published = self.read(path)[0]
        for name, weight in self.first.items():
            for part in PARTS[:2]:
                off = float((published[f"{part}.{name}"] - weight).norm())
                if off > SAME_START * float(weight.norm()):
                    raise InputError(
                        f"its first checkpoint is not what seed {self.settings.seed} gives: {name} differs"
                    )
        if any(bool(tensor.any()) for name, tensor in published.items() if name.startswith(PARTS[2:])):
            raise InputError("its first checkpoint has moments of the optimiser, before any step was taken")

    def redo(self, segment: Segment) -> dict[str, float]:
        """Replays a segment; returns the update's error relative to the published one, for all that is learned."""
        learner = self.learner
        progress = checkpoint.load(segment.start, learner.tensors())
        before = {name: tensor.clone() for name, tensor in tensors_of(learner).items()}
        learner.set_updates(progress.updates)
        published, expected = self.read(segment.end)
        tally = Tally(progress, self.distributed.device)
        learner.network.train()
        with closing(
            Batches(self.task, self.settings.batch, self.settings.seed, self.distributed.share, self.distributed.device)
        ) as batches:
            while progress.step < expected.step:
                learner.advance(progress, batches, tally)
        tally.look(progress)
        if (progress.updates, progress.skipped) != (expected.updates, expected.skipped):
            raise InputError(
                f"{segment} have {expected.updates} updates by its checkpoints, and {progress.updates} redone"
            )
        return compare(before, tensors_of(learner), published)

    def read(self, path: Path) -> tuple[dict[str, Tensor], Progress]:
        """Returns the learned tensors of a checkpoint, and its progress."""
        into = {name: torch.empty_like(tensor) for name, tensor in tensors_of(self.learner).items()}
        progress = checkpoint.load(path, into)
        check_finite(into, path)
        return into, progress


def tensors_of(learner: Learner) -> dict[str, Tensor]:
    """Returns a learner's learned tensors, without copying them."""
    return {name: tensor.detach() for name, tensor in learner.tensors().items() if isinstance(tensor, Tensor)}


def compare(
    before: Mapping[str, Tensor], redone: Mapping[str, Tensor], published: Mapping[str, Tensor]
) -> dict[str, float]:
    """Returns |redone - published| / |published - before| of weights, EMA weights and both moments."""

    def distance(some: Mapping[str, Tensor], others: Mapping[str, Tensor], part: str) -> float:
        names = [name for name in published if name.startswith(f"{part}.")]
        return math.sqrt(sum(float((some[name].double() - others[name].double()).square().sum()) for name in names))

    errors = {}
    for part in PARTS:
        off, length = distance(redone, published, part), distance(published, before, part)
        errors[part] = 0.0 if off == 0 else min(off / length, 1e9) if length else 1e9
    return errors


def describe(errors: Mapping[str, float]) -> dict[str, Any]:
    """Returns errors for JSON: rounded, under readable names."""
    names = dict(zip(PARTS, ("weights", "ema", "moment1", "moment2"), strict=True))
    return {names[part]: float(f"{error:.3g}") for part, error in errors.items()}
