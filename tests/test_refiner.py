"""The refiner after a PCA decoder, and lapped patches: their effect on noise and seams, and what must not change."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.fft import dct

from atoll.cards import CodecCard, DatasetCard, require_same
from atoll.encoders import refiner
from atoll.encoders.codecs import load_codec, make_codec
from atoll.encoders.pca import PatchPCA, lapping
from atoll.errors import InputError
from test_codecs import pictures

OLD = Path(__file__).parent / "data" / "before_hashes" / "data"


def seam_ratio(images: torch.Tensor, patch: int) -> float:
    """Returns the mean absolute difference across patch borders, relative to that elsewhere."""
    along = (images.diff(dim=3).abs().mean((0, 1, 2)) + images.diff(dim=2).abs().mean((0, 1, 3))) / 2
    at_border = torch.arange(1, images.shape[3]) % patch == 0
    return float(along[at_border].mean() / along[~at_border].mean())


def noisy(latents: torch.Tensor, level: float) -> torch.Tensor:
    return latents + level * torch.randn(latents.shape, generator=torch.Generator().manual_seed(1))


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).square().mean())


@pytest.fixture(scope="module")
def plain() -> PatchPCA:
    return PatchPCA.fit(pictures(256, 16), 4, 12)


@pytest.fixture(scope="module")
def refined() -> PatchPCA:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refiner, "STEPS", 128)
        return PatchPCA.fit(pictures(256, 16), 4, 12, refine=True)


class TestRefiner:
    def test_noise_and_seams(self, plain, refined):
        """Measured on unseen images."""
        images = pictures(64, 16, seed=1)
        latents = plain.encode(images)
        for level, most in ((0.25, 0.9), (0.5, 0.75)):
            before, after = (codec.decode(noisy(latents, level)) for codec in (plain, refined))
            assert error(after, images) < most * error(before, images)
            assert seam_ratio(after, 4) - 1 < 0.5 * (seam_ratio(before, 4) - 1)
        assert error(refined.decode(latents), images) < 0.01, "26 dB without noise"

    @pytest.mark.bits
    def test_latents_stay(self, plain, refined):
        images = pictures(8, 16, seed=2)
        assert torch.equal(refined.encode(images), plain.encode(images))
        assert torch.equal(refined._decode(plain.encode(images)), plain.decode(plain.encode(images)))

    def test_experts_of_either_fit_together(self, plain, refined):
        """Equal latents have equal fingerprints; caches of decoded images distinguish the decoders."""
        ours, theirs = refined.describe(), plain.describe()
        assert (ours.spec, theirs.spec) == ("pca:4x12", "pca:4x12:plain")
        require_same(ours, theirs, "codec", Path("a"), "b")
        assert ours.images != theirs.images == theirs.fingerprint == ours.fingerprint
        assert "decoder" not in theirs.values()
        assert CodecCard.parse(json.loads(json.dumps(ours.values())), "") == ours

    def test_fitting_again_gives_the_same_bytes(self, monkeypatch):
        monkeypatch.setattr(refiner, "STEPS", 3)
        torch.manual_seed(7)
        ours = PatchPCA.fit(pictures(40), 8, 12, refine=True)
        state = torch.get_rng_state()
        again = PatchPCA.fit(pictures(40), 8, 12, refine=True)
        assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers are not touched"
        assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in ours.state_dict().items())
        assert ours.describe() == again.describe()
        assert not any(weight.requires_grad for weight in ours.parameters())

    @pytest.mark.bits
    @pytest.mark.parametrize("lapped", [False, True])
    def test_the_number_of_cores_does_not_change_the_bytes(self, monkeypatch, lapped):
        monkeypatch.setattr(refiner, "STEPS", 3)
        codec = PatchPCA.fit(pictures(40), 8, 12)
        images = pictures(40)
        latents = codec.encode(images)
        fitted = []
        try:
            for num in (1, 3):
                torch.set_num_threads(num)
                fitted.append(refiner.fit_refiner(images, latents, codec.decode, 8, seamless=lapped).state_dict())
                assert torch.get_num_threads() == num, "what the caller had set is set again"
        finally:
            torch.set_num_threads(1)
        assert all(torch.equal(tensor, fitted[1][name]) for name, tensor in fitted[0].items())

    @pytest.mark.bits
    def test_round_trip(self, refined, tmp_path):
        refined.save(tmp_path)
        again = load_codec(tmp_path)
        latents = noisy(refined.encode(pictures(4, 16)), 0.3)
        assert torch.equal(again.decode(latents), refined.decode(latents))
        assert again.describe() == refined.describe()
        assert make_codec(f"saved:{tmp_path}").describe() == refined.describe()
        assert not any(weight.requires_grad for weight in again.parameters())

    @pytest.mark.bits
    def test_an_image_does_not_depend_on_its_batch(self, refined):
        latents = noisy(refined.encode(pictures(5, 16)), 0.3)
        assert torch.equal(refined.decode(latents)[3], refined.decode(latents[3:4])[0])

    @pytest.mark.parametrize(("size", "patch", "num"), [(28, 7, 12), (37, 1, 3), (16, 16, 12), (96, 8, 12), (12, 3, 6)])
    @pytest.mark.parametrize("lapped", [False, True])
    def test_sizes(self, monkeypatch, size, patch, num, lapped):
        """Odd numbers of patches, a single one, and cropped images."""
        monkeypatch.setattr(refiner, "STEPS", 3)
        images = pictures(20, size)
        codec = PatchPCA.fit(images, patch, num, lapped=lapped, refine=True)
        decoded = codec.decode(codec.encode(images))
        assert decoded.shape == images.shape
        assert decoded.isfinite().all()
        assert float(decoded.abs().max()) <= 1

    def test_few_images_take_few_steps(self, monkeypatch):
        steps: list[int] = []

        def counted(num: int, **_: object) -> range:
            steps.append(num)
            return range(1)

        monkeypatch.setattr(refiner, "trange", counted)
        monkeypatch.setattr(refiner, "STEPS", 600)
        for images in (pictures(4), pictures(4, 64), pictures(1500)):
            PatchPCA.fit(images, 8, 12, refine=True)
        assert steps == [4, 16, 600]

    def test_long(self, monkeypatch, tmp_path):
        """A longer fit gives other weights and the same latents."""
        monkeypatch.setattr(refiner, "STEPS", 2)
        monkeypatch.setattr(refiner, "LONG_STEPS", 5)
        images = pictures(40, 16)
        usual, long = (make_codec(f"pca:4x12{option}", sample=images) for option in ("", ":long"))
        assert (usual.spec, long.spec) == ("pca:4x12", "pca:4x12:long")
        ours, theirs = long.describe(), usual.describe()
        assert ours.fingerprint == theirs.fingerprint
        assert ours.images != theirs.images
        long.save(tmp_path)
        assert load_codec(tmp_path).describe() == ours
        with pytest.raises(InputError, match="leave :plain or :long out"):
            make_codec("pca:4x12:plain:long", sample=images)

    def test_of_old_data_sets(self):
        codec, card = load_codec(OLD), DatasetCard.read(OLD).codec
        assert codec.describe().fingerprint == card.fingerprint
        assert card.images == card.fingerprint
        assert isinstance(codec, PatchPCA)
        assert codec.refiner is None


class TestLapped:
    @pytest.mark.parametrize("patch", [2, 4, 7, 8, 16])
    def test_the_filter_is_orthogonal(self, patch):
        matrix = lapping(patch).double()
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(patch).double(), atol=1e-6, rtol=0)

    def test_the_filter_is_malvars(self):
        one = np.eye(4)
        dct2, dct4 = (dct(one, kind, axis=0, norm="ortho") for kind in (2, 4))
        flip = one[::-1]
        butterfly = np.block([[one, flip], [flip, -one]]) / np.sqrt(2)
        inner = np.block([[one, 0 * one], [0 * one, flip @ dct2.T @ dct4 @ flip]])
        np.testing.assert_allclose(lapping(8).numpy(), butterfly @ inner @ butterfly, atol=1e-6)

    @pytest.mark.parametrize(("size", "patch"), [(32, 4), (28, 7), (16, 1), (8, 8)])
    def test_all_components_are_exact(self, size, patch):
        images = pictures(100, size)
        codec = PatchPCA.fit(images, patch, 3 * patch**2, lapped=True)
        torch.testing.assert_close(codec.decode(codec.encode(images)), images, atol=1e-4, rtol=0)

    def test_fewer_seams(self, plain):
        images = pictures(256, 16)
        lapped = PatchPCA.fit(images, 4, 12, lapped=True)
        ratios = [seam_ratio(codec.decode(noisy(codec.encode(images), 0.5)), 4) for codec in (plain, lapped)]
        assert ratios[1] - 1 < 0.4 * (ratios[0] - 1)
        assert lapped.describe().fingerprint != plain.describe().fingerprint, "its latents are others"

    @pytest.mark.slow
    def test_a_refiner_that_is_told_of_seams(self):
        """It leaves weaker seams than the squared error alone, at nearly the same error, in images without seams."""
        rng = torch.Generator().manual_seed(2)
        waves = torch.randn(320, 3, 20, 20, generator=rng)
        images = torch.nn.functional.avg_pool2d(waves, 5, 1).clamp(-1, 1)  # [320, 3, 16, 16], stationary
        images, others = images[:256], images[256:]
        lapped = PatchPCA.fit(images, 4, 6, lapped=True)
        latents, given = lapped.encode(images), noisy(lapped.encode(others), 0.5)
        decoded = []
        for seamless in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(refiner, "STEPS", 128)
                network = refiner.fit_refiner(images, latents, lapped._decode, 4, seamless=seamless)
            decoded.append(network(given, lapped._decode(given)))
        ratios = [seam_ratio(part, 4) for part in (*decoded, others)]
        assert ratios[1] - ratios[2] < 0.7 * (ratios[0] - ratios[2])
        assert error(decoded[1], others) < 1.05 * error(decoded[0], others)

    @pytest.mark.parametrize(("size", "patch"), [(16, 1), (8, 8)])
    def test_patches_without_borders(self, size, patch):
        codec = PatchPCA.fit(pictures(40, size), patch, 3, lapped=True, refine=True)
        assert all(bool(weight.isfinite().all()) for weight in codec.state_dict().values())

    def test_the_seam_ratio(self):
        images = pictures(16, 16)
        assert float(refiner.seam_ratio(images, 4)) == pytest.approx(seam_ratio(images, 4), rel=1e-5)
        assert float(refiner.seam_ratio(images[:, :, 2:, 3:], 4, 2, 3)) == pytest.approx(seam_ratio(images, 4), rel=0.2)
        assert float(refiner.seam_ratio(torch.zeros(2, 3, 8, 8), 4)) == 0

    @pytest.mark.bits
    def test_round_trip(self, tmp_path):
        images = pictures(50)
        codec = make_codec("pca:8x12:lapped:plain", sample=images)
        codec.save(tmp_path)
        again, latents = load_codec(tmp_path), codec.encode(images)
        assert torch.equal(again.encode(images), latents)
        assert torch.equal(again.encode(images[7:8])[0], latents[7])
        assert torch.equal(again.decode(latents), codec.decode(latents))
        assert again.describe() == codec.describe()


class TestSpecs:
    @pytest.mark.parametrize("options", ["", ":plain", ":lapped", ":lapped:plain"])
    def test_options(self, options):
        assert make_codec(f"pca:8x12{options}", sample=pictures(20)).describe().spec == f"pca:8x12{options}"
        without = make_codec(f"pca{options}", sample=pictures(20)).describe()
        assert without.spec == f"pca:{without.factor}x{without.channels}{options}"

    def test_any_order(self):
        assert make_codec("pca:8x12:plain:lapped", sample=pictures(20)).describe().spec == "pca:8x12:lapped:plain"

    @pytest.mark.parametrize(
        "spec", ["pca:8x12:smooth", "pca:plain:8x12", "pca:plain:plain:plain", "pca:", "pca::plain"]
    )
    def test_bad_ones(self, spec):
        with pytest.raises(InputError, match="write it like pca:8x40"):
            make_codec(spec, sample=pictures(4))


class TestDamage:
    @pytest.fixture
    def folder(self, refined, tmp_path) -> Path:
        refined.save(tmp_path)
        return tmp_path / "vae"

    def refused(self, folder: Path, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            load_codec(folder.parent)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1000

    def test_weights(self, folder):
        path = folder / "model.safetensors"
        whole = load_file(path)
        name = "refiner.blocks.0.1.weight"
        save_file({**whole, name: whole[name] * float("nan")}, path)
        self.refused(folder, f"{name} in .* holds values that are not finite")
        save_file({**whole, name: whole[name][:, :3].contiguous()}, path)
        self.refused(folder, "are not those of its config.json .*size mismatch")
        save_file({key: value for key, value in whole.items() if key != name}, path)
        self.refused(folder, "are not those of its config.json .*Missing key")
        save_file({**whole, name: whole[name] + 1}, path)
        self.refused(folder, "is not the file that its config.json belongs to")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"refiner_width": 10**9}, "has up to 32 blocks of width up to 256, not 3 of width 1000000000"),
            ({"refiner_width": -1}, "has up to 32 blocks of width up to 256"),
            ({"refiner_blocks": 10**9}, "has up to 32 blocks of width up to 256"),
            ({"refiner_width": "wide"}, "refiner_width of .* must be of type int"),
            ({"refiner_width": 16}, "are not those of its config.json .*size mismatch"),
            ({"refiner_width": 0}, "are not those of its config.json .*Unexpected key"),
            ({"lapped": True}, "are not those of its config.json .*Missing key"),
            ({"lapped": 1}, "lapped of .* must be of type bool"),
        ],
        ids=str,
    )
    def test_configs(self, folder, change, message):
        path = folder / "config.json"
        about = json.loads(path.read_text())
        path.write_text(json.dumps({**about, "architecture": {**about["architecture"], **change}}))
        self.refused(folder, message)
