"""Captions in the formats that people use, several per image, and untrusted files."""

import csv
import io
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atoll.data import captions as module
from atoll.data import sources
from atoll.data.captions import MAX_CAPTIONS, caption_columns, captions_in
from atoll.data.prepare import count
from atoll.data.sources import Source, read_items
from atoll.errors import InputError
from test_sources import TRANSFORM, png, write, write_tar


def texts(place: Path, **options: object) -> dict[str, list[str] | str]:
    """Returns what is read: key -> captions, or the fault."""
    samples = read_items(Source(str(place), **options).items(), TRANSFORM)
    return {item.key: [item.caption, *item.more] if image else item.fault for item, image in samples}


def photos(place: Path, *names: str) -> Path:
    return write(place, {name: png(i) for i, name in enumerate(names)})


def as_csv(rows: list[list[str]], mark: str = ",") -> str:
    buffer = io.StringIO()
    csv.writer(buffer, delimiter=mark).writerows(rows)
    return buffer.getvalue()


class TestColumns:
    def test_the_first_that_is_usual(self):
        assert caption_columns(["id", "text", "caption"]) == ["caption"]
        assert caption_columns(["prompt", "description"]) == ["prompt"]
        assert caption_columns(["prompt", "alt"], "alt") == ["alt"]
        assert caption_columns(["prompt", "alt"], "nothing") == []
        assert caption_columns(["caption_10", "caption_2", "image", "caption_1"]) == [
            "caption_1",
            "caption_2",
            "caption_10",
        ]

    def test_rows(self):
        assert captions_in({"caption": ["a", 7, None, "b"]}) == ("a", "b")
        assert captions_in({"caption": None, "text": "t"}) == ("t",)
        assert captions_in({"caption": " ", "text": "t"}) == ("t",)
        assert captions_in({"caption": ""}) == ("",)
        assert captions_in({"caption": [str(i) for i in range(1000)]}) == tuple(map(str, range(MAX_CAPTIONS)))
        for row in (None, [], "text", {"caption": {"a": "b"}}, {"caption": [["a"]]}):
            assert captions_in(row) == ()


class TestSidecars:
    def test_json(self, tmp_path):
        photos(tmp_path, "a.png", "b.png", "c.png", "d.png", "e.png")
        files = {"a.json": {"caption": "a cat"}, "b.json": {"text": ["one", "two"]}, "c.json": {"label": 3}}
        write(tmp_path, {name: json.dumps(content) for name, content in files.items()})
        write(tmp_path, {"d.json": "{", "e.json": '{"caption": "no"}', "e.txt": "the text"})
        found = texts(tmp_path)
        assert found.pop("d.png").startswith("image or caption cannot be read (Expecting property name")
        assert found == {"a.png": ["a cat"], "b.png": ["one", "two"], "c.png": "no caption", "e.png": ["the text"]}

    def test_a_named_key(self, tmp_path):
        photos(tmp_path, "a.png", "b.png")
        write(tmp_path, {"a.json": '{"caption": "x", "alt": "y"}', "a.txt": "z", "b.txt": "z"})
        assert texts(tmp_path, caption_column="alt") == {"a.png": ["y"], "b.png": ["z"]}

    def test_class_folders_have_other_json(self, tmp_path):
        """An annotation tool's files beside the images are ignored if captions come from folder names."""
        photos(tmp_path, "owl/a.png")
        write(tmp_path, {"owl/a.json": "[" * 10})
        assert texts(tmp_path, template="a {label}") == {"owl/a.png": ["a owl"]}

    def test_a_tar(self, tmp_path):
        members = {"0.png": png(), "0.json": '{"caption": ["x", "y"]}', "1.png": png(1), "1.json": '{"alt": "z"}'}
        path = write_tar(tmp_path / "0.tar", members)
        assert texts(path) == {"0.tar/0.png": ["x", "y"], "0.tar/1.png": "no caption"}
        assert texts(path, caption_column="alt") == {"0.tar/0.png": "no caption", "0.tar/1.png": ["z"]}


