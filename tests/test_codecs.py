"""Codecs: the real classes, the built-in PCA against scikit-learn's, fingerprints, and all kinds of bad folders."""

import json
import os
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.decomposition import PCA
from torch import nn

from atoll.cards import CodecCard, require_same
from atoll.encoders import pca
from atoll.encoders.codecs import load_codec, make_codec, needs_sample
from atoll.encoders.pca import PatchPCA, default_patch
from atoll.encoders.pretrained import fingerprint, locate
from atoll.encoders.vae import VAE
from atoll.errors import InputError
from atoll.networks import stored


def pictures(num: int, size: int = 32, seed: int = 0) -> torch.Tensor:
    """Returns coloured discs on coloured grounds: [num, 3, size, size] in [-1, 1]."""
    g = torch.Generator().manual_seed(seed)
    line = torch.linspace(-1, 1, size)
    x, y, radius = (torch.rand(num, 1, 1, 1, generator=g) * scale for scale in (1, 1, 0.8))
    ground, disc = (torch.rand(num, 3, 1, 1, generator=g) * 2 - 1 for _ in range(2))
    inside = torch.sigmoid(20 * (radius - ((line - x + 0.5) ** 2 + (line[:, None] - y + 0.5) ** 2).sqrt()))
    return (ground * (1 - inside) + disc * inside).clamp(-1, 1)


@pytest.fixture
def broken(kl, tmp_path) -> Path:
    """Returns a copy of a VAE to damage."""
    for file in kl.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class TestPixels:
    def test_round_trip(self, tmp_path):
        images = pictures(2)
        codec = make_codec("pixels")
        assert codec.latent_shape(32) == (3, 32, 32)
        assert torch.equal(codec.decode(codec.encode(images)), images)
        codec.save(tmp_path)
        assert load_codec(tmp_path).describe() == codec.describe()
        assert CodecCard.parse(codec.describe().values(), "") == codec.describe()


