"""Object stores by URL: s3://, gs://, az://, file:// and, for tests, memory://.

Objects are written atomically, and a key names one object below the URL's prefix. Endpoints and credentials come from
the environment (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME, ...),
never from a URL, since URLs are printed and written into cards.

A failed request is retried for about a minute. The error then describes the failure without quoting the server's
response, which may contain parts of the request's signature.
"""

import errno
import fcntl
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache, wraps
from pathlib import Path, PosixPath
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

from atoll.errors import InputError, StoreError, printable, shown

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az", "file", "memory")
MAX_OBJECT = 64 << 20  # default limit of `get`, in bytes
PART = 8 << 20  # bytes per request, small enough to finish within the timeout on a slow connection
NUM_RETRIES = 100  # at most; normally the time limit ends retries
MOST_NONSENSE = 12.0  # seconds of retrying truncated responses
model_finders: list[Callable[[str | Path, str | None], Path | None]] = []  # (place, revision) -> a local folder
NONSENSE = "its answer makes no sense"
_memory: dict[str, Any] = {}  # the stores of memory://NAME, for the life of the process


def is_url(text: object) -> bool:
    """Returns whether a place is a URL (of an object store or not) rather than a local path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(text)) is not None


def open_store(url: str, timeout: float = 30, retry_for: float = 60) -> "Store":
    """Returns the store at a URL; `timeout` is per request, `retry_for` includes all its retries, in seconds."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InputError("this is no URL of an object store: it should look like s3://bucket/prefix") from error
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise InputError(
            f"a {parts.scheme}:// URL may hold no user, password, ? or #, since it is printed and written into cards: "
            "put credentials into the environment"
        )
    if parts.scheme not in SCHEMES:
        accepted = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise InputError(f"{printable(url, 200)} is no object store: accepted are {accepted}")
    if (parts.scheme == "file") == bool(parts.netloc):
        raise InputError(f"{printable(url, 200)} must look like s3://bucket/prefix or file:///folder")
    if parts.scheme == "memory" and parts.path.strip("/"):
        raise InputError("memory://NAME has no prefix: each name is a store of its own")
    check_key(parts.path.strip("/") or "root")
    return Store(url.rstrip("/"), timeout, retry_for)


def check_key(key: str) -> str:
    """Returns the key; raises InputError if it could name something outside its prefix."""
    if not key or len(key) > 900 or any(part in ("", ".", "..") for part in key.split("/")) or _ODD.search(key):
        raise InputError(f"{shown(key)} is no key of an object: it may not leave its prefix or hold controls")
    return key


_ODD = re.compile(r"[\x00-\x1f\x7f\\]")


class TooLargeError(InputError):
    """An object exceeds its size limit."""


class AccessError(StoreError):
    """A store refuses access: retrying with the same credentials is useless."""


class NonsenseError(StoreError):
    """A response that cannot be read, for example because it was truncated in transit."""


F = TypeVar("F", bound=Callable[..., Any])


def _again(method: F) -> F:
    """Retries requests with truncated responses, which obstore does not do in all cases."""

    @wraps(method)
    def call(store: "Store", *arguments: Any, **options: Any) -> Any:
        pause, end = 0.1, time.monotonic() + min(store.retry_for, MOST_NONSENSE)
        while True:
            try:
                return method(store, *arguments, **options)
            except NonsenseError:
                if time.monotonic() + pause > end:
                    raise
            time.sleep(pause)
            pause *= 2

    return cast(F, call)


