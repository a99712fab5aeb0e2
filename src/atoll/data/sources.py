"""Sources of images: folders, WebDataset tars, Parquet and Arrow files, and the built-in data sets.

A source lists its items in a fixed order without reading any image; an item can be read in any process. Names inside
archives are only labels, never paths to write to. Only regular files inside the source and within the size limits are
read; anything else becomes a fault of the item.
"""

import errno
import hashlib
import heapq
import json
import os
import posixpath
import tarfile
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from itertools import islice
from multiprocessing import get_context
from pathlib import Path, PurePosixPath
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple, TypeVar

from PIL import Image

from atoll.data.builtin import NAMES, make
from atoll.data.captions import (
    MAX_CAPTION,
    MAX_CAPTIONS,
    CaptionFile,
    Texts,
    caption_columns,
    captions_in,
    note_choice,
    read_caption_files,
    texts_of,
)
from atoll.data.images import CroppedImage, Rejected, Transform, read_image
from atoll.data.tables import Bounded, column_names, pyarrow, table_batches
from atoll.errors import InputError, StoreError, printable, shown
from atoll.object_store import StorePath, is_url, place_of
from atoll.processes import die_with_parent
from atoll.storage import exists, open_regular, parse_json, read_bytes, real_path, reason_of, resolved

IMAGES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".jfif", ".avif"}
TABLES = (".parquet", ".arrow")
MAX_IMAGE = 256 << 20  # bytes of a file or archive member
MAX_TEXT = 1 << 20  # bytes of a file or archive member with a caption
MAX_LABEL = 255  # characters, as for a folder's name
MAX_TAR_HEADER = 1 << 20  # bytes, for long names and the like
MAX_TAR_END = 1 << 20  # zeros at the end of an archive, which is padded to a whole record
MAX_KEPT = 100_000  # items held in memory, half a kilobyte each
AT_A_TIME = 32  # items per task of a worker process
NUM_REQUESTS = 16  # concurrent requests of one process to an object store
DAMAGED = "is damaged after this point"  # of an archive or table, whose remainder is lost

T = TypeVar("T")


class Item(NamedTuple):
    """One image of a source: `where` says how to read it (a path, a span of a file, a row), `fault` why it cannot be
    read."""

    key: str
    where: tuple[Any, ...]
    caption: str | None = None
    label: str = ""
    fault: str = ""
    more: Texts = ()  # further captions


Sample = tuple[Item, CroppedImage | None]
Samples = Iterator[Sample]
Reader = Callable[[Iterable[Item]], Samples]


