"""The training loop itself, on a toy task: normal runs and failures."""

import json
import math
import os
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from atoll.errors import InputError
from atoll.networks.dit import DiT, DiTConfig
from atoll.tensors import TensorFile
from atoll.training import checkpoint
from atoll.training.checkpoint import Progress
from atoll.training.loop import train
from atoll.training.metrics_log import MetricsLog, read_metrics
from atoll.training.settings import Settings
from atoll.training.tally import Tally
from atoll.training.task import Batch, Task, mixed_seed, rows_of_step, seeded

TOY = Settings(steps=12, batch=8, log_every=4, save_every=4, eval_every=6, sample_every=0, lr=1e-3)


class Toy(Task):
    """A tiny network learns to denoise 20 random images; `fault` alters its loss at some calls."""

    def __init__(self, fault=None) -> None:
        self.num_rows = 20
        self.fault = fault
        with seeded("toy"):
            self.network = DiT(
                DiTConfig(input_size=4, in_channels=2, hidden_size=16, depth=1, num_heads=2, text_dim=None)
            )
            self.pictures = torch.randn(20, 2, 4, 4)
        self.calls = 0
        self.finished = 0

    def describe(self):
        return {"data": {"fingerprint": "toy"}}

    def draw(self, num, generator):
        return torch.rand(num, generator=generator), torch.randn(num, 2, 4, 4, generator=generator)

    def read(self, rows, drawn):
        return Batch(self.pictures[rows], torch.from_numpy(rows), *drawn, torch.zeros(len(rows)))

    def loss(self, network, batch, host):
        self.calls += 1
        x0, _, t, eps, _ = batch
        noisy = x0 + t[:, None, None, None] * eps
        loss = ((network(noisy, t) - x0) ** 2).flatten(1).mean(1)
        return loss if self.fault is None else self.fault(self.calls, loss)

    def evaluate(self, sample):
        return {"held_out": float(self.network.out.bias.sum())}, None

    def finish(self, folder, training):
        self.finished += 1
        self.network.save_pretrained(folder)
        return ["done"]


def run(folder, settings=TOY, fault=None):
    toy = Toy(fault)
    return toy, list(train(lambda device: toy, settings, folder, progress_bar=False))


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def figures(folder):
    """Returns metrics.jsonl without timings."""
    return [{k: v for k, v in line.items() if "second" not in k} for line in read_metrics(folder)]


