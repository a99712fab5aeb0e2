"""Atomic writes, safe reads of untrusted files, and folder locks.

Files from others are opened only by `open_regular`: only regular files, only inside their folder. So a FIFO cannot hang
a reader, and a link cannot make it read, copy or publish a private file.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError

from atoll.errors import InputError, StoreError
from atoll.object_store import StorePath

MAX_JSON = 64 << 20  # bytes; a tokenizer with a quarter of a million tokens has 20 MB
MAX_DEPTH = 64  # of nested objects
KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
         stat.S_IFDIR: "a folder"}  # fmt: skip


# --- reading ------------------------------------------------------------------------------------------------------


def open_regular(path: Path, root: Path | None = None) -> BufferedReader:
    """Opens a regular file inside `root`, by default its parent folder; raises OSError for anything else."""
    if isinstance(path, StorePath):
        return path.open_reader()
    real = real_path(path, root)
    kind = stat.S_IFMT(os.stat(real).st_mode)
    if kind == stat.S_IFREG:
        handle = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
        kind = stat.S_IFMT(os.fstat(handle).st_mode)  # of the opened file, in case the path was replaced meanwhile
        if kind == stat.S_IFREG:
            return open(handle, "rb")
        os.close(handle)
    raise OSError(errno.EINVAL, f"it is {KINDS.get(kind, 'not a regular file')}, not a file", str(path))


def resolved(path: str | Path) -> Path:
    """Returns the absolute path with links resolved; unlike in pathlib, a link to itself is left unresolved."""
    if isinstance(path, StorePath):
        return path  # stores have no links
    return Path(os.path.realpath(path))


def real_path(path: Path, root: Path | None = None) -> Path:
    """Returns the path with links resolved; raises OSError if they lead out of `root`."""
    real, home = resolved(path), resolved(path.parent if root is None else root)
    if not any(real.is_relative_to(folder) for folder in (home, *_hub_blobs(home))):
        raise OSError(errno.EPERM, "it is a link that leaves its folder", str(path))
    return real


def _hub_blobs(home: Path) -> Iterator[Path]:
    """Yields the Hugging Face hub's blob folders, to which the links in its snapshots point."""
    for folder in (home, *home.parents):
        if folder.name == "snapshots" and folder.parent.name.startswith(("models--", "datasets--")):
            yield folder.parent / "blobs"


def read_bytes(path: Path, limit: int, root: Path | None = None) -> bytes:
    """Returns a file's content; raises OSError before reading if it is larger than `limit` bytes."""
    if isinstance(path, StorePath):
        return path.get(limit)
    check_size(path, limit, root)
    with open_regular(path, root) as file:
        return file.read(limit)  # limited in case it has grown meanwhile


def check_size(path: Path, limit: int, root: Path | None = None) -> None:
    """Raises OSError if a file is larger than `limit` bytes."""
    if size_of(path, root) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit:,} bytes", str(path))


def size_of(path: Path, root: Path | None = None) -> int:
    """Returns the size of a file in bytes; raises OSError."""
    if isinstance(path, StorePath):
        with path.open_reader() as file:
            return file.seek(0, os.SEEK_END)
    return os.stat(real_path(path, root)).st_size


def read_json(path: Path, advice: str, root: Path | None = None) -> dict[str, Any]:
    """Returns the JSON object in a file; `advice` ends the error message if there is none."""
    try:
        values = parse_json(read_bytes(path, MAX_JSON, root))
    except FileNotFoundError as error:
        raise InputError(f"there is no {path}: {advice}") from error
    except StoreError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON ({reason_of(error)}): {advice}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold a table of keys and values: {advice}")
    return values


def parse_json(content: bytes) -> Any:
    """Parses untrusted JSON; raises ValueError if it is invalid, not UTF-8, nested too deeply or not finite."""
    try:
        values = json.loads(content.decode("utf-8"), parse_constant=_finite, parse_float=_finite)
        too_deep = _depth(values) > MAX_DEPTH
    except RecursionError:
        too_deep = True
    if too_deep:
        raise ValueError(f"it is more than {MAX_DEPTH} levels deep")
    return values


