"""Several captions per image and mirrored images: stored once, redrawn at each step, and exact after any kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from atoll.cli.main import main
from atoll.data import prepare as module
from atoll.data.overview import describe
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.shards import Dataset, cluster_folders
from atoll.data.sources import Source
from atoll.data.view import DatasetView
from atoll.encoders.text import load_text_encoder
from atoll.errors import InputError
from atoll.partition.partition import partition
from atoll.training.expert import ExpertTask, train_expert
from atoll.training.router import train_router
from atoll.training.settings import ExpertSettings, RouterSettings
from atoll.training.task import Batches, rows_of_step
from test_loop import figures
from test_prepare import contents
from test_sources import png, write

NUM = 90
SETTINGS = PrepareSettings(size=16, codec="pixels", holdout=0.1, flip=True)
QUICK = ExpertSettings(model="16x1/2", steps=30, batch=12, log_every=5, save_every=6, eval_every=15, sample_every=0)
CPU = torch.device("cpu")


def captions_of(i: int) -> list[str]:
    """Returns one to five captions; every ninth image's last one distinguishes left from right."""
    texts = [f"photo {i} seen by person {k}" + " and more" * k for k in range(1 + i % 5)]
    return [*texts[:-1], texts[-1] + " on the left"] if i % 9 == 0 else texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns a folder of 90 images, each with one to five captions in a metadata.jsonl."""
    place = write(tmp_path_factory.mktemp("photos"), {f"{i:03d}.png": png(i) for i in range(NUM)})
    rows = [{"file_name": f"{i:03d}.png", "caption": captions_of(i)} for i in range(NUM)]
    return write(place, {"metadata.jsonl": "\n".join(map(json.dumps, rows))})


@pytest.fixture(scope="module")
def data(folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("data") / "d"
    prepare(Source(str(folder)), out, SETTINGS, 0, progress=False)
    return out


@pytest.fixture(scope="module")
def clusters(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("clusters") / "d"
    shutil.copytree(data, out)
    partition(out, 2, progress=False)
    return out


class TestStored:
    def check(self, data: Dataset, rows: np.ndarray) -> None:
        text = load_text_encoder(data.folder)
        keys, first = data.strings("key", rows), data.strings("caption", rows)
        tokens, more = data.column("tokens")[rows], data.column("more_tokens")[rows]
        lines, nums = data.strings("more_captions", rows), data.column("num_captions")[rows]
        latents, flipped = data.column("latents")[rows], data.column("flipped")[rows]
        for i, key in enumerate(keys):
            expected = captions_of(int(key[:3]))
            assert [first[i], *filter(None, lines[i].split("\n"))] == expected
            assert nums[i] == len(expected)
            np.testing.assert_array_equal(tokens[i], text.tokenize(expected[:1])[0])
            np.testing.assert_array_equal(more[i, : nums[i] - 1], text.tokenize(expected[1:]))
            assert not more[i, nums[i] - 1 :].any()
            mirrored = latents[i] if int(key[:3]) % 9 == 0 else latents[i][:, :, ::-1]
            np.testing.assert_array_equal(flipped[i], mirrored)

    def test_all_of_them(self, data):
        opened = Dataset.open(data)
        assert len(opened) == NUM
        assert opened.card.source.captions == 5
        self.check(opened, np.arange(NUM))
        told = "\n".join(describe(opened))
        assert "up to 5 captions per image" in told
        assert "also mirrored" in told

    def test_in_clusters(self, clusters):
        self.check(Dataset.open(clusters), np.arange(NUM))
        for cluster in cluster_folders(clusters):
            own = Dataset.open(clusters, cluster)
            self.check(own, np.arange(len(own)))
        assert main(["assign", str(clusters), "--to", str(clusters / "clusters")]) is None

    def test_one_caption_is_stored_as_ever(self, folder, data, tmp_path):
        """With the same first captions in .txt files and no flips, the shards are unchanged, bit for bit."""
        place = write(tmp_path / "in", {f"{i:03d}.png": png(i) for i in range(NUM)})
        write(place, {f"{i:03d}.txt": captions_of(i)[0] for i in range(NUM)})
        prepare(Source(str(place)), tmp_path / "d", replace(SETTINGS, flip=False), 0, progress=False)
        plain, several = (load_file(path / "shards" / "00000.safetensors") for path in (tmp_path / "d", data))
        extra = {"flipped", "more_tokens", "num_captions", "more_captions.bytes", "more_captions.offsets"}
        assert several.keys() - plain.keys() == extra
        about = json.loads((tmp_path / "d" / "dataset.json").read_text())
        assert "flip" not in about["settings"]
        assert {"captions", "caption_column"} & about["source"].keys() == set()
        for name, column in plain.items():
            assert torch.equal(column, several[name]), name


class TestResume:
    def test_interrupted(self, folder, data, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "CHUNK", 16)
        prepare(Source(str(folder)), tmp_path / "whole", SETTINGS, 0, progress=False)
        encode, left = module.Encoders.encode, [0]

        def stop_in_time(self, batch):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return encode(self, batch)

        monkeypatch.setattr(module.Encoders, "encode", stop_in_time)
        for num in (0, 1, 3):
            left[0] = num
            with pytest.raises(KeyboardInterrupt):
                prepare(Source(str(folder)), tmp_path / "cut", SETTINGS, 0, progress=False)
        left[0] = 1000
        prepare(Source(str(folder)), tmp_path / "cut", SETTINGS, 0, progress=False)
        assert contents(tmp_path / "cut") == contents(tmp_path / "whole")

    @pytest.mark.bits
    @pytest.mark.slow
    @pytest.mark.timeout(300)
    def test_killed(self, folder, tmp_path):
        """The real process is killed as soon as it has a shard, then the command is rerun to the end."""
        script = tmp_path / "run.py"
        script.write_text(
            "import sys; from atoll.data import prepare as p; from atoll.data.sources import Source\n"
            "p.CHUNK = 4\n"
            "if __name__ == '__main__':\n"
            "    settings = p.PrepareSettings(size=16, flip=True)\n"
            "    p.prepare(Source(sys.argv[1], num=80), sys.argv[2], settings, 1, progress=False)\n"
        )
        command = [sys.executable, str(script), str(folder)]
        subprocess.run([*command, str(tmp_path / "whole")], check=True, timeout=200)
        process = subprocess.Popen([*command, str(tmp_path / "cut")])
        while process.poll() is None and not (tmp_path / "cut" / "shards" / "00001.safetensors").exists():
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait() in (-signal.SIGKILL, 0)
        subprocess.run([*command, str(tmp_path / "cut")], check=True, timeout=200)
        assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
        assert len(Dataset.open(tmp_path / "cut")) == 80

    def test_a_caption_more(self, folder, data, tmp_path):
        changed = shutil.copytree(folder, tmp_path / folder.name)
        out = shutil.copytree(data, tmp_path / "d")
        with (changed / "metadata.jsonl").open("a") as file:
            file.write('\n{"file_name": "000.png", "caption": "another"}')
        with pytest.raises(InputError, match="its images or captions have changed"):
            prepare(Source(str(changed)), out, SETTINGS, 0, progress=False)
        with pytest.raises(InputError, match="flip was True, now False"):
            prepare(Source(str(folder)), out, replace(SETTINGS, flip=False), 0, progress=False)


class TestDrawn:
    def batches(self, data: Path, steps: range, seed: int = 0) -> list:
        task = ExpertTask(Dataset.open(data), QUICK, CPU)
        batches = Batches(task, QUICK.batch, seed, slice(None), CPU)
        return [batches.get(step)[0] for step in steps]

    def test_any_caption_and_either_side(self, data):
        """Over many steps each caption of an image is drawn about equally often, and half are mirrored."""
        task = ExpertTask(Dataset.open(data), replace(QUICK, text_dropout=0.0), CPU)
        view, text = task.view, task.text
        [row] = [i for i, index in enumerate(view.train) if int(view.data.strings("key", [index])[0][:3]) == 4]
        drawn = task.draw(4000, torch.Generator().manual_seed(0))
        batch = task.read(np.full(4000, row), drawn)
        ids = text.tokenize(captions_of(4))[:, : batch.ids.shape[1]]
        counts = (batch.ids[:, None] == ids).all(2).sum(0)
        assert counts.sum() == 4000
        assert counts.min() > 4000 / 5 * 0.85
        plain = view.stored_latents(view.train[[row]])
        share = (batch.latents == plain).flatten(1).all(1).float().mean()
        assert 0.45 < share < 0.55
        assert (batch.latents == plain.flip(3)).flatten(1).all(1).float().mean() == 1 - share

    def test_never_one_that_is_not_there(self, data):
        view = DatasetView(Dataset.open(data))
        text = load_text_encoder(data)
        for value in (0.0, 0.5, 1 - 2**-24):
            ids = view.tokens(np.arange(NUM), text, torch.full((NUM,), value))
            expected = [some[int(value * len(some))] for some in map(captions_of, range(NUM))]
            assert torch.equal(ids, text.tokenize(expected))
        assert torch.equal(view.tokens(np.arange(NUM)), view.tokens(np.arange(NUM), text, torch.zeros(NUM)))

    @pytest.mark.parametrize("kind", ["words", "clip"])
    def test_the_longest_text(self, folder, tmp_path, kind, request):
        """Memory is predicted from it: the longest caption counts, not the padding."""
        spec = "words" if kind == "words" else f"clip:{request.getfixturevalue('clip')}"
        settings = PrepareSettings(size=16, codec="pixels", text=spec, holdout=0)
        prepare(Source(str(folder), num=30), tmp_path / "d", settings, 0, progress=False)
        view, text = DatasetView(Dataset.open(tmp_path / "d")), load_text_encoder(tmp_path / "d")
        texts = [some for key in view.data.strings("key") for some in captions_of(int(key[:3]))]
        assert view.longest_text(text) == max(text.lengths(text.tokenize(texts)))

    def test_by_seed_and_step_alone(self, data):
        all_steps, late = self.batches(data, range(9)), self.batches(data, range(6, 9))
        for one, other in zip(all_steps[6:], late, strict=True):
            for a, b in zip(one, other, strict=True):
                assert torch.equal(a, b)
        others = self.batches(data, range(9), seed=1)
        assert not all(torch.equal(a.t, b.t) for a, b in zip(all_steps, others, strict=True))

    def test_nothing_more_is_drawn_for_one_caption(self, data, tmp_path):
        """Times, noise and dropped captions equal those of data with one caption, which draws nothing else."""
        prepare(Source("shapes", num=60, size=16), tmp_path / "d", PrepareSettings(size=16, codec="pixels"), 0,
                progress=False)  # fmt: skip
        plain, several = (ExpertTask(Dataset.open(path), QUICK, CPU) for path in (tmp_path / "d", data))
        generators = [torch.Generator().manual_seed(3) for _ in range(2)]
        one, other = plain.draw(8, generators[0]), several.draw(8, generators[1])
        assert (len(one), len(other)) == (3, 5)
        for a, b in zip(one, other[:3], strict=True):
            assert torch.equal(a, b)
        rows = rows_of_step(plain.num_rows, 8, "0.0", 0)
        batch = plain.read(rows, one)
        assert torch.equal(batch.latents, plain.view.stored_latents(plain.view.train[rows]))


@pytest.mark.bits
class TestTraining:
    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["expert", pytest.param("router", marks=pytest.mark.slow)])
    def test_interrupted(self, clusters, tmp_path, monkeypatch, kind):
        """Weights and metrics equal those of an uninterrupted run, bit for bit."""

        def run(out: Path) -> None:
            if kind == "expert":
                train_expert(clusters, 0, QUICK, out, progress=False)
            else:
                settings = RouterSettings(model="16x1/2", steps=30, batch=12, log_every=5, save_every=6, eval_every=15)
                train_router(clusters, settings, out, progress=False)

        run(tmp_path / "whole")
        read, left = Batches._read, [0]

        def stop_in_time(self, step, rollbacks):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return read(self, step, rollbacks)

        monkeypatch.setattr(Batches, "_read", stop_in_time)
        for num in (11, 10):
            left[0] = num
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path / "cut")
        left[0] = 1000
        run(tmp_path / "cut")
        whole, cut = (load_file(tmp_path / name / "state" / "000000030.safetensors") for name in ("whole", "cut"))
        assert whole.keys() == cut.keys()
        assert all(torch.equal(whole[name], cut[name]) for name in whole)
        assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "cut/model.safetensors").read_bytes()
        assert figures(tmp_path / "whole") == figures(tmp_path / "cut")

    @pytest.mark.slow
    def test_other_data_are_another_run(self, folder, clusters, data, tmp_path):
        """A run that began without flips does not resume with them."""
        prepare(Source(str(folder)), tmp_path / "d", replace(SETTINGS, flip=False), 0, progress=False)
        train_expert(tmp_path / "d", None, replace(QUICK, steps=2), tmp_path / "run", progress=False)
        with pytest.raises(InputError):
            train_expert(data, None, replace(QUICK, steps=2), tmp_path / "run", progress=False)


class TestDamaged:
    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("flipped", None, "has no column 'flipped'"),
            ("more_tokens", None, "has no column 'more_tokens'"),
            ("num_captions", None, "has no column 'num_captions'"),
            ("more_tokens", torch.zeros(NUM, 9, 32, dtype=torch.int32), "dataset.json says"),
            ("flipped", torch.zeros(NUM, 1, 2, 2, dtype=torch.half), "dataset.json says"),
            ("num_captions", torch.zeros(NUM, 2, dtype=torch.uint8), "dataset.json says"),
            ("more_captions.offsets", torch.zeros(3, dtype=torch.int64), "copy it again"),
        ],
    )
    def test_columns_that_do_not_fit(self, data, tmp_path, name, value, message):
        path = shutil.copytree(data, tmp_path / "d") / "shards" / "00000.safetensors"
        os.unlink(path.parent / "SHA256SUMS")
        columns = load_file(path)
        columns.pop(name)
        save_file(columns | ({} if value is None else {name: value}), path)
        with pytest.raises(InputError, match=message):
            DatasetView(Dataset.open(tmp_path / "d"))

    def test_values_of_anyone(self, data, tmp_path):
        path = shutil.copytree(data, tmp_path / "d") / "shards" / "00000.safetensors"
        os.unlink(path.parent / "SHA256SUMS")
        columns = load_file(path)
        save_file(columns | {"num_captions": torch.full((NUM,), 255, dtype=torch.uint8)}, path)
        view = DatasetView(Dataset.open(tmp_path / "d"))
        assert view.tokens(np.arange(NUM), None, torch.full((NUM,), 0.999)).shape == (NUM, 32)
        columns["more_tokens"][:] = -5
        columns["flipped"][:] = float("nan")
        save_file(columns, path)
        view = DatasetView(Dataset.open(tmp_path / "d"))
        with pytest.raises(InputError, match="a caption among rows 0 to 89 .* is damaged"):
            view.tokens(np.arange(NUM), load_text_encoder(data), torch.full((NUM,), 0.9))
        with pytest.raises(InputError, match="holds latents that are not finite"):
            view.stored_latents(np.arange(NUM), torch.ones(NUM, dtype=torch.bool))


def test_the_command(folder, tmp_path, capsys):
    main(["prepare", str(folder), "--size", "16", "--num", "40", "--flip", "--caption-column",
          "caption", "--workers", "0", "--out", str(tmp_path / "d")])  # fmt: skip
    card = Dataset.open(tmp_path / "d").card
    assert (card.counts.rows, card.settings.flip, card.source.caption_column) == (40, True, "caption")
    main(["inspect", str(tmp_path / "d")])
    assert "also mirrored" in capsys.readouterr().out


def test_photos_are_mirrored_for_a_learned_codec_too(tmp_path, kl):
    """Latents of the mirrored image, not mirrored latents."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8))
    place = tmp_path / "in"
    place.mkdir()
    for name, some in (("a", image), ("b", image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))):
        some.save(place / f"{name}.png")
        (place / f"{name}.txt").write_text("noise")
    prepare(Source(str(place)), tmp_path / "d", PrepareSettings(size=32, codec=f"vae:{kl}", flip=True), 0,
            progress=False)  # fmt: skip
    data = Dataset.open(tmp_path / "d")
    np.testing.assert_allclose(data.column("flipped")[0], data.column("latents")[1], atol=1e-3)
    np.testing.assert_allclose(data.column("flipped")[1], data.column("latents")[0], atol=1e-3)
