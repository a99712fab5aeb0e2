"""`atoll evaluate`: the figures against others' on the same images, going on after an end, refusals, the table."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from sklearn.datasets import load_sample_images

from atoll.cards import ModelIndex
from atoll.cli.main import main
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.shards import HELD_OUT, TRAIN, Dataset
from atoll.data.sources import Source
from atoll.data.view import decode_rows
from atoll.encoders.codecs import load_codec
from atoll.encoders.features import make_features
from atoll.errors import InputError
from atoll.experiments import images as module
from atoll.experiments.evaluate import Contender, Evaluation, evaluate, name_contenders
from atoll.experiments.images import SampledImages, tensor_of
from atoll.experiments.sanity import doubt_density, doubt_features, quilts_of, tells
from atoll.experiments.settings import MetricSettings
from atoll.experiments.tables import draw_metrics, format_value, name_of, render_table, with_error
from atoll.metrics.diversity import Distance
from atoll.metrics.labels import are_right
from atoll.plots.contact_sheet import draw_samples
from atoll.sampling.assemble import assemble
from atoll.sampling.pipeline import AtollPipeline
from atoll.sampling.settings import Sampling
from test_assemble import parts

SETTINGS = MetricSettings(
    num=24, features=("simple",), metrics=("frechet", "kernel", "coverage", "accuracy", "flops"), neighbours=3
)
QUICK = Sampling(steps=2, batch=10)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return parts(tmp_path_factory.getbasetemp())[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    data, run = parts(tmp_path_factory.getbasetemp())
    folder = tmp_path_factory.mktemp("evaluated") / "model"
    assemble([run], None, folder, data)
    return folder


@pytest.fixture(scope="module")
def monolith(tmp_path_factory) -> Path:
    data, run = parts(tmp_path_factory.getbasetemp())
    folder = tmp_path_factory.mktemp("evaluated") / "monolith"
    assemble([run / "monolith"], None, folder, data)
    return folder


@pytest.fixture(scope="module")
def done(model, data, tmp_path_factory):
    """An evaluation, and what it gave."""
    out = tmp_path_factory.mktemp("evaluation")
    before = snapshot(data)
    results = evaluate([Contender("ours", model, QUICK)], data, out, SETTINGS, progress=False)
    assert snapshot(data) == before, "nothing is written to the data"
    return out, results


def snapshot(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def pictures_in(out: Path) -> dict[str, np.ndarray]:
    return {str(p.relative_to(out)): load_file(p)["rows"] for p in sorted((out / "pictures").rglob("*.safetensors"))}


def figure(results, key, name="ours"):
    return next(one for one in results["models"] if one["name"] == name)["figures"][key]


class TestFigures:
    def test_against_scipy_and_prdc(self, done, model, data, capsys):
        """The same images made by hand, and measured by others."""
        linalg, prdc = pytest.importorskip("scipy.linalg"), pytest.importorskip("prdc")
        _, results = done
        dataset, codec, features = Dataset.open(data), load_codec(data), make_features("simple")
        split = dataset.column("split")[:]
        held_out, train = np.flatnonzero(split == HELD_OUT), np.flatnonzero(split == TRAIN)
        captions = dataset.strings("caption", np.random.default_rng(0).permutation(held_out))
        captions = [captions[i % len(captions)] for i in range(24)]
        made = AtollPipeline(model)(
            captions, seed=list(range(24)), num_inference_steps=2, output_type="np", batch_size=10, progress=False
        ).images
        pictures = np.round(made * 255).astype(np.uint8)
        order = np.random.default_rng(1).permutation(train)
        real, mine = (
            features.extract(tensor_of(shown)).double().numpy()
            for shown in (decode_rows(dataset, order, codec), pictures)
        )
        one, other = np.cov(real, rowvar=False), np.cov(mine, rowvar=False)
        root = linalg.sqrtm(one @ other).real
        expected = ((real.mean(0) - mine.mean(0)) ** 2).sum() + np.trace(one + other - 2 * root)
        assert figure(results, "frechet/simple")["value"] == pytest.approx(expected, rel=1e-4)
        for name, value in prdc.compute_prdc(real[:24], mine, 3).items():
            assert figure(results, f"{name}/simple")["value"] == pytest.approx(float(value), abs=1e-9)
        assert figure(results, "prompt_accuracy")["value"] == np.mean(are_right(pictures, captions))
        assert figure(results, "flops_an_image")["value"] > 1e6

    def test_each_says_what_it_was_measured_by(self, done, model):
        _, results = done
        fingerprint = make_features("simple").describe().fingerprint
        for key, found in results["models"][1]["figures"].items():
            if "/" in key:
                assert found["features"] == {"name": "simple", "fingerprint": fingerprint}
        assert results["networks"]["simple"]["fingerprint"] == fingerprint
        assert results["models"][1]["hash"] == ModelIndex.read(model).hash
        assert name_of("kernel/efficientnet:96") == (
            "Kernel distance (EfficientNet-Lite0 features at 96 pixels; not Inception KID)"
        )
        assert name_of("frechet/efficientnet") == ("Frechet distance (EfficientNet-Lite0 features; not Inception FID)")
        assert "not Inception" not in name_of("frechet/inception")
        assert "not Inception KID" in name_of("kernel/clip:small")

    def test_real_pictures_are_nearer(self, done):
        _, results = done
        assert results["models"][0]["name"] == "real images"
        assert figure(results, "frechet/simple", "real images")["value"] < figure(results, "frechet/simple")["value"]
        assert figure(results, "prompt_accuracy", "real images")["value"] > 0.8

    def test_errors_over_seeds(self, model, data, tmp_path):
        several = evaluate(
            [Contender("ours", model, QUICK)], data, tmp_path, replace(SETTINGS, seeds=2), progress=False
        )
        found = figure(several, "frechet/simple")
        assert found["error_from"] == "seeds"
        assert figure(several, "frechet/simple", "real images")["error_from"] == "leaving out tenths"
        assert len(found["values"]) == 2
        assert found["value"] == pytest.approx(np.mean(found["values"]))
        assert found["error"] == pytest.approx(np.std(found["values"], ddof=1))
        alone = [
            Evaluation(data, tmp_path, replace(SETTINGS, first_seed=seed), progress=False)
            .judge(Contender("ours", model, QUICK))["figures"]["frechet/simple"]
            for seed in (0, 1)
        ]  # fmt: skip
        assert [one["value"] for one in alone] == found["values"]
        assert {one["error_from"] for one in alone} == {"leaving out tenths"}

    def test_diversity(self, model, data, tmp_path):
        try:
            distance = Distance.pretrained()
        except InputError as error:
            pytest.skip(str(error))
        settings = replace(SETTINGS, metrics=("diversity",), num=6, varied=2, each=3)
        judged_one = Contender("ours", model, QUICK)
        judged = Evaluation(data, tmp_path, settings, progress=False).judge(judged_one)
        per_prompt, overall = (judged["figures"][f"{key}/stlpips-alex"] for key in ("lpips_per_prompt", "lpips"))
        assert per_prompt["error_from"] == "prompts"
        one, other = pictures_in(tmp_path).values()
        assert len(one) == len(other) == 6
        means = [[distance.mean_over_pairs([tensor_of(rows[i : i + 3])]) for i in (0, 3)] for rows in (one, other)]
        assert per_prompt["value"] in [pytest.approx(np.mean(found)) for found in means]
        assert overall["value"] in [pytest.approx(distance.mean_over_pairs([tensor_of(rows)])) for rows in (one, other)]
        few = Evaluation(data, tmp_path, replace(settings, paired=4), progress=False)
        images = few._usual_images(Contender("ours", model, replace(QUICK, batch=3)), few.open(judged_one), 0)
        among_four = few.suite.measure(images)["lpips/stlpips-alex"]["value"]  # of two batches, one of them in part
        assert among_four == pytest.approx(distance.mean_over_pairs([tensor_of(images.load()[:4])]))

    def test_one_cluster(self, model, data, tmp_path):
        evaluation = Evaluation(
            data, tmp_path, replace(SETTINGS, metrics=("frechet",), num=4), cluster=1, progress=False
        )
        assert set(evaluation.prompts) <= set(Dataset.open(data, 1).strings("caption"))
        assert evaluation.describe()["data"]["cluster"] == 1
        assert evaluation.describe()["reference"]["num"] < len(Dataset.open(data)) / 2
        assert evaluation.judge(Contender("ours", model, QUICK))["figures"]["frechet/simple"]["value"] > 0


class TestGoingOn:
    @pytest.mark.slow
    def test_after_an_end(self, model, data, done, tmp_path, monkeypatch):
        """Interrupted while it draws, it makes only what is missing, and ends with the same images and figures."""
        painted: list[int] = []
        paint = SampledImages.paint

        def tire(self, span):
            if len(painted) == 1:
                raise KeyboardInterrupt
            painted.append(span.start)
            return paint(self, span)

        monkeypatch.setattr(SampledImages, "paint", tire)
        with pytest.raises(KeyboardInterrupt):
            evaluate([Contender("ours", model, QUICK)], data, tmp_path, SETTINGS, progress=False)
        assert not (tmp_path / "results.json").exists()
        painted.clear()
        monkeypatch.setattr(SampledImages, "paint", lambda s, span: painted.append(span.start) or paint(s, span))
        evaluate([Contender("ours", model, QUICK)], data, tmp_path, SETTINGS, progress=False)
        assert painted == [10, 20]
        old, new = pictures_in(done[0]), pictures_in(tmp_path)
        assert old.keys() == new.keys()
        assert all(np.array_equal(old[name], new[name]) for name in old)
        assert (tmp_path / "results.json").read_bytes() == (done[0] / "results.json").read_bytes()

    def test_more_pictures(self, model, data, done, tmp_path):
        """With a larger --num the whole batches stay; an image depends on its own seed, not on how many there are."""
        out = Path(shutil.copytree(done[0], tmp_path / "out"))
        before = snapshot(out / "pictures")
        Evaluation(data, out, replace(SETTINGS, num=30), progress=False).judge(Contender("ours", model, QUICK))
        changed = [path for path, time in snapshot(out / "pictures").items() if before.get(path) != time]
        (name,) = [path for path in changed if path.endswith(".safetensors")]
        (old,) = (rows for rows in pictures_in(done[0]).values() if len(rows) == 4)
        new = load_file(name)["rows"]
        assert len(new) == 10
        assert np.abs(old.astype(int) - new[:4]).max() <= 1

    def test_others_are_made_anew(self, model, data, monolith, tmp_path):
        """Another model, sampling, seed or prompts: other images."""
        files = lambda: len(list((tmp_path / "pictures").iterdir()))  # noqa: E731
        settings = replace(SETTINGS, num=4, metrics=("frechet",))
        for number, (contender, changed) in enumerate(
            [
                (Contender("ours", model, QUICK), settings),
                (Contender("monolith", monolith, QUICK), settings),
                (Contender("ours", model, replace(QUICK, guidance=1.5)), settings),
                (Contender("ours", model, QUICK), replace(settings, first_seed=5)),
                (Contender("ours", model, QUICK), replace(settings, split="train")),
            ]
        ):
            Evaluation(data, tmp_path, changed, progress=False).judge(contender)
            assert files() == 1 + number

    @pytest.mark.slow
    def test_what_strangers_left(self, model, data, done, tmp_path):
        """A FIFO, a link to elsewhere, a header without end: a sentence each, and no wait; other rows are not used."""
        out = Path(shutil.copytree(done[0], tmp_path / "out"))
        contender = Contender("ours", model, QUICK)
        images = sorted((out / "pictures").glob("*.safetensors"))[0]
        (tmp_path / "mine").write_bytes(images.read_bytes())
        content = images.read_bytes()
        for spoil, message in (
            (os.mkfifo, "it is a FIFO"),
            (lambda path: path.symlink_to(tmp_path / "mine"), "it is a link that leaves its folder"),
            (lambda path: path.write_bytes(b"\xff" * 8 + b"{}"), "too few for its header"),
            (lambda path: path.write_bytes(content[:200]), "is truncated .*: remove it"),
        ):
            images.unlink()
            spoil(images)
            with pytest.raises(InputError, match=message):
                Evaluation(data, out, SETTINGS, progress=False).judge(contender)
        features = sorted((out / "features").glob("*.safetensors"))
        for path in (images, *features):
            content = (done[0] / path.relative_to(out)).read_bytes()
            for tensors in ({"other": np.zeros(3)}, {"rows": np.zeros((10, 7), np.float32)}, {"rows": np.zeros(())}):
                with safe_open(done[0] / path.relative_to(out), "np") as file:
                    metadata = file.metadata()
                path.unlink()
                save_file(tensors, path, metadata)
                Evaluation(data, out, SETTINGS, progress=False).real()
                Evaluation(data, out, SETTINGS, progress=False).judge(contender)
                assert path.read_bytes() == content

    @pytest.mark.slow
    def test_two_at_once(self, tmp_path):
        """Processes that make the same rows at the same time do not spoil each other's files."""
        program = """
import sys, numpy as np
from pathlib import Path
from atoll.experiments.cache import cached
for number in range(60):
    rows = cached(Path(sys.argv[1]), {"number": number}, "int64", (2, 50_000), lambda: np.full((2, 50_000), number))
    assert (rows == number).all()
"""
        runs = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) for _ in range(3)]
        assert [run.wait() for run in runs] == [0, 0, 0]
        assert len(list(tmp_path.iterdir())) == 60


