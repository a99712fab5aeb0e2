"""What a verifier accepts, and what it refuses with which message."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atoll.data.shards import Dataset
from atoll.errors import InputError
from atoll.federation import judge as module
from atoll.federation.gate import Gate, Limits
from atoll.federation.judge import Judgement, judge, judge_here
from atoll.federation.quality import QualityError, check_quality, check_samples
from atoll.networks.expert import Expert
from atoll.training import expert as expert_module
from atoll.training.expert import ExpertTask
from atoll.training.settings import ExpertSettings
from submissions import GATE, data, edit_json, edit_weights, evaluated, relabel, seal, submission, submit

__all__ = ["data", "evaluated", "submission"]  # fixtures


def judged(folder: Path, data: Path, slot: int = 0, gate: Gate = GATE, **options) -> Judgement:
    return judge_here(str(folder), slot, gate, str(data), **options)


def refused(folder: Path, data: Path, sentence: str, **options) -> None:
    judgement = judged(folder, data, **options)
    assert not judgement.accepted
    assert sentence in judgement.reason
    assert str(folder) not in judgement.reason
    assert "\n" not in judgement.reason


def test_an_honest_expert_is_accepted(submission, data):
    judgement = judged(submission, data, others=[str(data.with_name("run_1"))])
    assert judgement.accepted, judgement.reason
    assert json.dumps(judgement.model_dump(), allow_nan=False)
    quality, (segment,) = judgement.figures["quality"], judgement.figures["replay"]["segments"]
    assert len(quality["expert"]) == len(quality["baseline"]) == GATE.levels
    assert max(segment[part] for part in ("weights", "ema", "moment1", "moment2")) < 1e-3
    assert judgement.figures["static"]["nearest"]["distance"] > 0.5  # of the other cluster's, from the same seed


class TestFiles:
    def test_a_file_too_few(self, submission, data):
        (submission / "run.json").unlink()
        refused(submission, data, "there is no run.json")

    @pytest.mark.parametrize("name", ["model.pkl", "checkpoints/000000020.pt", "checkpoints/deep/a.json", "a/b"])
    def test_a_file_too_many(self, submission, data, name):
        (submission / name).parent.mkdir(exist_ok=True)
        (submission / name).write_bytes(b"\x80\x04N.")
        refused(submission, data, "is not a file of a submission")

    def test_thousands_of_files(self, submission, data):
        for number in range(300):
            (submission / f"{number}").touch()
        refused(submission, data, "there are more than")

    def test_a_pickle_in_place_of_safetensors(self, submission, data):
        (submission / "model.safetensors").write_bytes(b"\x80\x04\x95" + bytes(100))
        seal(submission)
        refused(submission, data, "not a safetensors file")

    @pytest.mark.parametrize("name", ["model.safetensors", "checkpoints/000000020.safetensors"])
    def test_a_link(self, submission, data, name):
        (submission / name).unlink()
        (submission / name).symlink_to("/etc/hostname")
        refused(submission, data, "is a link")

    def test_a_linked_folder(self, submission, data, tmp_path):
        (submission / "checkpoints").rename(tmp_path / "elsewhere")
        (submission / "checkpoints").symlink_to(tmp_path / "elsewhere")
        refused(submission, data, "checkpoints")

    def test_a_fifo(self, submission, data):
        (submission / "run.json").unlink()
        os.mkfifo(submission / "run.json")
        refused(submission, data, "it is a FIFO")

    def test_a_header_that_claims_terabytes(self, submission, data):
        header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
        (submission / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        seal(submission)
        refused(submission, data, "not a safetensors file")

    @pytest.mark.parametrize(
        ("limit", "name"),
        [("max_weights", "model.safetensors"), ("max_other", "calibration.safetensors"),
         ("max_checkpoint", "checkpoints/000000000.safetensors")],
    )  # fmt: skip
    def test_sizes_are_known_before_anything_is_read(self, submission, data, limit, name):
        refused(submission, data, f"{name} has", gate=GATE.model_copy(update={limit: 5000}))


class TestCard:
    def test_another_slot(self, data, tmp_path):
        theirs = submit(data.with_name("run_1"), tmp_path / "submission")
        refused(theirs, data, "it is the expert of cluster 1, not of slot 0")

    def test_other_data(self, submission, data):
        edit_json(submission / "config.json", lambda about: about["data"].update(fingerprint="0" * 64))
        refused(submission, data, "names other data")

    def test_another_codec(self, submission, data):
        edit_json(submission / "config.json", lambda about: about["latent_space"]["codec"].update(fingerprint="0"))
        refused(submission, data, "its codec")

    def test_a_licence_that_is_not_allowed(self, submission, data):
        refused(submission, data, "licence 'unknown'", gate=GATE.model_copy(update={"licenses": ["CC0-1.0"]}))

    def test_an_objective_that_is_not_allowed(self, submission, data):
        refused(submission, data, "its objective (ddpm-min-snr)", gate=GATE.model_copy(update={"objectives": ["fm"]}))

    def test_first_weights_of_unknown_origin(self, submission, data):
        edit_json(submission / "config.json", lambda about: about.update(init={"fingerprint": "abc"}))
        refused(submission, data, "its first weights are not those")

    def test_not_finite(self, submission, data):
        edit_weights(submission, lambda tensor: tensor * torch.nan)
        refused(submission, data, "not finite")

    def test_half_precision(self, submission, data):
        edit_weights(submission, lambda tensor: tensor.half())
        refused(submission, data, "float32")

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            (lambda about: about["training"].update(steps=9000), "training.steps 9000, but it is 120"),
            (lambda about: about["training"].update(samples=10**6), "training.samples"),
            (lambda about: about["training"]["settings"].update(batch=4096), "training.settings.batch"),
            (lambda about: about["training"]["held_out"].update(loss=1e-3), "training.held_out.loss"),
            (lambda about: about["data"].update(pictures=10**6), "data.pictures"),
            (lambda about: about["data"].update(license="CC0-1.0"), "data.license"),
            (lambda about: about.update(license="CC0-1.0"), "claims license"),
        ],
    )
    def test_a_card_that_lies(self, submission, data, change, sentence):
        edit_json(submission / "config.json", change)
        refused(submission, data, sentence)

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            (lambda run: run["settings"].update(steps=9000), "ended at step 120 of 9000"),
            (lambda run: run["data"].update(pictures=7), "other data"),
            (lambda run: run["settings"].update(model="s/2"), "a network of size s/2"),
            (lambda run: run["settings"].update(objective="fm"), "not the objective"),
            (lambda run: run["settings"].update(unknown=1), "unknown"),
            (lambda run: run.update(settings=3), "must be a table"),
        ],
    )
    def test_a_run_that_lies(self, submission, data, change, sentence):
        edit_json(submission / "run.json", change)
        refused(submission, data, sentence)

    @pytest.mark.parametrize("name", ["mean", "gain", "text_centre", "text_covariance", "text_weight"])
    def test_statistics_that_would_draw_more_prompts(self, submission, data, name):
        from safetensors.torch import load_file, save_file

        tensors = load_file(submission / "calibration.safetensors")
        tensors[name] = tensors[name] * 0.5
        save_file(tensors, submission / "calibration.safetensors")
        seal(submission)
        refused(submission, data, f"has a {name}" if name != "gain" else "a gain")


class TestCopies:
    @pytest.mark.parametrize("noise", [0.0, 1e-3, 1e-2])
    def test_another_s_expert_under_a_new_name(self, data, submission, tmp_path, noise):
        generator = torch.Generator().manual_seed(0)

        def disturb(tensor):
            return tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator)

        edit_weights(submission, lambda tensor: disturb(tensor) if tensor.numel() > 1 else tensor)
        refused(submission, data, "it is a copy of run_0", others=[str(data.with_name("run_0"))])

    def test_with_noise_it_is_not_its_own_last_checkpoint_either(self, submission, data):
        edit_weights(submission, lambda tensor: tensor * 1.001)
        refused(submission, data, "not the EMA weights of its last checkpoint")


class TestQuality:
    @pytest.fixture
    def task(self, data):
        return ExpertTask(Dataset.open(data, 0), ExpertSettings("8x1", sample_every=0), torch.device("cpu"))

    @pytest.fixture
    def expert(self, data):
        return Expert.load(data.with_name("run_0"))

    def test_good_enough(self, expert, task):
        errors = check_quality(expert, expert, task, GATE)
        assert errors["expert"] == errors["present"]
        middle = GATE.levels // 2
        assert errors["expert"][middle] < 0.95 * errors["baseline"][middle]

    def test_of_another_cluster(self, data, task):
        with pytest.raises(QualityError, match="times what captions alone allow"):
            check_quality(Expert.load(data.with_name("run_1")), None, task, GATE)

    def test_random_weights(self, expert, task):
        torch.manual_seed(0)
        for p in expert.network.parameters():
            p.data = p.data.std() * torch.randn(p.shape) if p.numel() > 1 else p.data
        with pytest.raises(QualityError, match="times what captions alone allow"):
            check_quality(expert, None, task, GATE)

    def test_good_on_average_and_bad_at_one_level(self, expert, task, monkeypatch):
        honest = expert.network.forward

        def spoiled(x, t, *text):
            output = honest(x, t, *text)
            bad = (t > 0.35) & (t < 0.45)
            return torch.where(bad.view(-1, 1, 1, 1), output.flip(2), output)

        present = Expert(
            type(expert.network)(expert.network.config), expert.objective, expert.calibration, expert.prior
        )
        present.network.load_state_dict(expert.network.state_dict())
        monkeypatch.setattr(expert.network, "forward", spoiled)
        with pytest.raises(QualityError, match=r"at noise times 0\.[34]"):
            check_quality(expert, None, task, GATE)
        with pytest.raises(QualityError, match="times that of the present expert"):
            check_quality(expert, present, task, GATE.model_copy(update={"baseline_margin": 10.0}))

    def test_worse_than_the_present_one(self, expert, task, data):
        present = Expert.load(data.with_name("run_0"))
        for p in expert.network.parameters():
            p.data *= 0.9
        with pytest.raises(QualityError, match="times that of the present expert"):
            check_quality(expert, present, task, GATE.model_copy(update={"baseline_margin": 10.0}))

    def test_not_finite_answers(self, expert, task, monkeypatch):
        monkeypatch.setattr(expert.network, "forward", lambda x, t, *text: x * torch.nan)
        with pytest.raises(QualityError, match="times what captions alone allow") as caught:
            check_quality(expert, None, task, GATE)
        assert json.dumps(caught.value.figures, allow_nan=False)

    def test_a_stolen_run_of_another_cluster_whose_card_is_right(self, data, tmp_path):
        """All of its figures are true of slot 0, and its checkpoints lead to its weights."""
        stolen = submit(data.with_name("run_1"), tmp_path / "submission")
        relabel(stolen, data, 0)
        refused(stolen, data, "redone, lead elsewhere", gate=GATE.model_copy(update={"baseline_margin": 99.0}))

    @pytest.mark.slow
    def test_samples_with_it_and_without_it(self, data, task, tmp_path):
        gate, own, other = GATE.model_copy(update={"samples": 24}), data.with_name("run_0"), data.with_name("run_1")
        scores = check_samples(own, None, [other], 0, task, gate)
        assert scores["with"] < scores["without"]
        assert check_samples(own, own, [other], 0, task, gate)["without"] == scores["with"]
        spoiled = Path(shutil.copytree(own, tmp_path / "spoiled", ignore=shutil.ignore_patterns("state")))
        edit_weights(spoiled, lambda tensor: tensor + 0.1 if tensor.dim() > 1 else tensor)
        with pytest.raises(InputError, match="are worse with it than without"):
            check_samples(spoiled, own, [other], 0, task, gate)
        assert "without" not in check_samples(own, None, [], 0, task, gate)  # there is nothing to compare with

    def test_private_data_are_judged_without_replay(self, data, tmp_path):
        theirs = submit(data.with_name("run_0"), tmp_path / "submission")
        edit_json(theirs / "config.json", lambda about: about["data"].update(fingerprint="1" * 64))
        refused(theirs, data, "names other data")
        judgement = judged(theirs, data, private=True)
        assert judgement.accepted
        assert "replay" not in judgement.figures


class TestProcess:
    @pytest.mark.slow
    def test_accepts(self, submission, data, monkeypatch):
        monkeypatch.setattr(expert_module, "EVALUATED_AT_THE_END", 2048)  # as the other process does
        relabel(submission, data, 0)
        judgement = judge(submission, slot=0, gate=GATE, data=data)
        assert judgement.accepted, judgement.reason
        assert judgement.figures["replay"]["seed"] > 0

    def test_has_none_of_the_credentials(self, monkeypatch):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
        environment = module.child_environment()
        assert "AWS_SECRET_ACCESS_KEY" not in environment
        assert environment["ATEN_CPU_CAPABILITY"] == "avx2"

    @pytest.mark.slow
    def test_too_much_time(self, submission, data, monkeypatch):
        """The process would judge forever, so that no machine is too fast for its limit."""
        program = "from atoll.federation import judge\ndef judge_for_ever(**_):\n    while True: pass\n"
        program += "judge.judge_here = judge_for_ever\njudge.main()"
        monkeypatch.setattr(module, "dying_with_parent", lambda command: [sys.executable, "-c", program, command[-1]])
        judgement = judge(submission, slot=0, gate=GATE, data=data, limits=Limits(seconds=1))
        assert not judgement.accepted
        assert judgement.reason == "judging it took more than 1 seconds of CPU time"

    @pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
    def test_too_much_memory(self, monkeypatch, error):
        monkeypatch.setattr(module, "judge_here", lambda **_: (_ for _ in ()).throw(error))
        answer = module.answer_to({"gate": GATE.model_dump()}, Limits(memory=1 << 30))
        assert answer["reason"] == "judging it needs more than 1,073,741,824 bytes of memory"

    def test_limits_hold(self):
        """Memory, size of files and number of open files are refused by the system."""
        program = """
