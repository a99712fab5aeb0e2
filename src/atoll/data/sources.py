"""Where images come from: folders, WebDataset tars, Parquet and Arrow files, and what is built in.

A source lists its items in an order that never changes and without reading an image; an item knows how to read its
own bytes, in any process. Names inside archives are labels: nothing is ever written where they say. Whatever is read
is a regular file inside the source and no larger than it may be: the rest is a fault of the item.
"""

import csv
import errno
import hashlib
import heapq
import os
import posixpath
import stat
import tarfile
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from io import BufferedReader, TextIOWrapper
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from atoll.data.builtin import NAMES, make
from atoll.data.images import CroppedImage, Rejected, Transform, read_image
from atoll.errors import InputError, printable, shown
from atoll.processes import die_with_parent
from atoll.storage import KINDS, open_regular, parse_json, read_bytes, real_path, reason_of

IMAGES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".jfif", ".avif"}
METADATA = ("metadata.jsonl", "metadata.csv")
CAPTION_KEYS = ("text", "caption", "TEXT", "prompt")
MAX_IMAGE = 256 << 20  # bytes of a file or a member
MAX_TEXT = 1 << 20  # bytes of a file or a member with a caption, and characters of a line of metadata
MAX_CAPTION = 10_000  # characters; what comes after them is cut off
MAX_LABEL = 255  # characters, as of a folder's name
MAX_METADATA = 4 << 30  # bytes: it is held in memory
MAX_TAR_HEADER = 1 << 20  # bytes: of long names and the like
MAX_TAR_END = 1 << 20  # zeros at the end of an archive, which is filled up to a whole record
NO_CAPTION = "no caption"
LEAVES = "a link that leads out of the folder"
AT_A_TIME = 32  # items handed to a process
DAMAGED = "is damaged after this point"  # said of an archive or a table: what follows is lost


class Item(NamedTuple):
    """One image to be: `where` says how to read it (a path, a span of a file, a row), `fault` why it cannot be."""

    key: str
    where: tuple[Any, ...]
    caption: str | None = None
    label: str = ""
    fault: str = ""


Sample = tuple[Item, CroppedImage | None]
Samples = Iterator[Sample]


