"""Files: written whole or not at all, read as data, and folders held by one process.

Whatever was made elsewhere is opened by `open_regular` alone: only regular files, only inside their folder. So a FIFO
cannot hang a reader, and a link cannot make it read, copy or publish a file of somebody else's.
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

MAX_JSON = 64 << 20  # bytes; a tokenizer of a quarter of a million tokens has 20 MB
MAX_DEPTH = 64  # of tables within tables
KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
         stat.S_IFDIR: "a folder"}  # fmt: skip


# --- reading ------------------------------------------------------------------------------------------------------


def open_regular(path: Path, root: Path | None = None) -> BufferedReader:
    """Opens a regular file that lies inside `root`, by default the folder that it is named in; else raises OSError."""
    if isinstance(path, StorePath):
        return path.open_reader()
    real = real_path(path, root)
    kind = stat.S_IFMT(os.stat(real).st_mode)
    if kind == stat.S_IFREG:
        handle = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
        kind = stat.S_IFMT(os.fstat(handle).st_mode)  # what was opened, should it have been replaced meanwhile
        if kind == stat.S_IFREG:
            return open(handle, "rb")
        os.close(handle)
    raise OSError(errno.EINVAL, f"it is {KINDS.get(kind, 'not a regular file')}, not a file", str(path))


def resolved(path: str | Path) -> Path:
    """Returns the absolute path without links; unlike pathlib's, a link to itself is left as it is."""
    if isinstance(path, StorePath):
        return path  # there are no links
    return Path(os.path.realpath(path))


def real_path(path: Path, root: Path | None = None) -> Path:
    """Returns where a file or folder really is; raises OSError if links lead it out of `root`."""
    real, home = resolved(path), resolved(path.parent if root is None else root)
    if not any(real.is_relative_to(folder) for folder in (home, *_hub_blobs(home))):
        raise OSError(errno.EPERM, "it is a link that leaves its folder", str(path))
    return real


def _hub_blobs(home: Path) -> Iterator[Path]:
    """Yields where the Hugging Face hub keeps the files that its snapshots consist of links to."""
    for folder in (home, *home.parents):
        if folder.name == "snapshots" and folder.parent.name.startswith(("models--", "datasets--")):
            yield folder.parent / "blobs"


def read_bytes(path: Path, limit: int, root: Path | None = None) -> bytes:
    """Returns a file's content, if it has at most `limit` bytes; else raises OSError before any is read."""
    if isinstance(path, StorePath):
        return path.get(limit)
    check_size(path, limit, root)
    with open_regular(path, root) as file:
        return file.read(limit)  # no more of it, should it have grown meanwhile


def check_size(path: Path, limit: int, root: Path | None = None) -> None:
    """Raises OSError if a file has more than `limit` bytes."""
    if size_of(path, root) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit:,} bytes", str(path))


def size_of(path: Path, root: Path | None = None) -> int:
    """Returns how many bytes a file has; raises OSError."""
    if isinstance(path, StorePath):
        with path.open_reader() as file:
            return file.seek(0, os.SEEK_END)
    return os.stat(real_path(path, root)).st_size


def read_json(path: Path, advice: str, root: Path | None = None) -> dict[str, Any]:
    """Returns a file's table of keys and values; `advice` says what to do if there is none."""
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
    """Returns what JSON of anyone's says; raises ValueError if it is not UTF-8, too deep or not finite."""
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
    """Returns where things are kept that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atoll"


def known_digest(path: Path, root: Path | None = None) -> str:
    """Returns the SHA-256 of a file, remembered from the last time if neither size nor time of change is another."""
    about = real_path(path, root).stat()
    key, version = str(real_path(path, root)), [about.st_size, about.st_mtime_ns, about.st_ino]
    memory = cache_folder() / "sha256" / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        known = json.loads(memory.read_bytes())
        if known["version"] == version and known["path"] == key:
            return str(known["sha256"])
    digest = digest_of(path, root)
    if time.time_ns() - about.st_mtime_ns > 2e9:  # of a file just written, a later change might have the same time
        with suppress(InputError, UnicodeEncodeError):
            write_json(memory, {"path": key, "version": version, "sha256": digest})
    return digest


# --- writing ------------------------------------------------------------------------------------------------------


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Calls write(staged path), makes sure of the bytes, then gives the file its name, or uploads it under that."""
    if isinstance(path, StorePath):
        with TemporaryDirectory(prefix="atoll-") as folder:
            write_whole(Path(folder) / "object", write)
            return path.put_file(Path(folder) / "object")
    staged = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged.unlink(missing_ok=True)  # not through a link that somebody has put there
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
    """Makes a folder to write to, with all those above it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError("it may not be read and written")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {path} ({reason_of(error)}): choose another --out") from error


@contextmanager
def work_folder(path: Path) -> Iterator[None]:
    """Makes a folder and holds it for this process; removes it if nothing came of the work.

    A folder of an object store is not held: who writes there makes the same bytes, or finds another's card.
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
                path.rmdir()  # if it is empty


def reason_of(error: Exception) -> str:
    """Returns what went wrong in one line, without the number."""
    first, *more = str(getattr(error, "strerror", None) or error).strip().split("\n")
    return f"{first} {more[0].strip()}" if more and first.endswith(":") else first


def make_readable(path: Path) -> None:
    """Gives a file the mode any other new file has: safetensors makes its own for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def write_text(path: Path, content: str) -> None:
    """Writes a text whole; half characters, as a name may hold them, are spelled out."""
    write_lines(path, [content], end="")


def write_lines(path: Path, lines: Iterable[str], end: str = "\n") -> None:
    """Writes lines as they come, a file whole or none."""

    def write(staged: Path) -> None:
        with staged.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(f"{line}{end}" for line in lines)

    write_whole(path, write)


def write_json(path: Path, values: Any) -> None:
    write_text(path, _as_json(values))


def create_json(path: Path, values: Any) -> None:
    """Writes a file of a folder that this process holds; in an object store, which none holds, unless there is one."""
    if isinstance(path, StorePath):
        path.create(_as_json(values).encode("utf-8", "backslashreplace"))
    else:
        write_json(path, values)


def _as_json(values: Any) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def remove_tree(folder: Path) -> None:
    """Removes a folder with all that is in it, as far as that is possible."""
    if isinstance(folder, StorePath):
        for path in list(folder.rglob("*")):
            path.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def exists(path: Path) -> bool:
    """Returns whether there is such a file, folder or link, wherever it leads."""
    return path.exists() if isinstance(path, StorePath) else os.path.lexists(path)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds the folder for this process; the hold ends with the process, however it ends."""
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
