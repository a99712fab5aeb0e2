"""Muon: nearly orthogonal updates of the matrices within blocks, beside AdamW."""

import pytest
import torch

from atoll.networks.dit import DiT, DiTConfig
from atoll.networks.presets import preset
from atoll.training.muon import Muon, orthogonal


def network() -> DiT:
    torch.manual_seed(0)
    return DiT(DiTConfig(**preset("xs/1:local", input_size=4, in_channels=3, text_dim=8)))


def gradients_of(weights, seed=0):
    g = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=g)


@pytest.mark.parametrize("shape", [(1, 48, 48), (2, 64, 32), (3, 16, 80)])
def test_singular_vectors_stay_and_singular_values_become_about_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    around = u.mT @ orthogonal(matrices) @ vh.mT  # diagonal if the singular vectors are the same
    values = around.diagonal(dim1=1, dim2=2)
    assert (around - torch.diag_embed(values)).abs().max() < 1e-4
    assert 0.5 < values.min() <= values.max() < 1.3


def test_takes_the_matrices_of_blocks_and_nothing_else():
    dit = network()
    names = {name.split(".", 2)[2] for name in Muon(dict(dit.named_parameters())).weights}
    assert names == {
        *("attention.qkv.weight", "attention.out.weight"),
        *("cross.q.weight", "cross.kv.weight", "cross.out.weight"),
        *("mlp.0.weight", "mlp.2.weight"),
    }


@pytest.mark.parametrize("name", ["blocks.0.mlp.0.weight", "blocks.0.mlp.2.weight", "blocks.0.attention.out.weight"])
def test_goes_where_torch_goes(name):
    """torch.optim.Muon computes in bfloat16: updates have the same direction and length to that precision."""
    ours, theirs = (torch.nn.Parameter(dict(network().named_parameters())[name].detach().clone()) for _ in range(2))
    before = ours.detach().clone()
    muon = Muon({name: ours})
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0, momentum=0.95)
    for seed in range(4):
        for weight in (ours, theirs):
            gradients_of([weight], seed)
        muon.step(0.02)
        reference.step()
    change, expected = ours.detach() - before, theirs.detach() - before
    assert (change - expected).norm() < 0.05 * expected.norm()


def test_stacked_matrices_are_updated_one_by_one():
    """Queries, keys and values are updated as if each had its own matrix."""
    weight = torch.nn.Parameter(torch.zeros(96, 32))
    muon = Muon({"blocks.0.attention.qkv.weight": weight})
    gradients_of([weight])
    muon.step(1.0)
    expected = torch.cat([orthogonal(part[None])[0] for part in weight.grad.chunk(3)])
    torch.testing.assert_close(weight.detach(), -expected)


def test_a_skipped_step_changes_nothing():
    dit = network()
    weights = dict(dit.named_parameters())
    muon = Muon(weights)
    gradients_of(muon.weights.values())
    muon.step(0.02, torch.zeros(()))
    before = {name: weight.detach().clone() for name, weight in muon.weights.items()}
    momenta = {name: momentum.clone() for name, momentum in muon.momenta.items()}
    for weight in muon.weights.values():
        weight.grad.fill_(torch.nan)
    muon.step(0.02, torch.ones(()))
    assert all(torch.equal(weight, before[name]) for name, weight in muon.weights.items())
    assert all(torch.equal(momentum, momenta[name]) for name, momentum in muon.momenta.items())
