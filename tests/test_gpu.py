"""The real code on a GPU that is not there (simulated_gpu.py): devices do not mix, and results are those of the CPU."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from atoll.cli.main import main
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source
from atoll.tensors import read_tensors
from atoll.training import distill, expert, router
from simulated_gpu import CUDA, simulated_gpu

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
    """Evaluates fewer held-out rows: each batch of four takes a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (expert, router, distill):
            patch.setattr(module, "EVALUATED_AT_THE_END", 64)
            patch.setattr(module, "EVALUATED", 64)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A data set of two clusters, an expert of each objective, a router and a model."""
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
            for network, images in ((ours, x), (theirs, x.to(CUDA, non_blocking=True))):
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
            lambda x: x + torch.zeros(3).to(CUDA), lambda x: torch.tensor([1.0], device=CUDA),
        ],
    )  # fmt: skip
    def test_what_stalls_it_is_counted(self, look):
        with simulated_gpu() as gpu:
            x = torch.ones(3, device=CUDA)
            assert not gpu.stalls
            look(x)
            assert sum(gpu.stalls.values()) == 1


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
        """Bit for bit what the CPU learns, so nothing of it is left on the host or done twice."""
        verb, *rest = (str(folder / word) if word in ("data", "model") else word for word in command)
        main([verb, *rest, *SMALL, "--out", str(tmp_path / "cpu")])
        with simulated_gpu():
            main([verb, *rest, *SMALL, "--device", "cuda:0", "--out", str(tmp_path / "gpu")])
        ours, theirs = (read_tensors(tmp_path / name / "model.safetensors", "") for name in ("cpu", "gpu"))
        for name, tensor in ours.items():
            torch.testing.assert_close(theirs[name], tensor, rtol=1e-5, atol=1e-6, msg=name)

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