class TestMetadata:
    ROWS = ({"file_name": "a.png", "caption": "one", "alt": "eins"}, {"file_name": "s/b.png", "caption": "t, u"},
            {"file_name": "a.png", "caption": "uno"})  # fmt: skip

    def write(self, place: Path, kind: str) -> None:
        if kind == "jsonl":
            write(place, {"metadata.jsonl": "\n".join(map(json.dumps, self.ROWS))})
        elif kind == "csv":
            names = ["file_name", "caption", "alt"]
            write(place, {"metadata.csv": as_csv([names, *([row.get(n, "") for n in names] for row in self.ROWS)])})
        else:
            pq.write_table(pa.Table.from_pylist(list(self.ROWS)), place / "metadata.parquet")

    @pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
    def test_several_rows_are_several_captions(self, tmp_path, kind):
        photos(tmp_path, "a.png", "s/b.png", "c.png")
        self.write(tmp_path, kind)
        assert texts(tmp_path) == {"a.png": ["one", "uno"], "c.png": "no caption", "s/b.png": ["t, u"]}
        found = texts(tmp_path, caption_column="alt")
        assert found["a.png"] == ["eins"]
        assert found["s/b.png"] in ("no caption", "empty caption")
        with pytest.raises(InputError, match=rf"metadata.{kind} has no captions in 'nothing': give another"):
            texts(tmp_path, caption_column="nothing")

    def test_a_list(self, tmp_path):
        photos(tmp_path, "a.png")
        table = pa.table({"file_name": ["a.png"], "caption": [["one", "two", "one", " "]]})
        pq.write_table(table, tmp_path / "metadata.parquet")
        assert texts(tmp_path) == {"a.png": ["one", "two"]}

    def test_parquet_in_a_split(self, tmp_path):
        photos(tmp_path, "train/a.png")
        pq.write_table(pa.table({"file_name": ["a.png"], "text": ["one"]}), tmp_path / "train" / "metadata.parquet")
        assert Source(str(tmp_path)).kind == "folder"
        assert texts(tmp_path) == {"train/a.png": ["one"]}

    def test_a_table_of_that_name(self, tmp_path):
        pq.write_table(pa.table({"image": [png()], "text": ["one"]}), tmp_path / "metadata.parquet")
        assert texts(tmp_path) == {"metadata.parquet/00000000": ["one"]}

    def test_damaged_parquet(self, tmp_path):
        photos(tmp_path, "a.png")
        (tmp_path / "metadata.parquet").write_bytes(b"PAR1 nonsense")
        with pytest.raises(InputError, match=r"metadata.parquet cannot be read \(cannot be read as Parquet"):
            texts(tmp_path)

    def test_two_files(self, tmp_path):
        photos(tmp_path, "a.png")
        write(
            tmp_path,
            {"metadata.csv": "file_name,text\na.png,no", "metadata.jsonl": '{"file_name":"a.png","text":"yes"}'},
        )
        with pytest.warns(UserWarning, match=r"has metadata.jsonl and metadata.csv: metadata.jsonl is taken"):
            assert texts(tmp_path) == {"a.png": ["yes"]}

    def test_two_columns(self, tmp_path):
        photos(tmp_path, "a.png")
        write(tmp_path, {"metadata.csv": "file_name,text,prompt\na.png,yes,no"})
        with pytest.warns(
            UserWarning, match="has columns text and prompt: text is taken, --caption-column takes another"
        ):
            assert texts(tmp_path) == {"a.png": ["yes"]}

    def test_other_columns(self, tmp_path):
        photos(tmp_path, "a.png")
        write(tmp_path, {"metadata.csv": "file_name,label\na.png,3", "a.txt": "beside"})
        found = texts(tmp_path)
        assert found["a.png"] == ["beside"]
        assert found["metadata.csv"].startswith("it has the columns ['file_name', 'label'], not one of file_name")

    def test_a_caption_with_marks_that_nobody_quoted(self, tmp_path):
        photos(tmp_path, "a.png")
        write(tmp_path, {"metadata.csv": "file_name,text\na.png,red, green, blue\n"})
        assert texts(tmp_path) == {"a.png": ["red, green, blue"]}