@dataclass(frozen=True)
class Source:
    """A source of images. `template` makes captions from folder names: "a photo of a {label}".

    `caption_column` is the key or column with captions, by default the first of the usual names.
    """

    place: str
    template: str | None = None
    num: int | None = None  # how many: the first ones of a built-in source, a random selection of any other
    size: int = 32
    seed: int = 0
    caption_column: str | None = None

    def __post_init__(self) -> None:
        if self.num is not None and self.num < 1:
            raise InputError(f"--num must be at least 1, but is {self.num}")
        if self.kind == "built-in" and self.template is not None:
            raise InputError(f"{self.place} has captions of its own: leave --template out")
        if self.kind == "built-in" and self.caption_column is not None:
            raise InputError(f"{self.place} has captions of its own: leave --caption-column out")
        if self.template is not None and "{label}" not in self.template:
            raise InputError(f"the template {self.template!r} must contain {{label}}, as in 'a photo of a {{label}}'")

    @cached_property
    def kind(self) -> str:
        """Returns built-in, folder, tar or table."""
        return _kind_of(self.place)

    def items(self) -> Iterator[Item]:
        """Yields the items in order; with `num`, that many valid ones, and all that have a fault."""
        if self.num is None or self.kind == "built-in":
            return self._all()
        if self.num <= MAX_KEPT:
            return iter(self._few)
        return (item for item in self._all() if item.fault or self._rank(item) in self._chosen)

    @cached_property
    def _few(self) -> list[Item]:
        """Returns what `items` yields, cached, since listing a folder of a million images takes minutes."""
        faults, heap = list[tuple[int, Item]](), list[tuple[int, int, Item]]()
        for place, item in enumerate(self._all()):
            if item.fault:
                faults.append((place, item))
            else:
                full = len(heap) == self.num
                (heapq.heappushpop if full else heapq.heappush)(heap, (-self._rank(item), place, item))
        return [item for _, item in sorted([*faults, *((place, item) for _, place, item in heap)])]

    @cached_property
    def _chosen(self) -> set[int]:
        """Returns the ranks of the `num` selected items, if these are too many to keep in memory."""
        return set(heapq.nsmallest(self.num or 0, (self._rank(item) for item in self._all() if not item.fault)))

    def _rank(self, item: Item) -> int:
        """Returns a hash of an item's name and the seed, by which `num` items are selected."""
        name = f"{self.seed} {item.key}".encode("utf-8", "surrogateescape")
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")

    def _all(self) -> Iterator[Item]:
        """Yields all items; the listing of an object store is cached in a temporary file, since it is slow."""
        if not isinstance(place_of(self.place), StorePath):
            yield from self._list()
        elif "listing" in self.__dict__:
            with open(self.__dict__["listing"].name, encoding="ascii") as file:
                for key, where, caption, label, fault, more in map(json.loads, file):
                    yield Item(key, tuple(where), caption, label, fault, tuple(more))
        else:
            listing = NamedTemporaryFile("w", encoding="ascii", prefix="atoll-", suffix=".jsonl")  # noqa: SIM115
            for item in self._list():
                listing.write(json.dumps(item) + "\n")
                yield item
            listing.flush()
            self.__dict__["listing"] = listing  # deleted with the source

    def _list(self) -> Iterator[Item]:
        place = place_of(self.place)
        if self.kind == "built-in":
            for i in range(len(make(self.place, self.num, self.size, self.seed))):
                where = ("built-in", self.place, self.num, self.size, self.seed, i)
                yield Item(f"{self.place}/{i:08d}", where, caption="?")
        elif self.kind == "folder":
            read_json = self.template is None or self.caption_column is not None
            yield from map(self._captioned, _folder_items(resolved(place), self.caption_column, read_json))
        else:
            list_items = _tar_items if self.kind == "tar" else _table_items
            root, paths = resolved(place).parent, [resolved(place)]  # a link given by the user may lead anywhere
            if place.is_dir():
                found = place.glob("*.tar") if self.kind == "tar" else place.rglob("*")
                root, paths = place, sorted(path for path in found if path.suffix in (".tar", *TABLES))
            for path in paths:
                name = path.relative_to(place).as_posix() if place.is_dir() else place.name
                try:
                    yield from map(self._captioned, list_items(real_path(path, root), name, self.caption_column))
                except OSError as error:
                    yield Item(name, (), fault=f"cannot be read ({reason_of(error)})")

    def _captioned(self, item: Item) -> Item:
        if item.fault:
            return item
        texts = [text for text in (item.caption, *item.more) if text is not None]
        if not any(texts) and self.template is not None and item.label:
            texts = [self.template.replace("{label}", item.label.replace("_", " "))]
        if not texts:
            return item._replace(fault="no caption")
        plain = (" ".join(unicodedata.normalize("NFC", text[:MAX_CAPTION]).split()) for text in texts[:MAX_CAPTIONS])
        first, *more = list(dict.fromkeys(filter(None, plain))) or [""]
        return item._replace(caption=first, more=tuple(more), fault="" if first else "empty caption")

    def describe(self) -> dict[str, Any]:
        """Returns the source's entry in dataset.json; of a path only the last part, the rest being machine-specific."""
        built_in = self.kind == "built-in"
        name = {"name": self.place if built_in else resolved(place_of(self.place)).name, "kind": self.kind}
        template = {} if built_in else {"template": self.template}
        template |= {} if self.caption_column is None else {"caption_column": self.caption_column}
        return name | template | ({"num": self.num, "seed": self.seed} if built_in or self.num is not None else {})


