"""Networks on disk: round trips, and all kinds of bad folders."""

import json
import os
from pathlib import Path
from unittest.mock import create_autospec

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file

from atoll.errors import InputError
from atoll.networks import stored as store
from atoll.networks.dit import DiT, DiTConfig
from atoll.networks.presets import preset
from atoll.networks.router import Router, RouterConfig

EXPERT = DiTConfig(**preset("xs/2", input_size=8, text_dim=16))
ROUTER = RouterConfig(**preset("xs/2", input_size=8, text_dim=None), num_experts=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    DiT(EXPERT).save_pretrained(tmp_path / "expert")
    return tmp_path / "expert"


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(("cls", "config"), [(DiT, EXPERT), (Router, ROUTER)])
def test_round_trip(cls, config, tmp_path):
    torch.manual_seed(0)
    model = cls(config)
    model.save_pretrained(tmp_path)
    again = cls.from_pretrained(tmp_path)
    assert again.config == config
    assert not again.training
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    for (name, ours), (_, theirs) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert ours.requires_grad == theirs.requires_grad, name
    assert cls.from_pretrained(str(tmp_path), dtype=torch.bfloat16).blocks[0].mlp[0].weight.dtype == torch.bfloat16


def test_saving_again_replaces(folder):
    model = DiT(EXPERT)
    model.save_pretrained(folder)
    assert torch.equal(DiT.from_pretrained(folder).time_block.weight, model.time_block.weight)


def test_a_failed_save_leaves_the_old_model(folder, monkeypatch):
    before = DiT.from_pretrained(folder).state_dict()

    def full_disk(tensors: object, path: Path) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "save_file", full_disk)
    with pytest.raises(InputError, match="cannot write .*model.safetensors .*No space left on device.*: free the disk"):
        DiT(EXPERT).save_pretrained(folder)
    after = DiT.from_pretrained(folder).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


def test_push_to_hub(monkeypatch):
    """The folder that would be uploaded can be loaded."""
    seen = {}

    def upload(repo_id: str, folder_path: Path, allow_patterns: list[str]) -> str:
        assert {path.name for path in folder_path.iterdir()} == set(allow_patterns)
        seen["model"] = DiT.from_pretrained(folder_path)
        return f"uploaded {repo_id}"

    api = create_autospec(HfApi)  # calls that the real one would not take are refused
    api.return_value.upload_folder.side_effect = upload
    monkeypatch.setattr(store, "HfApi", api)
    assert DiT(EXPERT).push_to_hub("someone/expert", private=True, token="secret") == "uploaded someone/expert"
    api.assert_called_once_with(token="secret")
    api.return_value.create_repo.assert_called_once_with("someone/expert", private=True, exist_ok=True)
    assert seen["model"].config == EXPERT
    api.return_value.create_repo.side_effect = OSError("no such user\nmore")
    with pytest.raises(InputError, match=r"the hub did not take someone/expert \(no such user\)"):
        DiT(EXPERT).push_to_hub("someone/expert")


def test_from_the_hub(folder, monkeypatch):
    monkeypatch.setattr(store, "snapshot_download", lambda repo_id, **options: folder)
    assert DiT.from_pretrained("someone/expert").config == EXPERT


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="cannot write"):
            DiT(EXPERT).save_pretrained(place)


def test_weights_that_diverged_are_not_saved(folder):
    model = DiT(EXPERT)
    torch.nn.init.constant_(model.out.bias, torch.nan)
    with pytest.raises(InputError, match=r"out.bias in the network to save holds values that are not finite"):
        model.save_pretrained(folder)
    assert torch.isfinite(DiT.from_pretrained(folder).out.bias).all()


class TestBadFolder:
    def refused(self, folder: Path | str, message: str, cls: type = DiT) -> None:
        with pytest.raises(InputError, match=message) as raised:
            cls.from_pretrained(folder)
        assert "\n" not in str(raised.value)

    def test_missing(self, tmp_path):
        self.refused(tmp_path / "nowhere", "nowhere is not a folder: give one that is there")
        self.refused("./nowhere", "not a folder")
        self.refused("someone/nothing", "there is no folder someone/nothing, and the hub did not give it")
        self.refused(tmp_path, "there is no .*config.json: a model is a folder with config.json")

    def test_no_weights(self, folder):
        (folder / "model.safetensors").unlink()
        self.refused(folder, "model.safetensors is missing")

    def test_broken_json(self, folder):
        (folder / "config.json").write_text('{"format": 1,')
        self.refused(folder, "config.json cannot be read as JSON")
        (folder / "config.json").write_text("[1]")
        self.refused(folder, "must hold a table of keys and values")
        (folder / "config.json").write_text("[" * 100_000)
        self.refused(folder, "config.json cannot be read as JSON")

    def test_unknown_keys(self, folder):
        edit(folder, surprise=1)
        self.refused(folder, "has the unknown key 'surprise'")

    def test_architecture(self, folder):
        good = json.loads((folder / "config.json").read_text())["architecture"]
        edit(folder, architecture={**good, "hiden_size": 64})
        self.refused(folder, r"unknown key of the architecture in .* 'hiden_size': did you mean 'hidden_size'\?")
        edit(folder, architecture={**good, "depth": "two"})
        self.refused(folder, "depth of the architecture in .* must be of type int, but is 'two'")
        edit(folder, architecture={**good, "depth": True})
        self.refused(folder, "depth of the architecture in .* must be of type int")
        for key, value in {
            "mlp_ratio": -1.0,
            "time_scale": 1e300,
            "hidden_size": 10**30,
            "depth": 10**9,
            "out_channels": 0,
            "text_dim": 0,
        }.items():
            edit(folder, architecture={**good, key: value})
            self.refused(folder, f"{key} must be a")
        edit(folder, architecture=None)
        self.refused(folder, "must be a table of keys and values")

    def test_format_and_kind(self, folder):
        edit(folder, format=2)
        self.refused(folder, "has format 2, and this version of atoll reads 1")
        edit(folder, format=1)
        self.refused(folder, "describes a 'DiT', not a Router", Router)

    @pytest.mark.parametrize("size", [0, 4, 100, 5000, -1])
    def test_truncated(self, folder, size):
        path = folder / "model.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[:size])
        self.refused(folder, "model.safetensors is truncated or not a safetensors file")

    def test_not_finite(self, folder):
        weights = load_file(folder / "model.safetensors")
        weights["time_block.bias"][3] = torch.nan
        save_file(weights, folder / "model.safetensors")
        self.refused(folder, "time_block.bias in .* holds values that are not finite")

    @pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float64, torch.complex64, torch.float8_e4m3fn])
    def test_other_types(self, folder, dtype):
        weights = load_file(folder / "model.safetensors")
        weights["out.bias"] = weights["out.bias"].to(dtype)
        save_file(weights, folder / "model.safetensors")
        self.refused(folder, "must all be of one kind of float|Only Tensors of floating point")

    def test_other_weights(self, folder):
        weights = load_file(folder / "model.safetensors")
        bias = weights.pop("out.bias")
        save_file(weights, folder / "model.safetensors")
        self.refused(folder, r'Missing key.* "out.bias"')
        save_file({**weights, "out.bias": bias[:2]}, folder / "model.safetensors")
        self.refused(folder, "size mismatch for out.bias")
        save_file({**weights, "out.bias": bias, "extra": bias.clone()}, folder / "model.safetensors")
        self.refused(folder, r'Unexpected key.* "extra"')