class TestFlickr:
    def test_kaggle_8k(self, tmp_path):
        photos(tmp_path, "Images/1.png", "Images/2.png")
        rows = [["image", "caption"], ["1.png", "A dog ."], ["1.png", "A dog , running"], ["2.png", 'A "sign" .']]
        write(tmp_path, {"captions.txt": as_csv(rows)})
        assert texts(tmp_path) == {"Images/1.png": ["A dog .", "A dog , running"], "Images/2.png": ['A "sign" .']}

    def test_kaggle_30k(self, tmp_path):
        """With the row that lacks a bar, as in the published file."""
        photos(tmp_path, "flickr30k_images/1.png", "flickr30k_images/2.png")
        lines = [
            "image_name| comment_number| comment",
            '1.png| 0| "A dog runs .',
            "1.png| 1| Two, dogs",
            "1.png| 4   A dog",
        ]
        write(tmp_path, {"flickr30k_images/results.csv": "\n".join([*lines, "2.png| 0| a cat"])})
        assert texts(tmp_path) == {
            "flickr30k_images/results, row 3": "a row of results.csv without a file name or a caption",
            "flickr30k_images/1.png": ['"A dog runs .', "Two, dogs"],
            "flickr30k_images/2.png": ["a cat"],
        }

    def test_the_authors_own(self, tmp_path):
        photos(tmp_path, "Flicker8k_Dataset/1.png")
        write(tmp_path, {"Flickr8k.token.txt": "1.png#0\tA dog\n1.png#1\tA hound\nnonsense\n"})
        found = texts(tmp_path)
        assert found.pop("Flickr8k.token, row 3").startswith("a row of Flickr8k.token.txt")
        assert found == {"Flicker8k_Dataset/1.png": ["A dog", "A hound"]}

    def test_files_that_only_have_the_name(self, tmp_path):
        photos(tmp_path, "a.png")
        write(tmp_path, {"a.txt": "a", "results.csv": "epoch,loss\n1,2\n"})
        assert texts(tmp_path) == {"a.png": ["a"]}
        photos(tmp_path, "captions.png")
        write(tmp_path, {"captions.txt": "image,caption"})
        assert texts(tmp_path) == {"a.png": ["a"], "captions.png": ["image,caption"]}
        (tmp_path / "captions.png").unlink()
        write(tmp_path, {"captions.txt": "a cat\na dog"})
        with pytest.warns(UserWarning, match=r"captions.txt is not read: its first line must name its columns"):
            assert texts(tmp_path) == {"a.png": ["a"]}


COCO = {
    "info": {"year": 2017, "nested": [1, [2]]},
    "licenses": [],
    "images": [{"id": 7, "file_name": "7.png"}, {"id": 8, "file_name": "8.png"}, {"id": 9, "file_name": "9.png"}],
    "annotations": [
        {"image_id": 7, "id": 1, "caption": "A bike.\n"},
        {"image_id": 8, "id": 2, "caption": "A café é."},
        {"image_id": 7, "id": 3, "caption": "A bicycle."},
        {"image_id": 99, "id": 4, "caption": "of no image"},
    ],
}


class TestCoco:
    @pytest.mark.parametrize("indent", [None, 2])
    def test_its_folders(self, tmp_path, indent):
        photos(tmp_path, "train2017/7.png", "train2017/8.png")
        write(tmp_path, {"annotations/captions_train2017.json": json.dumps(COCO, indent=indent),
                         "annotations/instances_train2017.json": "not ours"})  # fmt: skip
        without = "without a file name or a caption"
        assert texts(tmp_path) == {
            "annotations/captions_train2017, row 3": f"a row of captions_train2017.json {without}",
            "train2017/7.png": ["A bike.", "A bicycle."],
            "train2017/8.png": ["A café é."],
        }

    def test_beside_the_images(self, tmp_path):
        photos(tmp_path, "8.png")
        write(tmp_path, {"captions_val.json": json.dumps(COCO, ensure_ascii=False)})
        found = texts(tmp_path)
        assert found["8.png"] == ["A café é."]
        assert found["captions_val.json"] == "it names 1 file not among the images in its folder, such as '7.png'"

    @pytest.mark.parametrize(
        "content",
        ["", "{", "7", '{"images": [', '{"images": [1 2]}', '{"images" 7}', '{"a": 1, }', '{"images": [{"id": 1,]}',
         "[" * 100_000, '{"images": ' + "[" * 100_000, '{"images": [' + "[" * 100_000, '{"images": [' + "{}," * 1000,
         "[]", '{"images": [' + "7" * 5000 + "]}"],
    )  # fmt: skip
    def test_damage(self, tmp_path, content):
        photos(tmp_path, "8.png")
        write(tmp_path, {"captions_val.json": content})
        with pytest.raises(InputError, match=r"captions_val.json cannot be read \(.{,200}\): save it") as error:
            texts(tmp_path)
        assert len(str(error.value)) < 500

    def test_other_json_of_that_name(self, tmp_path):
        photos(tmp_path, "a.png")
        odd = {
            "images": [7, {"id": [1], "file_name": "a.png"}, {"id": 1}],
            "annotations": [{"image_id": {}}, None],
            "x": {},
        }
        write(tmp_path, {"captions_val.json": json.dumps(odd), "a.txt": "a"})
        found = texts(tmp_path)
        assert found == {
            "captions_val.json": "it has no annotations of images as those of COCO's captions",
            "a.png": ["a"],
        }

    @pytest.mark.slow
    def test_much_of_it_takes_little_memory(self, tmp_path, monkeypatch):
        """Unneeded entries are not kept, so that a flood of them takes little more memory than its text."""
        import tracemalloc

        monkeypatch.setattr(module, "MAX_COCO", 8 << 20)
        photos(tmp_path, "a.png")
        write(tmp_path, {"captions_val.json": '{"x": [' + "{}," * 1_000_000 + "{}]}", "a.txt": "a"})
        tracemalloc.start()
        assert "a" in [item.caption for item in Source(str(tmp_path)).items()]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20 << 20