class TestRun:
    def test_what_it_leaves(self, tmp_path):
        toy, told = run(tmp_path / "a")
        assert toy.finished == 1
        assert "12 steps" in told[0]
        assert told[1] == "done"
        assert sorted(p.name for p in (tmp_path / "a" / "state").iterdir()) == [
            "000000008.safetensors", "000000012.safetensors"]  # fmt: skip
        lines = read_metrics(tmp_path / "a")
        assert [line["step"] for line in lines] == [4, 6, 8, 12, 12]
        assert all(math.isfinite(line["loss"]) for line in lines if "loss" in line)
        about = json.loads((tmp_path / "a" / "run.json").read_text())
        assert about["complete"] is True

    def test_it_learns_and_the_ema_weights_are_what_is_kept(self, tmp_path):
        _, _ = run(tmp_path / "a", replace(TOY, steps=150, lr=3e-3))
        losses = [line["loss"] for line in read_metrics(tmp_path / "a") if "loss" in line]
        assert losses[-1] < 0.9 * losses[0]
        kept = DiT.from_pretrained(tmp_path / "a").state_dict()
        from safetensors.torch import load_file

        last = load_file(tmp_path / "a" / "state" / "000000150.safetensors")
        assert torch.equal(kept["out.bias"], last["averaged.out.bias"])
        assert not torch.equal(kept["out.bias"], last["weights.out.bias"])

    def test_the_ema_is_what_it_says(self, tmp_path):
        """Compared with the explicit sum over the checkpoints of every step."""
        from safetensors.torch import load_file

        settings = replace(TOY, save_every=1, keep_last=100, steps=6)
        run(tmp_path / "a", settings)
        checkpoints = [load_file(path) for path in checkpoint.saved(tmp_path / "a" / "state")]
        mean = checkpoints[0]["weights.out.bias"].double()
        for step in range(6):
            decay = min(0.9999, (1 + step) / (10 + step))
            mean = decay * mean + (1 - decay) * checkpoints[step + 1]["weights.out.bias"].double()
        torch.testing.assert_close(checkpoints[6]["averaged.out.bias"].double(), mean, rtol=1e-5, atol=1e-7)

    def test_micro_batches_and_checkpointing_change_nothing(self, tmp_path):
        _, _ = run(tmp_path / "a")
        _, _ = run(tmp_path / "b", replace(TOY, micro_batch=3))
        _, _ = run(tmp_path / "c", replace(TOY, checkpointing=True))
        a, b, c = (DiT.from_pretrained(tmp_path / name).state_dict() for name in "abc")
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(a[name], c[name], rtol=1e-4, atol=1e-5)

    def test_seeds_matter_and_repeat(self, tmp_path):
        for name, seed in (("a", 0), ("b", 0), ("c", 1)):
            run(tmp_path / name, replace(TOY, seed=seed))
        assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")
        assert figures(tmp_path / "a") == figures(tmp_path / "b")

    def test_checkpoints_that_are_kept(self, tmp_path):
        run(tmp_path / "a", replace(TOY, save_every=1, keep_last=2, keep_every=5))
        assert [int(p.stem) for p in checkpoint.saved(tmp_path / "a" / "state")] == [0, 5, 10, 11, 12]

    def test_bf16(self, tmp_path):
        run(tmp_path / "a", replace(TOY, precision="bf16"))
        assert DiT.from_pretrained(tmp_path / "a").out.bias.dtype == torch.float32

    def test_bf16_on_a_machine_that_only_says_it_can(self, tmp_path, monkeypatch):
        monkeypatch.setattr("atoll.tensors.runs_bf16", lambda: False)
        with pytest.raises(InputError, match="crashes on them in bf16: use float32, or set ONEDNN_MAX_CPU_ISA=AVX512_"):
            run(tmp_path / "a", replace(TOY, precision="bf16"))
        assert not (tmp_path / "a").exists()


class TestOrder:
    def test_every_epoch_has_each_row_once(self):
        seen = np.concatenate([rows_of_step(20, 8, "0", step) for step in range(5)])
        assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))
        assert list(seen[:20]) != list(seen[20:])

    def test_it_depends_on_seed_and_step_alone(self):
        steps = [rows_of_step(20, 8, "0", step) for step in range(9)]
        for step in (8, 3, 5, 0):
            assert np.array_equal(rows_of_step(20, 8, "0", step), steps[step])
        assert not np.array_equal(rows_of_step(20, 8, "1", 0), steps[0])

    def test_a_batch_may_be_larger_than_the_data(self):
        assert np.array_equal(np.bincount(rows_of_step(3, 9, "0", 0)), [3, 3, 3])

    def test_seeds_do_not_meet(self):
        assert len({mixed_seed("step", seed, step) for seed in range(30) for step in range(30)}) == 900


