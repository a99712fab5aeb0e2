"""Sources: every convention for pictures with captions, and archives that cannot be trusted."""

import csv
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from atoll.data.images import Transform, read_picture
from atoll.data.sources import Item, Source, read_items
from atoll.errors import InputError

TRANSFORM = Transform(size=16, min_side=8)


def png(seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 20, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def write(folder: Path, files: dict[str, bytes | str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def write_tar(path: Path, members: dict[str, bytes | str]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            data = content if isinstance(content, bytes) else content.encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def items(place: Path | str, **options: object) -> list[Item]:
    return list(Source(str(place), **options).items())


def captions(place: Path | str, **options: object) -> dict[str, str]:
    """What is read in the end: key -> caption, or the fault in brackets."""
    readings = read_items(items(place, **options), TRANSFORM)
    return {r.item.key: f"[{r.fault}]" if r.fault else r.caption for r in readings}


class TestFolders:
    def test_sidecars(self, tmp_path):
        write(
            tmp_path, {"a.png": png(), "a.txt": "a cat", "sub/b.PNG": png(1), "sub/b.txt": "a dog\n", "notes.md": "x"}
        )
        assert captions(tmp_path) == {"a.png": "a cat", "sub/b.PNG": "a dog"}

    @pytest.mark.parametrize("kind", ["jsonl", "csv"])
    def test_metadata(self, tmp_path, kind):
        rows = [{"file_name": "a.png", "text": "one"}, {"file_name": "sub/b.png", "text": 'two, "quoted"'}]
        content = "\n".join(json.dumps(row) for row in rows)
        if kind == "csv":
            buffer = io.StringIO()
            writer = csv.DictWriter(buffer, ["file_name", "text"])
            writer.writeheader()
            writer.writerows(rows)
            content = buffer.getvalue()
        write(tmp_path, {"a.png": png(), "sub/b.png": png(1), "c.png": png(2), f"metadata.{kind}": content})
        assert captions(tmp_path) == {"a.png": "one", "c.png": "[no caption]", "sub/b.png": 'two, "quoted"'}

    def test_broken_metadata(self, tmp_path):
        rows = ['{"file_name": "a.png", "text"', '{"text": "nameless"}', "[1]", '{"file_name": "./b.png", "text": "b"}']
        write(tmp_path, {"a.png": png(), "b.png": png(1), "metadata.jsonl": "\n".join(rows)})
        found = captions(tmp_path)
        fault = "[a row of metadata.jsonl without file_name and text]"
        assert found == {**{f"metadata, row {i}": fault for i in (1, 2, 3)}, "a.png": "[no caption]", "b.png": "b"}
        (tmp_path / "metadata.jsonl").write_bytes(b"\xff\xfe")
        with pytest.raises(InputError, match=r"metadata.jsonl cannot be read .*: save it as UTF-8"):
            items(tmp_path)

    def test_what_we_made_is_no_source(self, tmp_path):
        write(tmp_path, {"a.png": png(), "a.txt": "a", "data/dataset.json": "{}", "data/sheet.png": png(1)})
        assert list(captions(tmp_path)) == ["a.png"]

    def test_arguments_that_do_not_fit(self, tmp_path, monkeypatch):
        write(tmp_path, {"a.png": png(), "a.txt": "a", "digits/b.png": png(1)})
        for place, options, message in (
            (tmp_path, {"num": 5}, "--num is for"),
            ("shapes", {"num": 0}, "--num must be at least 1"),
            ("shapes", {"num": 5, "template": "a {label}"}, "leave --template out"),
            ("", {}, "the source is empty"),
        ):
            with pytest.raises(InputError, match=message):
                Source(str(place), **options)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InputError, match="both built in and here: write ./digits"):
            Source("digits")
        assert captions("./digits", template="{label} {x} {") == {"b.png": "[no caption]"}

    def test_class_folders(self, tmp_path):
        write(tmp_path, {"red_fox/a.png": png(), "owl/b.png": png(1)})
        found = captions(tmp_path, template="a photo of a {label}")
        assert found == {"owl/b.png": "a photo of a owl", "red_fox/a.png": "a photo of a red fox"}
        with pytest.raises(InputError, match=r"must contain \{label\}"):
            Source(str(tmp_path), template="a photo")

    def test_odd_names(self, tmp_path):
        write(tmp_path, {"with space.png": png(), "with space.txt": "s", "new\nline.png": png(1), "new\nline.txt": "n"})
        assert captions(tmp_path) == {"with space.png": "s", "new\nline.png": "n"}

    def test_odd_captions(self, tmp_path):
        files: dict[str, bytes | str] = {f"{i}.png": png(i) for i in range(5)}
        files |= {
            "0.txt": "\ufeffein  Hund\n auf\tGras ",
            "1.txt": "狗在草地上",
            "2.txt": " \n",
            "3.txt": b"\xff\xfe\x00",
        }
        found = captions(write(tmp_path, files))
        assert list(found.values()) == [
            "ein Hund auf Gras",
            "狗在草地上",
            "[empty caption]",
            "[caption is not UTF-8]",
            "[no caption]",
        ]

    def test_links(self, tmp_path):
        outside = write(tmp_path / "outside", {"secret.png": png()})
        inside = write(tmp_path / "in", {"real.png": png(1), "real.txt": "r", "leads.txt": "x", "also.txt": "y"})
        (inside / "leads.png").symlink_to(outside / "secret.png")
        (inside / "also.png").symlink_to(inside / "real.png")
        (inside / "loop").symlink_to(inside)
        found = captions(inside)
        assert found == {"also.png": "y", "leads.png": "[a link that leads out of the folder]", "real.png": "r"}

    def test_damaged_pictures_are_faults(self, tmp_path):
        write(tmp_path, {"a.png": b"", "a.txt": "a", "b.png": png()[:50], "b.txt": "b", "c.png": png(), "c.txt": "c"})
        found = captions(tmp_path)
        assert found["a.png"] == "[empty file]"
        assert found["b.png"].startswith("[broken image")
        assert found["c.png"] == "c"

    def test_missing(self, tmp_path):
        with pytest.raises(InputError, match="there is no .*nowhere: give a folder, a .tar"):
            Source(str(tmp_path / "nowhere"))
        write(tmp_path, {"a.zip": b""})
        with pytest.raises(InputError, match="neither a folder nor a .tar"):
            Source(str(tmp_path / "a.zip"))

    @given(st.text(max_size=60))
    def test_captions_in_any_script(self, text):
        source = Source("shapes")
        item = source._captioned(Item("k", (), text))
        assert item.fault == ("" if text.split() else "empty caption")
        assert item.caption == " ".join(item.caption.split())


class TestTars:
    def test_img2dataset(self, tmp_path):
        write_tar(tmp_path / "00000.tar", {
            "000000000.png": png(), "000000000.txt": "from text", "000000000.json": '{"caption": "from json"}',
            "000000001.json": '{"caption": "from json"}', "000000001.png": png(1),
            "000000002.png": png(2),
            "000000003.txt": "no picture",
        })  # fmt: skip
        write_tar(tmp_path / "00001.tar", {"a/b.c/x.png": png(3), "a/b.c/x.txt": "dots"})
        assert captions(tmp_path) == {
            "00000.tar/000000000.png": "from text",
            "00000.tar/000000001.png": "from json",
            "00000.tar/000000002.png": "[no caption]",
            "00000.tar/000000003": "[no picture in the sample]",
            "00001.tar/a/b.c/x.png": "dots",
        }

    def test_a_truncated_archive_gives_what_it_has(self, tmp_path):
        path = write_tar(
            tmp_path / "0.tar",
            {f"{i}.{kind}": png(i) if kind == "png" else "c" for i in range(6) for kind in ("png", "txt")},
        )
        content = path.read_bytes()
        write_tar(tmp_path / "1.tar", {"z.png": png(9), "z.txt": "next archive"})
        for cut in (len(content) // 2, len(content) // 2 + 700, 700):
            path.write_bytes(content[:cut])
            found = captions(tmp_path)
            assert found["1.tar/z.png"] == "next archive"
            assert any(caption.startswith("[") for caption in found.values())
            if cut > 1000:
                assert found["0.tar/0.png"] == "c"

    def test_members_that_reach_out(self, tmp_path):
        path = write_tar(
            tmp_path / "0.tar",
            {"../../evil.png": png(), "../../evil.txt": "up", "/etc/abs.png": png(1), "/etc/abs.txt": "abs"},
        )
        with tarfile.open(path, "a") as archive:
            link = tarfile.TarInfo("link.png")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(link)
        before = set(tmp_path.parent.rglob("*"))
        found = captions(path)
        assert found["0.tar/link.png"] == "[not a plain file in the archive]"
        assert found["0.tar/../../evil.png"] == "up"  # a label: nothing is written there
        assert set(tmp_path.parent.rglob("*")) == before


class TestTables:
    def table(self) -> pa.Table:
        pictures = [{"bytes": png(i), "path": f"{i}.png"} for i in range(3)] + [{"bytes": None, "path": "x"}]
        return pa.table({"image": pictures, "text": ["one", "two", None, "four"]})

    def expected(self, name: str) -> dict[str, str]:
        faults = ("one", "two", "[no caption]", "[cannot be read (the cell holds no picture)]")
        return {f"{name}/{i:08d}": caption for i, caption in enumerate(faults)}

    def test_parquet(self, tmp_path):
        pq.write_table(self.table(), tmp_path / "data.parquet")
        assert captions(tmp_path / "data.parquet") == self.expected("data.parquet")
        assert captions(tmp_path) == self.expected("data.parquet")

    def test_a_saved_hugging_face_dataset(self, tmp_path):
        """`datasets` saves Arrow streams named data-00000-of-00001.arrow, a folder a split."""
        (tmp_path / "train").mkdir()
        with (
            pa.OSFile(str(tmp_path / "train" / "data-00000-of-00001.arrow"), "wb") as file,
            pa.ipc.new_stream(file, self.table().schema) as stream,
        ):
            stream.write_table(self.table())
        assert captions(tmp_path) == self.expected("train/data-00000-of-00001.arrow")

    def test_the_layout_of_the_hub(self, tmp_path):
        (tmp_path / "data").mkdir()
        text = pa.array(["one", "two", None, "four"]).dictionary_encode()
        table = self.table().set_column(1, "text", text)
        pq.write_table(table, tmp_path / "data" / "train.parquet")
        assert captions(tmp_path) == self.expected("data/train.parquet")

    def test_several_batches_in_any_order(self, tmp_path):
        rows = 600
        table = pa.table({"jpg": [png(i) for i in range(rows)], "caption": [str(i) for i in range(rows)]})
        pq.write_table(table, tmp_path / "data.parquet", row_group_size=300)
        found = items(tmp_path)
        assert [item.caption for item in found] == [str(i) for i in range(rows)]
        order = [550, 3, 4, 599, 0, 120, 119]
        readings = read_items([found[i] for i in order], TRANSFORM)
        expected = [read_picture(png(i), TRANSFORM).digest for i in order]
        assert [reading.picture.digest for reading in readings] == expected

    def test_broken(self, tmp_path):
        pq.write_table(self.table(), tmp_path / "b.parquet")
        (tmp_path / "data.parquet").write_bytes(b"PAR1 nonsense")
        found = captions(tmp_path)
        assert found["b.parquet/00000000"] == "one"
        assert found["data.parquet/00000000"].startswith("[the table is damaged after this point (cannot be read as")
        pq.write_table(pa.table({"text": ["a"]}), tmp_path / "data.parquet")
        with pytest.raises(InputError, match="has no column of pictures"):
            items(tmp_path)


@pytest.mark.parametrize("name", ["avatars", "shapes", "digits"])
def test_built_in(name):
    found = items(name, num=5, size=16)
    readings = read_items(found, TRANSFORM)
    assert [reading.fault for reading in readings] == [""] * 5
    assert all(reading.caption.startswith("a ") for reading in readings)