def _kind_of(place: str) -> str:
    path, offered = place_of(place), f"give a folder, a .tar, a .parquet, or one of {', '.join(NAMES)}"
    if place in NAMES:
        if os.path.lexists(path):
            raise InputError(f"{place} is both built in and here: write ./{place} for the one here, or go elsewhere")
        return "built-in"
    if not place or not (exists(path) or path.is_dir()):
        raise InputError(f"there is no {place}: {offered}" if place else f"the source is empty: {offered}")
    if path.is_dir():
        if any(path.glob("*.tar")):
            return "tar"
        tables = (table for level in ("*", "*/*") for table in path.glob(level) if table.suffix in TABLES)
        return "folder" if all(_is_metadata(table, path) for table in tables) else "table"
    if path.suffix not in (".tar", *TABLES):
        advice = ": unpack it first" if path.suffix in (".gz", ".tgz", ".zip", ".bz2", ".xz") else ""
        raise InputError(f"{place} is neither a folder nor a .tar, .parquet or .arrow file{advice}")
    try:
        open_regular(resolved(path)).close()
    except OSError as error:
        raise InputError(f"{place} cannot be read ({reason_of(error)}): {offered}") from error
    return "tar" if path.suffix == ".tar" else "table"


def _is_metadata(path: Path, root: Path) -> bool:
    """Returns whether a table is metadata for image files beside it."""
    try:
        return path.name == "metadata.parquet" and "file_name" in column_names(path, root)
    except OSError:
        return True  # reading it reports the error


# --- reading ------------------------------------------------------------------------------------------------------


def read_items(items: Iterable[Item], transform: Transform) -> list[Sample]:
    """Reads and decodes some items, in any process; an item that yields no image gives the reason in its `fault`."""
    items = list(items)
    # Requests to a store run concurrently to hide latency; for tables one request returns many rows anyway.
    if any(item.where and item.where[0] != "row" and is_url(item.where[1]) for item in items):
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            return [_decode(item, content, transform) for item, content in list(pool.map(_load, items))]
    return [_decode(*_load(item), transform) for item in items]


def _load(item: Item) -> tuple[Item, bytes | Image.Image | None]:
    """Reads an item's stored bytes, or draws a built-in image."""
    if item.fault:
        return item, None
    try:
        match item.where:
            case ("file", root, _):
                return item, read_bytes(place_of(root) / item.key, MAX_IMAGE, place_of(root))
            case ("span", path, start, length):
                return item, _read_span(place_of(path), start, length)
            case ("row", path, group, number, row, column):
                return item, _table_image(path, group, number, row, column)
            case (_, name, num, size, seed, i):
                image, caption, attributes = make(name, num, size, seed)[i]
                return item._replace(caption=caption, label=", ".join(attributes.values())), image
    except OSError as error:
        return item._replace(fault=f"cannot be read ({reason_of(error)})"), None
    raise AssertionError(item.where)


def _decode(item: Item, content: bytes | Image.Image | None, transform: Transform) -> Sample:
    if content is None:
        return item, None
    try:
        return item, read_image(content, transform)
    except Rejected as error:
        return item._replace(fault=str(error)), None


def batched(values: Iterable[T], num: int) -> Iterator[list[T]]:
    """Yields lists of `num` values; the last may have fewer."""
    iterator = iter(values)
    return iter(lambda: list(islice(iterator, num)), [])


