"""Where pictures come from: folders, WebDataset tars, Parquet and Arrow files, and what is built in.

A source lists its items in an order that never changes and without reading a picture; an item knows how to read its
own bytes, in any process. Names inside archives are labels: nothing is ever written where they say.
"""

import csv
import json
import os
import posixpath
import tarfile
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from atoll.data.builtin import NAMES, make
from atoll.data.images import Picture, Rejected, Transform, read_picture
from atoll.errors import InputError

IMAGES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".jfif", ".avif"}
METADATA = ("metadata.jsonl", "metadata.csv")
CAPTION_KEYS = ("text", "caption", "TEXT", "prompt")


class Item(NamedTuple):
    """One picture to be: `where` says how to read it (a path, a span of a file, a row), `fault` why it cannot be."""

    key: str
    where: tuple[Any, ...]
    caption: str | None = None
    label: str = ""
    fault: str = ""


@dataclass(frozen=True)
class Source:
    """A place with pictures. `template` makes captions of folder names: "a photo of a {label}"."""

    place: str
    kind: str = field(init=False)
    template: str | None = None
    num: int | None = None  # how many of a built-in one
    size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", _kind_of(self.place))
        if self.num is not None and self.kind != "built-in":
            raise InputError(f"--num is for {', '.join(NAMES)}: of {self.place} all pictures are taken")
        if self.num is not None and self.num < 1:
            raise InputError(f"--num must be at least 1, but is {self.num}")
        if self.template is not None and self.kind == "built-in":
            raise InputError(f"{self.place} has captions of its own: leave --template out")
        if self.template is not None and "{label}" not in self.template:
            raise InputError(f"the template {self.template!r} must contain {{label}}, as in 'a photo of a {{label}}'")

    def items(self) -> Iterator[Item]:
        """All items, in their order."""
        found = {
            "folder": self._folder,
            "tar": self._tars,
            "table": self._tables,
            "built-in": self._built_in,
        }[self.kind]()
        for item in found:
            yield item if item.fault else self._captioned(item)

    def _captioned(self, item: Item) -> Item:
        caption = item.caption
        if not caption and self.template is not None and item.label:
            caption = self.template.replace("{label}", item.label.replace("_", " "))
        if caption is None:
            return item._replace(fault="no caption")
        caption = " ".join(unicodedata.normalize("NFC", caption).split())
        return item._replace(caption=caption, fault="" if caption else "empty caption")

    def _folder(self) -> Iterator[Item]:
        root = Path(self.place).resolve()
        metadata: dict[Path, dict[str, str]] = {}  # of this folder and those above it
        for folder, names in _walk(root):
            metadata = {above: captions for above, captions in metadata.items() if folder.is_relative_to(above)}
            metadata[folder], faults = _read_metadata(folder)
            for number, fault in faults:
                key = (folder / f"metadata, row {number}").relative_to(root).as_posix()
                yield Item(key, (), fault=fault)
            for name in names:
                path = folder / name
                if path.suffix.lower() not in IMAGES:
                    continue
                key = path.relative_to(root).as_posix()
                label = "" if folder == root else folder.name
                if path.is_symlink() and not path.resolve().is_relative_to(root):
                    yield Item(key, (), fault="a link that leads out of the folder")
                    continue
                listed = (captions.get(path.relative_to(above).as_posix()) for above, captions in metadata.items())
                caption, fault = next((c for c in listed if c is not None), None), ""
                if caption is None:
                    caption, fault = _read_sidecar(path.with_suffix(".txt"))
                try:
                    size = path.stat().st_size
                except OSError as error:
                    size, fault = 0, f"cannot be read ({error.strerror})"
                yield Item(key, ("file", str(path), size), caption, label, fault)

    def _tars(self) -> Iterator[Item]:
        place = Path(self.place)
        paths = [place] if place.is_file() else sorted(place.glob("*.tar"))
        for path in paths:
            yield from _tar_items(path)

    def _tables(self) -> Iterator[Item]:
        place = Path(self.place)
        if place.is_file():
            yield from _table_items(place, place.name)
            return
        for path in sorted(p for p in place.rglob("*") if p.suffix in (".parquet", ".arrow")):
            yield from _table_items(path, path.relative_to(place).as_posix())

    def _built_in(self) -> Iterator[Item]:
        examples = make(self.place, self.num, self.size, self.seed)
        for i in range(len(examples)):
            yield Item(
                f"{self.place}/{i:08d}", ("built-in", self.place, self.num, self.size, self.seed, i), caption="?"
            )

    def describe(self) -> dict[str, Any]:
        """For dataset.json; a path is named by its last part, since the rest belongs to one machine."""
        name = self.place if self.kind == "built-in" else Path(self.place).resolve().name
        made = {"num": self.num, "seed": self.seed} if self.kind == "built-in" else {"template": self.template}
        return {"name": name, "kind": self.kind, **made}