@dataclass(frozen=True)
class Store:
    """The objects below one URL. It connects on first use, and can be pickled."""

    url: str
    timeout: float = 30
    retry_for: float = 60

    def get(self, key: str, limit: int = MAX_OBJECT) -> bytes:
        """Returns an object of at most `limit` bytes; raises FileNotFoundError if there is none."""
        return self.read(key, limit)[0]

    @_again
    def read(self, key: str, limit: int = MAX_OBJECT) -> tuple[bytes, str]:
        """Returns an object of at most `limit` bytes and its etag, for `replace`."""
        content = bytearray()
        with self._request(key) as store:
            answer = _obstore().get(store, key)
            size, etag = answer.meta["size"], answer.meta["e_tag"] or ""
            if size > limit:
                raise TooLargeError(f"{self.url}/{printable(key)} is larger than {limit:,} bytes: it may not be")
            for part in answer.stream(min_chunk_size=1 << 20):
                content += memoryview(part)
                if len(content) > size:
                    break
        self._check_length(key, len(content), size)
        return bytes(content), etag

    def get_to_file(self, key: str, path: Path, on_bytes: Callable[[int], object] = lambda num: None) -> None:
        """Downloads an object in parts; the file appears atomically."""
        from atoll.storage import write_whole

        size, etag = self.head(key)

        def write(staged: Path) -> None:
            with staged.open("xb") as file:
                for start in range(0, size, PART):
                    part = self.get_range(key, start, min(PART, size - start), etag)
                    file.write(part)
                    on_bytes(len(part))

        write_whole(path, write)

    @_again
    def get_range(self, key: str, start: int, size: int, etag: str = "") -> bytes:
        """Returns `size` bytes of an object from `start`; raises InputError if its etag has changed."""
        if not size:
            return b""
        options: dict[str, Any] = {"range": (start, start + size), **({"if_match": etag} if etag else {})}
        with self._request(key) as store:
            content = bytes(_obstore().get(store, key, options=options).bytes())
        self._check_length(key, len(content), size)
        return content

    @_again
    def put(self, key: str, content: bytes) -> None:
        """Writes an object, replacing any existing one."""
        with self._request(key) as store:
            _obstore().put(store, key, content, chunk_size=PART, max_concurrency=4)

    @_again
    def put_file(self, key: str, path: Path) -> None:
        """Uploads a file, in parts if it is large; the object appears once all parts have arrived."""
        with self._request(key) as store, path.open("rb") as file:
            _obstore().put(store, key, file, chunk_size=PART, max_concurrency=4)

    @_again
    def create(self, key: str, content: bytes) -> bool:
        """Writes an object unless it exists; returns whether it did.

        False may also mean that an earlier attempt of this same request succeeded but its response was lost: to be
        certain, read the object.
        """
        with self._request(key) as store:
            try:
                _obstore().put(store, key, content, mode="create", use_multipart=False)
            except _errors().AlreadyExistsError:
                return False
        return True

    @_again
    def replace(self, key: str, content: bytes, etag: str) -> bool:
        """Writes an object if the existing one still has this etag; returns whether it did (see `create`)."""
        with self._request(key) as store:
            try:
                if self._folder is None:
                    _obstore().put(store, key, content, mode={"e_tag": etag}, use_multipart=False)
                    return True
                with locked(self._folder):  # a file system has no conditional write
                    if self.head(key)[1] != etag:
                        return False
                    _obstore().put(store, key, content)
            except (_errors().PreconditionError, FileNotFoundError):
                return False
        return True

    @_again
    def list_folder(self, prefix: str = "") -> tuple[list[str], dict[str, int]]:
        """Returns the sorted names of the folders directly below a prefix, and of the objects with their sizes."""
        with self._request(prefix, everything=not prefix) as store:
            found = _obstore().list_with_delimiter(store, prefix or None)
        start = len(prefix) + 1 if prefix else 0
        folders = sorted(check_key(folder.rstrip("/")[start:]) for folder in found["common_prefixes"])
        # Some servers keep an empty object to represent a folder.
        names = {entry["path"][start:]: entry["size"] for entry in found["objects"]}
        objects = {name: size for name, size in sorted(names.items()) if name and name not in folders}
        return folders, {check_key(name): size for name, size in objects.items()}

    @_again
    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        """Returns the key and size of each object below a prefix, in order of keys."""
        found: list[tuple[str, int]] = []
        with self._request(prefix, everything=not prefix) as store:
            for page in _obstore().list(store, prefix or None):
                found += [(check_key(entry["path"]), entry["size"]) for entry in page if entry["path"] != prefix]
        folders = {key[:i] for key, _ in found for i, letter in enumerate(key) if letter == "/"}
        return sorted((key, size) for key, size in found if key not in folders)

    @_again
    def list_modified(self, prefix: str) -> dict[str, float]:
        """Returns when each object below a prefix was written, by the store's clock, in seconds since 1970."""
        with self._request(prefix) as store:
            pages = list(_obstore().list(store, prefix))
        return {check_key(entry["path"]): entry["last_modified"].timestamp() for page in pages for entry in page}

    @_again
    def head(self, key: str) -> tuple[int, str]:
        """Returns the size and the etag of an object; raises FileNotFoundError if there is none."""
        with self._request(key) as store:
            about = _obstore().head(store, key)
        return about["size"], about["e_tag"] or ""

    @_again
    def modified(self, key: str) -> float:
        """Returns when an object was written, by the store's clock, in seconds since 1970."""
        with self._request(key) as store:
            return float(_obstore().head(store, key)["last_modified"].timestamp())

    def exists(self, key: str) -> bool:
        try:
            self.head(key)
        except FileNotFoundError:
            return False
        return True

    @_again
    def copy(self, key: str, to: str) -> None:
        """Copies an object within the store, on the server."""
        check_key(to)
        with self._request(key) as store:
            _obstore().copy(store, key, to)

    @_again
    def delete(self, key: str) -> None:
        """Removes an object if it exists."""
        with self._request(key) as store:
            try:
                _obstore().delete(store, key)
            except FileNotFoundError:
                return

    def _check_length(self, key: str, length: int, size: int) -> None:
        if length != size:
            raise StoreError(f"{self.url}/{printable(key)} is truncated: the server sent {length:,} of {size:,} bytes")

    @cached_property
    def _folder(self) -> Path | None:
        """Returns the folder of a file:// store, or None."""
        return Path(self.url.removeprefix("file://")) if self.url.startswith("file://") else None

    @cached_property
    def _opened(self) -> "ObjectStore":
        from obstore import store

        if self.url.startswith("memory://"):
            return _memory.setdefault(self.url, store.MemoryStore())
        if self._folder is not None:
            return store.LocalStore(self._folder, mkdir=True)
        allow_http = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", "")).startswith("http://")
        try:
            return store.from_url(
                self.url,
                client_options={
                    "timeout": timedelta(seconds=self.timeout),
                    "connect_timeout": timedelta(seconds=min(5, self.timeout)),
                    **({"allow_http": True} if allow_http else {}),
                },
                retry_config={
                    "max_retries": NUM_RETRIES,
                    "retry_timeout": timedelta(seconds=self.retry_for),
                    "backoff": {
                        "init_backoff": timedelta(seconds=0.1),
                        "max_backoff": timedelta(seconds=5),
                        "base": 2,
                    },
                },
            )
        except (_errors().BaseError, ValueError):
            raise StoreError(f"{self.url} cannot be opened: check what the environment says of the store") from None

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "timeout": self.timeout, "retry_for": self.retry_for}  # without the connection

    @contextmanager
    def _request(self, key: str, everything: bool = False) -> Iterator["ObjectStore"]:
        """Converts all exceptions of a store to StoreError, except FileNotFoundError and InputError."""
        place = self.url if everything else f"{self.url}/{check_key(key)}"
        errors = _errors()
        from atoll.storage import resolved

        try:
            if self._folder is not None and not resolved(self._folder / key).is_relative_to(resolved(self._folder)):
                raise OSError(errno.EPERM, "it is a link that leaves its folder")
            yield self._opened
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no {place}") from None
        except errors.PreconditionError:
            raise StoreError(f"{place} was replaced while it was read: start again") from None
        except (errors.BaseError, OSError, NotImplementedError) as error:
            # Not `from error`, whose text contains the server's response.
            if _EXPIRED.search(str(error)):
                raise AccessError(
                    f"{self.url} refuses access, since the credentials in the environment have expired: get new ones "
                    "and rerun the command"
                ) from None
            if isinstance(error, (errors.PermissionDeniedError, errors.UnauthenticatedError)) or _DENIED.search(
                str(error)
            ):
                raise AccessError(f"{self.url} refuses access: check the credentials in the environment") from None
            kind = NonsenseError if (reason := _reason(error)) == NONSENSE else StoreError
            raise kind(f"{place} cannot be read or written ({reason}): check the server") from None


