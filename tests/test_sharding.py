"""A network sharded over processes (FSDP2): it learns the same as in one process, and any number can resume it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.cli.main import main
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source
from atoll.errors import InputError
from atoll.networks.dit import DiT, DiTConfig
from atoll.networks.expert import Expert
from atoll.networks.presets import SIZES, preset
from atoll.training.memory import predict
from atoll.training.metrics_log import read_metrics
from atoll.training.settings import Settings

pytest.importorskip("accelerate")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
FLAGS = "--model xs/4 --batch 12 --lr 1e-3 --log-every 1 --save-every 10 --eval-every 10 --device cpu"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "avatars"
    settings = PrepareSettings(size=16, codec="pixels", holdout=0.1)
    prepare(Source("avatars", num=200, size=16), folder, settings, 0, progress=False)
    return folder


def launch(processes: int, *arguments: object) -> None:
    """Runs an atoll command in so many processes, which shard what they train."""
    run = subprocess.run(
        [*TORCHRUN, f"--nproc-per-node={processes}", "-m", "atoll.cli.main", *map(str, arguments), "--shard"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder) if "loss" in line]


def apart(a: Path, b: Path) -> float:
    """Returns the largest difference of two checkpoints, relative to each tensor's norm."""
    ours, theirs = load_file(a), load_file(b)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).norm() / (ours[name].norm() + 1e-12)) for name in ours)


@pytest.fixture(scope="module")
def train(data):
    return ["train", str(data), *FLAGS.split()]


@pytest.fixture(scope="module")
def one(train, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    main([*train, "--steps", "30", "--sample-every", "0", "--keep-last", "9", "--out", str(folder)])
    return folder


@pytest.fixture(scope="module")
def two(train, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "run"
    launch(2, *train, "--steps", 20, "--sample-every", 0, "--out", folder)
    return folder


@pytest.mark.slow
def test_two_processes_are_one(one, two, report):
    curves = losses(one)[:20], losses(two)
    assert len(curves[1]) == 20
    worst = max(abs(a - b) for a, b in zip(*curves, strict=True))
    report(f"losses of two processes that share out a network against one: {worst:.1e} apart at most over 20 steps")
    assert worst < 1e-5
    held_out = [[line["held_out"] for line in read_metrics(folder) if "held_out" in line][:2] for folder in (one, two)]
    assert held_out[1] == pytest.approx(held_out[0], abs=1e-5)  # by EMA weights, in the middle of a run
    assert apart(*(folder / "state" / "000000020.safetensors" for folder in (one, two))) < 1e-2
    expert = Expert.load(two)
    assert expert.network.card["training"]["processes"] == 2
    assert expert.network.card["training"]["parameters"] == sum(
        p.numel() for p in expert.network.parameters() if p.requires_grad
    )


@pytest.mark.slow
def test_one_process_resumes_two(train, one, two, tmp_path):
    shutil.copytree(two, tmp_path / "a")
    main([*train, "--steps", "30", "--sample-every", "0", "--out", str(tmp_path / "a")])
    assert losses(tmp_path / "a")[:20] == losses(two)
    worst = max(abs(a - b) for a, b in zip(losses(one), losses(tmp_path / "a"), strict=True))
    assert worst < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processes", [2, 3])
def test_any_number_resumes(train, one, two, tmp_path, processes):
    """Both kinds of checkpoint can be resumed: one process's and two processes'."""
    for source in (one, two):
        folder = tmp_path / source.parent.name
        shutil.copytree(source, folder)
        for path in (folder / "state").glob("*.safetensors"):
            if path.stem > "000000020":
                path.unlink()
        about = json.loads((folder / "run.json").read_text())
        about.pop("sha256")
        (folder / "run.json").write_text(json.dumps({**about, "complete": False}))
        launch(processes, *train, "--steps", 30, "--sample-every", 25, "--micro-batch", 2, "--checkpointing",
               "--out", folder)  # fmt: skip
        assert (folder / "samples" / "000000025.png").stat().st_size > 1000
        worst = max(abs(a - b) for a, b in zip(losses(one), losses(folder), strict=True))
        assert worst < 1e-5
        assert Expert.load(folder).network.card["training"]["processes"] == processes


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory(data, tmp_path, report):
    """Measured beyond libraries, where the network dominates: 107M parameters, batches of 4."""
    program = """
import sys
import accelerate, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor
from atoll.cli.main import main
from atoll.training import expert
from atoll.training.memory import measure_base, peak_resident
expert.EVALUATED = expert.EVALUATED_AT_THE_END = 1  # which takes no memory, only time
base = measure_base()
main(sys.argv[1:])
print("grown by", peak_resident() - base)
"""
    (tmp_path / "train.py").write_text(program)
    flags = ["--model", "512x24/4", "--steps", "2", "--batch", "4", "--sample-every", "0", "--device", "cpu"]
    peaks = {}
    for processes in (1, 2):
        launcher = [*TORCHRUN, f"--nproc-per-node={processes}"] if processes > 1 else [sys.executable]
        command = ["train", str(data), *flags, "--shard", "--out", str(tmp_path / "run")]
        run = subprocess.run(
            [*launcher, str(tmp_path / "train.py"), *command], capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        found = re.findall(r"grown by (\d+)", run.stdout)
        assert len(found) == processes
        peaks[processes] = max(map(int, found))
        shutil.rmtree(tmp_path / "run")
    one, two = (peaks[processes] / 1e9 for processes in (1, 2))
    report(f"peak memory of 107M parameters: {one:.2f} GB alone, {two:.2f} GB each of two: {two / one:.2f}x")
    assert two < 0.6 * one


def test_the_text_is_read_in_blocks_to_the_same_bits():
    """Keys and values computed within each block, as in a sharded network, equal those computed in advance."""
    torch.manual_seed(0)
    network = DiT(DiTConfig(**preset("xs/2", input_size=8, text_dim=16))).train()
    for p in network.parameters():
        torch.nn.init.normal_(p, std=0.1)
    x, t, text, mask = torch.randn(3, 4, 8, 8), torch.rand(3), torch.randn(3, 5, 16), torch.rand(3, 5) > 0.3
    mask[:, 0] = True
    gradients = []
    for network.is_sharded in (False, True):
        network.zero_grad()
        network(x, t, text, mask).square().mean().backward()
        gradients.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_largest_preset():
    with torch.device("meta"):
        network = DiT(DiTConfig(**preset("3b/2")))
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(3.1e9, rel=0.01)
    assert SIZES["3b"]["hidden_size"] // SIZES["3b"]["num_heads"] == 72  # as in xl


@pytest.mark.slow
def test_predicted_memory_falls_with_the_processes():
    config, settings = DiTConfig(**preset("xs/2", input_size=8, text_dim=8)), Settings(batch=8, shard=True)
    totals = [predict(config, settings, text_length=4, base=0, processes=num).weights for num in (1, 2, 4)]
    assert totals == [totals[0], totals[0] // 2, totals[0] // 4]


def test_what_cannot_be_shared_out():
    for changes in ({"compile": True}, {"optimizer": "muon"}):
        with pytest.raises(InputError, match=r"--shard is for AdamW without torch.compile"):
            Settings(shard=True, **changes)