def test_oracle(model, monolith, data, tmp_path, monkeypatch):
    """Each caption goes to the expert of the cluster that its image is in."""
    seen: list[list[int]] = []
    generate = module.generate

    def watch(*arguments, labels, **options):
        seen.append(labels.tolist())
        return generate(*arguments, labels=labels, **options)

    monkeypatch.setattr(module, "generate", watch)
    settings = replace(SETTINGS, num=8, metrics=("frechet",))
    evaluation = Evaluation(data, tmp_path, settings, progress=False)
    oracle = replace(QUICK, routing="oracle", batch=8)
    found = evaluation.judge(Contender("oracle", model, oracle))
    dataset = Dataset.open(data)
    by_caption: dict[str, set[int]] = {}
    for caption, cluster in zip(dataset.strings("caption"), dataset.clusters(), strict=True):
        by_caption.setdefault(caption, set()).add(int(cluster))
    assert all(label in by_caption[caption] for label, caption in zip(seen[0], evaluation.prompts, strict=False))
    assert len(set(seen[0])) > 1
    assert found["figures"]["frechet/simple"]["value"] > 0
    with pytest.raises(InputError, match="monolith has 1 expert, but the data has a cluster 2"):
        evaluation.judge(Contender("monolith", monolith, oracle))


class TestRefused:
    def test_settings(self):
        with pytest.raises(InputError, match="unknown metric 'frechett': did you mean 'frechet'"):
            MetricSettings(metrics=("frechett",))
        with pytest.raises(InputError, match="num must be from 2 to 1000000, but is 1"):
            MetricSettings(num=1)
        with pytest.raises(InputError, match="unknown split"):
            MetricSettings(split="test")
        with pytest.raises(InputError, match="no features"):
            MetricSettings(features=())
        with pytest.raises(InputError, match="steps must be a whole number from 1 to 10000"):
            Sampling(steps=0)
        for scale in (-3.0, float("nan"), float("inf")):
            with pytest.raises(InputError, match="guidance scale must be a finite number of at least 0"):
                Sampling(guidance=scale)

    def test_what_cannot_be_measured(self, data, tmp_path, monkeypatch):
        with pytest.raises(InputError, match="clip cannot be measured: no CLIP was named"):
            Evaluation(data, tmp_path, replace(SETTINGS, metrics=("clip",)), progress=False)
        with monkeypatch.context() as patch:
            patch.setattr(Dataset, "strings", lambda self, column, rows: ["a dog"] * len(rows))
            with pytest.raises(InputError, match="accuracy cannot be measured: the captions are not those of avatars"):
                Evaluation(data, tmp_path, replace(SETTINGS, metrics=("accuracy",)), progress=False)
        monkeypatch.setattr("atoll.metrics.diversity.PACKAGE", "no-such-package")
        left_out = Evaluation(data, tmp_path, replace(SETTINGS, metrics=()), progress=False).left_out
        assert "pip install 'atoll[eval]'" in left_out["diversity"]
        assert "--clip" in left_out["clip"]
        assert "--num 528" in left_out["frechet_infinity/simple"]

    def test_places(self, model, data, tmp_path):
        with pytest.raises(InputError, match="lies within"):
            evaluate([Contender("ours", model, QUICK)], data, data / "out", SETTINGS)
        with pytest.raises(InputError, match="two models have the same name"):
            evaluate([Contender("ours", model, QUICK)] * 2, data, tmp_path, SETTINGS)
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match="choose another --out"):
            evaluate([Contender("ours", model, QUICK)], data, tmp_path / "file" / "out", SETTINGS)

    def test_an_empty_split(self, tmp_path):
        """Nothing held out: the captions are those of training, and there is no column of real images."""
        data = tmp_path / "data"
        prepare(Source("avatars", num=12, size=32), data, PrepareSettings(size=32, holdout=0), 0, progress=False)
        evaluation = Evaluation(data, tmp_path / "out", replace(SETTINGS, num=4), progress=False)
        assert evaluation.split == "train"
        assert evaluation.real() == []
        assert "outside of the reference there are 0, too few to measure" in evaluation.notes[-1]
        with pytest.raises(InputError, match="holds nothing out: use --split train"):
            Evaluation(data, tmp_path / "out", replace(SETTINGS, split="held_out"), progress=False)

    def test_too_few_for_neighbours(self, data, tmp_path):
        few = replace(SETTINGS, num=3, metrics=("coverage",))
        with pytest.raises(
            InputError, match="coverage cannot be measured: 3 neighbours need 4 images, and there are 3"
        ):
            Evaluation(data, tmp_path, few, progress=False)
        assert "coverage" in Evaluation(data, tmp_path, replace(few, metrics=()), progress=False).left_out
        held_out = len(np.flatnonzero(Dataset.open(data).column("split")[:] == HELD_OUT))
        many = replace(few, num=60, neighbours=held_out)
        evaluation = Evaluation(data, tmp_path, many, progress=False)
        assert evaluation.real() == []
        assert f"there are {held_out}, too few to measure" in evaluation.notes[-1]

    def test_features_that_are_not_finite(self, model, data, tmp_path, monkeypatch):
        evaluation = Evaluation(data, tmp_path, replace(SETTINGS, num=4), progress=False)
        network = evaluation.suite.networks["simple"]
        extract = network.extract
        monkeypatch.setattr(network, "extract", lambda images: extract(images) / 0)
        with pytest.raises(InputError, match="the features of 98 images are not finite: .* weights are damaged"):
            evaluation.judge(Contender("ours", model, QUICK))

    def test_so_is_a_damaged_expert_that_the_first_image_does_not_need(self, model, data, tmp_path):
        mine = Path(shutil.copytree(model, tmp_path / "model"))
        evaluation = Evaluation(data, tmp_path / "out", SETTINGS, progress=False)
        for expert in ("expert_0", "expert_1", "expert_2"):
            path = mine / expert / "model.safetensors"
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            with pytest.raises(InputError, match=f"{expert}/model.safetensors is not the file"):
                evaluation.check(Contender("ours", mine, QUICK))
            path.write_bytes(content)

    def test_a_bad_model_is_found_before_the_work(self, model, data, tmp_path):
        bad = Contender("bad", model, replace(QUICK, routing="top9"))
        with pytest.raises(InputError, match="unknown routing 'top9'"):
            evaluate([Contender("ours", model, QUICK), bad], data, tmp_path, SETTINGS, progress=False)
        assert not (tmp_path / "features").exists()

    def test_the_command(self, model, data, tmp_path, capsys):
        for arguments, told in (
            (["evaluate", str(model)], "give one or several models, and then the data"),
            (["evaluate", str(model), str(model / "router")], "there is no"),
            (["evaluate", str(data), str(data), "--features", "simple"], "model_index.json"),
        ):
            with pytest.raises(SystemExit) as stop:
                main([*arguments, "--out", str(tmp_path / "out")])
            assert stop.value.code == 2
            assert told in capsys.readouterr().err


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Pieces of two photographs, a third of them held out."""
    images = [Image.fromarray(image) for image in load_sample_images().images]
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    (folder / "pieces").mkdir()
    for i in range(300):
        image, side = images[i % 2], int(rng.integers(40, 200))
        left, top = (int(rng.integers(0, full - side)) for full in image.size)
        piece = image.crop((left, top, left + side, top + side)).resize((32, 32), Image.Resampling.LANCZOS)
        piece.save(folder / "pieces" / f"{i:03d}.png")
        (folder / "pieces" / f"{i:03d}.txt").write_text(f"piece {i}")
    settings = PrepareSettings(size=32, holdout=0.3, codec="pixels", near_duplicates="keep")
    prepare(Source(str(folder / "pieces")), folder / "data", settings, 0, progress=False)
    return folder / "data"


class TestSanity:
    """Pictures of nothing are not to pass for good ones."""

    def judged(self, monkeypatch, model: Path, data: Path, out: Path, paint) -> dict:
        """What results.json says of a model that makes these images."""
        monkeypatch.setattr(SampledImages, "paint", paint)
        settings = MetricSettings(num=80, features=("simple",), metrics=("frechet", "kernel", "coverage"))
        return evaluate([Contender("ours", model, replace(QUICK, batch=80))], data, out, settings, progress=False)

    @pytest.mark.filterwarnings("ignore:ours has another codec:UserWarning")
    def test_quilts(self, model, photos, tmp_path, monkeypatch, report):
        def quilt(asked, span):
            return quilts_of(decode_rows(Dataset.open(photos), np.arange(80), load_codec(photos)), seed=1)[span]

        with pytest.warns(UserWarning, match="do not trust") as told:
            results = self.judged(monkeypatch, model, photos, tmp_path / "out", quilt)
        texts = [str(warning.message) for warning in told if "codec" not in str(warning.message)]
        assert "do not trust precision and density by simple on this data, and use --features efficientnet" in texts[0]
        assert texts[1].startswith("ours has a density of ")
        assert len(texts) == 2
        table = (tmp_path / "out" / "results.md").read_text()
        assert all(f"- {text}.\n" in table for text in texts)
        assert results["notes"][:2] == [f"{text}." for text in texts]
        sanity = results["sanity"]
        assert not sanity["precision/simple"]["tells"]
        for key in ("frechet", "kernel", "recall", "coverage"):
            assert sanity[f"{key}/simple"]["tells"], key
        figures = {key: figure(results, f"{key}/simple")["value"] for key in ("precision", "density", "coverage")}
        assert figures["precision"] > 0.9
        assert figures["density"] > 1.5
        report("quilts by simple features: " + ", ".join(f"{key} {value:.2f}" for key, value in figures.items()))

    @pytest.mark.filterwarnings("ignore:ours has another codec:UserWarning")
    def test_real_pictures_rouse_no_doubt(self, model, photos, tmp_path, monkeypatch):
        rows = Dataset.open(photos)
        held_out = np.flatnonzero(rows.column("split")[:] == HELD_OUT)

        def copy(asked, span):
            return decode_rows(rows, held_out[:80], load_codec(photos))[span]

        with pytest.warns(UserWarning, match="do not trust precision and density") as told:
            self.judged(monkeypatch, model, photos, tmp_path, copy)
        assert not [warning for warning in told if "ours has a density" in str(warning.message)]

    def test_where_features_tell(self, tmp_path):
        """On avatars, colours and edges know a quilt by every figure."""
        data = tmp_path / "data"
        settings = PrepareSettings(size=32, holdout=0.3, codec="pixels", near_duplicates="keep")
        prepare(Source("avatars", num=600, size=32), data, settings, 0, progress=False)
        settings = MetricSettings(num=150, features=("simple",), metrics=("frechet", "kernel", "coverage"))
        sanity = Evaluation(data, tmp_path / "out", settings, progress=False).check_features()
        metrics = ("frechet", "kernel", "precision", "recall", "density", "coverage")
        assert list(sanity) == [f"{metric}/simple" for metric in metrics]
        assert all(about["tells"] for about in sanity.values()), sanity
        assert doubt_features(sanity) == []
        few = Evaluation(data, tmp_path / "out", replace(settings, num=20), progress=False)
        assert few.check_features() == {}

    def test_sentences(self):
        pairs = {"frechet/dino:x": (3.0, 2.0), "recall/dino:x": (0.9, 0.1)}
        sanity = {key: {"real": a, "quilts": b, "tells": tells(key, a, b)} for key, (a, b) in pairs.items()}
        (told,) = doubt_features(sanity)
        assert (
            "(frechet 2.00 against 3.00): do not trust frechet by dino:x on this data, and use --features ano" in told
        )
        values = {"real": 1.0, "a": 1.4, "b": 3.96}
        models: list = [
            {"name": name, "num": 90, "figures": {"density/simple": {"value": value}}} for name, value in values.items()
        ]
        for model in models[1:]:
            model["hash"] = "0"
        (told,) = doubt_density(models)
        assert told.startswith("b has a density of 3.96 by simple features, real images 1.00: its images crowd")
        assert doubt_density(models[1:]) == doubt_density([]) == []


class TestTable:
    def test_the_command(self, model, monolith, data, tmp_path, capsys):
        main(
            ["evaluate", str(model), str(monolith), str(data), "--num", "6", "--steps", "1", "--features", "simple",
             "--metrics", "frechet", "accuracy", "--out", str(tmp_path / "out"), "--device", "cpu"]
        )  # fmt: skip
        shown = capsys.readouterr().out
        assert "| real images | model | monolith |" in shown
        assert "Frechet distance (colour and edge features; not Inception FID) | lower is better |" in shown
        table = (tmp_path / "out" / "results.md").read_text()
        results = json.loads((tmp_path / "out" / "results.json").read_text())
        assert table == render_table(results)
        assert results["networks"]["simple"]["fingerprint"] in table
        assert "6 images span fewer than the 132 dimensions of simple" in table
        assert str(tmp_path) not in table + json.dumps(results)
        for name in ("samples.png", "metrics.png"):
            assert (tmp_path / "out" / name).stat().st_size > 1000

    def results(self, *values):
        models = [{"name": "real images", "num": 5, "seeds": 1, "figures": {}}]
        for i, (value, error) in enumerate(values):
            found = {"value": value, "error": error, "error_from": "seeds"}
            models.append({"name": f"m|{i}", "hash": "0", "num": 9, "seeds": 2, "sampling": {"steps": 3},
                           "figures": {"frechet/simple": found}})  # fmt: skip
        data = {"name": "d", "fingerprint": "f", "license": "l"}
        reference = {"num": 3, "split": "train", "pictures": "decoded latents"}
        return {"data": data, "models": models, "prompts": {"split": "train", "num": 1, "hash": "h"}, "notes": [],
                "left_out": {}, "reference": reference, "networks": {}}  # fmt: skip

    def test_bold_is_what_wins_by_more_than_the_errors(self):
        assert "**1.00 ± 0.10** | 2.00 ± 0.10" in render_table(self.results((1.0, 0.1), (2.0, 0.1)))
        assert "**" not in render_table(self.results((1.0, 0.9), (2.0, 0.9)))
        assert "**" not in render_table(self.results((1.0, None), (2.0, None)))
        assert "m\\|0" in render_table(self.results((1.0, 0.1)))
        evil = self.results((1.0, 0.1))
        evil["data"]["name"] = "d\n# \x1b[31m<b>"
        assert render_table(evil).startswith("# Evaluation on d# [31m<b>\n\n|")
        assert "2 x 9" in render_table(self.results((1.0, 0.1)))

    def test_numbers_as_they_are_told(self):
        told = [
            format_value("frechet/x", value) for value in (0, 0.00012, 0.1234, 1.2345, 12.345, 123.45, 1234.5, -0.5)
        ]
        assert told == ["0.000", "1.20e-04", "0.123", "1.234", "12.3", "123", "1234", "-0.500"]
        pairs = [(27.61, 0.6404), (0.00237, 0.00153), (1234.5, 56.7), (0.688, 1e-16), (-0.5, None)]
        told = [with_error("kernel/x", {"value": value, "error": error}) for value, error in pairs]
        assert told == ["27.61 ± 0.64", "0.0024 ± 0.0015", "1234 ± 57", "0.688 ± 0", "-0.500"]
        assert [format_value("flops_an_image", value) for value in (12, 1.234e9, 5e15)] == ["12", "1.23 G", "5 P"]

    def test_pictures_of_any_number(self):
        results = self.results((1.0, 0.1), (-2.0, None))
        assert draw_metrics(results["models"]).width > 400
        rows = {name: np.zeros((num, 32, 32, 3), np.uint8) for name, num in (("a", 1), ("b" * 60, 3))}
        assert draw_samples(rows, ["a caption\nof two lines", "", "c" * 400]).height > 64

    def test_names(self, tmp_path):
        paths = [tmp_path / "a" / "model", tmp_path / "b" / "model"]
        assert [one.name for one in name_contenders(paths, QUICK)] == [str(path) for path in paths]
        assert [one.name for one in name_contenders(paths[:1], QUICK)] == ["model"]


def test_held_out_reference_and_correlation(data, model, tmp_path):
    """The papers' reference is what was held out; and images of the same noise are alike, of other noise less so."""
    settings = replace(SETTINGS, reference_split="held_out", metrics=("frechet",))
    evaluation = Evaluation(data, tmp_path, settings, progress=False)
    assert set(evaluation.reference.rows) <= set(evaluation.view.held_out)
    assert evaluation.describe()["reference"]["split"] == "held_out"
    assert not set(evaluation._others[:4]) & set(evaluation.reference.rows)
    contender = Contender("it", model, QUICK)
    figures = evaluation.correlate(contender, contender)
    assert figures["same_noise"]["value"] == pytest.approx(1)
    assert figures["other_noise"]["value"] < 0.9
    with pytest.raises(InputError, match="reference split"):
        replace(SETTINGS, reference_split="all")