def _depth(values: object) -> int:
    parts = values.values() if isinstance(values, dict) else values if isinstance(values, list) else ()
    return 1 + max((_depth(part) for part in parts if isinstance(part, dict | list)), default=1 if parts else 0)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it holds {text[:20]}, which no number can be")
    return value


def digest_of(path: Path, root: Path | None = None) -> str:
    """Returns the SHA-256 of a file; raises OSError."""
    with open_regular(path, root) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """Returns the folder for cached files, which can all be recreated."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atoll"


def known_digest(path: Path, root: Path | None = None) -> str:
    """Returns the SHA-256 of a file, cached until its size or modification time changes."""
    about = real_path(path, root).stat()
    key, version = str(real_path(path, root)), [about.st_size, about.st_mtime_ns, about.st_ino]
    memory = cache_folder() / "sha256" / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        known = json.loads(memory.read_bytes())
        if known["version"] == version and known["path"] == key:
            return str(known["sha256"])
    digest = digest_of(path, root)
    if time.time_ns() - about.st_mtime_ns > 2e9:  # a change soon after could leave the same time
        with suppress(InputError, UnicodeEncodeError):
            write_json(memory, {"path": key, "version": version, "sha256": digest})
    return digest


# --- writing ------------------------------------------------------------------------------------------------------


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Calls write(staged path), syncs the file to disk, then renames it to `path`, or uploads it there."""
    if isinstance(path, StorePath):
        with TemporaryDirectory(prefix="atoll-") as folder:
            write_whole(Path(folder) / "object", write)
            return path.put_file(Path(folder) / "object")
    staged = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged.unlink(missing_ok=True)  # never write through a link planted there
        write(staged)
        make_readable(staged)
        with staged.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(staged, path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {path} ({reason_of(error)}): free the disk or choose another place") from error
    finally:
        with suppress(OSError):
            staged.unlink()


def make_folder(path: Path) -> None:
    """Creates a writable folder and its parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError("it may not be read and written")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {path} ({reason_of(error)}): choose another --out") from error


@contextmanager
def work_folder(path: Path) -> Iterator[None]:
    """Creates a folder and locks it for this process; removes it afterwards if it is empty.

    A folder in an object store is not locked: concurrent runs write the same bytes, or detect the other's card.
    """
    if isinstance(path, StorePath):
        yield
        return
    new = not os.path.lexists(path)
    make_folder(path)
    try:
        with alone(path):
            yield
    finally:
        if new:
            with suppress(OSError):
                path.rmdir()  # fails unless it is empty


def reason_of(error: Exception) -> str:
    """Returns an exception's message in one line, without the error number."""
    first, *more = str(getattr(error, "strerror", None) or error).strip().split("\n")
    return f"{first} {more[0].strip()}" if more and first.endswith(":") else first


def make_readable(path: Path) -> None:
    """Gives a file the default mode of new files, since safetensors creates files readable by the owner only."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def write_text(path: Path, content: str) -> None:
    """Writes a text file atomically; lone surrogates, which file names may contain, are escaped."""
    write_lines(path, [content], end="")


def write_lines(path: Path, lines: Iterable[str], end: str = "\n") -> None:
    """Writes lines from an iterable to a file, atomically."""

    def write(staged: Path) -> None:
        with staged.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(f"{line}{end}" for line in lines)

    write_whole(path, write)


def write_json(path: Path, values: Any) -> None:
    write_text(path, _as_json(values))


def create_json(path: Path, values: Any) -> None:
    """Writes a file in a folder locked by this process; in an object store, which has no locks, only if it is new."""
    if isinstance(path, StorePath):
        path.create(_as_json(values).encode("utf-8", "backslashreplace"))
    else:
        write_json(path, values)


def _as_json(values: Any) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def remove_tree(folder: Path) -> None:
    """Removes a folder and its content, as far as possible."""
    if isinstance(folder, StorePath):
        for path in list(folder.rglob("*")):
            path.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def exists(path: Path) -> bool:
    """Returns whether a file, folder or link exists, even if the link is broken."""
    return path.exists() if isinstance(path, StorePath) else os.path.lexists(path)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Locks the folder for this process; the lock ends with the process, however it ends."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise InputError(f"another process is at work on {folder}: wait for it, or choose another folder") from error
    try:
        yield
    finally:
        os.close(handle)