def read_item(item: Item) -> tuple[bytes | Image.Image, str, str]:
    """The picture of an item, its caption and its label. Raises OSError if its bytes cannot be had."""
    match item.where:
        case ("file", path, _):
            return Path(path).read_bytes(), item.caption or "", item.label
        case ("span", path, start, length):
            with open(path, "rb") as file:
                file.seek(start)
                content = file.read(length)
            if len(content) < length:
                raise OSError("the archive ends within the picture")
            return content, item.caption or "", item.label
        case ("row", path, group, number, row, column):
            return _table_picture(path, group, number, row, column), item.caption or "", item.label
        case ("built-in", name, num, size, seed, i):
            example = make(name, num, size, seed)[i]
            return example.image, example.caption, ", ".join(example.attributes.values())
    raise AssertionError(item.where)


class Reading(NamedTuple):
    """What became of an item: a picture with its caption, or a fault."""

    item: Item
    picture: Picture | None = None
    caption: str = ""
    label: str = ""
    fault: str = ""


def read_items(items: list[Item], transform: Transform) -> list[Reading]:
    """Read and decode some items, in whatever process."""
    readings = []
    for item in items:
        if item.fault:
            readings.append(Reading(item, fault=item.fault))
            continue
        try:
            content, caption, label = read_item(item)
            readings.append(Reading(item, read_picture(content, transform), caption, label))
        except Rejected as error:
            readings.append(Reading(item, fault=str(error)))
        except OSError as error:
            readings.append(Reading(item, fault=f"cannot be read ({error.strerror or error})"))
    return readings


def _kind_of(place: str) -> str:
    path = Path(place)
    if place in NAMES:
        if path.exists():
            raise InputError(f"{place} is both built in and here: write ./{place} for the one here, or go elsewhere")
        return "built-in"
    if not place:
        raise InputError(f"the source is empty: give a folder, a .tar, a .parquet, or one of {', '.join(NAMES)}")
    if not path.exists():
        raise InputError(f"there is no {place}: give a folder, a .tar, a .parquet, or one of {', '.join(NAMES)}")
    if path.is_file():
        kind = {".tar": "tar", ".parquet": "table", ".arrow": "table"}.get(path.suffix)
        if kind is None:
            advice = ": unpack it first" if path.suffix in (".gz", ".tgz", ".zip", ".bz2", ".xz") else ""
            raise InputError(f"{place} is neither a folder nor a .tar, .parquet or .arrow file{advice}")
        return kind
    if any(path.glob("*.tar")):
        return "tar"
    if any(any(path.glob(f"{level}*.{kind}")) for level in ("", "*/") for kind in ("parquet", "arrow")):
        return "table"
    return "folder"


def _walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each folder below root with its sorted file names; links to folders are not followed."""
    for folder, subfolders, names in os.walk(root):
        subfolders.sort()
        own = [name for name in subfolders if (Path(folder) / name / "dataset.json").exists()]  # what we made
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in own]
        yield Path(folder), sorted(name for name in names if not name.startswith("."))


def _read_sidecar(path: Path) -> tuple[str | None, str]:
    """A caption beside its picture, and a fault if there is one that cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig"), ""
    except FileNotFoundError:
        return None, ""
    except UnicodeDecodeError:
        return None, "caption is not UTF-8"
    except OSError as error:
        return None, f"caption cannot be read ({error.strerror})"


def _read_metadata(folder: Path) -> tuple[dict[str, str], list[tuple[int, str]]]:
    """file name -> caption by the imagefolder convention (file_name, text), and the rows that cannot be used."""
    captions: dict[str, str] = {}
    faults: list[tuple[int, str]] = []
    path = next((folder / name for name in METADATA if (folder / name).is_file()), None)
    if path is None:
        return captions, faults
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".csv":
                csv.field_size_limit(1 << 24)
                rows: Iterator[Any] = csv.DictReader(file)
            else:
                rows = (_json_or_none(line) for line in file if line.strip())
            for number, row in enumerate(rows, 1):
                name = row.get("file_name") if isinstance(row, dict) else None
                caption = (
                    next((row[key] for key in CAPTION_KEYS if isinstance(row.get(key), str)), None) if name else None
                )
                if isinstance(name, str) and caption is not None:
                    captions[posixpath.normpath(name)] = caption
                else:
                    faults.append((number, f"a row of {path.name} without file_name and text"))
    except (UnicodeDecodeError, OSError, csv.Error) as error:
        raise InputError(
            f"{path} cannot be read ({error}): save it as UTF-8, with file_name and text in each row"
        ) from error
    return captions, faults


