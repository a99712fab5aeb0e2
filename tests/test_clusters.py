"""Partitions, assigns and inspects through the command line, as a user would."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atoll.cli.main import main
from atoll.data import shards
from atoll.data.shards import Dataset
from test_sources import png, write_tar

COLUMNS = ("latents", "tokens", "features", "split", "digest", "row")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "data"
    main(["prepare", "avatars", "--num", "300", "--size", "16", "--workers", "0", "--out", str(folder)])
    return folder


@pytest.fixture
def data(prepared, tmp_path) -> Path:
    shutil.copytree(prepared, tmp_path / "data")
    return tmp_path / "data"


def run(*arguments: object) -> None:
    main([str(argument) for argument in arguments])


def refused(capsys, *arguments: object) -> str:
    """Returns the one-sentence error of a mistake, with exit code 2 and no traceback."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run(*arguments)
    assert end.value.code == 2
    message = capsys.readouterr().err.strip().split("\n")[-1].split("\r")[-1]  # after the remains of a progress bar
    assert message.startswith("atoll: ")
    return message


def rows_by_key(folder: Path) -> dict[str, list[bytes]]:
    data = Dataset.open(folder)
    columns = [data.column(name)[:] for name in COLUMNS]
    texts = [data.strings(name) for name in ("caption", "label")]
    return {
        key: [*(column[i].tobytes() for column in columns), *(text[i].encode() for text in texts)]
        for i, key in enumerate(data.strings("key"))
    }


class TestPartition:
    def test_every_row_is_in_one_cluster(self, data, prepared, capsys):
        run("partition", data, "--experts", 4)
        told = capsys.readouterr().out
        assert "fine centroids instead of 1024: there are only 300 images" in told
        assert not (data / "shards").exists()
        about = json.loads((data / "clusters" / "partition.json").read_text())
        clusters = [Dataset.open(data, k) for k in range(4)]
        assert [len(cluster) for cluster in clusters] == about["sizes"]
        assert sum(about["sizes"]) == 300
        assert about["method"] == "kmeans"
        assert about["silhouette"] > 0
        assert rows_by_key(data) == rows_by_key(prepared)  # in the order of the source, too
        assert list(rows_by_key(data)) == list(rows_by_key(prepared))

    def test_clusters_are_of_a_kind(self, data):
        """On average, images lie nearer to their own cluster's mean than to the overall mean."""
        run("partition", data, "--experts", 4)
        features = [Dataset.open(data, k).column("features")[:].astype(np.float64) for k in range(4)]
        inside = sum(((f - f.mean(0)) ** 2).sum() for f in features)
        everything = np.concatenate(features)
        assert inside < 0.8 * ((everything - everything.mean(0)) ** 2).sum()

    def test_one_cluster_is_enough_for_a_contributor(self, data, tmp_path, capsys):
        run("partition", data, "--experts", 3)
        own = tmp_path / "elsewhere"
        (own / "clusters").mkdir(parents=True)
        shutil.copy(data / "dataset.json", own)
        shutil.copytree(data / "clusters" / "01", own / "clusters" / "01")
        mine = Dataset.open(own, 1)
        assert mine.strings("caption") == Dataset.open(data, 1).strings("caption")
        np.testing.assert_array_equal(mine.column("latents")[:], Dataset.open(data, 1).column("latents")[:])
        shutil.copytree(data / "vae", own / "vae")
        run("inspect", own)
        assert f"({len(mine)} of them here)" in capsys.readouterr().out

    def test_pictures_of_the_clusters(self, data):
        run("partition", data, "--experts", 3)
        for path in [data / "clusters" / "map.png", *(data / "clusters" / f"{k:02d}" / "sheet.png" for k in range(3))]:
            pixels = np.asarray(Image.open(path))
            assert pixels.shape[1] > 400
            assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 100

    @pytest.mark.parametrize("method", ["kmeans", "random", "label"])
    def test_methods_are_repeatable(self, method, data, prepared, tmp_path):
        shutil.copytree(prepared, tmp_path / "again")
        for folder in (data, tmp_path / "again"):
            run("partition", folder, "--experts", 3, "--method", method)
        for path in sorted((data / "clusters").rglob("*")):
            if path.is_file():
                other = tmp_path / "again" / path.relative_to(data)
                assert path.read_bytes() == other.read_bytes(), path.name

    @pytest.mark.slow
    def test_again_with_another_number(self, data, prepared, tmp_path):
        """The earlier partition leaves no trace."""
        run("partition", data, "--experts", 5)
        run("partition", data, "--experts", 2)
        shutil.copytree(prepared, tmp_path / "direct")
        run("partition", tmp_path / "direct", "--experts", 2)
        files = {str(p.relative_to(data)): p.read_bytes() for p in data.rglob("*") if p.is_file()}
        direct = {
            str(p.relative_to(tmp_path / "direct")): p.read_bytes()
            for p in (tmp_path / "direct").rglob("*")
            if p.is_file()
        }
        assert files == direct

    def test_balance(self, data):
        run("partition", data, "--experts", 4, "--balance", 1.2)
        assert max(json.loads((data / "clusters" / "partition.json").read_text())["sizes"]) <= 1.2 * 75

    @pytest.mark.slow
    def test_cut_short(self, data, monkeypatch):
        """Nothing is lost when it stops between two renames, or earlier."""
        run("partition", data, "--experts", 3)
        whole = rows_by_key(data)
        for last in (1, 2):
            replaced, replace = [], os.replace

            def stop(source, target, replaced=replaced, last=last, replace=replace):
                if Path(target).parent == data:
                    replaced.append(target)
                    if len(replaced) == last:
                        raise KeyboardInterrupt
                replace(source, target)

            monkeypatch.setattr(shards.os, "replace", stop)
            with pytest.raises(SystemExit) as end:
                run("partition", data, "--experts", 2)
            assert end.value.code == 130
            monkeypatch.undo()
            assert rows_by_key(data) == whole
        run("partition", data, "--experts", 2)
        assert rows_by_key(data) == whole
        assert sorted(path.name for path in data.iterdir() if "cluster" in path.name) == ["clusters"]


