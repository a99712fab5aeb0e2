"""AdamW against torch's own class, and what a training process must not import."""

import subprocess
import sys

import pytest
import torch

from atoll.adam import AdamW
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source


def weights() -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=rng) for shape in ((7, 5), (5,), (3, 2, 2))]


@pytest.mark.bits
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.03])
def test_it_is_that_of_torch(fused, weight_decay):
    """With changing learning rates, and a weight that has no gradient for a while."""
    ours, theirs = weights(), weights()
    optimizer = AdamW(ours, (0.9, 0.98), weight_decay, fused)
    reference = torch.optim.AdamW(theirs, betas=(0.9, 0.98), weight_decay=weight_decay, fused=fused)
    rng = torch.Generator().manual_seed(1)
    for step in range(6):
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            a.grad = None if number == 1 and step < 2 else torch.randn(a.shape, generator=rng)
            b.grad = None if a.grad is None else a.grad.clone()
        optimizer.step(0.01 * (step + 1))
        reference.param_groups[0]["lr"] = 0.01 * (step + 1)
        reference.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for first, second, p in zip(optimizer.first, optimizer.second, theirs, strict=True):
        assert torch.equal(first, reference.state[p]["exp_avg"])
        assert torch.equal(second, reference.state[p]["exp_avg_sq"])
    optimizer.clear_gradients()
    optimizer.step(1.0)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_an_update_that_is_skipped():
    ours = weights()
    optimizer = AdamW(ours, (0.9, 0.99), fused=True)
    for p in ours:
        p.grad = torch.ones_like(p)
    optimizer.step(0.1, skip=torch.ones(()))
    assert all(torch.equal(a, b) for a, b in zip(ours, weights(), strict=True))
    assert not any(int(step) for step in optimizer.steps)
    optimizer.step(0.1, skip=torch.zeros(()))
    assert not any(torch.equal(a, b) for a, b in zip(ours, weights(), strict=True))


@pytest.mark.slow
def test_training_does_not_load_the_compiler(tmp_path):
    """It would cost every training process seconds."""
    code = (
        "import sys; from atoll.cli.main import main; main(sys.argv[1:]); "
        "sys.exit('torch._dynamo was loaded' if 'torch._dynamo' in sys.modules else 0)"
    )
    prepare(Source("shapes", num=40), tmp_path / "data", PrepareSettings(16), 0, progress=False)
    arguments = ["train", str(tmp_path / "data"), "--model", "xs", "--steps", "2", "--batch", "4", "--out"]
    arguments.append(str(tmp_path / "run"))
    end = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert end.returncode == 0, end.stderr
