"""Kernel distance, coverage, diversity, CLIP score and the Inception network, against other implementations."""

import hashlib
import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.encoders.features import Inception, make_features
from atoll.encoders.inception import InceptionV3
from atoll.encoders.pretrained import public_spec
from atoll.errors import InputError
from atoll.metrics import diversity
from atoll.metrics.clip_score import CLIPScore
from atoll.metrics.coverage import measure_coverage
from atoll.metrics.diversity import Distance
from atoll.metrics.kernel import kernel_distance, squared_discrepancy
from tiny_models import write_tokenizer


def cloud(num, dim, seed, shift=0.0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(num, dim)) @ np.random.default_rng(7).normal(size=(dim, dim)) + shift


def noise(num, size, seed=0):
    return torch.rand(num, 3, size, size, generator=torch.Generator().manual_seed(seed)) * 2 - 1


class TestKernel:
    def test_against_torchmetrics(self):
        theirs = pytest.importorskip("torchmetrics.image.kid")
        real, made = cloud(200, 10, 0), cloud(200, 10, 1, shift=0.3)
        expected = theirs.poly_mmd(torch.from_numpy(real), torch.from_numpy(made))
        assert squared_discrepancy(real, made) == pytest.approx(float(expected), rel=1e-6)

    def test_mean_and_spread_against_torchmetrics(self):
        """Subsets are drawn by different generators, so means agree to within a few standard errors."""
        kid = pytest.importorskip("torchmetrics.image.kid")

        class Flat(torch.nn.Module):
            num_features = 12

            def forward(self, x):
                return x.flatten(1)

        real, made = cloud(300, 12, 0), cloud(300, 12, 1, shift=0.5)
        theirs = kid.KernelInceptionDistance(feature=Flat(), subsets=60, subset_size=80)
        theirs.update(torch.from_numpy(real).reshape(-1, 3, 2, 2), real=True)
        theirs.update(torch.from_numpy(made).reshape(-1, 3, 2, 2), real=False)
        mean, spread = map(float, theirs.compute())
        our_mean, our_spread = kernel_distance(real, made, num_subsets=60, subset_size=80)
        assert our_mean == pytest.approx(mean, abs=4 * spread / math.sqrt(60))
        assert 0.7 < our_spread / spread < 1.4

    def test_no_bias(self):
        """For two samples of one distribution it is 0 on average, and as often below as above."""
        found = [squared_discrepancy(cloud(40, 5, 2 * seed), cloud(40, 5, 2 * seed + 1)) for seed in range(200)]
        assert abs(np.mean(found)) < 4 * np.std(found) / math.sqrt(200)
        assert 40 < sum(value < 0 for value in found) < 160

    def test_sizes(self):
        real, made = cloud(30, 4, 0), cloud(20, 4, 1)
        assert kernel_distance(real[:2], made[:2])[1] == pytest.approx(0, abs=1e-9)  # one subset, of all
        assert kernel_distance(np.ones((9, 4)), np.ones((9, 4)))[0] == pytest.approx(0, abs=1e-12)
        with pytest.raises(InputError, match="not finite"):
            kernel_distance(real, np.full((9, 4), np.nan))


