"""Object stores by URL: s3://, gs://, az://, file:// and, for tests, memory://.

An object is there whole or not at all, and a key names one object below the URL's prefix. Where a store is and who may
use it is in the environment (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS,
AZURE_STORAGE_ACCOUNT_NAME, ...), never in a URL: URLs are printed and written into cards.

A request that fails is tried again for about a minute; then one sentence says what the server did, without what it
sent: an answer may hold parts of the request's signature.
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
MAX_OBJECT = 64 << 20  # bytes that `get` returns unless told otherwise
PART = 8 << 20  # bytes per request: of this size, one takes no longer than the timeout even on a slow line
NUM_RETRIES = 100  # at most; what ends them is the time
MOST_NONSENSE = 12.0  # seconds of answers that are cut short, until it is an error
model_finders: list[Callable[[str | Path, str | None], Path | None]] = []  # (place, revision) -> a local folder
NONSENSE = "its answer makes no sense"
_memory: dict[str, Any] = {}  # the stores of memory://NAME, for the life of the process


def is_url(text: object) -> bool:
    """Whether a place is a URL, of an object store or not, rather than a local path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(text)) is not None


def open_store(url: str, timeout: float = 30, retry_for: float = 60) -> "Store":
    """Returns the store at a URL; `timeout` is that of one request, `retry_for` of all its attempts, in seconds."""
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
    """Returns a key; raises InputError if it could name something outside of its prefix."""
    if not key or len(key) > 900 or any(part in ("", ".", "..") for part in key.split("/")) or _ODD.search(key):
        raise InputError(f"{shown(key)} is no key of an object: it may not leave its prefix or hold controls")
    return key


_ODD = re.compile(r"[\x00-\x1f\x7f\\]")


class TooLargeError(InputError):
    """An object that is larger than what it is to be may be."""


class AccessError(StoreError):
    """A store that does not let us in: trying again with the same credentials is of no use."""


class NonsenseError(StoreError):
    """An answer that cannot be read, such as one that was cut short on its way."""


F = TypeVar("F", bound=Callable[..., Any])


