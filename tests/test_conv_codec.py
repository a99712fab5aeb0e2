"""The codec `conv`: what it learns beyond its initialisation as a lapped PCA, its files, and its data sets."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from atoll.cards import CodecCard, DatasetCard
from atoll.data import prepare as prepare_module
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.shards import Dataset
from atoll.data.sources import Source
from atoll.encoders import conv
from atoll.encoders.codecs import load_codec, make_codec, needs_sample
from atoll.encoders.conv import ConvCodec, default_patch
from atoll.encoders.pca import PatchPCA
from atoll.errors import InputError
from test_codecs import pictures
from test_prepare import contents
from test_refiner import error, noisy, seam_ratio


@pytest.fixture(scope="module")
def start() -> PatchPCA:
    """Returns the codec's initialisation."""
    return PatchPCA.fit(pictures(256, 16), 4, 12, lapped=True)


@pytest.fixture(scope="module")
def learned() -> ConvCodec:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv, "STEPS", 160)
        patch.setattr(conv, "PIXELS", 2**12)  # small steps
        return ConvCodec.fit(pictures(256, 16), 4, 12)


class TestLearning:
    def test_it_starts_as_the_lapped_pca(self, start, monkeypatch):
        monkeypatch.setattr(conv, "STEPS", 0)
        codec, images = ConvCodec.fit(pictures(256, 16), 4, 12), pictures(8, 16, seed=1)
        latents = codec.encode(images)
        torch.testing.assert_close(latents * codec.scale + codec.shift, start.encode(images), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(codec.decode(latents), start.decode(start.encode(images)), rtol=1e-4, atol=1e-4)

    @pytest.mark.slow
    def test_noise_and_seams(self, start, learned):
        """Measured on unseen images."""
        images = pictures(64, 16, seed=1)
        for level, most in ((0.25, 0.9), (0.5, 0.75)):
            before, after = (codec.decode(noisy(codec.encode(images), level)) for codec in (start, learned))
            assert error(after, images) < most * error(before, images)
            assert seam_ratio(after, 4) < seam_ratio(before, 4) + 0.05
        assert error(learned.decode(learned.encode(images)), images) < 0.01, "26 dB without noise"

    def test_both_sides_learn(self, start, learned):
        for part in (learned.encoder.out, learned.refiner.out):
            assert float(part.weight.abs().max()) > 0
        assert not torch.equal(learned.analysis.weight, start.basis / start.scale[:, None])
        assert not torch.equal(learned.synthesis.bias, start.mean)

    def test_latents_have_unit_variance(self, learned):
        latents = learned.encode(pictures(256, 16))
        assert latents.dtype == torch.float32
        assert latents.shape[1:] == learned.latent_shape(16) == (12, 4, 4)
        assert latents.var().item() == pytest.approx(1, rel=0.01)
        assert float(latents.mean((0, 2, 3)).abs().max()) < 1e-3
        assert learned.encode(pictures(256, 16, seed=1)).var().item() == pytest.approx(1, rel=0.2)

    def test_fitting_again_gives_the_same_bytes(self):
        torch.manual_seed(7)
        codec = ConvCodec.fit(pictures(40), 8, 12)
        state = torch.get_rng_state()
        again = ConvCodec.fit(pictures(40), 8, 12)
        assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers are not touched"
        assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in codec.state_dict().items())
        assert codec.describe() == again.describe()
        other = ConvCodec.fit(pictures(40), 8, 12, seed=1)
        assert codec.fingerprint != other.fingerprint
        assert not any(weight.requires_grad for weight in codec.parameters())

    def test_few_images_take_few_steps(self, monkeypatch):
        steps: list[int] = []

        def counted(num: int, **_: object) -> range:
            steps.append(num)
            return range(1)

        monkeypatch.setattr(conv, "trange", counted)
        monkeypatch.setattr(conv, "STEPS", 600)
        for images in (pictures(4), pictures(4, 64), pictures(700)):
            ConvCodec.fit(images, 8, 12)
        assert steps == [4, 16, 600]

    @pytest.mark.parametrize(
        ("size", "patch", "num"), [(28, 7, 12), (37, 1, 3), (16, 16, 12), (96, 12, 12), (12, 2, 6)]
    )
    def test_sizes(self, size, patch, num):
        """Odd numbers of patches, a single one, and cropped images."""
        images = pictures(20, size)
        codec = ConvCodec.fit(images, patch, num)
        latents = codec.encode(images)
        decoded = codec.decode(latents)
        assert latents.shape[1:] == codec.latent_shape(size)
        assert decoded.shape == images.shape
        assert decoded.isfinite().all()
        assert float(decoded.abs().max()) <= 1


class TestSameBits:
    @pytest.mark.bits
    def test_round_trip(self, learned, tmp_path):
        learned.save(tmp_path)
        again, images = load_codec(tmp_path), pictures(4, 16)
        latents = learned.encode(images)
        assert torch.equal(again.encode(images), latents)
        assert torch.equal(again.decode(noisy(latents, 0.3)), learned.decode(noisy(latents, 0.3)))
        assert again.describe() == learned.describe()
        assert make_codec(f"saved:{tmp_path}").describe() == learned.describe()
        assert not any(weight.requires_grad for weight in again.parameters())

    @pytest.mark.bits
    def test_an_image_does_not_depend_on_its_batch(self, learned):
        images = pictures(5, 16)
        latents = learned.encode(images)
        assert torch.equal(learned.encode(images[3:4])[0], latents[3])
        assert torch.equal(learned.decode(latents[3:4])[0], learned.decode(latents)[3])

    def test_the_fingerprint_covers_both_sides(self, learned, tmp_path):
        learned.save(tmp_path)
        card = learned.describe()
        assert CodecCard.parse(json.loads(json.dumps(card.values())), "") == card
        prints = {card.fingerprint}
        for name in ("analysis.weight", "encoder.out.bias", "synthesis.bias", "refiner.out.bias", "shift", "scale"):
            codec = load_codec(tmp_path)
            codec.state_dict()[name].add_(1e-3)
            prints.add(codec.fingerprint)
        assert len(prints) == 7