class TestResume:
    def test_stopped_by_sigterm_it_goes_on_as_if_it_had_not(self, tmp_path):
        run(tmp_path / "whole")

        def told_to_stop(call, loss):
            if call == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            return loss

        toy, told = run(tmp_path / "a", fault=told_to_stop)
        assert toy.finished == 0
        assert "stopped at step 7 of 12" in told[0]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        run(tmp_path / "a")
        assert weights(tmp_path / "a") == weights(tmp_path / "whole")
        assert figures(tmp_path / "a") == figures(tmp_path / "whole")

    def test_ctrl_c_saves_too(self, tmp_path):
        def interrupt(call, loss):
            if call == 5:
                os.kill(os.getpid(), signal.SIGINT)
            return loss

        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "a", fault=interrupt)
        assert [int(p.stem) for p in checkpoint.saved(tmp_path / "a" / "state")] == [4, 5]

    def test_a_finished_run_is_left_alone(self, tmp_path):
        run(tmp_path / "a")
        before = weights(tmp_path / "a")
        toy, told = run(tmp_path / "a")
        assert toy.calls == 0
        assert "trained already" in told[0]
        assert weights(tmp_path / "a") == before

    def test_more_steps_go_on_from_there(self, tmp_path):
        run(tmp_path / "whole", replace(TOY, steps=20, warmup=3))
        run(tmp_path / "a", replace(TOY, warmup=3))
        toy, _ = run(tmp_path / "a", replace(TOY, steps=20, warmup=3))
        assert toy.calls == 8
        assert weights(tmp_path / "a") == weights(tmp_path / "whole")

    def test_more_steps_of_a_decay_are_refused_in_words(self, tmp_path):
        """Its learning rates depend on the number of steps: a longer run would differ from its first step on."""
        cosine = replace(TOY, lr_schedule="cosine")
        run(tmp_path / "a", cosine)
        with pytest.raises(InputError, match=r"begun with 12 steps of cosine decay, .* give the same --steps"):
            run(tmp_path / "a", replace(cosine, steps=20))
        toy, _ = run(tmp_path / "a", cosine)
        assert toy.calls == 0

    def test_the_default_warm_up_does_not_come_back(self, tmp_path):
        run(tmp_path / "a", replace(TOY, steps=40))
        run(tmp_path / "a", replace(TOY, steps=400, eval_every=400))
        rates = [line["lr"] for line in read_metrics(tmp_path / "a") if "lr" in line]
        assert all(rate == 1e-3 for rate in rates[1:])

    def test_a_finished_run_keeps_its_metrics_without_its_checkpoints(self, tmp_path):
        run(tmp_path / "a")
        before = figures(tmp_path / "a")
        shutil.rmtree(tmp_path / "a" / "state")
        toy, told = run(tmp_path / "a")
        assert "trained already, to step 12" in told[0]
        assert toy.calls == 0
        assert figures(tmp_path / "a") == before

    def test_what_only_saves_memory_may_change(self, tmp_path):
        run(tmp_path / "a")
        toy, _ = run(tmp_path / "a", replace(TOY, steps=14, warmup=None, micro_batch=2, checkpointing=True))
        assert toy.finished == 1

    def test_a_folder_of_something_else_is_refused(self, tmp_path):
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "novel.txt").write_text("Chapter 1")
        with pytest.raises(InputError, match=r"holds novel.txt and is not a run of atoll: choose another --out"):
            run(tmp_path / "a")
        assert (tmp_path / "a" / "novel.txt").read_text() == "Chapter 1"

    @pytest.mark.parametrize(
        ("name", "content"),
        [("run.json", "{"), ("run.json", '{"settings": []}'), ("run.json", "3"), ("metrics.jsonl", None)],
    )
    def test_a_damaged_run_is_a_sentence(self, tmp_path, name, content):
        run(tmp_path / "a", replace(TOY, steps=4))
        (tmp_path / "a" / name).unlink()
        if content is None:
            (tmp_path / "a" / name).mkdir()
        else:
            (tmp_path / "a" / name).write_text(content)
        with pytest.raises(InputError, match=name if content != '{"settings": []}' else "cannot be read"):
            run(tmp_path / "a")

    def test_bytes_in_the_metrics_that_are_no_text(self, tmp_path):
        run(tmp_path / "a", replace(TOY, steps=4))
        (tmp_path / "a" / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
        toy, _ = run(tmp_path / "a")
        assert toy.finished == 1

    def test_only_checkpoints_are_touched(self, tmp_path):
        run(tmp_path / "a", replace(TOY, steps=4))
        copy = tmp_path / "a" / "state" / "000000004 copy.safetensors"
        copy.write_bytes(b"a backup")
        (tmp_path / "a" / "state" / ".000000005.safetensors.tmp").write_bytes(b"half")
        run(tmp_path / "a", replace(TOY, save_every=1, keep_last=1, keep_every=7))
        assert copy.read_bytes() == b"a backup"
        assert not list((tmp_path / "a" / "state").glob(".*"))

    def test_another_run_is_refused(self, tmp_path):
        run(tmp_path / "a")
        with pytest.raises(InputError, match=r"was begun with lr 0.001, not 0.01: rerun the same command to resume"):
            run(tmp_path / "a", replace(TOY, lr=1e-2))

    def test_a_damaged_checkpoint_gives_way_to_the_one_before(self, tmp_path, capsys):
        run(tmp_path / "whole")
        run(tmp_path / "a", replace(TOY, steps=8))
        last = tmp_path / "a" / "state" / "000000008.safetensors"
        last.write_bytes(last.read_bytes()[:-100])
        toy, _ = run(tmp_path / "a", replace(TOY, steps=12))
        assert "000000008.safetensors is truncated" in capsys.readouterr().err
        assert toy.calls == 8
        assert weights(tmp_path / "a") != b""

    def test_lines_past_the_checkpoint_are_written_anew(self, tmp_path):
        log = MetricsLog(tmp_path, 0)
        for step in (2, 4, 6):
            log.write({"step": step})
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 8, "lo')
        log = MetricsLog(tmp_path, 4)
        log.write({"step": 5})
        assert [line["step"] for line in read_metrics(tmp_path)] == [2, 4, 5]


class TestStrangers:
    """A stranger's run is resumed as data only: nothing outside its folder is read or written."""

    @pytest.fixture
    def begun(self, tmp_path):
        run(tmp_path / "a", replace(TOY, steps=4))
        return tmp_path / "a"

    @pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "log.txt", "state/000000004.safetensors"])
    def test_a_fifo(self, begun, name):
        (begun / name).unlink(missing_ok=True)
        os.mkfifo(begun / name)
        with pytest.raises(InputError, match=r"is not one of a run's own files \(it is a FIFO"):
            run(begun)

    @pytest.mark.parametrize("name", ["metrics.jsonl", ".run.json.tmp", "samples", "state", "state/.000000005.tmp"])
    def test_a_link_to_something_else(self, begun, tmp_path, name):
        target = tmp_path / "precious"
        if name in ("samples", "state"):
            shutil.rmtree(begun / name, ignore_errors=True)
            target.mkdir()
        else:
            (begun / name).unlink(missing_ok=True)
            target.write_text("mine")
        (begun / name).symlink_to(target)
        with pytest.raises(InputError, match="it is a link that leaves its folder"):
            run(begun)
        assert not list(target.iterdir()) if target.is_dir() else target.read_text() == "mine"

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"progress": "[" * 10**5}, "cannot be resumed from"),
            ({"progress": '{"step": 1000000000}'}, "is of step 1000000000"),
            ({"progress": '{"step": 4, "loss_sum": NaN}'}, "NaN"),
            ({"progress": '{"step": 4, "\\u001b[2J": 1}'}, "unknown key"),
            ({"format": "\x1b]0;x\x07" * 1000}, "its format is"),
        ],
    )
    def test_the_progress_in_a_checkpoint(self, begun, changes, sentence):
        path = begun / "state" / "000000004.safetensors"
        with TensorFile(path, "") as file:
            tensors, about = file.read(), file.metadata
        save_file(tensors, path, {**about, **changes})
        (begun / "state" / "000000000.safetensors").unlink()
        with pytest.raises(InputError, match=sentence) as error:
            run(begun)
        assert "\x1b" not in str(error.value)
        assert len(str(error.value)) < 1000

    def test_a_checkpoint_of_another_type(self, begun):
        path = begun / "state" / "000000004.safetensors"
        with TensorFile(path, "") as file:
            tensors, about = file.read(), file.metadata
        save_file({name: tensor.double() for name, tensor in tensors.items()}, path, about)
        (begun / "state" / "000000000.safetensors").unlink()
        with pytest.raises(InputError, match="is of another network"):
            run(begun)

    def test_metrics_without_end(self, begun):
        (begun / "metrics.jsonl").write_text("[" * 10**6 + "\n")
        toy, _ = run(begun)
        assert toy.finished == 1
        with (begun / "metrics.jsonl").open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(InputError, match="metrics.jsonl .*it is larger than"):
            read_metrics(begun)


