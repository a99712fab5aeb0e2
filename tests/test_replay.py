"""Replayed training between published checkpoints: an honest run agrees, and nothing else does."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll.data.shards import Dataset
from atoll.errors import InputError
from atoll.federation.gate import Gate
from atoll.federation.replay import Replay, Segment, choose, compare, for_replay, read_progress, segments_of
from atoll.tensors import read_tensors
from atoll.training.checkpoint import PARTS, saved
from atoll.training.expert import ExpertTask
from atoll.training.settings import ExpertSettings
from submissions import GATE, SETTINGS, data, edit_checkpoint, evaluated, submission
from test_judge import refused

__all__ = ["data", "evaluated", "submission"]  # fixtures
TOLERANCE = Gate().tolerance


def replay_of(data: Path, settings: ExpertSettings = SETTINGS, cluster: int = 0) -> Replay:
    settings = for_replay(replace(settings, warmup=SETTINGS.resolved_warmup))
    return Replay(ExpertTask(Dataset.open(data, cluster), settings, torch.device("cpu")), settings)


def parts_of(submission: Path) -> list[Segment]:
    return segments_of(submission / "checkpoints", SETTINGS, 20)


@pytest.mark.slow
def test_every_part_of_an_honest_run_agrees(submission, data):
    replay = replay_of(data)
    replay.check_start(parts_of(submission)[0].start)
    for segment in parts_of(submission)[::2]:
        assert max(replay.redo(segment).values()) < 1e-3


class TestForged:
    @pytest.fixture
    def segment(self, submission) -> Segment:
        return parts_of(submission)[2]

    def error(self, data, segment, **options) -> float:
        return max(replay_of(data, **options).redo(segment).values())

    @pytest.fixture
    def ends(self, segment):
        return (read_tensors(path, "") for path in segment)

    def test_a_random_direction_of_the_same_length(self, data, segment, ends):
        before, after = ends
        drawn = {
            name: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
            for name, tensor in after.items()
        }
        forged = {
            name: before[name] + part * (after[name] - before[name]).norm() / part.norm()
            for name, part in drawn.items()
            if name.startswith("weights.") and part.norm() > 0
        }
        edit_checkpoint(segment.end, forged)
        assert self.error(data, segment) > 0.5

    def test_a_straight_line_between_checkpoints(self, data, submission, segment, ends):
        before, _ = ends
        beyond = read_tensors(parts_of(submission)[3].end, "")
        edit_checkpoint(segment.end, {name: (before[name] + beyond[name]) / 2 for name in before})
        assert self.error(data, segment) > 10 * TOLERANCE

    def test_half_of_the_update_twice(self, data, segment, ends):
        before, after = ends
        edit_checkpoint(segment.end, {name: before[name] + 2 * (after[name] - before[name]) for name in before})
        assert self.error(data, segment) > 10 * TOLERANCE

    def test_other_data(self, data, segment):
        assert self.error(data, segment, cluster=1) > 10 * TOLERANCE

    def test_another_seed(self, data, segment):
        assert self.error(data, segment, settings=replace(SETTINGS, seed=1)) > 10 * TOLERANCE

    def test_another_learning_rate(self, data, segment):
        assert self.error(data, segment, settings=replace(SETTINGS, lr=3.9e-3)) > TOLERANCE

    @pytest.mark.parametrize("part", PARTS)
    def test_anything_that_is_learned(self, data, segment, ends, part):
        """This includes the moments: anyone who could choose them would steer the next segment."""
        _, after = ends
        edit_checkpoint(segment.end, {name: 1.05 * own for name, own in after.items() if name.startswith(f"{part}.")})
        assert self.error(data, segment) > TOLERANCE

    def test_counted_updates(self, data, segment):
        edit_checkpoint(segment.end, {}, updates=30, skipped=30)
        with pytest.raises(InputError, match="have 30 updates by its checkpoints, and 60"):
            self.error(data, segment)

    def test_by_a_judge(self, data, submission, segment, ends):
        _, after = ends
        edit_checkpoint(segment.end, {name: 1.01 * own for name, own in after.items() if name.startswith("weights.")})
        gate = GATE.model_copy(update={"segments": 6})
        refused(submission, data, "steps 40 to 60, redone, lead elsewhere", gate=gate)


class TestChain:
    def test_without_gaps(self, submission, data):
        saved(submission / "checkpoints")[3].unlink()
        refused(submission, data, "between steps 40 and 80 there is no checkpoint")

    @pytest.mark.parametrize("place", [0, -1])
    def test_from_the_first_step_to_the_last(self, submission, data, place):
        saved(submission / "checkpoints")[place].unlink()
        refused(submission, data, "publish them all")

    def test_from_random_weights(self, submission, data):
        first = parts_of(submission)[0].start
        later = read_tensors(parts_of(submission)[-1].end, "")
        edit_checkpoint(first, {name: own for name, own in later.items() if name.startswith(PARTS[:2])})
        with pytest.raises(InputError, match="not what seed 0 gives"):
            replay_of(data).check_start(first)

    def test_without_momentum(self, submission, data):
        first = parts_of(submission)[0].start
        own = {name: tensor + 1 for name, tensor in read_tensors(first, "").items() if name.startswith("moment1.")}
        edit_checkpoint(first, own)
        with pytest.raises(InputError, match="moments of the optimiser"):
            replay_of(data).check_start(first)

    def test_of_another_network(self, submission, data):
        path = parts_of(submission)[2].end
        name = next(iter(read_tensors(path, "")))
        edit_checkpoint(path, {name: torch.zeros(3)})
        refused(submission, data, "of another network")

    def test_not_finite(self, submission, data):
        path = parts_of(submission)[2].end
        own = {
            name: tensor * torch.nan for name, tensor in read_tensors(path, "").items() if name.startswith("weights.")
        }
        edit_checkpoint(path, own)
        refused(submission, data, "not finite")

    def test_a_leap_is_always_redone(self, submission):
        """Foreign weights are inserted between two checkpoints of an otherwise honest run."""
        parts = parts_of(submission)
        for segment in parts[3:]:
            own = read_tensors(segment.end, "")
            edit_checkpoint(
                segment.end, {name: tensor + 0.2 for name, tensor in own.items() if name.startswith("weights.")}
            )
        for seed in range(5):
            assert parts[3] in choose(parts, SETTINGS, 64, 2, seed)

    def test_the_seed_chooses(self, submission):
        parts = parts_of(submission)
        chosen = {seed: tuple(choose(parts, SETTINGS, 64, 3, seed)) for seed in range(20)}
        assert len({*chosen.values()}) > 3
        assert {part for own in chosen.values() for part in own} == set(parts)
        assert chosen[7] == tuple(choose(parts, SETTINGS, 64, 3, 7))

    def test_what_does_not_say_how_far_it_is(self, submission):
        from safetensors.torch import save_file

        save_file({"a": torch.zeros(1)}, path := submission / "checkpoints" / "000000020.safetensors")
        with pytest.raises(InputError, match="does not say how far its run is"):
            read_progress(path)


def test_compare():
    before = {f"{part}.a": torch.zeros(4) for part in PARTS}
    published = {name: torch.tensor([3.0, 4.0, 0.0, 0.0]) for name in before}
    redone = {name: tensor + torch.tensor([0.0, 0.0, 0.5, 0.0]) for name, tensor in published.items()}
    assert compare(before, redone, published) == pytest.approx(dict.fromkeys(PARTS, 0.1))
    assert compare(before, before, before) == dict.fromkeys(PARTS, 0.0)
    assert compare(before, redone, before)["weights"] == 1e9  # an update that was not published


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_on_another_kind_of_cpu(submission, data, capability):
    isa = {"default": ("SSE41", "SSE4_2"), "avx2": ("AVX2", "AVX2")}[capability]
    program = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_replay import parts_of, replay_of
replay, parts = replay_of(Path({str(data)!r})), parts_of(Path({str(submission)!r}))
print(json.dumps([max(replay.redo(part).values()) for part in parts]))
"""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": isa[0],
                   "MKL_ENABLE_INSTRUCTIONS": isa[1]}  # fmt: skip
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert max(json.loads(run.stdout.splitlines()[-1])) < TOLERANCE / 5