@dataclass(frozen=True)
class Source:
    """A place with images. `template` makes captions of folder names: "a photo of a {label}"."""

    place: str
    kind: str = field(init=False)
    template: str | None = None
    num: int | None = None  # how many: the first of a built-in one, a random choice of any other
    size: int = 32
    seed: int = 0
    follow_links: bool = False  # to folders that lie within the source

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", _kind_of(self.place))
        if self.num is not None and self.num < 1:
            raise InputError(f"--num must be at least 1, but is {self.num}")
        if self.template is not None and self.kind == "built-in":
            raise InputError(f"{self.place} has captions of its own: leave --template out")
        if self.template is not None and "{label}" not in self.template:
            raise InputError(f"the template {self.template!r} must contain {{label}}, as in 'a photo of a {{label}}'")
        if self.follow_links and self.kind != "folder":
            raise InputError(f"--follow-links is for folders of images: leave it out for {self.place}")

    def items(self) -> Iterator[Item]:
        """All items, in their order; with `num`, so many of them, and all that have a fault."""
        left = self.num
        for item in self._all():
            if item.fault or left is None or self.kind == "built-in":
                yield item
            elif left and self._rank(item) <= self._last_rank:
                left -= 1
                yield item

    def _all(self) -> Iterator[Item]:
        listing = {"folder": self._folder, "tar": self._tars, "table": self._tables, "built-in": self._built_in}
        for item in listing[self.kind]():
            yield item if item.fault else self._captioned(item)

    def _rank(self, item: Item) -> int:
        """A number for an item, by which `num` of them are chosen: from its name and the seed alone."""
        name = f"{self.seed} {item.key}".encode("utf-8", "surrogateescape")
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")

    @cached_property
    def _last_rank(self) -> int:
        """The rank of the last item that is chosen."""
        least = heapq.nsmallest(self.num or 0, (self._rank(item) for item in self._all() if not item.fault))
        return least[-1] if least else -1

    def _captioned(self, item: Item) -> Item:
        caption = item.caption
        if not caption and self.template is not None and item.label:
            caption = self.template.replace("{label}", item.label.replace("_", " "))
        if caption is None:
            return item._replace(fault=NO_CAPTION)
        caption = " ".join(unicodedata.normalize("NFC", caption[:MAX_CAPTION]).split())
        return item._replace(caption=caption, fault="" if caption else "empty caption")

    def _folder(self) -> Iterator[Item]:
        root = Path(os.path.realpath(self.place))
        metadata: dict[Path, dict[str, str]] = {}  # of this folder and those above it
        for folder, names, why_not in _walk(root, self.follow_links):
            if why_not:
                yield Item(folder.relative_to(root).as_posix(), (), fault=why_not)
                continue
            metadata = {above: captions for above, captions in metadata.items() if folder.is_relative_to(above)}
            metadata[folder], faults = _read_metadata(folder, names, root)
            for number, bad in faults:
                key = (folder / f"metadata, row {number}").relative_to(root).as_posix()
                yield Item(key, (), fault=bad)
            beside = set(names)
            for name in names:
                path = folder / name
                if path.suffix.lower() not in IMAGES:
                    continue
                key = path.relative_to(root).as_posix()
                label = "" if folder == root else folder.name
                size, fault = _look(path, root)
                listed = (captions.get(path.relative_to(above).as_posix()) for above, captions in metadata.items())
                caption = next((c for c in listed if c is not None), None)
                if caption is None and not fault and (sidecar := path.with_suffix(".txt")).name in beside:
                    caption, fault = _read_sidecar(sidecar, root)
                yield Item(key, ("file", str(root), size), caption, label, fault)

    def _tars(self) -> Iterator[Item]:
        for path, name, root in self._files(lambda folder: folder.glob("*.tar")):
            try:
                yield from _tar_items(real_path(path, root), name)
            except OSError as error:
                yield Item(name, (), fault=f"the archive cannot be read ({reason_of(error)})")

    def _tables(self) -> Iterator[Item]:
        tables = (".parquet", ".arrow")
        for path, name, root in self._files(lambda folder: (p for p in folder.rglob("*") if p.suffix in tables)):
            row = 0
            try:
                for item in _table_items(real_path(path, root), name):
                    yield item
                    row += 1
            except OSError as error:
                reason = printable(reason_of(error), 200)
                yield Item(f"{name}/{row:08d}", (), fault=f"the table {DAMAGED} ({reason})")

    def _files(self, find: Callable[[Path], Iterable[Path]]) -> Iterator[tuple[Path, str, Path]]:
        """The files of a source, in order, with their names in it and the folder that their links may not leave."""
        place = Path(self.place)
        if place.is_dir():
            yield from ((path, path.relative_to(place).as_posix(), place) for path in sorted(find(place)))
        else:
            real = Path(os.path.realpath(place))  # the user's own link may lead anywhere
            yield real, place.name, real.parent

    def _built_in(self) -> Iterator[Item]:
        for i in range(len(make(self.place, self.num, self.size, self.seed))):
            where = ("built-in", self.place, self.num, self.size, self.seed, i)
            yield Item(f"{self.place}/{i:08d}", where, caption="?")

    def describe(self) -> dict[str, Any]:
        """For dataset.json; a path is named by its last part, since the rest belongs to one machine."""
        name = self.place if self.kind == "built-in" else Path(os.path.realpath(self.place)).name
        choices: dict[str, Any] = {} if self.kind == "built-in" else {"template": self.template}
        if self.kind == "built-in" or self.num is not None:
            choices |= {"num": self.num, "seed": self.seed}
        if self.follow_links:
            choices["follow_links"] = True
        return {"name": name, "kind": self.kind, **choices}


