"""The real code on a simulated GPU (simulated_gpu.py): devices do not mix, and results are those of the CPU."""

import inspect
import json
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from atoll.cards import ModelIndex
from atoll.cli.main import main
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.shards import Dataset
from atoll.data.sources import Source
from atoll.encoders.codecs import make_codec
from atoll.encoders.features import make_features
from atoll.encoders.text import make_text_encoder
from atoll.tensors import read_tensors, send
from atoll.training import checkpoint, distill, expert, router
from atoll.training.checkpoint import Progress
from atoll.training.distributed import Distributed
from atoll.training.loop import Learner, train
from atoll.training.metrics_log import read_metrics
from atoll.training.settings import DistillSettings, ExpertSettings, RouterSettings, Settings
from atoll.training.tally import Tally
from atoll.training.task import LENGTHS, Batch, Batches, Task
from simulated_gpu import CUDA, Gpu, simulated_gpu
from test_loop import TOY, Toy

SMALL = (
    "--model",
    "32x1",
    "--steps",
    "3",
    "--batch",
    "4",
    "--log-every",
    "1",
    "--sample-every",
    "0",
    "--precision",
    "fp32",
)


@pytest.fixture(scope="module", autouse=True)
def brief():
    """Evaluates fewer held-out rows, since each batch of four takes 0.1 seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (expert, router, distill):
            patch.setattr(module, "EVALUATED_AT_THE_END", 64)
            patch.setattr(module, "EVALUATED", 64)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns a data set of two clusters, an expert of each objective, a router and a model."""
    folder = tmp_path_factory.mktemp("gpu")
    prepare(
        Source("shapes", num=80, size=16), folder / "data", PrepareSettings(size=16, holdout=0.2), 0, progress=False
    )
    main(["partition", str(folder / "data"), "--experts", "2"])
    for k, objective in enumerate(("fm", "ddpm")):
        out = str(folder / f"run/expert_{k}")
        main(["train", str(folder / "data"), "--cluster", str(k), "--objective", objective, *SMALL, "--out", out])
    main(["train-router", str(folder / "data"), *SMALL, "--out", str(folder / "run/router")])
    main(["assemble", str(folder / "run"), "--data", str(folder / "data"), "--out", str(folder / "model")])
    return folder


class TestTheDevice:
    def test_it_trains_as_the_cpu_does(self):
        torch.manual_seed(0)
        ours, theirs = nn.Linear(8, 8), nn.Linear(8, 8)
        theirs.load_state_dict(ours.state_dict())
        x = torch.randn(4, 8)
        with simulated_gpu() as gpu:
            theirs.to(CUDA)
            assert theirs.weight.device == CUDA
            gpu.stalls.clear()
            for network, images in ((ours, x), (theirs, send(x, CUDA))):
                optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, fused=True)
                network(images).square().mean().backward()
                nn.utils.clip_grad_norm_(network.parameters(), 0.1)
                optimizer.step()
            assert not gpu.stalls
            assert torch.equal(theirs.weight.detach().cpu(), ours.weight.detach())

    def test_a_tensor_on_the_host_is_refused(self):
        with simulated_gpu(), pytest.raises(RuntimeError, match="same device"):
            torch.zeros(3, device=CUDA) + torch.zeros(3)

    @pytest.mark.parametrize(
        "look",
        [
            lambda x: x.sum().item(), lambda x: bool((x > 0).any()), lambda x: x.nonzero(), lambda x: x.tolist(),
            lambda x: x[x > 0], lambda x: x.cpu(), lambda x: x.to("cpu"), lambda x: x[torch.tensor([0])],
            lambda x: x + torch.zeros(3).to(CUDA), lambda x: x + torch.zeros(3).to(CUDA, non_blocking=True),
            lambda x: torch.tensor([1.0], device=CUDA),
        ],
    )  # fmt: skip
    def test_what_stalls_it_is_counted(self, look):
        with simulated_gpu() as gpu:
            x = torch.ones(3, device=CUDA)
            assert not gpu.stalls
            look(x)
            assert sum(gpu.stalls.values()) == 1


# --- training -----------------------------------------------------------------------------------------------------


