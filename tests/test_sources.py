"""Sources: every convention for images with captions, and untrusted archives."""

import csv
import io
import json
import os
import socket
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from atoll.data import tables
from atoll.data.images import Transform, read_image
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
    """Returns what is read: key -> caption, or the fault in brackets."""
    samples = read_items(items(place, **options), TRANSFORM)
    return {item.key: item.caption if image else f"[{item.fault}]" for item, image in samples}


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
        fault = "[a row of metadata.jsonl without a file name or a caption]"
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
            (tmp_path, {"num": 0}, "--num must be at least 1"),
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
            "[image or caption cannot be read ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)]",  # noqa: E501
            "[no caption]",
        ]

    def test_links(self, tmp_path):
        outside = write(tmp_path / "outside", {"secret.png": png()})
        inside = write(tmp_path / "in", {"real.png": png(1), "real.txt": "r", "leads.txt": "x", "also.txt": "y"})
        (inside / "leads.png").symlink_to(outside / "secret.png")
        (inside / "also.png").symlink_to(inside / "real.png")
        (inside / "loop").symlink_to(inside)
        (inside / "away").symlink_to(outside)
        (inside / "itself.png").symlink_to("itself.png")
        found = captions(inside)
        out = "[image or caption cannot be read (it is a link that leaves its folder)]"
        itself = "[image or caption cannot be read (Too many levels of symbolic links)]"
        away = "[a linked folder: give it as a source of its own]"
        assert found == {"also.png": "y", "itself.png": itself, "leads.png": out, "real.png": "r", "away": away}

    def test_linked_folders(self, tmp_path):
        """Links to folders that are not read anyway are reported."""
        files: dict[str, bytes | str] = {}
        for i, folder in enumerate((".store/a", "c")):
            files |= {f"{folder}/{i}.png": png(i), f"{folder}/{i}.txt": f"picture {i}"}
        write(tmp_path, files)
        for link in ("a", "c/a", "c/again"):
            (tmp_path / link).symlink_to(tmp_path / (".store/a" if link != "c/again" else "c"))
        fault = "[a linked folder: give it as a source of its own]"
        assert captions(tmp_path) == {"c/1.png": "picture 1", "a": fault, "c/a": fault}

    def test_texts_that_lead_out(self, tmp_path):
        """A link beside an image would publish its target."""
        write(tmp_path / "out", {"secret.txt": "password", "rows.jsonl": '{"file_name": "a.png", "text": "password"}'})
        inside = write(tmp_path / "in", {"a.png": png()})
        (inside / "a.txt").symlink_to(tmp_path / "out" / "secret.txt")
        assert captions(inside) == {"a.png": "[image or caption cannot be read (it is a link that leaves its folder)]"}
        (inside / "metadata.jsonl").symlink_to(tmp_path / "out" / "rows.jsonl")
        with pytest.raises(InputError, match=r"metadata.jsonl cannot be read \(it is a link that leaves its folder\)"):
            captions(inside)

    @pytest.mark.timeout(60)
    def test_what_is_no_file(self, tmp_path):
        """Opening a FIFO would block, and a device never ends."""
        write(tmp_path, {"a.txt": "a", "b.png": png(), "c.png": png(1), "c.txt": "c", "d.txt": "d"})
        for name in ("a.png", "b.txt", "0.tar", "0.parquet"):
            os.mkfifo(tmp_path / name)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(tmp_path / "d.png"))
        (tmp_path / "e.png").symlink_to("/dev/zero")
        (tmp_path / "itself.tar").symlink_to("itself.tar")
        (tmp_path / "itself.parquet").symlink_to("itself.parquet")
        for name in ("0.tar", "0.parquet"):
            with pytest.raises(InputError, match="cannot be read .it is a FIFO, not a file"):
                Source(str(tmp_path / name))
        for name in ("itself.tar", "itself.parquet"):
            with pytest.raises(InputError, match="cannot be read .Too many levels"):
                Source(str(tmp_path / name))
        assert captions(tmp_path) == {
            "0.tar": "[cannot be read (it is a FIFO, not a file)]",
            "itself.tar": "[cannot be read (Too many levels of symbolic links)]",
        }
        for path in tmp_path.glob("*.tar"):
            path.unlink()
        assert all("is damaged" in caption for caption in captions(tmp_path).values())
        for path in tmp_path.glob("*.parquet"):
            path.unlink()
        assert captions(tmp_path) == {
            "a.png": "[cannot be read (it is a FIFO, not a file)]",
            "b.png": "[image or caption cannot be read (it is a FIFO, not a file)]",
            "c.png": "c",
            "d.png": "[cannot be read (it is a socket, not a file)]",
            "e.png": "[image or caption cannot be read (it is a link that leaves its folder)]",
        }
        os.mkfifo(tmp_path / "metadata.jsonl")
        with pytest.raises(InputError, match="it is a FIFO"):
            captions(tmp_path)

    def test_what_is_too_large(self, tmp_path, monkeypatch):
        """None of it is read: the files are sparse, and larger than memory."""
        write(tmp_path, {"a.png": b"", "b.png": png(), "c.png": png(1), "c.txt": "word " * 10_000})
        os.truncate(tmp_path / "a.png", 1 << 40)
        (tmp_path / "a.txt").write_text("a")
        (tmp_path / "b.txt").write_text("")
        os.truncate(tmp_path / "b.txt", 1 << 40)
        found = captions(tmp_path)
        assert found["a.png"] == "[cannot be read (it is larger than 268,435,456 bytes)]"
        assert found["b.png"] == "[image or caption cannot be read (it is larger than 1,048,576 bytes)]"
        assert found["c.png"] == ("word " * 10_000)[:10_000].strip()
        for name in ("metadata.csv", "metadata.jsonl"):
            (tmp_path / name).write_text("file_name,text\n")
            os.truncate(tmp_path / name, 1 << 31)
            with pytest.raises(InputError, match="it is larger than 1,073,741,824 bytes"):
                captions(tmp_path)
            (tmp_path / name).unlink()

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