class TestPCA:
    def test_explained_variance_is_scikit_learns(self):
        images = pictures(60)
        codec = PatchPCA.fit(images, 8, 20)
        rows = pca.to_patches(images, 8).reshape(-1, 192).double().numpy()
        theirs = PCA(20, svd_solver="full").fit(rows)
        assert codec.config.explained_variance == pytest.approx(theirs.explained_variance_ratio_.sum(), abs=1e-6)
        overlap = codec.basis.double().numpy() @ theirs.components_.T
        assert abs(overlap.diagonal()).min() > 0.9999
        torch.testing.assert_close(codec.mean.double(), torch.from_numpy(theirs.mean_), atol=1e-6, rtol=0)

    def test_reconstruction_loses_what_was_not_explained(self):
        images = pictures(200)
        codec = PatchPCA.fit(images)
        assert codec.config.explained_variance >= 0.99
        assert codec.latent_shape(32) == (codec.config.num_components, 4, 4)
        latents = codec.encode(images)
        assert latents.dtype == torch.float32
        assert latents.shape[1:] == codec.latent_shape(32)
        assert latents.var().item() == pytest.approx(1, rel=0.01)
        patches = pca.to_patches(images, 8)
        lost = (codec.decode(latents) - images).square().mean() / (patches - codec.mean).square().mean()
        assert lost.item() <= 1 - codec.config.explained_variance + 1e-4

    def test_all_components_are_exact(self):
        images = pictures(100)
        codec = PatchPCA.fit(images, 4, 48)
        torch.testing.assert_close(codec.decode(codec.encode(images)), images, atol=1e-5, rtol=0)

    def test_no_other_scales_are_quieter(self):
        """Noise in the latents causes less in the pixels than with whitening, or with one scale for all."""
        codec = PatchPCA.fit(pictures(100), 8, 20)
        latents = codec.encode(pictures(100))
        noise = 0.05 * torch.randn(latents.shape, generator=torch.Generator().manual_seed(1))
        deviations = latents.std((0, 2, 3)) * codec.scale

        def error(scale: torch.Tensor) -> float:
            unit = (deviations / scale).square().mean().sqrt() * scale  # unit variance overall
            return (noise * unit[:, None, None]).square().mean().item()

        assert error(codec.scale) < 0.7 * error(deviations)
        assert error(codec.scale) < 0.7 * error(torch.ones(20))
        torch.testing.assert_close((deviations / codec.scale).square().mean(), torch.tensor(1.0), rtol=0.02, atol=0)

    def test_more_components_than_the_sample_has(self):
        images = torch.linspace(-1, 1, 10)[:, None, None, None].expand(10, 3, 16, 16)
        codec = PatchPCA.fit(images, 4, 48)
        assert codec.encode(images).isfinite().all()
        torch.testing.assert_close(codec.decode(codec.encode(images)), images, atol=1e-5, rtol=0)

    def test_fitting_again_gives_the_same_bytes(self):
        images = pictures(100)
        ours, again = PatchPCA.fit(images), PatchPCA.fit(images.clone())
        assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in ours.state_dict().items())
        assert ours.fingerprint == again.fingerprint != PatchPCA.fit(pictures(100, seed=1)).fingerprint

    @pytest.mark.bits
    def test_an_image_does_not_depend_on_its_batch(self):
        images = pictures(64)
        codec = PatchPCA.fit(images)
        latents = codec.encode(images)
        for i in (0, 17, 63):
            assert torch.equal(codec.encode(images[i : i + 1])[0], latents[i])

    @pytest.mark.bits
    def test_round_trip(self, tmp_path):
        images = pictures(50)
        codec = make_codec("pca:8x12", sample=images)
        assert codec.describe().spec == "pca:8x12"
        codec.save(tmp_path)
        again = load_codec(tmp_path)
        assert again.describe() == codec.describe()
        latents = codec.encode(images)
        assert torch.equal(again.encode(images), latents)
        assert torch.equal(again.decode(latents), codec.decode(latents))

    def test_defaults(self):
        assert [default_patch(size) for size in (8, 12, 16, 28, 32, 37, 64, 256)] == [2, 3, 4, 7, 8, 1, 8, 8]
        noise = torch.rand(80, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
        assert make_codec("pca", sample=noise).latent_shape(32) == (48, 4, 4)
        assert needs_sample("pca")
        assert needs_sample("pca:4x8")
        assert not needs_sample("vae:pca")

    def test_large_samples_are_thinned(self, monkeypatch):
        images = pictures(100)
        monkeypatch.setattr(pca, "MAX_PATCHES", 800)
        assert PatchPCA.fit(images).fingerprint == PatchPCA.fit(images[::2]).fingerprint

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("pca:8", "write it like pca:8x40"),
            ("pca:8x", "write it like pca:8x40"),
            ("pca:0x4", "1 to 3 x patch x patch"),
            ("pca:2x13", "1 to 3 x patch x patch"),
            ("pca:2x0", "1 to 3 x patch x patch"),
            ("pca:5x8", "images of 32 x 32 cannot be cut into patches of 5: use 30 x 30"),
        ],
    )
    def test_bad_specs(self, spec, message):
        with pytest.raises(InputError, match=message):
            make_codec(spec, sample=pictures(4))

    def test_bad_samples(self):
        with pytest.raises(InputError, match="the codec pca is fitted to images: give it some"):
            make_codec("pca")
        with pytest.raises(InputError, match="the same flat colour"):
            make_codec("pca", sample=torch.full((3, 3, 32, 32), 0.5))