def read_items(items: list[Item], transform: Transform) -> list[Sample]:
    """Reads and decodes some items, in whatever process; an item without an image says why in its `fault`."""
    return [_read_item(item, transform) for item in items]


def _read_item(item: Item, transform: Transform) -> Sample:
    swallowed = item.fault == NO_CAPTION and item.where[0] == "span"  # the caption may be, by a size too large
    if item.fault and not swallowed:
        return item, None
    try:
        content: bytes | Image.Image
        match item.where:
            case ("file", root, _):
                content = read_bytes(Path(root) / item.key, MAX_IMAGE, Path(root))
            case ("span", path, start, length):
                with open_regular(Path(path)) as file:
                    content = _span(file, start, length, MAX_IMAGE, "image")
            case ("row", path, group, number, row, column):
                content = _table_image(path, group, number, row, column)
            case ("built-in", name, num, size, seed, i):
                content, caption, attributes = make(name, num, size, seed)[i]
                item = item._replace(caption=caption, label=", ".join(attributes.values()))
            case _:
                raise AssertionError(item.where)
        return item, None if item.fault else read_image(content, transform)
    except Rejected as error:
        return item._replace(fault=str(error)), None
    except OSError as error:
        reason = reason_of(error)
        return item._replace(fault=reason if DAMAGED in reason else f"cannot be read ({reason})"), None


@contextmanager
def readers(num_workers: int, transform: Transform, num_ahead: int) -> Iterator[Callable[[Iterable[Item]], Samples]]:
    """Yields a function that reads items in their order, by num_workers processes some `num_ahead` items ahead of it.

    With no workers it reads them in this process.
    """
    read = partial(read_items, transform=transform)

    def pieces(items: Iterable[Item]) -> Iterator[list[Item]]:
        source = iter(items)
        return iter(lambda: list(islice(source, AT_A_TIME)), [])

    if num_workers < 1:
        yield lambda items: chain.from_iterable(map(read, pieces(items)))
        return

    def read_ahead(items: Iterable[Item]) -> Samples:
        ahead: deque[Future[list[Sample]]] = deque()
        for piece in pieces(items):
            ahead.append(pool.submit(read, piece))
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


def _kind_of(place: str) -> str:
    path = Path(place)
    if place in NAMES:
        if os.path.lexists(path):
            raise InputError(f"{place} is both built in and here: write ./{place} for the one here, or go elsewhere")
        return "built-in"
    offered = f"give a folder, a .tar, a .parquet, or one of {', '.join(NAMES)}"
    if not place:
        raise InputError(f"the source is empty: {offered}")
    if not os.path.lexists(path):
        raise InputError(f"there is no {place}: {offered}")
    if not path.is_dir():
        kind = {".tar": "tar", ".parquet": "table", ".arrow": "table"}.get(path.suffix)
        if kind is None:
            advice = ": unpack it first" if path.suffix in (".gz", ".tgz", ".zip", ".bz2", ".xz") else ""
            raise InputError(f"{place} is neither a folder nor a .tar, .parquet or .arrow file{advice}")
        try:
            open_regular(Path(os.path.realpath(path))).close()
        except OSError as error:
            raise InputError(f"{place} cannot be read ({reason_of(error)}): {offered}") from error
        return kind
    if any(path.glob("*.tar")):
        return "tar"
    if any(any(path.glob(f"{level}*.{kind}")) for level in ("", "*/") for kind in ("parquet", "arrow")):
        return "table"
    return "folder"


# --- folders ------------------------------------------------------------------------------------------------------