from atoll.federation.gate import Limits
from atoll.federation.judge import set_limits
import os, tempfile
set_limits(Limits(memory=1 << 30, files=32, written=1000))
faults = []
try:
    bytearray(2 << 30)
except MemoryError:
    faults.append("memory")
try:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(2000))
        file.flush()
except OSError:
    faults.append("written")
try:
    held = [open(os.devnull) for _ in range(40)]
except OSError:
    faults.append("files")
os.write(1, " ".join(faults).encode())
"""
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert run.stdout == "memory written files"

    def test_a_process_that_does_not_start(self, submission, data, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", "/nowhere")
        monkeypatch.setattr(module.sys, "executable", "/bin/false")
        with pytest.raises(InputError, match="did not start"):
            judge(submission, slot=0, gate=GATE, data=data)

    def test_the_verifier_s_own_faults_are_not_the_submission_s(self, submission, tmp_path):
        with pytest.raises(InputError, match="give a folder that `atoll prepare` has made"):
            judge(submission, slot=0, gate=GATE, data=tmp_path)

    @pytest.mark.parametrize(
        ("answer", "code", "sentence"),
        [
            (b"started\n", -signal.SIGSEGV, "SIGSEGV"),
            (b"started\n", -signal.SIGXCPU, "seconds of CPU time"),
            (b"started\n" + b"{}" * 1_000_000, 0, "without an answer"),
            (b"started\n[1]", 0, "without an answer"),
            (b"started\nnonsense", 3, "exit 3"),
        ],
    )
    def test_answers_of_a_process_that_went_wrong(self, answer, code, sentence):
        judgement = module._read_answer(answer, code, Limits())
        assert not judgement.accepted
        assert sentence in judgement.reason
