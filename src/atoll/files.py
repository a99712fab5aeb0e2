"""Files that are there whole or not at all, the one way to read JSON, and folders held by one process."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from atoll.errors import InputError


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call write(staged path), make sure of the bytes, then give the file its name."""
    staged = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
    """A folder to write to, with all those above it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path} ({reason_of(error)}): choose another --out") from error


def reason_of(error: Exception) -> str:
    """What went wrong, in one line and without the number."""
    return str(getattr(error, "strerror", None) or error).strip().split("\n")[0]


def make_readable(path: Path) -> None:
    """Give a file the mode any other new file has: safetensors makes its own for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def write_json(path: Path, values: Any) -> None:
    content = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(path, lambda staged: staged.write_text(content, encoding="utf-8", errors="backslashreplace"))


def read_json(path: Path, advice: str) -> dict[str, Any]:
    """A file's table of keys and values; `advice` says what to do if there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"there is no {path}: {advice}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}): {advice}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold a table of keys and values: {advice}")
    return values


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the hold ends with the process, however it ends."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise InputError(
            f"cannot open {folder} ({error.strerror}): give a folder that is there and may be read"
        ) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another process is at work on {folder}: wait for it, or choose another folder"
            ) from error
        yield
    finally:
        os.close(handle)