def _walk(root: Path, follow: bool) -> Iterator[tuple[Path, list[str], str]]:
    """Each folder below root once, with its sorted file names, or the reason why a linked folder is not read.

    Linked folders come last: most lead to what has been read already.
    """
    seen: set[str] = set()
    todo, linked = [root], list[Path]()
    while todo or linked:
        if todo:
            top = todo.pop()
        else:
            top, real = linked.pop(0), ""
            try:
                real = str(real_path(top, root))
            except OSError:
                yield top, [], LEAVES
            if not real or real in seen or _is_ours(Path(real)):
                continue
            if not follow:
                yield top, [], "a linked folder, which --follow-links would read"
                continue
        for place, subfolders, names in os.walk(top):
            folder = Path(place)
            seen.add(os.path.realpath(folder))
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            linked += [folder / name for name in subfolders if (folder / name).is_symlink()]
            subfolders[:] = [name for name in subfolders if not _is_ours(folder / name)]
            yield folder, sorted(name for name in names if not name.startswith(".")), ""


def _is_ours(folder: Path) -> bool:
    """Whether a folder is a data set that was made of images, and no source of them."""
    return os.path.lexists(folder / "dataset.json")


def _look(path: Path, root: Path) -> tuple[int, str]:
    """The size of an image's file, and what is wrong with it, which is found without opening it."""
    try:
        about = path.lstat()
        if stat.S_ISLNK(about.st_mode):
            about = os.stat(real_path(path, root))
    except OSError as error:
        return 0, LEAVES if error.errno == errno.EPERM else f"cannot be read ({reason_of(error)})"
    if not stat.S_ISREG(about.st_mode):
        return 0, f"it is {KINDS.get(stat.S_IFMT(about.st_mode), 'not a regular file')}, not a file"
    return about.st_size, _too_large(about.st_size)


def _too_large(size: int) -> str:
    return f"larger than {MAX_IMAGE >> 20} MB" if size > MAX_IMAGE else ""


def _read_sidecar(path: Path, root: Path) -> tuple[str | None, str]:
    """A caption beside its image, and a fault if there is one that cannot be read."""
    try:
        return read_bytes(path, MAX_TEXT, root).decode("utf-8-sig"), ""
    except UnicodeDecodeError:
        return None, "caption is not UTF-8"
    except OSError as error:
        return None, f"caption cannot be read ({reason_of(error)})"


def _read_metadata(folder: Path, names: list[str], root: Path) -> tuple[dict[str, str], list[tuple[int, str]]]:
    """file name -> caption by the imagefolder convention (file_name, text), and the rows that cannot be used."""
    captions: dict[str, str] = {}
    faults: list[tuple[int, str]] = []
    path = next((folder / name for name in METADATA if name in names), None)
    if path is None:
        return captions, faults
    try:
        with open_regular(path, root) as raw, TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            if os.fstat(raw.fileno()).st_size > MAX_METADATA:
                raise OSError(errno.EFBIG, f"it is larger than {MAX_METADATA >> 30} GB")
            csv.field_size_limit(MAX_TEXT)
            lines = _lines(file)
            rows: Iterator[Any] = (
                csv.DictReader(lines) if path.suffix == ".csv" else (_json_or_none(line) for line in lines)
            )
            for number, row in enumerate(rows, 1):
                name = row.get("file_name") if isinstance(row, dict) else None
                caption = _caption_in(row) if name else None
                if isinstance(name, str) and caption is not None:
                    captions[posixpath.normpath(name)] = caption[:MAX_CAPTION]
                else:
                    faults.append((number, f"a row of {path.name} without file_name and text"))
    except (UnicodeDecodeError, OSError, csv.Error) as error:
        raise InputError(
            f"{path} cannot be read ({reason_of(error)}): save it as UTF-8, with file_name and text in each row"
        ) from error
    return captions, faults


def _lines(file: TextIOWrapper) -> Iterator[str]:
    """The lines that are not blank, none of which may fill the memory."""
    while line := file.readline(MAX_TEXT + 1):
        if len(line) > MAX_TEXT:
            raise OSError(errno.EFBIG, f"it has a line of more than {MAX_TEXT:,} characters")
        if line.strip():
            yield line