_EXPIRED = re.compile(r"<Code>(ExpiredToken|ExpiredTokenException|RequestExpired|TokenRefreshRequired)</Code>")
_DENIED = re.compile(r"status code: 40[13]\b")


def _reason(error: Exception) -> str:
    """Returns a short reason in our own words, without quoting the server."""
    if isinstance(error, OSError):
        return error.strerror or "an error of the file system"
    text = str(error)
    if status := re.search(r"status code: (\d{3}(?: [A-Z][A-Za-z]+)*)", text):
        return f"the server answers {status[1]}"
    if "kind: Timeout" in text or "TimedOut" in text:
        return "the server does not answer in time"
    if "kind: Connect" in text:
        return "the server refuses the connection" if "ConnectionRefused" in text else "no connection"
    code = re.search(r"<Code>(\w{1,40})</Code>", text)
    return f"the server answers {code[1]}" if code else NONSENSE


class StorePath(PosixPath):
    """A path in an object store that can be used like a local path.

    Pure path operations are inherited from pathlib; file operations go to the store, and anything else that would use
    it as a local file fails, since `os.fspath` raises.
    """

    def __str__(self) -> str:
        plain = super().__str__()
        scheme, _, rest = plain.partition(":/")
        return f"{scheme}://{rest}" if scheme in SCHEMES else plain

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is no local file")

    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    @property
    def _at(self) -> tuple[Store, str]:
        """Returns the bucket, and the key in it."""
        scheme, bucket, *key = self.parts
        return _bucket(f"{scheme}//{bucket}", _settings()), "/".join(key)

    def open_reader(self) -> io.BufferedReader:
        """Returns the object as a file, read by range requests of at least a megabyte; raises FileNotFoundError."""
        return io.BufferedReader(_Reader(*self._at), 1 << 20)

    def get(self, limit: int) -> bytes:
        """Returns the object; raises OSError, as for a local file, if it is larger than `limit` bytes."""
        store, key = self._at
        try:
            return store.get(key, limit)
        except TooLargeError as error:
            raise OSError(errno.EFBIG, f"it is larger than {limit:,} bytes", str(self)) from error

    def get_range(self, start: int, size: int) -> bytes:
        store, key = self._at
        return store.get_range(key, start, size)

    def put_file(self, path: Path) -> None:
        store, key = self._at
        store.put_file(key, path)

    def create(self, content: bytes) -> bool:
        """Writes the object unless it exists; see Store.create."""
        store, key = self._at
        return store.create(key, content)

    def download(self, path: Path, on_bytes: Callable[[int], object] = lambda num: None) -> None:
        store, key = self._at
        store.get_to_file(key, path, on_bytes)

    def copy_from(self, other: "StorePath") -> None:
        """Copies an object within the same bucket."""
        store, key = self._at
        store.copy(other._at[1], key)

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        store, key = self._at
        return bool(key) and store.exists(key)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return any(self.listing())

    def is_symlink(self) -> bool:
        return False

    def listing(self) -> tuple[list[str], dict[str, int]]:
        """Returns the names of the folders in this one, and those of its objects with their sizes."""
        store, key = self._at
        return store.list_folder(key)

    def walk_store(self) -> Iterator[tuple["StorePath", list[str], dict[str, int]]]:
        """Yields each folder from here down as `os.walk` does; the caller may remove subfolders from the list."""
        folders, sizes = self.listing()
        yield self, folders, sizes
        for name in folders:
            yield from (self / name).walk_store()

    def iterdir(self) -> Iterator["StorePath"]:  # type: ignore[override]
        return (self / name for part in self.listing() for name in part)

    def glob(self, pattern: str, **options: Any) -> Iterator["StorePath"]:  # type: ignore[override]
        """Yields the matching paths; `*` does not match across folders."""
        first, _, rest = pattern.partition("/")
        for path in self.iterdir():
            if fnmatchcase(path.name, first):
                yield from path.glob(rest) if rest else (path,)

    def rglob(self, pattern: str, **options: Any) -> Iterator["StorePath"]:  # type: ignore[override]
        """Yields all objects below whose names match."""
        for folder, _, sizes in self.walk_store():
            yield from (folder / name for name in sizes if fnmatchcase(name, pattern))

    def unlink(self, missing_ok: bool = True) -> None:
        store, key = self._at
        store.delete(key)

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: a store has no folders."""


@lru_cache(maxsize=64)
def _bucket(url: str, settings: frozenset[tuple[str, str]]) -> Store:
    return open_store(url)


def _settings() -> frozenset[tuple[str, str]]:
    """Returns the environment's store settings, part of the cache key so that a notebook can switch endpoints."""
    prefixes = ("AWS_", "GOOGLE_", "AZURE_")
    return frozenset((name, value) for name, value in os.environ.items() if name.startswith(prefixes))