def _again(method: F) -> F:
    """Tries a request again whose answer was cut short, which obstore itself does not do in all cases."""

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
    """The objects below one URL. It holds no connection until it is used, and may be sent to other processes."""

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
        """Downloads an object part by part; the file is there whole or not at all."""
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
        """Returns `size` bytes of an object from `start` on; raises InputError if its etag is another."""
        if not size:
            return b""
        options: dict[str, Any] = {"range": (start, start + size), **({"if_match": etag} if etag else {})}
        with self._request(key) as store:
            content = bytes(_obstore().get(store, key, options=options).bytes())
        self._check_length(key, len(content), size)
        return content

    @_again
    def put(self, key: str, content: bytes) -> None:
        """Writes an object in the place of any other."""
        with self._request(key) as store:
            _obstore().put(store, key, content, chunk_size=PART, max_concurrency=4)

    @_again
    def put_file(self, key: str, path: Path) -> None:
        """Uploads a file, in parts if it is large; it appears when the last of them has arrived."""
        with self._request(key) as store, path.open("rb") as file:
            _obstore().put(store, key, file, chunk_size=PART, max_concurrency=4)

    @_again
    def create(self, key: str, content: bytes) -> bool:
        """Writes an object unless there is one; returns whether it did.

        False may also mean that an earlier attempt of this very request got through, but its answer was lost: who must
        know reads the object.
        """
        with self._request(key) as store:
            try:
                _obstore().put(store, key, content, mode="create", use_multipart=False)
            except _errors().AlreadyExistsError:
                return False
        return True

    @_again
    def replace(self, key: str, content: bytes, etag: str) -> bool:
        """Writes an object if the present one has this etag still; returns whether it did (see `create`)."""
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
        """Returns the names of the folders right below a prefix, and those of the objects with their sizes, sorted."""
        with self._request(prefix, everything=not prefix) as store:
            found = _obstore().list_with_delimiter(store, prefix or None)
        start = len(prefix) + 1 if prefix else 0
        folders = sorted(check_key(folder.rstrip("/")[start:]) for folder in found["common_prefixes"])
        # Some servers keep an empty object in the place of a folder.
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
        """Returns when each object below a prefix was written, by the store's own clock, in seconds since 1970."""
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
        """Returns when an object was written, by the store's own clock, in seconds since 1970."""
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
        """Copies an object within the store; the server does it."""
        check_key(to)
        with self._request(key) as store:
            _obstore().copy(store, key, to)

    @_again
    def delete(self, key: str) -> None:
        """Removes an object; one that is not there is no error."""
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
        """The folder of a file:// store."""
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
        return {"url": self.url, "timeout": self.timeout, "retry_for": self.retry_for}  # no connection

    @contextmanager
    def _request(self, key: str, everything: bool = False) -> Iterator["ObjectStore"]:
        """Makes one sentence of whatever a store may raise, FileNotFoundError and InputError excepted."""
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
            # Not `from error`: its text holds the server's answer.
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
    """Returns what happened in a few words of ours."""
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
    """A path in an object store that is passed around as any other.

    What pathlib computes from a path alone is inherited; what asks for files is answered by the store, and anything
    else that would take it for a local file fails, since `os.fspath` does.
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
        """The bucket, and the key in it."""
        scheme, bucket, *key = self.parts
        return _bucket(f"{scheme}//{bucket}", _settings()), "/".join(key)

    def open_reader(self) -> io.BufferedReader:
        """Returns the object as a file that is read by ranges, a megabyte at least; raises FileNotFoundError."""
        return io.BufferedReader(_Reader(*self._at), 1 << 20)

    def get(self, limit: int) -> bytes:
        """Returns the object; raises OSError, as for a local file, if it has more than `limit` bytes."""
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
        """Writes the object unless there is one; see Store.create."""
        store, key = self._at
        return store.create(key, content)

    def download(self, path: Path, on_bytes: Callable[[int], object] = lambda num: None) -> None:
        store, key = self._at
        store.get_to_file(key, path, on_bytes)

    def copy_from(self, other: "StorePath") -> None:
        """Copies an object of the same bucket within it."""
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
        """Yields each folder from here down as `os.walk` does; of the subfolders some may be taken out of the list."""
        folders, sizes = self.listing()
        yield self, folders, sizes
        for name in folders:
            yield from (self / name).walk_store()

    def iterdir(self) -> Iterator["StorePath"]:  # type: ignore[override]
        return (self / name for part in self.listing() for name in part)

    def glob(self, pattern: str, **options: Any) -> Iterator["StorePath"]:  # type: ignore[override]
        """Yields what has such a name, a `*` for each folder on the way."""
        first, _, rest = pattern.partition("/")
        for path in self.iterdir():
            if fnmatchcase(path.name, first):
                yield from path.glob(rest) if rest else (path,)

    def rglob(self, pattern: str, **options: Any) -> Iterator["StorePath"]:  # type: ignore[override]
        """Yields all objects below that have such a name."""
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
    """Returns what the environment says of stores: when a notebook sets another endpoint, it means another store."""
    prefixes = ("AWS_", "GOOGLE_", "AZURE_")
    return frozenset((name, value) for name, value in os.environ.items() if name.startswith(prefixes))


def place_of(place: str | Path) -> Path:
    """Returns the path of a folder or file, local (also by file://) or in an object store, as a user names it."""
    if isinstance(place, StorePath):
        return place
    place = re.sub(rf"^({'|'.join(SCHEMES)}):/(?=[^/])", r"\1://", str(place))  # what pathlib makes of a URL
    if not is_url(place):
        return Path(place)
    if place.startswith("file://"):
        return Path(place.removeprefix("file://"))
    open_store(place)  # says what is wrong with it
    return StorePath(place)


def upload(folder: Path, place: Path, last: str = "") -> None:
    """Copies the files of a folder into one of a store; the one named `last` says that all of them are there."""
    assert isinstance(place, StorePath)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in sorted(files, key=lambda path: path.name == last):
        target = place.joinpath(*path.relative_to(folder).parts)
        target.put_file(path)


def download(place: Path, folder: Path) -> None:
    """Copies all objects below a folder of a store into a local one."""
    assert isinstance(place, StorePath)
    for path in place.rglob("*"):
        path.download(folder.joinpath(*path.relative_to(place).parts))


class _Reader(io.RawIOBase):
    """An object as a file: each read is a request for that part."""

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
    """Holds a local folder for this process, after any other that holds it."""
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