def _caption_in(row: dict[str, Any]) -> str | None:
    return next((row[key] for key in CAPTION_KEYS if isinstance(row.get(key), str)), None)


def _json_or_none(line: str) -> Any:
    try:
        return parse_json(line.encode())
    except ValueError:
        return None


# --- tars ---------------------------------------------------------------------------------------------------------


class _Headers:
    """A file as tarfile reads it: no header may ask for more than a header has."""

    def __init__(self, file: BufferedReader) -> None:
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_TAR_HEADER:
            raise tarfile.ReadError(f"a header of {shown(size)} bytes")
        return self._file.read(size)


def _tar_members(raw: BufferedReader) -> Iterator[tarfile.TarInfo]:
    """The members of an archive; raises ReadError and the like unless it has an end, and all lie before that."""
    size = os.fstat(raw.fileno()).st_size
    archive: Any = tarfile.TarFile(fileobj=_Headers(raw), mode="r")  # type: ignore[arg-type]
    last = -1
    while (member := archive.next()) is not None:
        archive.members.clear()  # which would grow with the archive
        if member.size < 0 or member.offset <= last:
            raise tarfile.ReadError("a member of less than no bytes")
        if member.isfile() and member.offset_data + member.size > size:
            raise tarfile.ReadError("it ends within a member")
        last = member.offset
        yield member
    # tarfile takes whatever is no header for the end, but the end is two blocks of zeros with nothing behind them.
    left = size - archive.offset
    if left < 2 * tarfile.BLOCKSIZE:
        raise tarfile.ReadError("it is truncated: the mark of its end is missing")
    raw.seek(archive.offset)
    if left > MAX_TAR_END or any(raw.read(left)):
        raise tarfile.ReadError("there is no header where the next one should be")


def _tar_items(path: Path, tar: str) -> Iterator[Item]:
    """WebDataset: members that share a name up to the first dot of its last part are one sample."""
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
                    yield from _tar_sample(path, f"{tar}/{stem}", sample, raw)
                    sample = {}
                stem = name
                sample["." + extension.lower()] = member
        except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError) as error:
            damage = f"the archive {DAMAGED} ({printable(reason_of(error), 200)})"
        yield from _tar_sample(path, f"{tar}/{stem}", sample, raw)
        if damage:
            yield Item(f"{tar}/{stem}", (), fault=damage)


def _tar_sample(path: Path, stem: str, sample: dict[str, tarfile.TarInfo], raw: BufferedReader) -> Iterator[Item]:
    extension = next((e for e in sample if e in IMAGES), None)
    if extension is None:
        if sample:
            yield Item(stem, (), fault="no picture in the sample")
        return
    member = sample[extension]
    caption, fault = None, _too_large(member.size)
    try:
        if ".txt" in sample:
            caption = _member_text(raw, sample[".txt"]).decode("utf-8-sig")
        if not caption and ".json" in sample:
            caption = _caption_in(parse_json(_member_text(raw, sample[".json"])))
    except (ValueError, AttributeError):
        fault = fault or "caption is not UTF-8 text or JSON"
    except OSError as error:
        fault = fault or reason_of(error)
    label = posixpath.basename(posixpath.dirname(stem.partition("/")[2]))
    yield Item(f"{stem}{extension}", ("span", str(path), member.offset_data, member.size), caption, label, fault)


def _member_text(raw: BufferedReader, member: tarfile.TarInfo) -> bytes:
    return _span(raw, member.offset_data, member.size, MAX_TEXT, "caption")


def _span(file: BufferedReader, start: int, length: int, limit: int, what: str) -> bytes:
    if length > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit:,} bytes")
    file.seek(start)
    content = file.read(length)
    if len(content) < length:
        raise OSError(errno.EIO, "the archive ends within it")
    if _holds_members(content):
        raise OSError(errno.EIO, f"the archive {DAMAGED}: this {what} is said to hold what comes after it")
    return content