def place_of(place: str | Path) -> Path:
    """Returns the path for a user's argument: local (also as file://) or in an object store."""
    if isinstance(place, StorePath):
        return place
    place = re.sub(rf"^({'|'.join(SCHEMES)}):/(?=[^/])", r"\1://", str(place))  # pathlib collapses the // of a URL
    if not is_url(place):
        return Path(place)
    if place.startswith("file://"):
        return Path(place.removeprefix("file://"))
    open_store(place)  # raises InputError for an invalid URL
    return StorePath(place)


def upload(folder: Path, place: Path, last: str = "") -> None:
    """Uploads the files of a folder to a store; the one named `last` goes last, to mark the upload as complete."""
    assert isinstance(place, StorePath)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in sorted(files, key=lambda path: path.name == last):
        target = place.joinpath(*path.relative_to(folder).parts)
        target.put_file(path)


def download(place: Path, folder: Path) -> None:
    """Downloads all objects below a folder of a store to a local folder."""
    assert isinstance(place, StorePath)
    for path in place.rglob("*"):
        path.download(folder.joinpath(*path.relative_to(place).parts))


class _Reader(io.RawIOBase):
    """An object as a raw file: each read is a range request."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key, self._position = store, key, 0
        self.size, self._etag = store.head(key)

    @property
    def version(self) -> tuple[int, str]:
        return self.size, self._etag

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self.size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self.size - self._position))
        buffer[:size] = self._store.get_range(self._key, self._position, size, self._etag)
        self._position += size
        return size


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a local folder for this process, waiting for any other that holds it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _obstore() -> ModuleType:
    try:
        import obstore
    except ImportError as error:
        raise InputError("object stores need obstore: pip install 'atoll[store]'") from error
    return obstore


def _errors() -> ModuleType:
    _obstore()
    from obstore import exceptions

    return exceptions
