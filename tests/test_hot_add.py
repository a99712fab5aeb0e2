"""Experts that join and leave without retraining the router, and their shares of the credit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from atoll.cards import ExpertCard
from atoll.errors import InputError
from atoll.federation.credits import lead_shares, training_flops
from atoll.networks.centroid_router import CentroidRouter
from atoll.networks.combined_router import CombinedRouter
from atoll.networks.router import Router, RouterConfig
from atoll.partition.partition import place_in
from atoll.sampling import assemble as module
from atoll.sampling.assemble import assemble, load_router, router_from_cards
from atoll.sampling.ensemble import Ensemble
from atoll.sampling.pipeline import AtollPipeline
from test_assemble import data, edit, run

__all__ = ["data", "run"]  # fixtures
PROMPTS = ["a red bear on a blue background", "an owl", "a green robot with a cap"]


@pytest.fixture
def trained(run, tmp_path) -> Path:
    """Returns experts 0 and 1 and a router that knows only these; expert 2 is new to it."""
    torch.manual_seed(0)
    known = load_router(run / "router")
    router = Router(RouterConfig(**{**vars(known.config), "num_experts": 2}))
    router.card = {**known.card, "temperature": 2.0}
    router.save_pretrained(tmp_path / "router")
    return tmp_path / "router"


def latents(folder: Path) -> torch.Tensor:
    made = AtollPipeline(folder)(PROMPTS, seed=0, num_inference_steps=4, output_type="latent", progress=False)
    assert isinstance(made.images, torch.Tensor)
    return made.images


class TestCombined:
    def test_probabilities(self, rng):
        known = Router(RouterConfig(hidden_size=16, depth=1, num_heads=2, in_channels=4, input_size=4, patch_size=2,
                                    text_dim=None, num_experts=2)).eval()  # fmt: skip
        known.card = {"temperature": 3.0}
        for p in known.parameters():
            p.data = torch.randn(p.shape, generator=rng) * 0.3
        means = torch.randn(4, 4, 4, 4, generator=rng)
        centroids = CentroidRouter.fit(means, torch.ones(4), torch.tensor([3, 1, 2, 2]), image_scale=0.05)
        both = CombinedRouter(known, centroids)
        x, t = torch.randn(8, 4, 4, 4, generator=rng), torch.linspace(0.1, 1, 8)
        p = torch.softmax(both(x, t), 1)
        q, own = torch.softmax(centroids(x, t), 1), torch.softmax(known(x, t) / 3.0, 1)
        assert torch.allclose(p[:, 2:], q[:, 2:], atol=1e-5)
        assert torch.allclose(p[:, :2], own * q[:, :2].sum(1, keepdim=True), atol=1e-5)

    def test_with_no_new_expert_it_is_the_trained_one(self, rng):
        means = torch.randn(3, 4, 4, 4, generator=rng)
        some, other = (CentroidRouter.fit(means, torch.ones(3), n) for n in (torch.ones(3), torch.tensor([1, 2, 9])))
        x, t = torch.randn(5, 4, 4, 4, generator=rng), torch.full((5,), 0.7)
        p = torch.softmax(CombinedRouter(some, other)(x, t), 1)
        assert torch.allclose(p, torch.softmax(some(x, t), 1), atol=1e-6)

    def test_an_ensemble_wants_as_many_experts(self, served_model, trained, run):
        pipe = AtollPipeline(served_model)
        router = CombinedRouter(load_router(trained), router_from_cards([run / f"expert_{k}" for k in range(3)]))
        with pytest.raises(InputError, match="knows 3 experts, but there are 2"):
            Ensemble(pipe.ensemble.experts[:2], router)


class TestCards:
    def test_the_router_is_that_of_all_the_data(self, run, data, monkeypatch):
        """It equals the router computed from the data of all clusters at once."""
        fitted = load_router(run / "centroids")
        monkeypatch.setattr(module, "IMAGE_SCALE", fitted.config.image_scale)
        made = router_from_cards([run / f"expert_{k}" for k in range(3)])
        for name, own in made.state_dict().items():
            other = fitted.state_dict()[name]
            assert F.mse_loss(own, other) < 1e-4 * other.var().clamp_min(1e-6), name

    def test_a_missing_expert_gets_nothing(self, run):
        router = router_from_cards([run / "expert_0", None, run / "expert_2"])
        logits = router(torch.zeros(1, *router.means.shape[1:]), torch.tensor(0.5))
        assert torch.isneginf(logits[0, 1])
        assert torch.isfinite(logits[0, ::2]).all()

    def test_without_statistics(self, run, tmp_path):
        from safetensors.torch import load_file, save_file

        old = Path(shutil.copytree(run / "expert_2", tmp_path / "old"))
        tensors = load_file(old / "calibration.safetensors")
        del tensors["text_covariance"]
        save_file(tensors, old / "calibration.safetensors")
        with pytest.raises(InputError, match="does not carry the statistics"):
            router_from_cards([run / "expert_0", old])

    @pytest.mark.parametrize(("key", "value"), [("pictures", -5), ("pictures", 0), ("variance", -1.0)])
    def test_statistics_that_cannot_be(self, run, tmp_path, key, value):
        bad = Path(shutil.copytree(run / "expert_2", tmp_path / "bad"))
        edit(bad, "data", key, value=value)
        with pytest.raises(InputError, match="does not carry the statistics"):
            router_from_cards([run / "expert_0", bad])


class TestAssembled:
    def test_joins_and_leaves(self, run, data, trained, tmp_path):
        experts = [run / f"expert_{k}" for k in range(3)]
        before = assemble(experts[:2], trained, tmp_path / "before", data)
        first = latents(tmp_path / "before")
        index = assemble(experts, trained, tmp_path / "model", data)
        assert (index.num_experts, index.router.centroids) == (3, "centroids")
        pipe = AtollPipeline(tmp_path / "model")
        assert isinstance(pipe.router, CombinedRouter)
        made = pipe(PROMPTS, seed=0, num_inference_steps=4, routing="full", output_type="latent", progress=False)
        assert torch.isfinite(made.images).all()
        assert all(sum(trace.shares) == pytest.approx(1) for trace in made.trace)
        again = assemble(experts[:2], trained, tmp_path / "model", data)
        assert again.hash == before.hash
        assert torch.equal(latents(tmp_path / "model"), first)

    def test_from_cards_alone(self, run, data, tmp_path):
        experts = [run / f"expert_{k}" for k in (2, 0, 1)]
        index = assemble(experts, None, tmp_path / "model", data, from_cards=True)
        assert [entry.cluster for entry in index.experts] == [0, 1, 2]
        assert index.router.model == "CentroidRouter"
        assert torch.isfinite(latents(tmp_path / "model")).all()
        pipe = AtollPipeline(tmp_path / "model")
        pipe.save_pretrained(tmp_path / "copy")
        assert torch.equal(latents(tmp_path / "copy"), latents(tmp_path / "model"))

    def test_a_slot_between_may_be_empty(self, run, data, tmp_path):
        experts = [run / "expert_0", run / "expert_2"]
        with pytest.raises(InputError, match="no expert of cluster 1"):
            assemble(experts, None, tmp_path / "model", data, from_cards=True)
        assemble(experts, None, tmp_path / "model", data, from_cards=True, allow_missing=True)
        with pytest.warns(UserWarning, match="expert_1 of 3"):
            assert torch.isfinite(latents(tmp_path / "model")).all()

    @pytest.mark.parametrize("cluster", [-1, 10**9])
    def test_numbers_that_no_slot_has(self, run, data, trained, tmp_path, cluster):
        bad = Path(shutil.copytree(run / "expert_2", tmp_path / "bad"))
        edit(bad, "data", "cluster", value=cluster)
        with pytest.raises(InputError, match=f"is of cluster {cluster}"):
            assemble([run / "expert_0", run / "expert_1", bad], trained, tmp_path / "model", data)

    def test_centroids_that_were_altered(self, run, data, trained, tmp_path):
        assemble([run / f"expert_{k}" for k in range(3)], trained, tmp_path / "model", data)
        path = tmp_path / "model" / "centroids" / "config.json"
        path.write_text(path.read_text().replace("experts' cards", "experts' Cards"))
        with pytest.raises(InputError, match="not the file that the model was made of"):
            AtollPipeline(tmp_path / "model")


def test_a_data_set_as_one_cluster_of_any_number(data, tmp_path):
    from atoll.data.shards import Dataset

    own = Path(shutil.copytree(data, tmp_path / "own"))
    num = len(Dataset.open(own))
    place_in(own, 5, progress=False)
    assert len(Dataset.open(own, 5)) == num
    assert set(Dataset.open(own).clusters().tolist()) == {5}
    with pytest.raises(InputError, match="the cluster must be from 0"):
        place_in(own, -1, progress=False)


class TestCredits:
    def test_shares(self, served_model):
        shares = lead_shares(served_model, PROMPTS, steps=3)
        assert set(shares) == {0, 1, 2}
        assert sum(shares.values()) == pytest.approx(1)
        with pytest.raises(InputError, match="at least one"):
            lead_shares(served_model, [])

    def test_flops(self, run, data):
        """They match the experiments' counter, except for captions shorter than the maximum."""
        from atoll.experiments.flops import training_flops as counted
        from test_assemble import QUICK

        flops, card = training_flops(run / "expert_0"), ExpertCard.read(run / "expert_0")
        exact = counted(QUICK, data, 0)
        assert exact <= flops < 2 * exact
        assert card.training["samples"] == QUICK.steps * QUICK.batch

    def test_a_card_without_samples(self, run, tmp_path):
        bad = Path(shutil.copytree(run / "expert_0", tmp_path / "bad"))
        edit(bad, "training", "samples", value="many")
        with pytest.raises(InputError, match="on how many samples"):
            training_flops(bad)
        assert json.loads((bad / "config.json").read_text())["training"]["samples"] == "many"