class TestNum:
    """A number of images is chosen from any source, at random but reproducibly."""

    def files(self) -> dict[str, bytes | str]:
        return {f"{i:02d}.{kind}": png(i) if kind == "png" else f"p{i}" for i in range(40) for kind in ("png", "txt")}

    def test_a_folder(self, tmp_path):
        write(tmp_path, {**self.files(), "fault.png": png()})
        chosen = captions(tmp_path, num=10)
        assert chosen.pop("fault.png") == "[no caption]"  # nothing is dropped silently
        assert len(chosen) == 10
        assert chosen == {name: f"p{int(name[:2])}" for name in sorted(chosen)} != captions(tmp_path, num=10, seed=1)
        more = captions(tmp_path, num=15)
        assert chosen.items() < more.items()
        assert sorted(chosen) != sorted(captions(tmp_path))[:10]
        assert len(captions(tmp_path, num=1000)) == 41

    def test_the_order_does_not_matter(self, tmp_path):
        files = self.files()
        names = sorted(files)
        one = write_tar(tmp_path / "one.tar", {name: files[name] for name in names})
        other = write_tar(tmp_path / "other.tar", {name: files[name] for i in range(39, -1, -1)
                                                   for name in names[2 * i : 2 * i + 2]})  # fmt: skip
        other.rename(tmp_path / "sub.tar")
        (tmp_path / "a").mkdir()
        (tmp_path / "sub.tar").rename(tmp_path / "a" / "one.tar")
        assert captions(one, num=10) == captions(tmp_path / "a" / "one.tar", num=10)
        assert len(captions(one, num=10)) == 10

    def test_a_table(self, tmp_path):
        table = pa.table({"image": [png(i) for i in range(40)], "text": [f"p{i}" for i in range(40)]})
        pq.write_table(table, tmp_path / "t.parquet")
        assert len(captions(tmp_path / "t.parquet", num=7)) == 7


FIELDS = {"name": (0, 100), "mode": (100, 8), "size": (124, 12), "time": (136, 12), "checksum": (148, 8),
          "type": (156, 1), "magic": (257, 8), "prefix": (345, 155), "all": (0, 512)}  # fmt: skip