def _holds_members(content: bytes) -> bool:
    """Whether headers of an archive lie where a size that is too large would make them part of a member."""
    at = content.find(b"ustar")
    while at >= 0:
        if at % tarfile.BLOCKSIZE == 257:
            block = content[at - 257 : at - 257 + tarfile.BLOCKSIZE]
            try:
                tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except tarfile.TarError:
                pass
            else:
                return True
        at = content.find(b"ustar", at + 1)
    return False


# --- tables -------------------------------------------------------------------------------------------------------


def _table_batches(path: Path, columns: list[str] | None = None, group: int = 0) -> Iterator[tuple[int, int, Any]]:
    """(row group, number within it, record batch of at most 256 rows), from a group on; an Arrow file is one group."""
    pa = _pyarrow()
    damaged = (pa.ArrowException, OSError, ValueError, IndexError, KeyError)
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            with open_regular(path) as raw, parquet.ParquetFile(raw) as file:
                for g in range(group, file.num_row_groups):
                    batches = file.iter_batches(batch_size=256, row_groups=[g], columns=columns)
                    yield from ((g, i, batch) for i, batch in enumerate(batches))
        else:
            open_regular(path).close()
            with pa.memory_map(str(path)) as mapped:
                try:
                    stream = pa.ipc.open_stream(mapped)
                except pa.ArrowInvalid:
                    file = pa.ipc.open_file(mapped)
                    stream = (file.get_batch(i) for i in range(file.num_record_batches))
                yield from ((0, i, batch) for i, batch in enumerate(stream))
    except damaged as error:
        raise OSError(f"cannot be read as Parquet or Arrow: {reason_of(error)}") from error


def _table_items(path: Path, name: str) -> Iterator[Item]:
    """The rows of a table. Raises OSError where it is damaged."""
    pa = _pyarrow()
    column, texts, wanted = "", [], None
    _, _, first = next(_table_batches(path), (0, 0, None))
    if first is not None:
        names = {name: first.schema.field(name).type for name in first.schema.names}
        columns = [n for n, kind in names.items() if pa.types.is_struct(kind) or _is_bytes(pa, kind)]
        columns.sort(key=lambda name: name not in ("image", "jpg", "png"))
        if not columns:
            raise InputError(f"{path} has no column of images: it needs one of bytes, or of {{bytes, path}}")
        texts = [n for n in CAPTION_KEYS if n in names and _is_text(pa, names[n])]
        column, wanted = columns[0], [*texts[:1], *(["label"] if "label" in names else [])]
    row_number = 0
    for group, number, batch in _table_batches(path, wanted or [column]):
        captions = batch.column(texts[0]).to_pylist() if texts else [None] * batch.num_rows
        labels = batch.column("label").to_pylist() if wanted and "label" in wanted else [""] * batch.num_rows
        for row in range(batch.num_rows):
            where = ("row", str(path), group, number, row, column)
            label = "" if labels[row] is None else str(labels[row])[:MAX_LABEL]
            yield Item(f"{name}/{row_number:08d}", where, captions[row], label)
            row_number += 1


def _is_bytes(pa: Any, kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_text(pa: Any, kind: Any) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


_open_table: dict[str, Any] = {}
"""The table that was last read from in this process, and where in it: rows mostly come in order."""


def _table_image(path: str, group: int, number: int, row: int, column: str) -> bytes:
    last = _open_table.get("at", (None, -1, -1, None))
    if last[:3] != (path, group, number):
        goes_on = last[:2] == (path, group) and number > last[2]
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
        raise OSError("the cell holds no image")
    if len(content) > MAX_IMAGE:
        raise OSError(_too_large(len(content)))
    return content


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise InputError("reading Parquet and Arrow needs pyarrow: pip install 'atoll[parquet]'") from error
    return pyarrow