class TestTrouble:
    def test_a_bad_step_is_skipped_and_counted(self, tmp_path):
        toy, _ = run(tmp_path / "a", fault=lambda call, loss: loss * (math.nan if call in (3, 9) else 1))
        assert toy.finished == 1
        assert read_metrics(tmp_path / "a")[-2]["skipped"] == 2
        assert all(torch.isfinite(p).all() for p in DiT.from_pretrained(tmp_path / "a").parameters())

    def test_an_infinite_gradient_is_skipped(self, tmp_path):
        def steep(call, loss):
            return loss if call != 3 else (loss - loss.detach() + 1e-30).sqrt() * 1e38 * 1e10

        toy, _ = run(tmp_path / "a", fault=steep)
        assert toy.finished == 1
        assert read_metrics(tmp_path / "a")[-2]["skipped"] == 1

    def test_several_in_a_row_roll_back_once(self, tmp_path, capsys):
        """It goes back to step 4, draws other noise, and ends well."""
        toy, _ = run(tmp_path / "a", fault=lambda call, loss: loss * (math.nan if 6 <= call < 11 else 1))
        assert toy.finished == 1
        assert toy.calls == 10 + 8
        assert "going back to step 4" in capsys.readouterr().err
        lines = read_metrics(tmp_path / "a")
        assert [line["rolled_back_from"] for line in lines if "rolled_back_from" in line] == [10]
        assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
        config = json.loads((tmp_path / "a" / "run.json").read_text())
        assert config["complete"] is True

    def test_then_it_stops_in_words(self, tmp_path):
        with pytest.raises(InputError, match=r"in steps 4 to 8, at a learning rate of 0.001, also after going back"):
            run(tmp_path / "a", fault=lambda call, loss: loss * (math.nan if call > 6 else 1))
        assert [int(p.stem) for p in checkpoint.saved(tmp_path / "a" / "state")] == [0, 4]
        resumed, _ = run(tmp_path / "a")  # the cause is gone: the last good checkpoint still works
        assert resumed.finished == 1

    def test_a_checkpoint_that_fails_at_once_was_broken_when_it_was_saved(self, tmp_path, capsys):
        longer = replace(TOY, steps=20)
        toy, _ = run(tmp_path / "a", longer, lambda call, loss: loss * (math.nan if 9 <= call < 14 else 1))
        assert toy.finished == 1
        assert "going back to step 4" in capsys.readouterr().err

    def test_no_checkpoint_is_saved_amid_bad_steps(self, tmp_path):
        def bad_then_stop(call, loss):
            if call == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            return loss * (math.nan if call >= 6 else 1)

        run(tmp_path / "a", fault=bad_then_stop)
        assert [int(p.stem) for p in checkpoint.saved(tmp_path / "a" / "state")] == [0, 4]
        run(tmp_path / "a")
        run(tmp_path / "whole")
        assert weights(tmp_path / "a") == weights(tmp_path / "whole")

    def test_figures_that_are_not_finite_are_null(self, tmp_path):
        log = MetricsLog(tmp_path, 0)
        log.write({"step": 1, "held_out": math.nan, "by": [1.0, math.inf]})
        assert read_metrics(tmp_path) == [{"step": 1, "held_out": None, "by": [1.0, None]}]

    def test_a_learning_rate_that_diverges(self, tmp_path, capsys):
        with pytest.raises(InputError, match="begin again with a lower --lr"):
            run(tmp_path / "a", replace(TOY, lr=1e4, steps=200))

    def test_a_full_disk_loses_nothing(self, tmp_path, monkeypatch):
        run(tmp_path / "whole")
        run(tmp_path / "a", replace(TOY, steps=4))
        before = {p.name: p.read_bytes() for p in (tmp_path / "a" / "state").iterdir()}
        real = checkpoint._write

        def full(path, *_):
            path.write_bytes(b"half of it")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(checkpoint, "_write", full)
        with pytest.raises(InputError, match=r"cannot write .*000000008.safetensors \(No space left on device\)"):
            run(tmp_path / "a")
        assert {p.name: p.read_bytes() for p in (tmp_path / "a" / "state").iterdir()} == before
        monkeypatch.setattr(checkpoint, "_write", real)
        run(tmp_path / "a")
        assert weights(tmp_path / "a") == weights(tmp_path / "whole")

    def test_a_folder_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(InputError, match="cannot write"):
            run(tmp_path / "file" / "a")

    def test_damaged_data_save_first(self, tmp_path):
        toy = Toy()
        read = toy.read

        def damaged(rows, drawn):
            if toy.calls >= 5:
                raise InputError("row 3 is damaged")
            return read(rows, drawn)

        toy.read = damaged
        with pytest.raises(InputError, match="row 3"):
            train(lambda device: toy, TOY, tmp_path / "a", progress_bar=False)
        assert max(int(p.stem) for p in checkpoint.saved(tmp_path / "a" / "state")) >= 5

    def test_too_little_memory(self, tmp_path):
        def huge(call, loss):
            raise torch.OutOfMemoryError("CUDA out of memory")

        with pytest.raises(InputError, match="halve --micro-batch"):
            run(tmp_path / "a", fault=huge)