class TestHostile:
    @pytest.mark.parametrize("kind", ["metadata.jsonl", "metadata.csv", "captions.txt"])
    def test_names_that_lead_out(self, tmp_path, kind):
        """Rows are looked up among the images of their folder; nothing else is ever opened."""
        outside = photos(tmp_path / "out", "secret.png")
        place = photos(tmp_path / "in", "a.png", "sub/b.png")
        (place / "link.png").symlink_to(outside / "secret.png")
        names = [
            "../out/secret.png",
            str(outside / "secret.png"),
            "link.png",
            "sub/../a.png",
            "a\nb.png",
            "/etc/passwd",
        ]
        rows = [{"file_name": name, "caption": f"c{i}"} for i, name in enumerate(names)]
        content = "\n".join(map(json.dumps, rows))
        if kind != "metadata.jsonl":
            content = as_csv(
                [["image" if kind == "captions.txt" else "file_name", "caption"], *(list(r.values()) for r in rows)]
            )
        write(place, {kind: content})
        found = texts(place)
        assert found["a.png"] == ["c3"]
        assert found["link.png"] == "image or caption cannot be read (it is a link that leaves its folder)"
        assert found["sub/b.png"] == "no caption"
        missing = 4
        assert (
            found[kind] == f"it names {missing} files not among the images in its folder, such as '../out/secret.png'"
        )
        assert len(found) == 4

    def test_a_name_with_a_newline(self, tmp_path):
        photos(tmp_path, "a\nb.png")
        write(tmp_path, {"metadata.csv": as_csv([["file_name", "text"], ["a\nb.png", "two\nlines"]])})
        assert texts(tmp_path) == {"a\nb.png": ["two lines"]}

    @pytest.mark.parametrize("kind", ["metadata.jsonl", "metadata.csv", "captions.txt", "Flickr8k.token.txt"])
    @pytest.mark.timeout(60)
    def test_a_line_without_end(self, tmp_path, kind):
        """10 GB are refused by their size; smaller files once a line is longer than any caption."""
        photos(tmp_path, "a.png")
        write(tmp_path, {kind: "image,caption\n"})
        os.truncate(tmp_path / kind, 10 << 30)
        with pytest.raises(InputError, match="it is larger than 1,073,741,824 bytes"):
            texts(tmp_path)
        os.truncate(tmp_path / kind, 100 << 20)
        with pytest.raises(InputError, match="a line is longer than 1,048,576 characters"):
            texts(tmp_path)

    def test_a_cell_without_end(self, tmp_path):
        photos(tmp_path, "a.png")
        write(tmp_path, {"metadata.csv": 'file_name,text\na.png,"' + "word \n" * 200_000})
        with pytest.raises(InputError, match="field larger than field limit"):
            texts(tmp_path)

    def test_bombs(self, tmp_path):
        photos(tmp_path, "a.png", "b.png")
        lines = ["[" * 100_000, '{"a":' * 100_000, '{"file_name": "a.png", "caption": ' + "[" * 900 + "]" * 900 + "}",
                 '{"file_name": "a.png", "caption": NaN}', '{"file_name": "a.png", "caption": ' + "9" * 9999 + "}",
                 '{"file_name": "b.png", "caption": "fine"}']  # fmt: skip
        write(tmp_path, {"metadata.jsonl": "\n".join(lines)})
        found = texts(tmp_path)
        assert found["b.png"] == ["fine"]
        assert sum(fault == "a row of metadata.jsonl without a file name or a caption" for fault in found.values()) == 5

    def test_many_bad_rows(self, tmp_path):
        photos(tmp_path, "a.png")
        write(tmp_path, {"metadata.jsonl": "7\n" * 5000 + '{"file_name": "a.png", "text": "a"}'})
        found = texts(tmp_path)
        assert len(found) == 102
        assert found["metadata, more rows"] == "4,900 more rows of metadata.jsonl without file name or caption"

    def test_many_captions_of_one_image(self, tmp_path):
        photos(tmp_path, "a.png")
        rows = "\n".join(json.dumps({"file_name": "a.png", "text": str(i)}) for i in range(2000))
        write(tmp_path, {"metadata.jsonl": rows})
        assert texts(tmp_path) == {"a.png": [str(i) for i in range(MAX_CAPTIONS)]}

    def test_links_and_fifos(self, tmp_path):
        out = write(tmp_path / "out", {"captions_x.json": json.dumps(COCO)})
        for name in ("captions.txt", "captions_a.json", "metadata.parquet", "annotations/captions_b.json"):
            place = photos(tmp_path / name.replace("/", "_"), "a.png")
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).symlink_to(out / "captions_x.json")
            with pytest.raises(InputError, match="it is a link that leaves its folder"):
                texts(place)
            (place / name).unlink()
            os.mkfifo(place / name)
            with pytest.raises(InputError, match="it is a FIFO"):
                texts(place)
        place = photos(tmp_path / "linked", "a.png")
        (place / "annotations").symlink_to(out)
        assert texts(place)["a.png"] == "no caption"