class TestDamage:
    """What a damaged archive has lost is reported: nothing is dropped silently."""

    def archive(self, path: Path) -> bytes:
        members = {f"{i}.{kind}": png(i) if kind == "png" else f"c{i}" for i in range(10) for kind in ("png", "txt")}
        return write_tar(path, members).read_bytes()

    def mend(self, content: bytearray, at: int) -> None:
        content[at + 148 : at + 156] = b" " * 8
        content[at + 148 : at + 156] = b"%06o\0 " % sum(content[at : at + 512])

    def check(self, path: Path, content: bytes) -> dict[str, str]:
        path.write_bytes(content)
        found = captions(path)
        kept = [caption for caption in found.values() if not caption.startswith("[")]
        told = [caption for caption in found.values() if caption.startswith("[")]
        assert len(kept) == 10 or told, found
        whole = {key: caption for key, caption in found.items() if caption in kept and key != "0.tar/3.png"}
        assert whole == {key: f"c{key.rpartition('/')[2][0]}" for key in whole}
        return found

    @pytest.mark.parametrize("field", FIELDS)
    @pytest.mark.parametrize("member", ["3.png", "3.txt"])
    @pytest.mark.parametrize("mended", [False, True], ids=["checksum wrong", "checksum right"])
    def test_every_field_of_a_header(self, field, member, mended, tmp_path):
        content = self.archive(tmp_path / "0.tar")
        with tarfile.open(tmp_path / "0.tar") as archive:
            at = archive.getmember(member).offset
        start, length = FIELDS[field]
        values = [b"\0" * length, b"7" * length, b"\xff" * length, np.random.default_rng(0).bytes(length)]
        if field == "size":
            values += [f"{size:011o}\0".encode() for size in (0, 1, 512, 600, 2048, 5000, 1 << 20, 1 << 32)]
            values += [b"\x80" + b"\x7f" * 11, b"\xff" * 11 + b"\0"]  # huge, and negative
        for value in values:
            broken = bytearray(content)
            broken[at + start : at + start + length] = value
            if mended and field != "checksum":
                self.mend(broken, at)
            found = self.check(tmp_path / "0.tar", bytes(broken))
            assert [found.get(f"0.tar/{i}.png") for i in range(3)] == ["c0", "c1", "c2"]

    def test_a_size_that_takes_the_rest(self, tmp_path):
        content = bytearray(self.archive(tmp_path / "0.tar"))
        with tarfile.open(tmp_path / "0.tar") as archive:
            member, end = archive.getmember("3.png"), archive.getmember("9.txt").offset + 1024
        content[member.offset + 124 : member.offset + 136] = b"%011o\0" % (end - member.offset_data)
        self.mend(content, member.offset)
        found = self.check(tmp_path / "0.tar", bytes(content))
        assert found["0.tar/3.png"] == "[no caption]"  # it lies within the image's claimed size

    def test_every_end(self, tmp_path):
        content = self.archive(tmp_path / "0.tar")
        with tarfile.open(tmp_path / "0.tar") as archive:
            starts = [member.offset for member in archive]
            end = archive.getmembers()[-1].offset + 1024
        for cut in (
            *starts[1:],
            *(start + 512 for start in starts),
            *(start + 700 for start in starts),
            end,
            end + 512,
        ):
            found = self.check(tmp_path / "0.tar", content[:cut])
            assert any("the archive is damaged after this point" in caption for caption in found.values())
        for garbage in (b"x" * 512, content[512:2048], content, b"\0" * 2048 + b"x"):
            found = self.check(tmp_path / "0.tar", content + garbage)
            assert len(found) == 11
        assert len(self.check(tmp_path / "0.tar", content + b"\0" * 20_480)) == 10

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"], ids=["pax", "global", "long name", "long link"])
    def test_headers_that_ask_for_too_much(self, kind, tmp_path):
        """A long name of a terabyte, and endlessly nested long names."""
        path = tmp_path / "0.tar"
        for size, repeat in ((1 << 40, 1), (-(1 << 40), 1), (0, 20_000)):
            info = tarfile.TarInfo("a")
            info.size, info.type = size, kind
            path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) * repeat)
            os.truncate(path, (1 << 41) if size > 0 else path.stat().st_size)
            found = captions(path)
            assert list(found) == ["0.tar/"]
            assert "the archive is damaged" in found["0.tar/"]

    def test_a_sparse_member(self, tmp_path):
        info = tarfile.TarInfo("a.png")
        info.type = tarfile.GNUTYPE_SPARSE
        (tmp_path / "0.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + b"\0" * 1024)
        assert captions(tmp_path / "0.tar") == {"0.tar/a.png": "[not a plain file in the archive]"}

    def test_members_that_are_too_large(self, tmp_path):
        """The archive is sparse where its image and another's caption should be."""
        sizes = {"a.png": 1 << 40, "a.txt": 0, "b.png": 0, "b.txt": 1 << 40}
        with (tmp_path / "0.tar").open("wb") as file:
            for name, size in sizes.items():
                info = tarfile.TarInfo(name)
                info.size = size or 1
                file.write(info.tobuf() + (b"" if size else b"x".ljust(512, b"\0")))
                file.seek(size, os.SEEK_CUR)
            file.truncate(file.tell() + 1024)
        assert captions(tmp_path / "0.tar") == {
            "0.tar/a.png": "[cannot be read (it is larger than 268,435,456 bytes)]",
            "0.tar/b.png": "[caption cannot be read (it is larger than 1,048,576 bytes)]",
        }


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
        assert found["0.tar/../../evil.png"] == "up"  # only a label: nothing is written there
        assert set(tmp_path.parent.rglob("*")) == before


class TestTables:
    def table(self) -> pa.Table:
        pictures = [{"bytes": png(i), "path": f"{i}.png"} for i in range(3)] + [{"bytes": None, "path": "x"}]
        return pa.table({"image": pictures, "text": ["one", "two", None, "four"]})

    def expected(self, name: str) -> dict[str, str]:
        faults = ("one", "two", "[no caption]", "[cannot be read (the cell holds no image)]")
        return {f"{name}/{i:08d}": caption for i, caption in enumerate(faults)}

    def test_parquet(self, tmp_path):
        pq.write_table(self.table(), tmp_path / "data.parquet")
        assert captions(tmp_path / "data.parquet") == self.expected("data.parquet")
        assert captions(tmp_path) == self.expected("data.parquet")

    def test_a_saved_hugging_face_dataset(self, tmp_path):
        """`datasets` saves Arrow streams named data-00000-of-00001.arrow, one folder per split."""
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
        samples = read_items([found[i] for i in order], TRANSFORM)
        expected = [read_image(png(i), TRANSFORM).digest for i in order]
        assert [image.digest for _, image in samples] == expected

    @pytest.mark.parametrize("kind", ["stream", "file"])
    def test_an_arrow_file_cut_short(self, kind, tmp_path):
        """If it were memory-mapped, this would kill the reading process."""
        path = tmp_path / "data.arrow"
        write = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        table = pa.table({"image": [png(i) for i in range(60)], "text": [str(i) for i in range(60)]})
        with pa.OSFile(str(path), "wb") as file, write(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=20)
        found = items(path)
        os.truncate(path, path.stat().st_size // 2)
        samples = read_items(found, TRANSFORM)
        assert [image is not None for _, image in samples] == [True] * 20 + [False] * 40 or kind == "file"
        assert all(item.fault.startswith("cannot be read (") for item, image in samples if image is None)

    def test_rows_of_many_bytes(self, tmp_path, monkeypatch):
        """Only a few of them are read at once."""
        monkeypatch.setattr(tables, "TABLE_BATCH_BYTES", 5000)
        table = pa.table({"image": [png(i) for i in range(40)], "text": [str(i) for i in range(40)]})
        pq.write_table(table, tmp_path / "data.parquet")
        assert max(batch.num_rows for _, _, batch in tables.table_batches(tmp_path / "data.parquet")) < 6
        assert list(captions(tmp_path).values()) == [str(i) for i in range(40)]

    def test_broken(self, tmp_path):
        pq.write_table(self.table(), tmp_path / "b.parquet")
        (tmp_path / "data.parquet").write_bytes(b"PAR1 nonsense")
        found = captions(tmp_path)
        assert found["b.parquet/00000000"] == "one"
        assert found["data.parquet/00000000"].startswith("[the table is damaged after this point (cannot be read as")
        pq.write_table(pa.table({"text": ["a"]}), tmp_path / "data.parquet")
        with pytest.raises(InputError, match="has no column of images"):
            items(tmp_path)


@pytest.mark.parametrize("name", ["avatars", "shapes", "digits"])
def test_built_in(name):
    found = items(name, num=5, size=16)
    samples = read_items(found, TRANSFORM)
    assert [item.fault for item, _ in samples] == [""] * 5
    assert all(item.caption.startswith("a ") for item, _ in samples)