def task_maker(folder: Path, name: str) -> tuple[Callable[[torch.device], Task], Settings]:
    """Returns a maker of the task of an expert, router or student, and settings with two micro-batches per step."""
    sizes: Any = {"model": "32x1", "batch": 4, "micro_batch": 2, "sample_every": 0, "precision": "fp32"}
    data, model = folder / "data", folder / "model"
    kind, _, option = name.partition(" ")
    if kind == "expert":
        changes = {"optimizer": "muon", "model": "32x1:local"} if option == "muon" else {"objective": option}
        settings: Any = ExpertSettings(**{**sizes, **changes}, device="cuda:0")
        return partial(expert.ExpertTask, Dataset.open(data, 0), settings), settings
    if kind == "router":
        settings = RouterSettings(**sizes, text=option == "with", device="cuda:0")
        return partial(router.RouterTask, Dataset.open(data), settings), settings
    settings = DistillSettings(**sizes, teacher=option, guidance=2.0, device="cuda:0")

    def student(device: torch.device) -> Task:
        teacher = distill.Teacher.open(model, ModelIndex.read(model), settings, device)
        return distill.DistillTask(Dataset.open(data), settings, device, teacher)

    return student, settings


def train_on(gpu: Gpu, make: Callable[[torch.device], Task], settings: Settings) -> Counter[str]:
    """Trains four steps, then reads results once; returns the stalls of the last two steps."""
    distributed = Distributed(settings)
    learner = Learner(make(CUDA), settings, distributed)
    progress = Progress()
    tally = Tally(progress, CUDA)
    with closing(Batches(learner.task, settings.batch, 0, distributed.share, CUDA)) as batches:
        for step in range(4):
            if step == 2:  # the first two load teachers and fill caches
                gpu.stalls.clear()
            losses = learner.backward(*batches.get(step))
            learner.update(1e-3, 0.9, skip=tally.count(losses))
    found = Counter(gpu.stalls)
    gpu.stalls.clear()
    tally.look(progress)
    assert progress.updates == 4
    assert sum(gpu.stalls.values()) == 1
    return found


TASKS = (
    *("expert fm", "expert ddpm-min-snr", "expert muon"),
    *("router with", "router without", "student label", "student router"),
)