@contextmanager
def readers(num_workers: int, transform: Transform, num_ahead: int) -> Iterator[Reader]:
    """Yields a function that reads items in order, with `num_workers` processes reading up to `num_ahead` items ahead.

    Without workers, it reads in this process.
    """
    if num_workers < 1:
        yield lambda items: (read for some in batched(items, AT_A_TIME) for read in read_items(some, transform))
        return

    def read_ahead(items: Iterable[Item]) -> Samples:
        ahead: deque[Future[list[Sample]]] = deque()
        for some in batched(items, AT_A_TIME):
            ahead.append(pool.submit(read_items, some, transform))
            if len(ahead) > max(num_workers, num_ahead // AT_A_TIME):
                yield from ahead.popleft().result()
        for future in ahead:
            yield from future.result()

    try:
        with ProcessPoolExecutor(num_workers, get_context("spawn"), die_with_parent) as pool:
            yield read_ahead
    except BrokenProcessPool as error:
        raise InputError(
            "a process that reads images was killed, most likely for lack of memory: "
            "rerun the command with --workers 1 to resume"
        ) from error


# --- folders ------------------------------------------------------------------------------------------------------


def _folder_items(root: Path, column: str | None, read_json: bool) -> Iterator[Item]:
    """Yields images with captions from files beside them, or from caption files in their folder or its parents."""
    files: dict[Path, list[CaptionFile]] = {}  # of this folder and its parents
    folders, links = set[Path](), list[Path]()
    for folder, subfolders, names in _walk(root):
        folders.add(folder)
        visible = sorted(name for name in subfolders if not name.startswith("."))
        links += [folder / name for name in visible if (folder / name).is_symlink()]
        # Skip prepared data sets.
        subfolders[:] = [name for name in visible if not exists(folder / name / "dataset.json")]
        for done in [above for above in files if not folder.is_relative_to(above)]:
            for file in files.pop(done):
                yield from _faults(file, root, file.leftover())
        if read := read_caption_files(folder, list(names), root, column):
            files[folder] = read
            for file in read:
                yield from _faults(file, root, file.faults())
        for path in (folder / name for name in sorted(names)):
            if path.suffix.lower() in IMAGES and not path.name.startswith("."):
                listed = [  # query all files, so that each can report its names without an image
                    file.find(PurePosixPath(path.relative_to(above))) for above, some in files.items() for file in some
                ]
                texts = next((texts for texts in listed if texts is not None), ())
                label = "" if folder == root else folder.name
                yield _file_item(path, root, texts, label, column, read_json, names)
    for file in (file for some in files.values() for file in some):
        yield from _faults(file, root, file.leftover())
    for link in links:
        if not exists(link / "dataset.json") and resolved(link) not in folders:
            yield Item(link.relative_to(root).as_posix(), (), fault="a linked folder: give it as a source of its own")


def _walk(root: Path) -> Iterator[tuple[Path, list[str], dict[str, int | None]]]:
    """Yields each folder, its subfolders (the caller may remove some, as with `os.walk`), and its files with sizes, if
    known."""
    if isinstance(root, StorePath):
        yield from root.walk_store()  # type: ignore[misc]
    else:
        for place, subfolders, names in os.walk(root):
            yield Path(place), subfolders, dict.fromkeys(names)


def _faults(file: CaptionFile, root: Path, faults: Iterable[tuple[str, str]]) -> Iterator[Item]:
    for name, fault in faults:
        yield Item((file.path.parent / name).relative_to(root).as_posix(), (), fault=fault)


def _file_item(
    path: Path,
    root: Path,
    texts: Texts,
    label: str,
    column: str | None,
    read_json: bool,
    names: Mapping[str, int | None],
) -> Item:
    """Returns an image of a folder, with captions from a sidecar file unless given; `names` are all the folder's
    files."""
    size, fault = names[path.name] or 0, ""
    try:
        if not isinstance(path, StorePath):
            size = (real_path(path, root) if path.is_symlink() else path).stat().st_size
        # .txt is the usual sidecar, but a caption column can only mean a .json.
        for sidecar in (path.with_suffix(end) for end in ((".txt", ".json") if column is None else (".json", ".txt"))):
            if texts or (sidecar.suffix == ".json" and not read_json) or sidecar.name not in names:
                continue
            content = read_bytes(sidecar, MAX_TEXT, root)
            is_text = sidecar.suffix == ".txt"
            texts = (content.decode("utf-8-sig"),) if is_text else captions_in(parse_json(content), column)
    except StoreError:
        raise
    except (OSError, ValueError) as error:
        fault = f"image or caption cannot be read ({reason_of(error)})"
    return _item(path.relative_to(root).as_posix(), ("file", str(root), size), texts, label, fault)


def _item(key: str, where: tuple[Any, ...], texts: Texts, label: str, fault: str = "") -> Item:
    return Item(key, where, texts[0] if texts else None, label, fault, texts[1:])


# --- tars ---------------------------------------------------------------------------------------------------------


def _tar_items(path: Path, tar: str, column: str | None) -> Iterator[Item]:
    """Yields the samples of a WebDataset: members whose names agree up to the first dot of the last component."""
    sample: dict[str, tarfile.TarInfo] = {}
    stem, damage = "", ""
    with open_regular(path) as raw:
        try:
            for member in _tar_members(raw):
                if not member.isfile() or member.issparse():
                    if not member.isdir():
                        yield Item(f"{tar}/{member.name}", (), fault="not a plain file in the archive")
                    continue
                head, _, tail = member.name.rpartition("/")
                base, _, extension = tail.partition(".")
                name = f"{head}/{base}" if head else base
                if name != stem and sample:
                    yield _tar_sample(path, f"{tar}/{stem}", sample, raw, column)
                    sample = {}
                stem = name
                sample["." + extension.lower()] = member
        except StoreError:
            raise
        except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError) as error:
            damage = f"the archive {DAMAGED} ({printable(reason_of(error), 200)})"
        if sample:
            yield _tar_sample(path, f"{tar}/{stem}", sample, raw, column)
        if damage:
            yield Item(f"{tar}/{stem}", (), fault=damage)