class TestCoverage:
    @pytest.mark.parametrize("k", [1, 5])
    @pytest.mark.parametrize("block", [7, 1000])
    def test_against_prdc(self, k, block, capsys):
        prdc = pytest.importorskip("prdc")
        real, made = cloud(120, 6, 0), cloud(90, 6, 1, shift=0.8)
        expected = prdc.compute_prdc(real_features=real, fake_features=made, nearest_k=k)
        ours = measure_coverage(real, made, k, block)
        for name, value in expected.items():
            assert getattr(ours, name) == pytest.approx(float(value), abs=1e-12), name
        assert 0 < ours.precision < 1
        assert 0 < ours.recall < 1

    def test_against_scikit_learn(self):
        """Compared with balls from its nearest neighbours, for float32 features far from the origin."""
        neighbors = pytest.importorskip("sklearn.neighbors")
        real, made = (cloud(80, 5, seed, shift=300).astype(np.float32) for seed in (0, 1))
        reach = neighbors.NearestNeighbors(n_neighbors=4).fit(real).kneighbors(real)[0][:, -1]
        apart = np.linalg.norm(real[:, None].astype(np.float64) - made, axis=2)
        assert measure_coverage(real, made, 3).precision == (apart < reach[:, None]).any(0).mean()

    def test_the_same_pictures(self):
        real = cloud(50, 4, 0)
        ours = measure_coverage(real, real, 3)
        assert (ours.precision, ours.recall, ours.coverage) == (1, 1, 1)

    def test_one_picture_again_and_again(self):
        """It may lie among the real ones, but covers few of them, and its own ball is empty."""
        real = cloud(100, 4, 0)
        ours = measure_coverage(real, np.tile(real[:1], (50, 1)), 5)
        assert ours.precision == 1
        assert ours.recall == 0
        assert ours.coverage < 0.2

    def test_equal_real_pictures_have_no_ball(self):
        same = np.tile(cloud(1, 300, 0, shift=50), (30, 1))
        assert measure_coverage(same, same, 5).density == 0

    def test_refused(self):
        real = cloud(6, 3, 0)
        assert measure_coverage(real, real, 5).coverage == 1
        with pytest.raises(InputError, match="not finite"):
            measure_coverage(real, np.full((9, 3), np.nan), 5)


# The package's own forward pass, in a separate process with stubs for what it imports and does not use.
THEIRS = """
import sys, types, torch
class Absent(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return object
for name in ("IPython", "torchsummary", "torchvision", "torchvision.models"):
    sys.modules[name] = Absent(name)
sys.modules["torchvision"].models = sys.modules["torchvision.models"]
from stlpips_pytorch import stlpips
theirs = stlpips.LPIPS(net="alex", variant="shift_tolerant", verbose=False)
pairs = torch.load(sys.argv[1], weights_only=True)
with torch.no_grad():
    torch.save([theirs(one, other).flatten() for one, other in pairs], sys.argv[2])
"""


@pytest.fixture(scope="module")
def distance() -> Distance:
    try:
        return Distance.pretrained()
    except InputError as error:
        pytest.skip(str(error))


