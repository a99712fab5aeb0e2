"""Reads the captions of a folder of images from the usual file formats.

    metadata.jsonl / .csv / .parquet    file_name and a caption in each row (Hugging Face's ImageFolder)
    captions.txt / .csv, results.csv    image,caption or image_name|comment_number|comment (Flickr8k, Flickr30k)
    Flickr8k.token.txt                  NAME.jpg#0, a tab, a caption (and results_20130124.token of Flickr30k)
    captions_*.json                     COCO's, also in the folder annotations/

Several rows for one image are several captions. A name in such a file is only looked up among the images that were
found in its folder; no file is opened because a row names it.
"""

import csv
import errno
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from itertools import chain
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from atoll.data.tables import column_names, table_batches
from atoll.errors import InputError, plural, shown
from atoll.storage import check_size, open_regular, parse_json, read_bytes, reason_of

CAPTION_KEYS = ("caption", "text", "TEXT", "prompt", "description", "comment")
FILE_KEYS = ("file_name", "filename", "image", "image_name", "file")
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
LISTS = ("captions.txt", "captions.csv", "results.csv", "Flickr8k.token.txt", "results_20130124.token")
MAX_CAPTIONS = 16  # per image; further ones are ignored
MAX_CAPTION = 10_000  # characters; longer captions are truncated
MAX_LINE = 1 << 20  # characters
MAX_METADATA = 1 << 30  # bytes of a file that is read line by line: names and captions are held in memory
MAX_COCO = 128 << 20  # bytes: COCO's own have 92 MB
MAX_ROWS = 20_000_000
MAX_BAD_ROWS = 100  # reported individually

Texts = tuple[str, ...]