class TestSettings:
    @pytest.mark.parametrize(
        ("name", "value"),
        [("steps", 0), ("batch", -1), ("lr", math.nan), ("lr", -1.0), ("ema", 1.5), ("precision", "fp8"),
         ("lr_schedule", "linear"), ("seed", -1), ("micro_batch", 0), ("clip", 0.0), ("text_dropout", 2.0),
         ("beta2", 1.0), ("threads", 10**9), ("batch", 10**12), ("steps", 10**400), ("lr", 10**400)],
    )  # fmt: skip
    def test_refused(self, name, value):
        with pytest.raises(InputError, match=name):
            Settings(**{name: value})

    def test_rates(self):
        constant, cosine = Settings(steps=100, lr=1.0, warmup=9), Settings(steps=100, lr=1.0, lr_schedule="cosine")
        assert constant.lr_at(0, 1) == pytest.approx(0.1)
        assert constant.lr_at(9, 1) == constant.lr_at(99, 1) == 1.0
        assert cosine.lr_at(52, 1) == pytest.approx(0.5, abs=0.02)
        assert cosine.lr_at(100, 1) == pytest.approx(0, abs=1e-9)
        assert Settings().lr_at(4000, 1152) == pytest.approx(1e-4)

    def test_devices(self):
        with pytest.raises(InputError, match="there is no device 'gpu' here"):
            _ = Settings(device="gpu").torch_device
        with pytest.raises(InputError, match="there is no device"):
            _ = Settings(device="meta").torch_device
        if not torch.cuda.is_available():
            with pytest.raises(InputError, match="there is no device 'cuda' here"):
                _ = Settings(device="cuda").torch_device


def test_the_loop_leaves_the_random_numbers_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(tmp_path / "a")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("good", "bad", "after"), [(3, 6, 0), (3, 6, 2), (0, 7, 4)])
def test_where_the_longest_run_of_bad_steps_was(good, bad, after):
    """On a GPU many steps are looked at together, and good ones may follow the bad ones."""
    progress = Progress(first_loss=1.0)
    tally = Tally(progress, torch.device("cpu"))
    for loss in [1.0] * good + [math.nan] * bad + [1.0] * after:
        tally.count(torch.tensor([loss, 1.0]))
    assert tally.look(progress) == (bad, after)
    assert progress.skipped == bad
    assert progress.updates == good + after