def _tar_members(raw: BufferedReader) -> Iterator[tarfile.TarInfo]:
    """Yields the members of an archive; raises ReadError and the like if it is truncated or damaged."""
    size = raw.seek(0, os.SEEK_END)
    raw.seek(0)
    archive: Any = tarfile.TarFile(fileobj=Bounded(raw, MAX_TAR_HEADER), mode="r")
    last = -1
    while (member := archive.next()) is not None:
        archive.members.clear()  # tarfile keeps every member, so this would grow without limit
        if member.size < 0 or member.offset <= last:
            raise tarfile.ReadError("a member of less than no bytes")
        if member.isfile() and member.offset_data + member.size > size:
            raise tarfile.ReadError("it ends within a member")
        last = member.offset
        yield member
    # tarfile treats any invalid header as the end, but a real end is two blocks of zeros with nothing after them.
    left = size - archive.offset
    if left < 2 * tarfile.BLOCKSIZE:
        raise tarfile.ReadError("it is truncated: the mark of its end is missing")
    raw.seek(archive.offset)
    if left > MAX_TAR_END or any(raw.read(left)):
        raise tarfile.ReadError("there is no header where the next one should be")


def _tar_sample(
    path: Path, stem: str, sample: dict[str, tarfile.TarInfo], raw: BufferedReader, column: str | None
) -> Item:
    extension = next((e for e in sample if e in IMAGES), None)
    if extension is None:
        return Item(stem, (), fault="no picture in the sample")
    member = sample[extension]
    texts, fault = Texts(), ""
    try:
        for end in (".txt", ".json") if column is None else (".json", ".txt"):
            if not any(texts) and (about := sample.get(end)):
                content = _span(raw, about.offset_data, about.size, MAX_TEXT)
                is_text = end == ".txt"
                texts = (content.decode("utf-8-sig"),) if is_text else captions_in(parse_json(content), column)
    except StoreError:
        raise
    except (OSError, ValueError) as error:
        fault = f"caption cannot be read ({printable(reason_of(error), 200)})"
    label = posixpath.basename(posixpath.dirname(stem.partition("/")[2]))
    return _item(f"{stem}{extension}", ("span", str(path), member.offset_data, member.size), texts, label, fault)