@dataclass
class CaptionFile:
    """The captions that one file has for the images in its folder and below."""

    path: Path
    loose: bool  # whether its names match files in any folder below
    captions: dict[str, Texts] = field(default_factory=dict)
    bad_rows: list[int] = field(default_factory=list)  # numbers of rows without a name or a caption
    num_bad_rows: int = 0
    fault: str = ""
    _used: set[str] = field(default_factory=set)

    def add(self, number: int, name: object, texts: Texts) -> None:
        """Adds a row; numbers begin at 1."""
        if number > MAX_ROWS:
            raise OSError(errno.EFBIG, f"it has more than {MAX_ROWS:,} rows")
        if isinstance(name, str) and name and texts:
            key = normpath(name)
            self.captions[key] = (*self.captions.get(key, ()), *texts)[:MAX_CAPTIONS]
        else:
            self.num_bad_rows += 1
            if len(self.bad_rows) < MAX_BAD_ROWS:
                self.bad_rows.append(number)

    def find(self, image: PurePosixPath) -> Texts | None:
        """Returns the captions of an image, given by its path relative to the file's folder."""
        key = str(image)
        if key not in self.captions and self.loose:
            key = image.name
        if key not in self.captions:
            return None
        self._used.add(key)
        return self.captions[key]

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yields problems of the file itself, as (name, fault)."""
        name = self.path.name
        if self.fault:
            yield name, self.fault
        for number in self.bad_rows:
            yield f"{self.path.stem}, row {number}", f"a row of {name} without a file name or a caption"
        if more := self.num_bad_rows - len(self.bad_rows):
            yield f"{self.path.stem}, more rows", f"{plural(more, 'more row')} of {name} without file name or caption"

    def leftover(self) -> Iterator[tuple[str, str]]:
        """Yields one fault for all names without an image; call it after all images were looked up."""
        missing = [name for name in self.captions if name not in self._used]
        if missing:
            files = plural(len(missing), "file")
            fault = f"it names {files} not among the images in its folder, such as {shown(missing[0])}"
            yield self.path.name, fault


def caption_columns(names: Sequence[str], column: str | None = None) -> list[str]:
    """Returns the columns that hold captions: `column` if given, otherwise the first known name.

    If there is none, caption_0, caption_1 and so on are one caption each.
    """
    if column is not None:
        return [column] if column in names else []
    if known := [key for key in CAPTION_KEYS if key in names]:
        return known[:1]
    return sorted((name for name in names if re.fullmatch(r"caption_?[0-9]{1,3}", name)), key=lambda n: (len(n), n))


def captions_in(row: object, column: str | None = None) -> Texts:
    """Returns the captions in a dictionary; a blank one only if there is no other."""
    texts = {key: texts_of(value) for key, value in row.items()} if isinstance(row, dict) else {}
    full = [key for key, some in texts.items() if any(map(str.strip, some))]
    names = caption_columns(full, column) or caption_columns([key for key, some in texts.items() if some], column)
    return tuple(chain.from_iterable(texts[name] for name in names))[:MAX_CAPTIONS]


def texts_of(value: object) -> Texts:
    """Returns the captions in a value: a string, or a list of strings."""
    values = value if isinstance(value, list) else [value]
    return tuple(text[:MAX_CAPTION] for text in values[: 4 * MAX_CAPTIONS] if isinstance(text, str))[:MAX_CAPTIONS]


def note_choice(path: Path, names: Iterable[str], column: str | None) -> None:
    """Warns if another column could also hold the captions."""
    known = [key for key in CAPTION_KEYS if key in set(names)]
    if column is None and len(known) > 1:
        rest = " and ".join(known[1:])
        warnings.warn(
            f"{path.name} has columns {known[0]} and {rest}: {known[0]} is taken, --caption-column takes another",
            stacklevel=2,
        )


def read_caption_files(folder: Path, names: Sequence[str], root: Path, column: str | None) -> list[CaptionFile]:
    """Returns the parsed caption files of a folder; `names` are the names of all its files."""
    known = [name for name in METADATA if name in names]
    if len(known) > 1:
        warnings.warn(f"{folder.name} has {' and '.join(known)}: {known[0]} is taken", stacklevel=2)
    places = [folder / name for name in known[:1]]
    places += [folder / name for name in LISTS if name in names]
    if folder.name != "annotations" or folder == root:  # else read with the parent folder, which has the images
        places += sorted(folder / name for name in names if name.startswith("captions_") and name.endswith(".json"))
    annotations = folder / "annotations"
    if annotations.is_dir() and not annotations.is_symlink():
        places += sorted(annotations.glob("captions_*.json"))
    files = [_read(path, root, column) for path in places if not _is_sidecar(path)]
    return [file for file in files if file is not None]


def _is_sidecar(path: Path) -> bool:
    """Returns whether the file is the caption of a single image of the same name."""
    return path.suffix == ".txt" and any(path.with_suffix(end).exists() for end in (".jpg", ".jpeg", ".png", ".webp"))


def _read(path: Path, root: Path, column: str | None) -> CaptionFile | None:
    """Reads one file; returns None if its content is not what its name suggests."""
    file = CaptionFile(path, loose=path.name not in METADATA)
    try:
        if path.suffix == ".parquet":
            _read_parquet(file, root, column)
        elif path.suffix == ".json":
            _read_coco(file, read_bytes(path, MAX_COCO, root).decode("utf-8-sig"), column)
        else:
            check_size(path, MAX_METADATA, root)
            with open_regular(path, root) as raw, TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
                lines = _lines(text)
                if path.suffix == ".jsonl":
                    for number, line in enumerate(lines, 1):
                        row = _json_or_none(line)
                        if number == 1 and isinstance(row, dict):
                            note_choice(path, row, column)
                        file.add(number, _name_in(row), captions_in(row, column))
                elif ".token" in path.name:
                    for number, line in enumerate(lines, 1):
                        name, tab, caption = line.partition("\t")
                        file.add(number, name.rpartition("#")[0] or name, texts_of(caption) if tab else ())
                elif not _read_csv(file, lines, column):
                    return None
    except (ValueError, OSError, csv.Error, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path} cannot be read ({reason_of(error)}): save it as UTF-8, with file_name and text in each row"
        ) from error
    if column is not None and not file.captions and (file.num_bad_rows or file.fault):
        raise InputError(f"{path} has no captions in {shown(column)}: give another --caption-column, or leave it out")
    return file


def _lines(file: TextIOWrapper) -> Iterator[str]:
    """Yields the non-blank lines."""
    while line := file.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise OSError(errno.EFBIG, f"a line is longer than {MAX_LINE:,} characters")
        if line.strip():
            yield line


def _json_or_none(line: str) -> Any:
    try:
        return parse_json(line.encode(errors="replace"))
    except ValueError:
        return None


def _name_in(row: object) -> object:
    values = (row.get(key) for key in FILE_KEYS) if isinstance(row, dict) else ()
    return next((value for value in values if isinstance(value, str)), None)


def _no_columns(names: Sequence[str]) -> str:
    return (
        f"it has the columns {shown(list(names))}, not one of {', '.join(FILE_KEYS)} and one of "
        f"{', '.join(CAPTION_KEYS)}: name that of captions with --caption-column"
    )


def _read_csv(file: CaptionFile, lines: Iterator[str], column: str | None) -> bool:
    """Reads a table whose first line names its columns; returns False if it is not a list of captions."""
    first = next(lines, "")
    mark = max(",|\t;", key=first.count)
    # In bar-separated files a leading quote is part of the caption.
    rows = csv.reader(
        chain([first], lines), delimiter=mark, quoting=csv.QUOTE_MINIMAL if mark in ",;" else csv.QUOTE_NONE
    )
    names = [name.strip() for name in next(rows, [])]
    if not set(names) & set(FILE_KEYS) or not caption_columns(names, column):
        if not file.loose:
            file.fault = _no_columns(names)
            return True
        if file.path.stem == "captions":
            example = "its first line must name its columns, as in image,caption"
            warnings.warn(f"{file.path.name} is not read: {example}", stacklevel=2)
        return False
    note_choice(file.path, names, column)
    for number, cells in enumerate(rows, 1):
        head, rest = cells[: len(names) - 1], cells[len(names) - 1 :]
        row = dict(zip(names, [*head, mark.join(rest)] if rest else head, strict=False))  # an unquoted delimiter
        file.add(number, _name_in(row), captions_in(row, column))
    return True


def _read_parquet(file: CaptionFile, root: Path, column: str | None) -> None:
    check_size(file.path, MAX_METADATA, root)
    names = column_names(file.path, root)
    columns, name = caption_columns(names, column), next((key for key in FILE_KEYS if key in names), None)
    if name is None or not columns:
        file.fault = _no_columns(names)
        return
    note_choice(file.path, names, column)
    number = 0
    for _, _, batch in table_batches(file.path, [name, *columns], root=root):
        for row in batch.to_pylist():
            number += 1
            file.add(number, row[name], tuple(chain.from_iterable(texts_of(row[key]) for key in columns)))


def _read_coco(file: CaptionFile, content: str, column: str | None) -> None:
    names: dict[int | str, str] = {}
    captions: dict[int | str, Texts] = {}

    def take(entry: dict[str, object]) -> None:
        """Keeps only the needed fields of each parsed object: as a Python object it takes twenty times its text."""
        match entry:
            case {"image_id": int() | str() as image}:
                captions[image] = (*captions.get(image, ()), *captions_in(entry, column))[:MAX_CAPTIONS]
            case {"id": int() | str() as image, "file_name": str() as name}:
                names[image] = name

    if json.loads(content, object_hook=take) is not None:
        raise ValueError("it is no table of keys and values")
    for number, (image, texts) in enumerate(captions.items(), 1):
        file.add(number, names.get(image), texts)
    if not captions:
        file.fault = "it has no annotations of images as those of COCO's captions"