class TestAssign:
    def test_the_same_pictures_come_to_the_same_clusters(self, data, prepared, tmp_path):
        run("partition", data, "--experts", 4)
        shutil.copytree(prepared, tmp_path / "more")
        run("assign", tmp_path / "more", "--to", data / "clusters")
        for k in range(4):
            assert Dataset.open(tmp_path / "more", k).strings("key") == Dataset.open(data, k).strings("key")

    def test_other_latents_are_refused(self, data, tmp_path, capsys):
        """Each PCA is fitted to its own images: to share clusters, data must share the codec."""
        run("partition", data, "--experts", 2)
        more = ("prepare", "avatars", "--num", 100, "--seed", 5, "--size", 16, "--workers", 0, "--out")
        run(*more, tmp_path / "own")
        assert "its codec (pca:4x" in refused(capsys, "assign", tmp_path / "own", "--to", data / "clusters")
        run(*more, tmp_path / "same", "--codec", f"saved:{data}")
        run("assign", tmp_path / "same", "--to", data / "clusters")
        assert len(Dataset.open(tmp_path / "same")) == 100

    def test_refused(self, data, prepared, tmp_path, capsys):
        run("partition", data, "--experts", 2, "--method", "random")
        shutil.copytree(prepared, tmp_path / "more")
        message = refused(capsys, "assign", tmp_path / "more", "--to", data / "clusters")
        assert "was made by random, without centroids" in message
        assert "there is no" in refused(capsys, "assign", tmp_path / "more", "--to", tmp_path)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("codec", 1),
            ("text", None),
            ("latent_shape", "\x1b[2J"),
            ("metric", ["x"]),
            ("metric", "\x1b[2J"),
            ("fine", {}),
            ("num_clusters", "many"),
        ],
    )
    def test_a_partition_of_anyone(self, key, value, data, prepared, tmp_path, capsys):
        run("partition", data, "--experts", 2)
        path = data / "clusters" / "partition.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
        shutil.copytree(prepared, tmp_path / "more")
        message = refused(capsys, "assign", tmp_path / "more", "--to", data / "clusters")
        assert "\x1b" not in message