class TestVAE:
    def test_kl_is_diffusers(self, kl):
        from diffusers import AutoencoderKL

        images = pictures(3)
        codec, theirs = make_codec(f"vae:{kl}"), AutoencoderKL.from_pretrained(kl).eval()
        latents = codec.encode(images)
        assert codec.latent_shape(32) == (4, 8, 8)
        with torch.no_grad():
            expected = (theirs.encode(images).latent_dist.mode() - 0.1) * 0.7
            decoded = theirs.decode(latents / 0.7 + 0.1).sample.clamp(-1, 1)
        torch.testing.assert_close(latents, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(codec.decode(latents), decoded, atol=1e-5, rtol=1e-5)
        assert torch.equal(codec.encode(images), latents), "the mode of the posterior, not a sample"

    def test_tiny_is_diffusers(self, tiny):
        from diffusers import AutoencoderTiny

        images = pictures(3)
        codec, theirs = make_codec(f"vae:{tiny}"), AutoencoderTiny.from_pretrained(tiny).eval()
        latents = codec.encode(images)
        assert latents.shape[1:] == codec.latent_shape(32) == (4, 8, 8)
        with torch.no_grad():
            expected = (theirs.encode(images).latents + 0.2) * 1.3
            decoded = theirs.decode(latents / 1.3 - 0.2).sample.clamp(-1, 1)
        torch.testing.assert_close(latents, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(codec.decode(latents), decoded, atol=1e-5, rtol=1e-5)

    def test_mean_and_deviation_of_each_channel(self, broken):
        plain = make_codec(f"vae:{broken}").encode(pictures(1))
        edit(broken / "config.json", shift_factor=None, latents_mean=[1, 2, 3, 4], latents_std=[1, 1, 2, 2])
        codec = make_codec(f"vae:{broken}")
        mean, std = torch.tensor([1.0, 2, 3, 4])[:, None, None], torch.tensor([1.0, 1, 2, 2])[:, None, None]
        latents = codec.encode(pictures(1))
        torch.testing.assert_close(latents, (plain / 0.7 + 0.1 - mean) / std * 0.7)
        torch.testing.assert_close(codec.decode(latents), make_codec(f"vae:{broken}").decode(latents))

    @pytest.mark.bits
    def test_an_image_does_not_depend_on_its_batch(self, kl):
        codec, images = make_codec(f"vae:{kl}"), pictures(3)
        latents = codec.encode(images)
        assert torch.equal(codec.encode(images[1:2])[0], latents[1])
        assert torch.equal(codec.decode(latents[1:2])[0], codec.decode(latents)[1])

    @pytest.mark.bits
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("kind", ["kl", "tiny"])
    def test_round_trip(self, kind, dtype, request, tmp_path):
        codec = make_codec(f"vae:{request.getfixturevalue(kind)}", dtype=dtype)
        codec.save(tmp_path)
        again = load_codec(tmp_path)
        images = pictures(2)
        latents = codec.encode(images)
        assert latents.dtype == torch.float32
        assert torch.equal(again.encode(images), latents)
        assert torch.equal(again.decode(latents), codec.decode(latents))
        here, there = codec.describe(), again.describe()
        assert here.dtype == str(dtype).removeprefix("torch.")
        assert {**here.values(), "spec": ""} == {**there.values(), "spec": ""}
        require_same(here, there, "codec", Path("here"), "there")
        assert CodecCard.parse(json.loads(json.dumps(here.values())), "") == here

    def test_in_a_pipeline(self, kl, tmp_path):
        """A published pipeline keeps its VAE in a folder of its own, beside another config.json."""
        make_codec(f"vae:{kl}").save(tmp_path)
        (tmp_path / "config.json").write_text('{"num_experts": 8}')
        assert make_codec(f"vae:{tmp_path}").describe().kind == "AutoencoderKL"

    @pytest.mark.parametrize("shards", [False, True])
    def test_from_the_hub(self, kl, tmp_path, monkeypatch, shards):
        """Its files are checked in the hub's cache, before diffusers sees them."""
        from diffusers import AutoencoderKL

        kept = tmp_path / "models--someone--vae" / "snapshots" / "1"
        size = "100KB" if shards else "1GB"
        AutoencoderKL.from_pretrained(kl).save_pretrained(kept, max_shard_size=size)

        def download(repo: str, revision: str | None, allow_patterns: list[str]) -> str:
            assert repo == "someone/vae"
            for path in kept.iterdir():
                assert any(fnmatch(path.name, pattern) for pattern in allow_patterns), path.name
            return str(kept)

        monkeypatch.setattr(stored, "snapshot_download", download)
        found, local = make_codec("vae:someone/vae").describe(), make_codec(f"vae:{kl}").describe()
        assert found.fingerprint == local.fingerprint
        assert found.spec == "vae:someone/vae"
        for path in kept.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-1])
        self.refused("someone/vae", "someone/vae has no whole AutoencoderKL in safetensors")

    def test_the_vae_folder_comes_before_the_root(self, kl, tmp_path):
        make_codec(f"vae:{kl}").save(tmp_path)
        (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderTiny"}')
        assert locate(str(tmp_path), ("vae", ""), ("AutoencoderKL",)).folder == tmp_path / "vae"

    def test_fingerprint_covers_weights_settings_and_dtype(self, broken):
        prints = {make_codec(f"vae:{broken}").describe().fingerprint}
        prints.add(make_codec(f"vae:{broken}", dtype=torch.bfloat16).describe().fingerprint)
        edit(broken / "config.json", scaling_factor=0.5)
        prints.add(make_codec(f"vae:{broken}").describe().fingerprint)
        path = broken / "diffusion_pytorch_model.safetensors"
        weights = load_file(path)
        weights["encoder.conv_in.bias"][0] += 1e-3
        save_file(weights, path)
        prints.add(make_codec(f"vae:{broken}").describe().fingerprint)
        assert len(prints) == 4

    def test_quiet(self, kl, tmp_path, capfd, caplog):
        make_codec(f"vae:{kl}", dtype=torch.bfloat16).save(tmp_path)
        load_codec(tmp_path)
        assert capfd.readouterr() == ("", "")
        assert not caplog.records

    def test_sizes(self, kl):
        with pytest.raises(InputError, match="images of 30 x 30 cannot be cut into patches of 4: use 32 x 32"):
            make_codec(f"vae:{kl}").latent_shape(30)
        with pytest.raises(InputError, match="cannot be cut"):
            make_codec(f"vae:{kl}").encode(pictures(1, 30))

    def test_overflow_is_reported(self, kl):
        codec = VAE.open(str(kl), torch.float32)
        codec.model.encoder.conv_in.weight.data.mul_(float("inf"))
        with pytest.raises(InputError, match="overflows in float32: use float32 or bfloat16"):
            codec.encode(pictures(1))

    def refused(self, where: object, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            make_codec(f"vae:{where}")
        assert "\n" not in str(caught.value)

    def test_not_there(self, tmp_path):
        self.refused("nobody/has-this", "there is no folder nobody/has-this, and the hub did not give it either")
        self.refused(tmp_path / "absent", "absent is not a folder: give one that is there, or a hub id")
        self.refused(tmp_path, "has no config.json: give the folder of a model")
        with pytest.raises(InputError, match=r"there is no .*config.json: give a folder in which it was saved"):
            load_codec(tmp_path)

    def test_foreign(self, broken):
        edit(broken / "config.json", _class_name="UNet2DModel")
        self.refused(broken, "holds a 'UNet2DModel': give a model of the kind AutoencoderKL or AutoencoderTiny")
        (broken / "config.json").write_text("[]")
        self.refused(broken, "must hold a table of keys and values")
        (broken / "config.json").write_text("{")
        self.refused(broken, "cannot be read as JSON")

    def test_other_class(self, broken):
        edit(broken / "config.json", _class_name="AutoencoderTiny")
        self.refused(broken, "lacks|unknown tensor|has no whole AutoencoderTiny|asks for [0-9,]+ weights")

    def test_damaged_weights(self, broken):
        path = broken / "diffusion_pytorch_model.safetensors"
        weights, name = load_file(path), "encoder.conv_in.bias"

        def with_weights(changed: dict[str, torch.Tensor], message: str) -> None:
            save_file(changed, path)
            self.refused(broken, message)

        with_weights({key: tensor for key, tensor in weights.items() if key != name}, f"lacks {name}")
        with_weights({**weights, "stray": torch.ones(1)}, "has the unknown tensor stray")
        with_weights({**weights, name: torch.ones(3)}, "has no whole AutoencoderKL in safetensors .*: copy it again")
        with_weights({**weights, name: weights[name] / 0}, f"{name} in .* holds values that are not finite")
        save_file(weights, path)
        path.write_bytes(path.read_bytes()[:1000])
        self.refused(broken, "has no whole AutoencoderKL in safetensors .*: copy it again")
        path.rename(broken / "diffusion_pytorch_model.bin")
        self.refused(broken, "has no whole AutoencoderKL in safetensors .*: copy it again")

    def test_old_names_of_attention(self, broken):
        """The published Stable Diffusion VAEs name attention as diffusers did in 2022."""
        path = broken / "diffusion_pytorch_model.safetensors"
        before = make_codec(f"vae:{broken}").describe().fingerprint
        new_names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
        old = {}
        for name, tensor in load_file(path).items():
            for new, former in new_names.items():
                name = name.replace(new, former)  # noqa: PLW2901
            old[name] = tensor
        save_file(old, path)
        assert make_codec(f"vae:{broken}").describe().fingerprint == before

    def test_a_file(self, kl):
        """A file of weights alone does not say what it is of."""
        path = kl / "diffusion_pytorch_model.safetensors"
        self.refused(path, "is not a folder: give one that is there, or a hub id")
        with pytest.raises(InputError, match=f"is a path: write vae:{kl} if it holds a VAE"):
            make_codec(str(kl))

    def test_copies_are_as_readable_as_any_new_file(self, kl, tmp_path):
        make_codec(f"vae:{kl}").save(tmp_path)
        (tmp_path / "new").write_text("")
        for path in (tmp_path / "vae").iterdir():
            assert path.stat().st_mode == (tmp_path / "new").stat().st_mode, path
        assert str(kl) not in (tmp_path / "vae" / "config.json").read_text()  # no local path is published

    @pytest.mark.slow
    def test_weights_are_not_mapped(self, broken):
        """Truncating the file afterwards kills no process and changes no weights."""
        program = (
            "import os, sys, torch; from atoll.encoders.codecs import make_codec\n"
            "codec = make_codec(f'vae:{sys.argv[1]}'); path = sys.argv[1] + '/diffusion_pytorch_model.safetensors'\n"
            "os.truncate(path, 0); codec.encode(torch.zeros(1, 3, 32, 32)); print(codec.describe().fingerprint)"
        )
        before = make_codec(f"vae:{broken}").describe().fingerprint
        run = subprocess.run([sys.executable, "-c", program, str(broken)], capture_output=True, text=True, check=True)
        assert run.stdout.strip() == before

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"latent_channels": 10**9}, "more than any known model has"),
            ({"block_out_channels": [8, 10**12, 16]}, "more than any known model has"),
            ({"block_out_channels": [8, 16, 16_000_000]}, "asks for .* weights, and its files have|has no whole"),
            ({"layers_per_block": 10**6}, "more than any known model has"),
            ({"layers_per_block": 200}, "asks for .* weights, and its files have"),
            ({"block_out_channels": [8] * 1000}, "more than any known model has"),
            ({"norm_num_groups": 0}, "has no whole AutoencoderKL"),
            ({"act_fn": "\x1b[2J" * 10**5}, "has no whole AutoencoderKL"),
            ({"_class_name": "\x1b[2J" * 10**5}, "give a model of the kind"),
            ({"_class_name": ["AutoencoderKL"]}, "give a model of the kind"),
            ({"in_channels": 4}, "in_channels in the config of .* is 4, not 3"),
            ({"scaling_factor": 0}, "scaling_factor in the config of .* is 0, not a number"),
            ({"scaling_factor": "\x1b[2J"}, "scaling_factor in the config of"),
            ({"latents_std": [1, 1, 0, 1]}, "latents_std in the config of"),
            ({"latents_mean": [1, 2]}, "latents_mean in the config of"),
        ],
        ids=lambda changes: str(changes)[:30],
    )
    def test_configs_of_strangers(self, broken, changes, message):
        """A config that does not fit the weights is refused before memory is allocated, and prints nothing."""
        edit(broken / "config.json", **changes)
        with pytest.raises(InputError, match=message) as caught:
            make_codec(f"vae:{broken}")
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000

    def test_files_of_strangers(self, broken, kl):
        path = broken / "diffusion_pytorch_model.safetensors"
        path.unlink()
        path.symlink_to(kl / path.name)
        self.refused(broken, "it is a link that leaves its folder")
        path.unlink()
        os.mkfifo(path)
        self.refused(broken, "it is a FIFO")
        path.unlink()
        index = {"weight_map": {"a": f"../{kl.name}/{path.name}"}}
        (broken / f"{path.name}.index.json").write_text(json.dumps(index))
        self.refused(broken, "names a file outside its folder")

    def test_a_folder_that_is_a_link(self, kl, tmp_path):
        (tmp_path / "vae").symlink_to(kl)
        with pytest.raises(InputError, match="it is a link that leaves its folder"):
            load_codec(tmp_path)

    def test_several_files(self, kl, tmp_path):
        from diffusers import AutoencoderKL

        AutoencoderKL.from_pretrained(kl).save_pretrained(tmp_path, max_shard_size="100KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        theirs, ours = make_codec(f"vae:{kl}").describe(), make_codec(f"vae:{tmp_path}").describe()
        assert ours.fingerprint == theirs.fingerprint

    def test_without_diffusers(self, kl, monkeypatch):
        monkeypatch.setitem(sys.modules, "diffusers", None)
        self.refused(kl, r"this needs diffusers: pip install 'atoll\[hf\]'")


class Block(nn.Module):
    """Three convolutions with a residual connection, as in TAESD."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Conv2d(64, 64, 3, padding=1) for _ in range(3)]
        self.conv = nn.Sequential(parts[0], nn.ReLU(), parts[1], nn.ReLU(), parts[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.conv(x) + x).relu()


class Clamp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * torch.tanh(x / 3)


class TestTAESD:
    """The authors' own files: two stacks of layers, for images in [0, 1]."""

    def halves(self, channels: int = 4) -> tuple[nn.Sequential, nn.Sequential]:
        torch.manual_seed(0)
        encoder: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1), Block()]
        decoder: list[nn.Module] = [Clamp(), nn.Conv2d(channels, 64, 3, padding=1), nn.ReLU()]
        for _ in range(3):
            encoder += [nn.Conv2d(64, 64, 3, 2, 1, bias=False), Block(), Block(), Block()]
            decoder += [Block(), Block(), Block(), nn.Upsample(scale_factor=2), nn.Conv2d(64, 64, 3, 1, 1, bias=False)]
        encoder.append(nn.Conv2d(64, channels, 3, padding=1))
        decoder += [Block(), nn.Conv2d(64, 3, 3, padding=1)]
        return nn.Sequential(*encoder), nn.Sequential(*decoder)

    def write(self, folder: Path, name: str = "taesd", channels: int = 4) -> tuple[nn.Sequential, nn.Sequential]:
        encoder, decoder = self.halves(channels)
        save_file(encoder.state_dict(), folder / f"{name}_encoder.safetensors")
        save_file(decoder.state_dict(), folder / f"{name}_decoder.safetensors")
        return encoder, decoder

    @pytest.mark.parametrize(("name", "channels"), [("taesd", 4), ("taesd3", 16)])
    def test_is_what_its_authors_compute(self, tmp_path, name, channels):
        encoder, decoder = self.write(tmp_path, name, channels)
        codec, images = make_codec(f"vae:{tmp_path}"), pictures(2)
        assert codec.latent_shape(32) == (channels, 4, 4)
        latents = codec.encode(images)
        with torch.no_grad():
            torch.testing.assert_close(latents, encoder((images + 1) / 2), rtol=1e-4, atol=1e-5)
            theirs = (2 * decoder(latents) - 1).clamp(-1, 1)
        torch.testing.assert_close(codec.decode(latents), theirs, rtol=1e-4, atol=1e-5)

    def test_is_diffusers_own(self, tmp_path):
        """The default AutoencoderTiny in the authors' layout is the same codec, and is saved in diffusers' layout."""
        from diffusers import AutoencoderTiny

        torch.manual_seed(0)
        model = AutoencoderTiny()
        model.save_pretrained(tmp_path / "diffusers")
        (tmp_path / "original").mkdir()
        for half, shift in (("encoder", 0), ("decoder", 1)):
            weights = {}
            for key, value in getattr(model, half).layers.state_dict().items():
                number, _, rest = key.partition(".")
                weights[f"{int(number) + shift}.{rest}"] = value
            save_file(weights, tmp_path / "original" / f"taesd_{half}.safetensors")
        ours, theirs = (make_codec(f"vae:{tmp_path / name}") for name in ("original", "diffusers"))
        assert ours.describe().fingerprint == theirs.describe().fingerprint
        ours.save(tmp_path / "saved")
        assert load_codec(tmp_path / "saved").describe().fingerprint == ours.describe().fingerprint

    def test_pickles(self, tmp_path):
        (tmp_path / "pth").mkdir()
        for half, part in zip(("encoder", "decoder"), self.write(tmp_path), strict=True):
            torch.save(part.state_dict(), tmp_path / "pth" / f"taesd_{half}.pth")
        one, other = (make_codec(f"vae:{folder}").describe().fingerprint for folder in (tmp_path, tmp_path / "pth"))
        assert one == other

    def test_refused(self, tmp_path):
        def refused(message: str) -> None:
            with pytest.raises(InputError, match=message) as caught:
                make_codec(f"vae:{tmp_path}")
            assert str(caught.value).isprintable()
            assert len(str(caught.value)) < 1000

        self.write(tmp_path)
        encoder, decoder = (tmp_path / f"taesd_{half}.safetensors" for half in ("encoder", "decoder"))
        self.write(tmp_path, "taesdxl")
        refused("holds several tiny VAEs .*: put the two files of one into a folder")
        for path in tmp_path.glob("taesdxl*"):
            path.unlink()
        whole = load_file(decoder)
        for changed in (
            {},
            {**whole, "1\x1b[2J.weight": torch.ones(1)},
            {**whole, "1.weight": torch.ones(64, 999, 3, 3)},
        ):
            save_file(changed, decoder)
            refused("are not the two halves of a TAESD")
        shutil.copy(encoder, decoder)
        refused("are not the two halves of a TAESD")
        decoder.unlink()
        refused("has no config.json")