class TestTables:
    def test_lists_and_numbered_columns(self, tmp_path):
        pictures = [png(i) for i in range(2)]
        pq.write_table(pa.table({"image": pictures, "caption": [["a", "b"], []]}), tmp_path / "l.parquet")
        assert list(texts(tmp_path / "l.parquet").values()) == [["a", "b"], "no caption"]
        numbered = {"image": pictures, "caption_0": ["a", "c"], "caption_1": ["b", None]}
        pq.write_table(pa.table(numbered), tmp_path / "n.parquet")
        assert list(texts(tmp_path / "n.parquet").values()) == [["a", "b"], ["c"]]

    def test_a_named_column(self, tmp_path):
        path = tmp_path / "t.parquet"
        pq.write_table(pa.table({"image": [png()], "text": ["no"], "alt": ["yes"], "id": [7]}), path)
        assert list(texts(path, caption_column="alt").values()) == [["yes"]]
        for column in ("id", "nothing"):
            with pytest.raises(InputError, match=rf"has no column '{column}' of texts \(it has text, alt\)"):
                texts(path, caption_column=column)
        with pytest.raises(InputError, match="has captions of its own: leave --caption-column out"):
            Source("shapes", caption_column="x")


class TestNum:
    def test_few_are_held_and_many_are_listed_again(self, tmp_path, monkeypatch):
        """Either way gives the same items in the same order, including all with a fault."""
        photos(tmp_path, *(f"{i:02d}.png" for i in range(40)))
        write(tmp_path, {f"{i:02d}.txt": f"c{i}" for i in range(0, 40, 2)} | {"00.txt": " "})
        few = list(Source(str(tmp_path), num=7).items())
        monkeypatch.setattr(sources, "MAX_KEPT", 3)
        assert few == list(Source(str(tmp_path), num=7).items())
        assert [item.key for item in few] == sorted(item.key for item in few)
        assert sum(not item.fault for item in few) == 7
        assert len(few) == 7 + 21

    def test_captions_are_read_once(self, tmp_path, monkeypatch):
        photos(tmp_path, *(f"{i:02d}.png" for i in range(20)))
        write(tmp_path, {f"{i:02d}.txt": f"c{i}" for i in range(20)})
        opened, read = [], sources.read_bytes
        monkeypatch.setattr(sources, "read_bytes", lambda path, *rest: (opened.append(path.name), read(path, *rest))[1])
        source = Source(str(tmp_path), num=5)
        count(source, progress=False)
        read_items(source.items(), TRANSFORM)
        assert sorted(opened) == sorted([*(f"{i:02d}.txt" for i in range(20)), *(item.key for item in source.items())])

    def test_it_chooses_by_name_alone(self, tmp_path):
        """The same images are chosen whatever file has the captions; only these are opened."""
        names = [f"{i:02d}.png" for i in range(40)]
        rows = [[name, f"{i} of {k}"] for k in range(5) for i, name in enumerate(names)]
        chosen = []
        for kind, header in (("metadata.csv", "file_name"), ("captions.txt", "image")):
            place = photos(tmp_path / kind, *names)
            write(place, {kind: as_csv([[header, "caption"], *rows])})
            found = texts(place, num=7)
            assert [len(some) for some in found.values()] == [5] * 7
            chosen.append(found)
            for path in place.glob("*.png"):
                if path.name not in found:
                    path.write_bytes(b"never looked at")
            assert texts(place, num=7) == found
        assert chosen[0] == chosen[1]