class TestSpecs:
    def test_defaults(self):
        assert [default_patch(size) for size in (8, 16, 28, 32, 37, 64, 96, 128, 256)] == [1, 2, 2, 4, 1, 8, 12, 16, 16]
        assert make_codec("conv", sample=pictures(20)).latent_shape(32)[1:] == (8, 8)
        assert needs_sample("conv")
        assert needs_sample("conv:8x24")
        assert not needs_sample("vae:conv")

    def test_numbers(self):
        assert make_codec("conv:8x12", sample=pictures(20)).describe().spec == "conv:8x12"

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("conv:8", "write it like conv:8x24"),
            ("conv:", "write it like conv:8x24"),
            ("conv:8x24:lapped", "write it like conv:8x24"),
            ("conv:0x4", "1 to 3 x patch x patch"),
            ("conv:2x13", "1 to 3 x patch x patch"),
            ("conv:64x24", "of up to 32 pixels a side"),
            ("conv:5x8", "images of 32 x 32 cannot be cut into patches of 5: use 30 x 30"),
        ],
    )
    def test_bad_ones(self, spec, message):
        with pytest.raises(InputError, match=message) as caught:
            make_codec(spec, sample=pictures(4))
        assert "\n" not in str(caught.value)

    def test_bad_samples(self):
        with pytest.raises(InputError, match="the codec conv is fitted to images: give it some"):
            make_codec("conv")
        with pytest.raises(InputError, match="the same flat colour"):
            make_codec("conv", sample=torch.full((3, 3, 32, 32), 0.5))


class TestDamage:
    @pytest.fixture
    def folder(self, learned, tmp_path) -> Path:
        learned.save(tmp_path)
        return tmp_path / "vae"

    def refused(self, folder: Path, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            load_codec(folder.parent)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1000

    def test_weights(self, folder):
        path = folder / "model.safetensors"
        whole, name = load_file(path), "encoder.down.weight"
        save_file({**whole, name: whole[name] * float("nan")}, path)
        self.refused(folder, f"{name} in .* holds values that are not finite")
        save_file({key: value for key, value in whole.items() if key != name}, path)
        self.refused(folder, "are not those of its config.json .*Missing key")
        save_file({**whole, name: whole[name] + 1}, path)
        self.refused(folder, "is not the file that its config.json belongs to")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"width": 10**9}, "up to 32 blocks of width 1 to 256, not 1 and 3 of widths 1000000000 and 96"),
            ({"latent_width": 10**9}, "up to 32 blocks of width 1 to 256"),
            ({"width": 0}, "up to 32 blocks of width 1 to 256"),
            ({"num_blocks": 10**9}, "up to 32 blocks of width 1 to 256"),
            ({"refiner_blocks": -1}, "up to 32 blocks of width 1 to 256"),
            ({"patch_size": 10**9}, "of each patch of up to 32 pixels a side"),
            ({"num_channels": 49}, "1 to 3 x patch x patch numbers .*not 49 of a patch of 4"),
            ({"width": "wide"}, "width of .* must be of type int"),
            ({"width": 16}, "are not those of its config.json .*size mismatch"),
        ],
        ids=str,
    )
    def test_configs(self, folder, change, message):
        path = folder / "config.json"
        about = json.loads(path.read_text())
        path.write_text(json.dumps({**about, "architecture": {**about["architecture"], **change}}))
        self.refused(folder, message)


class TestPrepare:
    SETTINGS = PrepareSettings(size=16, codec="conv:4x8")

    def make(self, out: Path) -> Dataset:
        prepare(Source("shapes", num=100, size=16), out, self.SETTINGS, 0, progress=False)
        return Dataset.open(out)

    @pytest.mark.bits
    def test_resuming_gives_the_same_bytes(self, tmp_path, monkeypatch):
        """Killed while fitting the codec, after that, and while writing shards."""
        data = self.make(tmp_path / "whole")
        card = DatasetCard.read(data.folder)
        assert card.codec.spec == "conv:4x8"
        assert card.latent_shape == [8, 4, 4]
        assert load_codec(data.folder).describe() == card.codec

        out = tmp_path / "killed"

        def stop(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        for place, name in ((ConvCodec, "_standardize"), (prepare_module, "ShardWriter")):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, stop)
                with pytest.raises(KeyboardInterrupt):
                    self.make(out)
        with monkeypatch.context() as patch:
            patch.setattr(ConvCodec, "fit", stop)  # it was saved complete: it is not fitted again
            self.make(out)
        assert contents(out) == contents(tmp_path / "whole")

    def test_the_codec_of_another_data_set(self, tmp_path):
        first = self.make(tmp_path / "first")
        settings = PrepareSettings(size=16, codec=f"saved:{first.folder}")
        prepare(Source("shapes", num=80, size=16, seed=1), tmp_path / "second", settings, 0, progress=False)
        assert DatasetCard.read(tmp_path / "second").codec == DatasetCard.read(first.folder).codec