class TestInspect:
    def test_it_tells_and_draws(self, data, capsys):
        run("inspect", data)
        told = capsys.readouterr().out
        for part in ("300 images", "held out", "16 x 16 pixels", "license   unknown", "rejected  0", "caption   a "):
            assert part in told
        assert Image.open(data / "sheet.png").width > 400
        run("partition", data, "--experts", 2)
        run("inspect", data, "--sheet", data / "other.png")
        assert "clusters  2:" in capsys.readouterr().out
        assert (data / "other.png").exists()
        assert "cannot write" in refused(capsys, "inspect", data, "--sheet", data / "clusters")

    def test_what_strangers_wrote(self, data, capsys):
        """Names and reasons cannot move the cursor, and folders that are not clusters are ignored."""
        about = json.loads((data / "dataset.json").read_text())
        about["source"]["name"] = about["license"] = "\x1b[2Jx\u202ey\x9b"
        (data / "dataset.json").write_text(json.dumps(about))
        (data / "rejected.jsonl").write_text(json.dumps({"key": "a", "reason": "\x1b[31mred"}) + "\n")
        run("inspect", data)
        told = capsys.readouterr().out
        assert "\\x1b[31mred" in told
        assert not {"\x1b", "\u202e", "\x9b"} & set(told)
        for line in ("{", "[]", '{"reason": 1}' * 2, "[" * 2000):
            (data / "rejected.jsonl").write_text(line)
            run("inspect", data)
            assert "rejected.jsonl cannot be read" in capsys.readouterr().out
        run("partition", data, "--experts", 2)
        (data / "clusters" / "0abc").mkdir()
        run("inspect", data)
        assert "clusters  2:" in capsys.readouterr().out


class TestCommandLine:
    @pytest.mark.parametrize("verb", ["prepare", "partition", "assign", "inspect"])
    def test_help_has_examples(self, verb, capsys):
        with pytest.raises(SystemExit) as end:
            run(verb, "--help")
        assert end.value.code == 0
        assert f"For example:\n  atoll {verb} " in capsys.readouterr().out

    def test_mistakes_get_one_sentence(self, data, tmp_path, capsys):
        assert "there is no nowhere: give a folder" in refused(capsys, "prepare", "nowhere", "--out", tmp_path / "x")
        assert "unknown codec 'pcb'" in refused(
            capsys, "prepare", "shapes", "--num", 40, "--codec", "pcb", "--out", tmp_path / "y"
        )
        assert "give a folder that `atoll prepare` has made" in refused(capsys, "partition", tmp_path, "--experts", 2)
        assert "there is no" in refused(capsys, "partition", tmp_path / "nowhere", "--experts", 2)
        assert "cannot make 0 clusters" in refused(capsys, "partition", data, "--experts", 0)
        assert "301" in refused(capsys, "partition", data, "--experts", 301)
        assert "did you mean 'cosine'" in refused(capsys, "partition", data, "--experts", 2, "--metric", "cosin")
        assert "unknown method 'means'" in refused(capsys, "partition", data, "--experts", 2, "--method", "means")
        assert "leave --balance out" in refused(
            capsys, "partition", data, "--experts", 2, "--method", "random", "--balance", 1.5
        )
        assert rows_by_key(data)
        assert not (tmp_path / "y").exists()  # the corrected command can run

    def test_a_cluster_that_does_not_exist(self, data):
        run("partition", data, "--experts", 2)
        with pytest.raises(shards.InputError, match="has no cluster 7: there are 00, 01"):
            Dataset.open(data, 7)

    def test_damage_is_told(self, tmp_path, capsys):
        """Of ten images in a truncated archive four are left: this is reported, so that nobody has to search."""
        files = {f"{i}.{kind}": png(i) if kind == "png" else "c" for i in range(10) for kind in ("png", "txt")}
        path = write_tar(tmp_path / "a\x1b[2J.tar", files)
        path.write_bytes(path.read_bytes()[: 4 * 3 * 1024])
        run("prepare", path, "--size", 16, "--workers", 0, "--codec", "pixels", "--out", tmp_path / "d")
        told = capsys.readouterr()
        assert "the archive is damaged after this point" in told.err
        assert "1 rejected" in told.out
        assert "\x1b[2J" not in told.err.replace("\x1b[A", "")
        assert (tmp_path / "d" / "rejected.jsonl").read_text().rstrip("\n").isprintable()

    @pytest.mark.slow
    def test_the_command_itself(self, tmp_path):
        """As installed: --help is fast, and stdout has no progress bars."""
        command = Path(sys.executable).parent / "atoll"
        done = subprocess.run(
            [command, "prepare", "digits", "--num", "50", "--size", "16", "--out", tmp_path / "d"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.startswith(f"{tmp_path / 'd'}: 50 images")
        assert "next: atoll partition" in done.stdout
        assert "images" in done.stderr