def _json_or_none(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _tar_items(path: Path) -> Iterator[Item]:
    """WebDataset: members that share a name up to the first dot of its last part are one sample."""
    sample: dict[str, tarfile.TarInfo] = {}
    stem, fault = "", ""
    with open(path, "rb") as raw:
        try:
            with tarfile.open(fileobj=raw, mode="r:") as archive:
                for member in archive:
                    if not member.isfile():
                        if not member.isdir():
                            yield Item(f"{path.name}/{member.name}", (), fault="not a plain file in the archive")
                        continue
                    head, _, tail = member.name.rpartition("/")
                    base, _, extension = tail.partition(".")
                    name = f"{head}/{base}" if head else base
                    if name != stem and sample:
                        yield from _tar_sample(path, stem, sample, archive)
                        sample = {}
                    stem = name
                    sample["." + extension.lower()] = member
                yield from _tar_sample(path, stem, sample, archive)
                sample = {}
        except (tarfile.TarError, OSError, EOFError) as error:
            fault = f"the archive is damaged after this point ({error})"
        if fault:
            yield Item(f"{path.name}/{stem}", (), fault=fault)


def _tar_sample(path: Path, stem: str, sample: dict[str, tarfile.TarInfo], archive: tarfile.TarFile) -> Iterator[Item]:
    extension = next((e for e in sample if e in IMAGES), None)
    if extension is None:
        if sample:
            yield Item(f"{path.name}/{stem}", (), fault="no picture in the sample")
        return
    key, member = f"{path.name}/{stem}{extension}", sample[extension]
    caption, fault = None, ""
    try:
        if ".txt" in sample:
            caption = _member_bytes(archive, sample[".txt"]).decode("utf-8-sig")
        if not caption and ".json" in sample:
            about = json.loads(_member_bytes(archive, sample[".json"]))
            caption = next((about[k] for k in CAPTION_KEYS if isinstance(about.get(k), str)), None)
    except (ValueError, AttributeError):
        fault = "caption is not UTF-8 text or JSON"
    label = Path(stem).parent.name
    yield Item(key, ("span", str(path), member.offset_data, member.size), caption, label, fault)


def _member_bytes(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None
    return file.read()


def _table_batches(path: Path, columns: list[str] | None = None, group: int = 0) -> Iterator[tuple[int, int, Any]]:
    """(row group, number within it, record batch of at most 256 rows), from a group on; an Arrow file is one group."""
    pa = _pyarrow()
    damaged = (pa.ArrowException, OSError)
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            with parquet.ParquetFile(path) as file:
                for g in range(group, file.num_row_groups):
                    batches = file.iter_batches(batch_size=256, row_groups=[g], columns=columns)
                    yield from ((g, i, batch) for i, batch in enumerate(batches))
        else:
            with pa.memory_map(str(path)) as raw:
                try:
                    stream = pa.ipc.open_stream(raw)
                except pa.ArrowInvalid:
                    file = pa.ipc.open_file(raw)
                    stream = (file.get_batch(i) for i in range(file.num_record_batches))
                yield from ((0, i, batch) for i, batch in enumerate(stream))
    except damaged as error:
        raise OSError(f"cannot be read as Parquet or Arrow: {error}") from error


def _table_items(path: Path, name: str) -> Iterator[Item]:
    """The rows of a table; where it is damaged, what comes before that point and a fault."""
    row_number = 0
    try:
        for item in _table_rows(path, name):
            yield item
            row_number += 1
    except OSError as error:
        yield Item(f"{name}/{row_number:08d}", (), fault=f"the table is damaged after this point ({error})")


def _table_rows(path: Path, name: str) -> Iterator[Item]:
    pa = _pyarrow()
    picture, texts, wanted = "", [], None
    _, _, first = next(_table_batches(path), (0, 0, None))
    if first is not None:
        names = {name: first.schema.field(name).type for name in first.schema.names}
        pictures = [n for n, kind in names.items() if pa.types.is_struct(kind) or _is_bytes(pa, kind)]
        pictures.sort(key=lambda name: name not in ("image", "jpg", "png"))
        if not pictures:
            raise InputError(f"{path} has no column of pictures: it needs one of bytes, or of {{bytes, path}}")
        texts = [n for n in CAPTION_KEYS if n in names and _is_text(pa, names[n])]
        picture, wanted = pictures[0], [*texts[:1], *(["label"] if "label" in names else [])]
    row_number = 0
    for group, number, batch in _table_batches(path, wanted or [picture]):
        captions = batch.column(texts[0]).to_pylist() if texts else [None] * batch.num_rows
        labels = batch.column("label").to_pylist() if wanted and "label" in wanted else [""] * batch.num_rows
        for row in range(batch.num_rows):
            where = ("row", str(path), group, number, row, picture)
            label = "" if labels[row] is None else str(labels[row])
            yield Item(f"{name}/{row_number:08d}", where, captions[row], label)
            row_number += 1


def _is_bytes(pa: Any, kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_text(pa: Any, kind: Any) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


_open_table: dict[str, Any] = {}
"""The table that was last read from in this process, and where in it: rows mostly come in order."""


def _table_picture(path: str, group: int, number: int, row: int, column: str) -> bytes:
    here = _open_table.get("at", (None, -1, -1, None))
    if here[:3] != (path, group, number):
        goes_on = here[:2] == (path, group) and number > here[2]
        if not goes_on:
            _open_table["batches"] = _table_batches(Path(path), [column], group)
        for g, i, batch in _open_table["batches"]:
            if (g, i) == (group, number):
                _open_table["at"] = (path, group, number, batch)
                break
        else:
            raise OSError("the row is no longer there")
    cell = _open_table["at"][3].column(column)[row].as_py()
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(content, bytes):
        raise OSError("the cell holds no picture")
    return content


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise InputError("reading Parquet and Arrow needs pyarrow: pip install 'atoll[parquet]'") from error
    return pyarrow
