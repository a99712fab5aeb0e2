"""Data sets and models written by an earlier version, before files had hashes, still open and give the same results."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.cards import ModelIndex
from atoll.cli.main import main
from atoll.data.shards import Dataset
from atoll.sampling.pipeline import AtollPipeline

OLD = Path(__file__).parent / "data" / "before_hashes"
PROMPTS = ["a pink ghost with a yellow party hat on a blue background", "a robot"]


def latents_of(model: Path) -> torch.Tensor:
    pipe = AtollPipeline.from_pretrained(model)
    made = pipe(PROMPTS, seed=[3, 4], num_inference_steps=6, routing="full", output_type="latent", progress=False)
    assert isinstance(made.images, torch.Tensor)
    return made.images


def test_a_model():
    torch.testing.assert_close(latents_of(OLD / "model"), load_file(OLD / "latents.safetensors")["latents"])


def test_its_parts(tmp_path):
    main(["assemble", str(OLD / "model"), "--out", str(tmp_path / "model")])
    assert ModelIndex.read(tmp_path / "model").objectives == ("fm", "ddpm")
    torch.testing.assert_close(latents_of(tmp_path / "model"), load_file(OLD / "latents.safetensors")["latents"])


@pytest.mark.parametrize("cluster", [None, 0, 1])
def test_a_data_set(cluster):
    data = Dataset.open(OLD / "data", cluster)
    assert len(data) == {None: 40, 0: 33, 1: 7}[cluster]
    assert data.strings("caption", [0])[0].startswith("a")


def test_training_on_it(tmp_path):
    data = shutil.copytree(OLD / "data", tmp_path / "data")
    first = OLD / "model" / "expert_1"
    main(["train", str(data), "--cluster", "1", "--init", str(first), "--out", str(tmp_path / "run"), "--steps", "2",
           "--batch", "2", "--model", "16x1/1", "--sample-every", "0"])  # fmt: skip
    assert (tmp_path / "run" / "config.json").exists()