class TestStored:
    """Saved folders of Atoll's own codecs."""

    @pytest.fixture
    def folder(self, tmp_path) -> Path:
        make_codec("pca:8x12", sample=pictures(20)).save(tmp_path)
        return tmp_path

    def refused(self, folder: Path, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            load_codec(folder)
        assert "\n" not in str(caught.value)

    def test_files(self, folder):
        assert sorted(path.name for path in (folder / "vae").iterdir()) == ["config.json", "model.safetensors"]

    def test_damage(self, folder):
        config, weights = folder / "vae" / "config.json", folder / "vae" / "model.safetensors"
        whole, tensors = json.loads(config.read_text()), load_file(weights)
        edit(config, model="DiT")
        self.refused(folder, "describes a 'DiT', not one of Pixels, PatchPCA, ConvCodec: give the right folder")
        edit(config, **{**whole, "surprise": 1})
        self.refused(folder, "has the unknown key 'surprise'")
        config.write_text(json.dumps({**whole, "architecture": {**whole["architecture"], "whiten": True}}))
        self.refused(folder, "unknown key of the architecture in .* 'whiten'")
        config.write_text(json.dumps(whole))
        save_file({**tensors, "stray": torch.ones(1)}, weights)
        self.refused(folder, 'Unexpected key.* "stray"')
        weights.write_bytes(weights.read_bytes()[:200])
        self.refused(folder, "is truncated or not a safetensors file")
        weights.unlink()
        self.refused(folder, r"model.safetensors is missing")


class TestSpecs:
    def test_unknown_spec(self):
        for spec in ("pixel", "vae", "vae:", "pixels:3", ""):
            with pytest.raises(InputError, match=f"unknown codec '{spec}'.*accepted are conv"):
                make_codec(spec)


class TestRequireSame:
    def test_the_same_elsewhere(self):
        card = make_codec("pixels").describe()
        require_same(card.model_copy(update={"spec": "vae:there"}), card, "codec", Path("a"), "b")

    @pytest.mark.parametrize("change", [{"fingerprint": "0" * 64}, {"dtype": "float16"}])
    def test_another(self, change):
        card = make_codec("pixels").describe()
        with pytest.raises(InputError) as caught:
            require_same(card.model_copy(update={"spec": "vae:x", **change}), card, "codec", Path("a"), "b")
        for part in ("a does not fit: its codec (vae:x, ", "is not that of b (pixels, float32", "with the same codec"):
            assert part in str(caught.value)


def test_fingerprint():
    weight = torch.arange(6.0)
    base = fingerprint({"a": weight}, {"x": 1})
    assert base == fingerprint({"a": weight.clone()}, {"x": 1})
    assert fingerprint({"a": weight.reshape(2, 3).T}, {}) == fingerprint({"a": weight.reshape(2, 3).T.contiguous()}, {})
    others = [
        fingerprint({"b": weight}, {"x": 1}),
        fingerprint({"a": weight}, {"x": 2}),
        fingerprint({"a": weight.reshape(2, 3)}, {"x": 1}),
        fingerprint({"a": weight.view(torch.int32)}, {"x": 1}),
        fingerprint({"a": weight, "b": torch.ones(())}, {"x": 1}),
        fingerprint({"a": weight + 1}, {"x": 1}),
    ]
    assert len({base, *others}) == 7


@pytest.mark.slow
def test_a_fresh_process_agrees(tmp_path):
    """A fresh process computes the same from saved weights; test_text.py does this with transformers."""
    make_codec("pca", sample=pictures(50)).save(tmp_path)
    program = (
        "import sys; from atoll.encoders.codecs import load_codec, make_codec\n"
        "for codec in (load_codec(sys.argv[1]), make_codec('pixels')): print(codec.describe().fingerprint)"
    )
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    ours = (make_codec("pca", sample=pictures(50)), make_codec("pixels"))
    assert run.stdout.split() == [codec.describe().fingerprint for codec in ours]