class TestTraining:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", TASKS)
    def test_a_step_asks_nothing_of_the_device(self, folder, name):
        with simulated_gpu() as gpu:
            assert not train_on(gpu, *task_maker(folder, name))

    @pytest.mark.parametrize(
        ("look", "called"),
        [
            (lambda loss: loss.item(), "item"),
            (lambda loss: bool(torch.isnan(loss)), "bool"),
            (lambda loss: loss.cpu(), "cpu"),
        ],
    )
    def test_a_look_is_found(self, folder, monkeypatch, look, called):
        loss = expert.ExpertTask.loss

        def looking(self: Any, *args: Any) -> torch.Tensor:
            found = loss(self, *args)
            look(found.sum().detach())
            return found

        monkeypatch.setattr(expert.ExpertTask, "loss", looking)
        with simulated_gpu() as gpu:
            assert sum(train_on(gpu, *task_maker(folder, "expert fm")).values()) == 4, called

    def test_a_tensor_that_stays_on_the_host_is_found(self, folder, monkeypatch):
        loss = expert.ExpertTask.loss
        monkeypatch.setattr(
            expert.ExpertTask, "loss", lambda self, network, batch, host: loss(self, network, batch, host) * host.t
        )
        with simulated_gpu() as gpu, pytest.raises(RuntimeError, match="same device"):
            train_on(gpu, *task_maker(folder, "expert fm"))

    def test_bad_steps_are_skipped_on_the_device(self, tmp_path):
        """As on the CPU, which checks every step; here only three of twelve are checked."""
        settings = replace(TOY, steps=12, log_every=4, save_every=100, eval_every=100)

        def fault(call: int, loss: torch.Tensor) -> torch.Tensor:
            return loss * (math.nan if call in (3, 7, 8) else 1e9 if call == 10 else 1)

        train(lambda device: Toy(fault), settings, tmp_path / "cpu", progress_bar=False)
        with simulated_gpu() as gpu:
            train(lambda device: Toy(fault), replace(settings, device="cuda:0"), tmp_path / "gpu", progress_bar=False)
        assert gpu.stalls[f"training/tally.py:{line_of(Tally.look, 'tolist')} look: tolist"] == 3
        ours, theirs = ([line for line in read_metrics(tmp_path / name) if "loss" in line] for name in ("cpu", "gpu"))
        assert [line["skipped"] for line in ours] == [line["skipped"] for line in theirs] == [1, 3, 4]
        assert [line["loss"] for line in theirs] == pytest.approx([line["loss"] for line in ours], rel=1e-5)
        states = [read_tensors(checkpoint.saved(tmp_path / name / "state")[-1], "") for name in ("cpu", "gpu")]
        for name, tensor in states[0].items():
            torch.testing.assert_close(states[1][name], tensor, rtol=1e-5, atol=1e-7, msg=name)

    @pytest.mark.slow
    def test_too_many_bad_steps_are_rolled_back(self, tmp_path):
        """They are detected at the next check, some steps after they happened."""
        settings = replace(TOY, steps=24, log_every=8, save_every=4, eval_every=100, device="cuda:0")
        with simulated_gpu():
            toy = Toy(lambda call, loss: loss * math.nan if 9 < call < 16 else loss)
            train(lambda device: toy, settings, tmp_path / "run", progress_bar=False)
        lines = read_metrics(tmp_path / "run")
        assert [line["step"] for line in lines if "rolled_back_from" in line] == [8]
        assert lines[-1]["step"] == 24

    def test_batches_are_copied_beside_the_step_before(self, folder, monkeypatch):
        """They are pinned and copied ahead on their own stream; a step waits only for its own copy."""
        make, settings = task_maker(folder, "expert fm")
        monkeypatch.setattr("atoll.training.task.ThreadPoolExecutor", lambda *_: InlineExecutor())
        with simulated_gpu() as gpu:
            task = make(CUDA)
            with closing(Batches(task, settings.batch, 0, slice(0, 4), CUDA)) as batches:
                gpu.log.clear()
                gpu.stalls.clear()
                for step in range(3):
                    gpu.log.append(("step", step))
                    batch, host = batches.get(step)
                    assert batch.latents.dtype == host.latents.dtype == torch.float16
                    assert host.latents.is_pinned()
                    assert not gpu.stalls
        copies = [("copy", "side")] * len(Batch._fields)
        first, waits = (
            [*copies, ("record", "side")],
            [("wait", "default"), *[("record_stream", "default")] * len(copies)],
        )
        kinds = [entry[:2] for entry in gpu.log]
        assert kinds == [
            ("step", 0), *first, *waits, *first,  # its own copy, and that of the step after it
            ("step", 1), *waits, *first,
            ("step", 2), *waits, *first,
        ]  # fmt: skip
        recorded = [entry[2] for entry in gpu.log if entry[0] == "record"]
        assert [entry[2] for entry in gpu.log if entry[0] == "wait"] == recorded[:3]

    def test_texts_are_cut_to_lengths_that_repeat(self, folder):
        make, _ = task_maker(folder, "expert fm")
        task = make(torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        for rows in np.arange(32).reshape(8, 4):
            batch = task.read(rows, task.draw(4, generator))
            length = max(task.text.lengths(batch.ids))
            assert batch.ids.shape[1] in range(length, length + LENGTHS)
            assert batch.ids.shape[1] % LENGTHS == 0 or batch.ids.shape[1] == task.text.max_length


class InlineExecutor(Executor):
    """Runs submitted functions immediately."""

    def submit(self, do: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(do(*args))
        return future


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


# --- verbs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
class TestVerbs:
    @pytest.mark.parametrize(
        "command",
        [
            ("train", "data", "--cluster", "1", "--objective", "ddpm-min-snr"),
            ("train-router", "data"),
            ("distill", "model", "data", "--teacher", "label"),
            ("distill", "model", "data", "--teacher", "router", "--guidance", "2"),
        ],
    )
    def test_training(self, folder, tmp_path, command):
        """Up to rounding it learns what the CPU does, so nothing is left on the host or done twice.

        A key's bias has only rounding as its gradient, of which AdamW makes a full step: runs are compared as a whole.
        """
        verb, *rest = (str(folder / word) if word in ("data", "model") else word for word in command)
        main([verb, *rest, *SMALL, "--out", str(tmp_path / "cpu")])
        with simulated_gpu():
            main([verb, *rest, *SMALL, "--device", "cuda:0", "--out", str(tmp_path / "gpu")])
        told = [[line["loss"] for line in read_metrics(tmp_path / name) if "loss" in line] for name in ("cpu", "gpu")]
        assert told[0] == pytest.approx(told[1], rel=1e-4)
        ours, theirs = (read_tensors(tmp_path / name / "model.safetensors", "") for name in ("cpu", "gpu"))
        ours, theirs = (torch.cat([weight.flatten() for weight in part.values()]) for part in (ours, theirs))
        assert float((ours - theirs).norm() / ours.norm()) < 1e-3

    @pytest.mark.parametrize("flags", [(), ("--routing", "topk:2"), ("--routing", "full", "--guidance", "1")])
    def test_sampling(self, folder, tmp_path, flags):
        command = ["sample", str(folder / "model"), "a red square", "a blue circle", "--steps", "3", "--trace", *flags]
        main([*command, "--device", "cpu", "--out", str(tmp_path / "cpu")])
        with simulated_gpu():
            main([*command, "--device", "cuda:0", "--out", str(tmp_path / "gpu")])
        for path in (tmp_path / "cpu").glob("a-*.png"):
            ours, theirs = (np.asarray(Image.open(tmp_path / name / path.name)).astype(int) for name in ("cpu", "gpu"))
            assert np.abs(ours - theirs).max() <= 1

    def test_evaluation(self, folder, tmp_path):
        command = ["evaluate", str(folder / "model"), str(folder / "data"), "--num", "8", "--steps", "2"]
        command += ["--features", "simple", "--metrics", "frechet", "kernel"]
        main([*command, "--device", "cpu", "--out", str(tmp_path / "cpu")])
        with simulated_gpu():
            main([*command, "--device", "cuda:0", "--out", str(tmp_path / "gpu")])
        results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("cpu", "gpu")]
        ours, theirs = ({k: v["value"] for k, v in result["models"][0]["figures"].items()} for result in results)
        assert ours == pytest.approx(theirs, rel=1e-3)


class TestEncoders:
    """Codecs, text encoders and feature networks: the CPU's results, and no more device reads than safety needs."""

    @pytest.mark.parametrize("name", ["pixels", "pca", "conv", "kl", "tiny"])
    def test_codecs(self, request, name):
        images = torch.rand(2, 3, 32, 32) * 2 - 1
        spec = name if name in ("pixels", "pca", "conv") else f"vae:{request.getfixturevalue(name)}"
        codec = make_codec(spec, sample=torch.rand(64, 3, 32, 32) * 2 - 1)
        latents = codec.encode(images)
        expected = codec.decode(latents)
        with simulated_gpu() as gpu:
            codec.to(CUDA)
            there = send(images, CUDA), send(latents, CUDA)
            gpu.stalls.clear()
            found = codec.encode(there[0]), codec.decode(there[1])
            assert all("_finite" in site for site in gpu.stalls), gpu.stalls  # a VAE's results are checked once
            for ours, theirs in zip(found, (latents, expected), strict=True):
                torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("name", ["words", "wordllama", "clip"])
    def test_texts(self, request, name):
        text = make_text_encoder(name if name != "clip" else f"clip:{request.getfixturevalue(name)}")
        ids = text.tokenize(["a red cat", ""])
        expected = text.encode(ids)
        with simulated_gpu() as gpu:
            text.to(CUDA)
            there = send(ids, CUDA)
            gpu.stalls.clear()
            found = text.encode(there)
            assert not gpu.stalls
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", ["simple", "dino"])
    def test_features(self, request, name):
        images = torch.rand(2, 3, 64, 64) * 2 - 1
        features = make_features(name if name == "simple" else f"{name}:{request.getfixturevalue(name)}")
        expected = features.extract(images)
        with simulated_gpu() as gpu:
            if isinstance(features, nn.Module):
                features.to(CUDA)
            there = send(images, CUDA)
            gpu.stalls.clear()
            found = features.extract(there)
            assert not gpu.stalls
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4)