class TestDiversity:
    @pytest.mark.slow
    def test_against_the_package(self, distance, tmp_path):
        pairs = [[noise(2, size, size), noise(2, size, size + 1)] for size in (64, 75, 96)]
        torch.save(pairs, tmp_path / "pairs.pt")
        run = subprocess.run(
            [sys.executable, "-c", THEIRS, str(tmp_path / "pairs.pt"), str(tmp_path / "found.pt")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        found = torch.load(tmp_path / "found.pt", weights_only=True)
        for (one, other), theirs in zip(pairs, found, strict=True):
            ours = [distance.mean_over_pairs([pair]) for pair in torch.stack([one, other], 1)]
            torch.testing.assert_close(torch.tensor(ours), theirs, atol=1e-6, rtol=1e-4)

    def test_the_mean_over_pairs_needs_no_pairs(self, distance):
        images = torch.cat([noise(3, 64), 0.2 * noise(3, 64, 1)])
        pairs = list(itertools.combinations(range(6), 2))
        each = [distance.mean_over_pairs([images[list(pair)]]) for pair in pairs]
        assert distance.mean_over_pairs(images.split(4)) == pytest.approx(np.mean(each), rel=1e-5)

    def test_identical_pictures(self, distance):
        assert distance.mean_over_pairs([noise(1, 64).expand(4, -1, -1, -1)]) == pytest.approx(0, abs=1e-9)

    def test_small_pictures_are_scaled_up(self, distance):
        small = noise(2, 16)
        large = torch.nn.functional.interpolate(small, (64, 64), mode="bilinear", antialias=True)
        assert distance.mean_over_pairs([small]) == pytest.approx(distance.mean_over_pairs([large]))

    def test_without_the_package(self, monkeypatch):
        monkeypatch.setattr(diversity, "PACKAGE", "no-such-package")
        with pytest.raises(InputError, match="this needs the files of no-such-package: pip install 'atoll\\[eval\\]'"):
            Distance.pretrained()


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    """Returns both towers of a tiny CLIP, in the published layout."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("whole-clip")
    size = write_tokenizer(folder)
    both = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "projection_dim": 12}  # fmt: skip
    text = {**both, "vocab_size": size, "max_position_embeddings": 16, "bos_token_id": size - 2,
            "eos_token_id": size - 1}  # fmt: skip
    vision = {**both, "image_size": 32, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)
    transformers.CLIPModel(config).save_pretrained(folder)
    return folder


class TestCLIP:
    captions = ("a cat", "two dogs on a mat that are far too long for sixteen tokens", "")

    def pictures(self, size):
        return [Image.fromarray(one) for one in np.random.default_rng(0).integers(0, 256, (3, size, size, 3), np.uint8)]

    def images(self, size):
        return torch.stack([torch.from_numpy(np.array(p)).permute(2, 0, 1) / 127.5 - 1 for p in self.pictures(size)])

    def inputs(self, transformers, clip, size):
        tokenizer = transformers.CLIPTokenizer.from_pretrained(clip)
        texts = tokenizer(list(self.captions), padding=True, truncation=True, max_length=16, return_tensors="pt")
        shown = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32)
        return {**texts, **shown(self.pictures(size), return_tensors="pt")}

    @pytest.mark.parametrize(("size", "off"), [(32, 1e-4), (50, 0.5), (20, 0.5)])
    def test_score_against_transformers(self, clip, size, off):
        """Pillow rounds to bytes when it resizes, so scores then agree to within 0.5 of 100."""
        transformers = pytest.importorskip("transformers")
        model = transformers.CLIPModel.from_pretrained(clip).eval()
        with torch.no_grad():
            theirs = model(**self.inputs(transformers, clip, size))
        expected = 100 * theirs.logits_per_image.diagonal() / model.logit_scale.exp()
        found = CLIPScore.open(str(clip)).scores(self.images(size), self.captions)
        torch.testing.assert_close(found, expected, atol=off, rtol=0)
        assert found.abs().max() > 1

    @pytest.mark.bits
    def test_features_against_transformers(self, clip):
        transformers = pytest.importorskip("transformers")
        model = transformers.CLIPVisionModelWithProjection.from_pretrained(clip).eval()
        with torch.no_grad():
            theirs = model(pixel_values=self.inputs(transformers, clip, 32)["pixel_values"]).image_embeds
        features = make_features(f"clip:{clip}")
        torch.testing.assert_close(features.extract(self.images(32)), theirs, atol=1e-5, rtol=1e-4)
        assert features.describe().dim == features.dim == 12

    def test_refused(self, clip, dino, tmp_path):
        with pytest.raises(InputError, match="holds a 'dinov2': give a model of the kind clip"):
            CLIPScore.open(str(dino))
        with pytest.raises(InputError, match="holds a 'dinov2'"):
            make_features(f"clip:{dino}")
        with pytest.raises(InputError, match="is not a folder: give one that is there"):
            CLIPScore.open(str(tmp_path / "none"))


def fill(weights: dict[str, torch.Tensor]) -> None:
    """Fills tensors from a fixed generator, in the order of their names."""
    g = torch.Generator().manual_seed(0)
    for name in sorted(weights):
        value = weights[name]
        if name.endswith("num_batches_tracked"):
            continue
        drawn = torch.rand(value.shape, generator=g)
        if name.endswith(("running_var", "bn.weight")):
            value.copy_(0.5 + drawn)
        else:
            value.copy_((drawn - 0.5) * (math.sqrt(24 / value[0].numel()) if value.dim() > 1 else 1))


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """Returns weights in the FID Inception's published layout, with our own numbers."""
    net = InceptionV3()
    fill(net.state_dict())
    path = tmp_path_factory.mktemp("inception") / "pt_inception.pth"
    torch.save(net.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def inception(weights) -> Inception:
    return make_features(f"inception:{weights}")


class TestInception:
    """The published weights are not available here: names, shapes and outputs are compared with torch-fidelity's.

    Its numbers were computed once, with `fill`'s weights, by torch_fidelity 0.4.0's FeatureExtractorInceptionV3, which
    reads the published file; both agreed bit for bit.
    """

    KEYS = "8cdd2faeb41211e17f0fb47e66168d0cb1f981aa773b5f44e5b9cc93857fe492"
    FIRST = (9.40153, 10.77905, 3.7462, 6.0231, 0.76993, 14.10582, 3.25834, 0.0)

    def test_names_and_shapes(self, inception):
        listed = [f"{name} {list(value.shape)}" for name, value in sorted(inception.net.state_dict().items())]
        assert len(listed) == 566
        assert hashlib.sha256("\n".join(listed).encode()).hexdigest() == self.KEYS

    def test_against_torch_fidelity(self, inception):
        images = (torch.rand(2, 3, 299, 299, generator=torch.Generator().manual_seed(1)) * 256).to(torch.uint8)
        with torch.no_grad():
            found = inception.net((images.float() - 128) / 128)  # as TensorFlow scales bytes
        np.testing.assert_allclose(found[0, :8], self.FIRST, atol=2e-5, rtol=1e-4)
        assert float(found[1].norm()) == pytest.approx(713.85333, rel=1e-4)
        assert float(found.double().sum()) == pytest.approx(37385.98963, rel=1e-4)

    @pytest.mark.bits
    def test_as_features(self, inception):
        """Images are scaled as in pytorch-fid, and features do not depend on the batch."""
        images = noise(2, 32)
        found = inception.extract(images)
        assert found.shape == (2, 2048)
        shown = torch.nn.functional.interpolate(images[:1], (299, 299), mode="bilinear", align_corners=False)
        assert torch.equal(inception.net(shown), found[:1])

    def test_no_path_of_this_machine_is_told(self, weights):
        assert public_spec(f"inception:{weights}") == "inception:pt_inception.pth"
        assert public_spec("dino:facebook/dinov2-large") == "dino:facebook/dinov2-large"

    def test_old_files(self, inception, weights, tmp_path):
        """Older files lack the batch counters of normalisation layers."""
        kept = {k: v for k, v in torch.load(weights, weights_only=True).items() if "num_batches" not in k}
        torch.save(kept, tmp_path / "old.pth")
        assert make_features(f"inception:{tmp_path / 'old.pth'}").describe() == inception.describe()

    def test_refused(self, weights, tmp_path):
        with pytest.raises(InputError, match="none.pth .*: give a checkpoint"):
            make_features(f"inception:{tmp_path / 'none.pth'}")
        torch.save({"fc.weight": torch.zeros(3)}, tmp_path / "other.pth")
        with pytest.raises(InputError, match="does not hold the weights of the FID Inception"):
            make_features(f"inception:{tmp_path / 'other.pth'}")
        (tmp_path / "cut.pth").write_bytes(weights.read_bytes()[:1000])
        with pytest.raises(InputError, match="is truncated or damaged"):
            make_features(f"inception:{tmp_path / 'cut.pth'}")
        torch.save({"fc.weight": torch.full((3,), math.nan)}, tmp_path / "nan.pth")
        with pytest.raises(InputError, match="fc.weight in .*nan.pth holds values that are not finite"):
            make_features(f"inception:{tmp_path / 'nan.pth'}")
        torch.save([torch.zeros(1)], tmp_path / "list.pth")
        with pytest.raises(InputError, match="holds no tensors by name"):
            make_features(f"inception:{tmp_path / 'list.pth'}")