def _read_span(path: Path, start: int, length: int) -> bytes:
    """Returns the bytes of an archive member."""
    if isinstance(path, StorePath) and length <= MAX_IMAGE:
        return path.get_range(start, length)
    with open_regular(path) as file:
        return _span(file, start, length, MAX_IMAGE)


def _span(file: BufferedReader, start: int, length: int, limit: int) -> bytes:
    if length > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit:,} bytes")
    file.seek(start)
    content = file.read(length)
    if len(content) < length:
        raise OSError(errno.EIO, "the archive ends within it")
    return content


# --- tables -------------------------------------------------------------------------------------------------------


def _table_items(path: Path, name: str, column: str | None) -> Iterator[Item]:
    """Yields the rows of a table, and a fault where it is damaged."""
    row_number = 0
    try:
        _, _, first = next(table_batches(path), (0, 0, None))
        if first is None:
            return
        image, texts, label = _table_columns(path, first.schema, column)
        wanted = [*texts, *([label] if label else [])] or [image]
        for group, number, batch in table_batches(path, wanted):
            captions = [batch.column(text).to_pylist() for text in texts]
            labels = batch.column(label).to_pylist() if label else [None] * batch.num_rows
            for row in range(batch.num_rows):
                where = ("row", str(path), group, number, row, image)
                row_label = "" if labels[row] is None else str(labels[row])[:MAX_LABEL]
                own = tuple(text for values in captions for text in texts_of(values[row]))
                yield _item(f"{name}/{row_number:08d}", where, own, row_label)
                row_number += 1
    except OSError as error:
        yield Item(f"{name}/{row_number:08d}", (), fault=f"the table {DAMAGED} ({printable(reason_of(error), 200)})")


def _table_columns(path: Path, schema: Any, column: str | None) -> tuple[str, list[str], str | None]:
    """Returns the columns that hold images, captions and labels."""
    types = pyarrow().types
    kinds = {name: schema.field(name).type for name in schema.names}
    images = [n for n, k in kinds.items() if types.is_struct(k) or types.is_binary(k) or types.is_large_binary(k)]
    if not images:
        raise InputError(f"{path} has no column of images: it needs one of bytes, or of {{bytes, path}}")
    image = min(images, key=lambda name: name not in ("image", "jpg", "png"))
    parts = {n: k.value_type if types.is_list(k) or types.is_large_list(k) else k for n, k in kinds.items()}
    parts |= {name: kind.value_type for name, kind in parts.items() if types.is_dictionary(kind)}
    names = [name for name, kind in parts.items() if types.is_string(kind) or types.is_large_string(kind)]
    if column is not None and column not in names:
        have = ", ".join(names) or "none"
        raise InputError(
            f"{path} has no column {shown(column)} of texts (it has {have}): give another --caption-column"
        )
    note_choice(path, names, column)
    return image, caption_columns(names, column), "label" if "label" in kinds else None


_open_table: dict[str, Any] = {}
"""This process's current table and position in it, cached since rows are mostly read in order."""


def _table_image(path: str, group: int, number: int, row: int, column: str) -> bytes:
    last = _open_table.get("at", (None, -1, -1, None))
    if last[:3] != (path, group, number):
        if last[:2] != (path, group) or number < last[2]:
            _open_table["batches"] = table_batches(place_of(path), [column], group)
        batch = next((batch for g, i, batch in _open_table["batches"] if (g, i) == (group, number)), None)
        if batch is None:
            raise OSError("the row is no longer there")
        _open_table["at"] = (path, group, number, batch)
    cell = _open_table["at"][3].column(column)[row].as_py()
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(content, bytes):
        raise OSError("the cell holds no image")
    return content
