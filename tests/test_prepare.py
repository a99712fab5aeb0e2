"""From source to data set: the same bytes however it is made, and nothing lost when it is interrupted."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from atoll.cards import BegunDatasetCard
from atoll.data import prepare as module
from atoll.data.prepare import ShardWriter, count, prepare, split_of, transform_of
from atoll.data.settings import PrepareSettings
from atoll.data.shards import HELD_OUT, TRAIN, Dataset
from atoll.data.sources import Source
from atoll.encoders.codecs import load_codec, make_codec
from atoll.encoders.text import load_text_encoder
from atoll.errors import InputError
from atoll.storage import alone
from test_sources import png, write, write_tar

SMALL = PrepareSettings(size=16)
COMMAND = Path(sys.executable).parent / "atoll"


def make(out: Path, source: Source | None = None, settings: PrepareSettings = SMALL, workers: int = 0) -> Dataset:
    prepare(source or Source("shapes", num=150, size=16), out, settings, workers, progress=False)
    return Dataset.open(out)


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file below, including hidden ones."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def unfinish(folder: Path) -> None:
    """Resets dataset.json to what a run writes at its start."""
    path = folder / "dataset.json"
    begun = {**json.loads(path.read_text()), "complete": False}
    path.write_text(json.dumps({key: value for key, value in begun.items() if key in BegunDatasetCard.model_fields}))


@pytest.fixture
def chunks_of_64(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 64)


class TestRows:
    def test_what_a_data_set_holds(self, tmp_path, chunks_of_64):
        data = make(tmp_path / "d")
        assert len(data) == 150
        about = json.loads((tmp_path / "d" / "dataset.json").read_text())
        counts = about["counts"]
        assert counts == {"rows": 150, "train": 150 - counts["held_out"], "held_out": counts["held_out"], "rejected": 0}
        assert counts["held_out"] == int((data.column("split")[:] == HELD_OUT).sum()) > 0
        assert str(tmp_path) not in json.dumps(about)  # no path of this machine
        latents, tokens = data.column("latents"), data.column("tokens")
        assert latents[0:3].shape == (3, *about["latent_shape"])
        assert latents[0:3].dtype == np.float16
        captions = data.strings("caption")
        text = load_text_encoder(data.folder)
        np.testing.assert_array_equal(tokens[:], text.tokenize(captions).numpy())
        np.testing.assert_array_equal(data.column("row")[:], np.arange(150))
        assert data.strings("key", [0, 149]) == ["shapes/00000000", "shapes/00000149"]

    def test_latents_are_the_codecs(self, tmp_path):
        data = make(tmp_path / "d", settings=PrepareSettings(size=16, codec="pixels"))
        assert data.card.latent_shape == [3, 16, 16]
        example = Source("shapes", num=150, size=16)
        from atoll.data.builtin import make as built_in

        pixels = np.asarray(built_in("shapes", 150, 16, example.seed)[7].image, np.float32) / 127.5 - 1
        np.testing.assert_allclose(data.column("latents")[7], pixels.transpose(2, 0, 1), atol=1e-3)

    def test_random_access(self, tmp_path, chunks_of_64):
        data = make(tmp_path / "d")
        column = data.column("latents")
        everything = column[:]
        rows = np.array([149, 0, 63, 64, 64, 128])
        np.testing.assert_array_equal(column[rows], everything[rows])
        np.testing.assert_array_equal(column[77], everything[77])
        np.testing.assert_array_equal(column[60:70], everything[60:70])

    def test_decoding_gives_the_pictures_back(self, tmp_path):
        data = make(tmp_path / "d", Source("avatars", num=200, size=32), PrepareSettings(size=32))
        from atoll.data.builtin import make as built_in

        codec = load_codec(data.folder)
        images = codec.decode(torch.from_numpy(data.column("latents")[:20]).float())
        real = (
            np.stack([np.asarray(e.image) for e in built_in("avatars", 200, 32, 0)[:20]]).transpose(0, 3, 1, 2) / 127.5
            - 1
        )
        assert float(np.sqrt(((images.numpy() - real) ** 2).mean())) < 0.12


class TestSplit:
    def test_by_content(self):
        rng = np.random.default_rng(0)
        digests = [rng.bytes(16) for _ in range(20_000)]
        held = [split_of(digest, 0.05) == HELD_OUT for digest in digests]
        assert 0.045 < np.mean(held) < 0.055
        more = [split_of(digest, 0.1) == HELD_OUT for digest in digests]
        assert all(b for a, b in zip(held, more, strict=True) if a)  # a larger share keeps those held out before
        assert split_of(digests[0], 0.0) == TRAIN

    def test_it_never_changes_when_data_is_added(self, tmp_path):
        half = PrepareSettings(size=16, holdout=0.5)
        few = make(tmp_path / "few", Source("shapes", num=60, size=16), half)
        many = make(tmp_path / "many", Source("shapes", num=150, size=16), half)
        np.testing.assert_array_equal(few.column("split")[:], many.column("split")[:60])

    def test_it_is_the_same_at_any_size_and_for_copies_without_loss(self, tmp_path):
        import io

        from PIL import Image

        place = write(
            tmp_path / "in",
            {f"{i:02d}.{kind}": png(i) if kind == "png" else "x" for i in range(40) for kind in ("png", "txt")},
        )
        bitmaps = tmp_path / "bitmaps"
        for path in sorted(place.glob("*.png")):
            buffer = io.BytesIO()
            Image.open(path).save(buffer, "BMP")
            write(bitmaps, {f"{path.stem}.bmp": buffer.getvalue(), f"{path.stem}.txt": "x"})
        splits = [
            make(
                tmp_path / f"d{i}", Source(str(source)), PrepareSettings(size=size, codec="pixels", holdout=0.5)
            ).column("split")[:]
            for i, (source, size) in enumerate([(place, 16), (place, 8), (bitmaps, 16)])
        ]
        assert 5 < int(splits[0].sum()) < 35
        np.testing.assert_array_equal(splits[0], splits[1])
        np.testing.assert_array_equal(splits[0], splits[2])


class TestDuplicates:
    def test_within_and_across_shards(self, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "CHUNK", 2)
        files: dict[str, bytes | str] = {}
        for i, seed in enumerate([0, 1, 0, 2, 1]):
            files |= {f"{i}.png": png(seed), f"{i}.txt": f"picture {i}"}
        make(tmp_path / "d", Source(str(write(tmp_path / "in", files))), PrepareSettings(size=16, codec="pixels"))
        assert Dataset.open(tmp_path / "d").strings("caption") == ["picture 0", "picture 1", "picture 3"]
        lines = [json.loads(line) for line in (tmp_path / "d" / "rejected.jsonl").read_text().splitlines()]
        assert lines == [{"key": "2.png", "reason": "exact duplicate"}, {"key": "4.png", "reason": "exact duplicate"}]


class TestRejected:
    def test_they_are_not_kept_in_memory(self, tmp_path, monkeypatch):
        writers = []

        class Watched(ShardWriter):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                writers.append(self)

        monkeypatch.setattr(module, "ShardWriter", Watched)
        files = {"a.png": png(), "a.txt": "a", "b.png": b""}
        make(tmp_path / "d", Source(str(write(tmp_path / "in", files))), PrepareSettings(size=16, codec="pixels"))
        assert len(list(writers[0].rejected())) == 1
        assert "b.png" not in repr(vars(writers[0]))

    def test_the_run_goes_on(self, tmp_path):
        files = {
            "a.png": png(),
            "a.txt": "a",
            "b.png": b"",
            "b.txt": "b",
            "c.png": png(1),
            "d.png": png(2),
            "d.txt": "d",
        }
        data = make(
            tmp_path / "d", Source(str(write(tmp_path / "in", files))), PrepareSettings(size=16, codec="pixels")
        )
        assert data.strings("caption") == ["a", "d"]
        lines = [json.loads(line) for line in (tmp_path / "d" / "rejected.jsonl").read_text().splitlines()]
        assert lines == [{"key": "b.png", "reason": "empty file"}, {"key": "c.png", "reason": "no caption"}]

    def test_nothing_usable(self, tmp_path):
        source = Source(str(write(tmp_path / "in", {"a.png": png(), "b.png": png(1)})))
        for i, codec in enumerate(("pca", "pixels")):
            with pytest.raises(InputError, match="mostly: no caption; add NAME.txt beside NAME.jpg"):
                prepare(source, tmp_path / f"d{i}", PrepareSettings(size=16, codec=codec), 0, progress=False)

    def test_captions_added_after_that(self, tmp_path):
        place = write(tmp_path / "in", {"a.png": png(), "b.png": png(1)})
        with pytest.raises(InputError, match="no caption"):
            make(tmp_path / "d", Source(str(place)), PrepareSettings(size=16, codec="pixels"))
        write(place, {"a.txt": "a", "b.txt": "b"})
        assert len(make(tmp_path / "d", Source(str(place)), PrepareSettings(size=16, codec="pixels"))) == 2

    def test_no_pictures(self, tmp_path):
        with pytest.raises(InputError, match="there is no image in"):
            count(Source(str(write(tmp_path / "in", {"a.doc": b"x"}))), progress=False)


KILLS = 20


class TestSameBytes:
    def test_workers_do_not_matter(self, tmp_path, chunks_of_64):
        make(tmp_path / "alone")
        make(tmp_path / "helped", workers=2)
        assert contents(tmp_path / "alone") == contents(tmp_path / "helped")

    def test_again_changes_nothing(self, tmp_path):
        make(tmp_path / "d")
        before = contents(tmp_path / "d")
        make(tmp_path / "d")
        assert contents(tmp_path / "d") == before

    @pytest.mark.bits
    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    def test_after_kills_at_random_times(self, tmp_path):
        """The real process and its workers are killed at random moments, then the command is rerun to the end."""
        source = write(tmp_path / "in", {f"{i}.txt": f"picture {i}" for i in range(400)})
        write(source, {f"{i}.png": png(i % 390) if i % 50 else b"broken" for i in range(400)})
        program = (
            "import sys; from atoll.data import prepare as p; from atoll.data.sources import Source\n"
            "p.CHUNK = 16\n"
            "if __name__ == '__main__':\n"
            "    p.prepare(Source(sys.argv[1]), sys.argv[2], p.PrepareSettings(size=16), 2, progress=False)\n"
        )
        script = tmp_path / "run.py"
        script.write_text(program)
        command = [sys.executable, str(script), str(source)]
        subprocess.run([*command, str(tmp_path / "whole")], check=True, timeout=600)
        out, rng, killed = tmp_path / "killed", random.Random(0), 0
        begun = time.monotonic()
        while killed < KILLS and time.monotonic() - begun < 1500:
            process = subprocess.Popen([*command, str(out)], start_new_session=True)
            wait = 1.0 + rng.random() * 5
            try:
                process.wait(wait)
                # It finished first: undo part of the work, so that there is something to interrupt.
                unfinish(out)
                for path in sorted((out / "shards").glob("*"))[rng.randrange(20) :]:
                    path.unlink()
                continue
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                killed += 1
            workers = time.monotonic() + 30
            while _group_alive(process.pid) and time.monotonic() < workers:
                time.sleep(0.1)
            assert not _group_alive(process.pid), "workers outlive a killed run"
        assert killed == KILLS
        subprocess.run([*command, str(out)], check=True, timeout=600)
        assert contents(out) == contents(tmp_path / "whole")

    @pytest.mark.bits
    def test_a_slow_codec_loses_a_few_images(self, kl, tmp_path, monkeypatch):
        """A codec that takes seconds per image gets small shards: a killed run repeats at most one."""
        source, settings = Source("shapes", num=80, size=32), PrepareSettings(size=32, codec=f"vae:{kl}")
        make(tmp_path / "whole", source, settings)
        encode, encoded, stop_after = module.Encoders.encode, [], [0]

        def count_and_stop(self, batch):
            if len(encoded) == stop_after[0]:
                raise KeyboardInterrupt
            encoded.append(len(batch))
            return encode(self, batch)

        monkeypatch.setattr(module.Encoders, "encode", count_and_stop)
        for number in (0, 42, 59):
            stop_after[0] = number
            with pytest.raises(KeyboardInterrupt):
                make(tmp_path / "killed", source, settings)
        stop_after[0] = -1
        make(tmp_path / "killed", source, settings)
        assert encoded == [1] * (80 + 42 - 32 + 59 - 42)
        assert contents(tmp_path / "killed") == contents(tmp_path / "whole")

    def test_shards_of_another_size(self, tmp_path, monkeypatch):
        """A run resumes after its existing shards, whatever their number of images."""
        monkeypatch.setattr(module, "CHUNK", 48)
        make(tmp_path / "d")
        unfinish(tmp_path / "d")
        for path in (tmp_path / "d" / "shards").glob("0000[23].*"):
            path.unlink()
        monkeypatch.setattr(module, "CHUNK", 10)
        assert make(tmp_path / "d").strings("key") == [f"shapes/{i:08d}" for i in range(150)]

    def test_the_bar_moves_from_the_first_picture(self, kl, tmp_path, monkeypatch):
        moves = []
        update = module.tqdm.update
        monkeypatch.setattr(module.tqdm, "update", lambda bar, n=1: (moves.append(n), update(bar, n))[1])
        settings = PrepareSettings(size=32, codec=f"vae:{kl}")
        prepare(Source("shapes", num=20, size=32), tmp_path / "d", settings, 0, progress=True)
        assert sum(moves) == 20
        assert max(moves) == 1


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


class TestRefused:
    def test_other_settings(self, tmp_path):
        make(tmp_path / "d")
        with pytest.raises(InputError, match=r"was begun otherwise \(size was 16, now 32\): choose another --out"):
            make(tmp_path / "d", Source("shapes", num=150, size=32), PrepareSettings(size=32))
        with pytest.raises(InputError, match=r"codec was 'pca', now 'pixels'"):
            make(tmp_path / "d", settings=PrepareSettings(size=16, codec="pixels"))

    def test_a_source_that_changed(self, tmp_path):
        source = write(tmp_path / "in", {"a.png": png(), "a.txt": "a"})
        make(tmp_path / "d", Source(str(source)), PrepareSettings(size=16, codec="pixels"))
        write(source, {"b.png": png(1), "b.txt": "b"})
        with pytest.raises(InputError, match="its images or captions have changed"):
            make(tmp_path / "d", Source(str(source)), PrepareSettings(size=16, codec="pixels"))

    def test_a_folder_of_something_else(self, tmp_path):
        files: dict[str, bytes | str] = {"thesis.docx": b"precious", ".draft.tmp": b"too", "vae/weights": b"and this"}
        write(tmp_path / "d", files)
        with pytest.raises(InputError, match="is not empty and not a data set"):
            make(tmp_path / "d")
        assert contents(tmp_path / "d") == files

    def test_two_at_once(self, tmp_path):
        (tmp_path / "d").mkdir()
        with alone(tmp_path / "d"), pytest.raises(InputError, match="another process is at work on"):
            make(tmp_path / "d")

    def test_a_place_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match="cannot write"):
            make(tmp_path / "file" / "d")

    @pytest.mark.parametrize(
        "error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")]
    )
    def test_a_full_disk(self, error, tmp_path, monkeypatch):
        def full(*_: object) -> None:
            raise error

        monkeypatch.setattr("atoll.data.shards.save_file", full)
        with pytest.raises(InputError, match=r"cannot write .*No space left on device"):
            make(tmp_path / "d")
        monkeypatch.undo()
        make(tmp_path / "d")
        make(tmp_path / "fresh")
        assert contents(tmp_path / "d") == contents(tmp_path / "fresh")

    @pytest.mark.parametrize(
        "values",
        [{"size": 4}, {"holdout": 1.0}, {"max_aspect": float("inf")}, {"near_duplicates": "maybe"}, {"min_side": 0}],
    )
    def test_settings(self, values):
        with pytest.raises(InputError, match=next(iter(values)).replace("_", "-")):
            PrepareSettings(**values)


class TestChanged:
    """A run is not finished with other inputs than it was started with."""

    def test_a_caption(self, tmp_path):
        place = write(tmp_path / "in", {"a.png": png(), "a.txt": "a"})
        make(tmp_path / "d", Source(str(place)), PrepareSettings(size=16, codec="pixels"))
        write(place, {"a.txt": "something else"})
        with pytest.raises(InputError, match="its images or captions have changed"):
            make(tmp_path / "d", Source(str(place)), PrepareSettings(size=16, codec="pixels"))

    def test_a_model(self, dino, tmp_path):
        shutil.copytree(dino, tmp_path / "model")
        settings = PrepareSettings(size=16, features=f"dino:{tmp_path / 'model'}")
        data = make(tmp_path / "d", settings=settings)
        assert str(tmp_path) not in (data.folder / "dataset.json").read_text()  # no path of this machine
        path = tmp_path / "model" / "model.safetensors"
        weights = load_file(path)
        weights["layernorm.bias"] += 1
        save_file(weights, path, metadata={"format": "pt"})
        with pytest.raises(InputError, match="does not fit: its features .* is not that of this run"):
            make(tmp_path / "d", settings=settings)


@pytest.mark.slow
def test_many_more_shards_than_files_may_be_open(tmp_path):
    """A data set of millions has more shards than a process may have files open."""
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "from atoll.data import prepare as p, shards; from atoll.data.sources import Source\n"
        "p.CHUNK, s = 2, p.PrepareSettings(size=16, codec='pixels', near_duplicates='drop')\n"
        "p.prepare(Source('shapes', num=400, size=16), sys.argv[1], s, 0, progress=False)\n"
        "data = shards.Dataset.open(sys.argv[1])\n"
        "assert len(data.shards) > 150, len(data.shards)\n"
        "assert len(data.column('latents')[:]) == len(data.strings('caption')) == len(data)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "d")], check=True, timeout=100)


def test_features_see_more_than_the_latents(tmp_path):
    """A photo of 300 pixels, prepared at 16, is clustered by what its 28 pixels show the network, not its 16."""
    from atoll.data.images import read_image

    transform = transform_of(PrepareSettings(size=16), feature_size=28)
    picture = read_image(png(3), transform)
    assert picture.pixels.shape == (16, 16, 3)
    assert picture.large.shape == (28, 28, 3)
    assert read_image(png(3), transform_of(PrepareSettings(size=32), feature_size=28)).large is None


def test_files_can_be_read_by_others(tmp_path):
    data = make(tmp_path / "d")
    mask = os.umask(0)
    os.umask(mask)
    for path in data.folder.rglob("*"):
        if path.is_file():
            assert path.stat().st_mode & 0o777 == 0o666 & ~mask, path


class TestOpening:
    def test_unfinished(self, tmp_path):
        make(tmp_path / "d")
        unfinish(tmp_path / "d")
        with pytest.raises(InputError, match="rerun the same `atoll prepare` command"):
            Dataset.open(tmp_path / "d")

    def test_other_folders(self, tmp_path):
        with pytest.raises(
            InputError, match=r"there is no .*dataset.json: give a folder that `atoll prepare` has made"
        ):
            Dataset.open(tmp_path)
        (tmp_path / "dataset.json").write_text("{")
        with pytest.raises(InputError, match="cannot be read"):
            Dataset.open(tmp_path)
        (tmp_path / "dataset.json").write_text('{"format": 9}')
        with pytest.raises(InputError, match="has format 9, and this version of atoll reads 1"):
            Dataset.open(tmp_path)

    @pytest.mark.parametrize("size", [0, 5, 200, -1])
    def test_a_truncated_shard(self, tmp_path, size):
        make(tmp_path / "d")
        path = tmp_path / "d" / "shards" / "00000.safetensors"
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(InputError, match=r"00000.safetensors is truncated or not a shard .*copy it again"):
            Dataset.open(tmp_path / "d")

    def test_a_missing_shard(self, tmp_path, chunks_of_64):
        make(tmp_path / "d")
        (tmp_path / "d" / "shards" / "00001.safetensors").unlink()
        with pytest.raises(InputError, match="shards lacks '00001.safetensors' of its 3 shards: copy it again"):
            Dataset.open(tmp_path / "d")
        (tmp_path / "d" / "shards" / "SHA256SUMS").unlink()
        with pytest.raises(InputError, match="86 rows of 150: some of its shards are missing"):
            Dataset.open(tmp_path / "d")

    @pytest.mark.slow
    @pytest.mark.parametrize("at", [0.1, 0.5, 0.999])
    def test_a_flipped_bit(self, tmp_path, at, chunks_of_64):
        """In latents, where any value is plausible, nothing else would notice it."""
        make(tmp_path / "d")
        path = tmp_path / "d" / "shards" / "00001.safetensors"
        content = bytearray(path.read_bytes())
        content[int(at * len(content))] ^= 1
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"00001.safetensors is (damaged, since its SHA-256 is not|truncated)"):
            Dataset.open(tmp_path / "d")
        run = subprocess.run([COMMAND, "inspect", tmp_path / "d"], capture_output=True, text=True, check=False)
        assert run.returncode == 2
        assert run.stderr.count("\n") == 1
        assert "copy it again" in run.stderr

    def test_sums_are_those_of_sha256sum(self, tmp_path, chunks_of_64):
        data = make(tmp_path / "d")
        lines = (tmp_path / "d" / "shards" / "SHA256SUMS").read_text().splitlines()
        expected = [f"{hashlib.sha256(s.path.read_bytes()).hexdigest()}  {s.path.name}" for s in data.shards]
        assert lines == expected
        assert len(lines) == 3

    def test_data_from_before_there_were_sums(self, tmp_path):
        make(tmp_path / "d")
        (tmp_path / "d" / "shards" / "SHA256SUMS").unlink()
        assert len(Dataset.open(tmp_path / "d")) == 150

    @pytest.mark.parametrize("content", [b"\xff", b"x\n", b"0" * 64 + b"  ../../secret\n", b""])
    def test_sums_that_are_none(self, tmp_path, content):
        make(tmp_path / "d")
        (tmp_path / "d" / "shards" / "SHA256SUMS").write_bytes(content)
        with pytest.raises(InputError, match=r"SHA256SUMS.*copy it again"):
            Dataset.open(tmp_path / "d")

    def test_links_that_leave_the_data(self, tmp_path):
        make(tmp_path / "other")
        make(tmp_path / "d")
        shutil.rmtree(tmp_path / "d" / "shards")
        (tmp_path / "d" / "shards").symlink_to(tmp_path / "other" / "shards")
        with pytest.raises(InputError, match="it is a link that leaves its folder"):
            Dataset.open(tmp_path / "d")
        (tmp_path / "d" / "dataset.json").unlink()
        (tmp_path / "d" / "dataset.json").symlink_to(tmp_path / "other" / "dataset.json")
        with pytest.raises(InputError, match="it is a link that leaves its folder"):
            Dataset.open(tmp_path / "d")
        (tmp_path / "link").symlink_to(tmp_path / "other")
        assert len(Dataset.open(tmp_path / "link")) == 150  # the user's own

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("row", np.zeros((150, 2), np.int64)),
            ("row", np.zeros(150, np.int32)),
            ("latents", np.zeros((3, 3, 16, 16), np.float16)),
            ("tokens", np.zeros(150, np.float64)),
            ("caption.offsets", np.zeros(3, np.int64)),
            ("caption.offsets", np.arange(151)[::-1].copy()),
            ("caption.offsets", np.full(151, 2**62)),
            ("caption.offsets", np.zeros(151, np.uint8)),
            ("caption.bytes", np.zeros((3, 3), np.uint8)),
            ("more.than.that", np.zeros(3, np.uint8)),
        ],
    )
    def test_a_shard_that_contradicts_itself(self, tmp_path, name, value):
        make(tmp_path / "d")
        path = tmp_path / "d" / "shards" / "00000.safetensors"
        save_file({**load_file(path), name: torch.from_numpy(value)}, path)
        (path.parent / "SHA256SUMS").unlink()
        with pytest.raises(InputError, match=r"00000.safetensors .*copy it again"):
            Dataset.open(tmp_path / "d").strings("caption", [1])

    def test_a_header_that_contradicts_itself(self, tmp_path):
        make(tmp_path / "d")
        path = tmp_path / "d" / "shards" / "00000.safetensors"
        content = path.read_bytes()
        assert b'"shape":[150,32]' in content
        path.write_bytes(content.replace(b'"shape":[150,32]', b'"shape":[150,99]'))
        with pytest.raises(InputError, match="truncated or not a shard .*'tokens'"):
            Dataset.open(tmp_path / "d")

    def test_shards_that_contradict_each_other(self, tmp_path, chunks_of_64):
        make(tmp_path / "d")
        path = tmp_path / "d" / "shards" / "00001.safetensors"
        save_file({**load_file(path), "latents": torch.zeros(64, 7)}, path)
        (path.parent / "SHA256SUMS").unlink()
        with pytest.raises(InputError, match="the latents of .*00001.safetensors are of another shape"):
            Dataset.open(tmp_path / "d").column("latents")[:]

    def test_a_file_that_is_cut_short_or_replaced_meanwhile(self, tmp_path):
        """If it were memory-mapped, this would kill the process."""
        data = make(tmp_path / "d")
        path = data.shards[0].path
        assert len(data.column("latents")[:3]) == 3
        content = path.read_bytes()
        os.truncate(path, 5000)
        with pytest.raises(InputError, match="has changed since it was opened"):
            data.column("latents")[:]
        with pytest.raises(InputError, match="has changed since it was opened"):
            data.strings("caption", [140])
        path.write_bytes(content)
        with pytest.raises(InputError, match="has changed since it was opened"):
            data.column("latents")[:]

    @pytest.mark.parametrize(
        ("place", "value"),
        [
            (("counts",), []),
            (("counts", "rows"), "150"),
            (("counts", "rows"), -1),
            (("counts", "rows"), 10**400),
            (("counts", "rejected"), True),
            (("source", "name"), ["a"]),
            (("settings", "size"), 10**9),
            (("settings", "size"), None),
            (("latent_shape",), [3, 16]),
            (("latent_shape",), [3, "16", 16]),
            (("latent_shape",), [60_000] * 3),
            (("text", "max_length"), 1 << 40),
            (("text", "fingerprint"), {}),
            (("codec", "spec"), 7),
            (("features",), "simple"),
            (("license",), {"a": 1}),
            (("format",), [[1]]),
            (("complete",), "yes"),
        ],
    )
    def test_a_dataset_json_of_anyone(self, tmp_path, place, value):
        make(tmp_path / "d", Source("shapes", num=20, size=16))
        path = tmp_path / "d" / "dataset.json"
        about = json.loads(path.read_text())
        *above, last = place
        inner = about[above[0]] if above else about
        inner[last] = value
        path.write_text(json.dumps(about))
        with pytest.raises(InputError) as error:
            Dataset.open(tmp_path / "d")
        assert str(tmp_path / "d") in str(error.value)
        assert len(str(error.value)) < 400

    def test_a_deep_dataset_json(self, tmp_path):
        for text in ("[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900, "[" * 100_000):
            (tmp_path / "dataset.json").write_text(text)
            with pytest.raises(InputError, match="cannot be read as JSON"):
                Dataset.open(tmp_path)


def test_webdataset_to_data_set(tmp_path):
    write_tar(
        tmp_path / "0.tar",
        {f"{i}.{kind}": png(i) if kind == "png" else f"number {i}" for i in range(9) for kind in ("png", "txt")},
    )
    data = make(tmp_path / "d", Source(str(tmp_path / "0.tar")), PrepareSettings(size=16, codec="pixels"))
    assert data.strings("caption") == [f"number {i}" for i in range(9)]


@pytest.mark.parametrize("autoencoder", ["kl", "tiny"])
def test_the_real_classes(autoencoder, clip, dino, tmp_path, request):
    """Tiny AutoencoderKL, AutoencoderTiny, CLIP and DINOv2 from folders, through the code path of published weights."""
    vae = request.getfixturevalue(autoencoder)
    settings = PrepareSettings(size=32, codec=f"vae:{vae}", text=f"clip:{clip}", features=f"dino:{dino}")
    data = make(tmp_path / "d", Source("shapes", num=40, size=32), settings)
    assert {"vae", "text_encoder", "tokenizer"} <= {path.name for path in data.folder.iterdir()}
    assert data.card.codec.fingerprint == make_codec(f"vae:{vae}").fingerprint
    assert data.card.codec.spec == f"vae:{vae.name}"
    assert data.card.text.fingerprint == load_text_encoder(data.folder).fingerprint


def test_a_log_file_gets_a_few_lines_of_progress(tmp_path):
    command = [sys.executable, "-m", "atoll.cli.main", "prepare", "shapes", "--num", "3000", "--size", "16"]
    run = subprocess.run([*command, "--out", str(tmp_path / "d")], capture_output=True, text=True, check=True)
    assert 0 < run.stderr.count("images/s") < 10
