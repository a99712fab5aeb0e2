"""Object stores by URL: s3://, gs://, az://, file:// and, for tests, memory://.

An object is there whole or not at all, and a key names one object below the URL's prefix. Where a store is and who may
use it is in the environment (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS,
AZURE_STORAGE_ACCOUNT_NAME, ...), never in a URL: URLs are printed and written into cards.

A request that fails is tried again for about a minute; then one sentence says what the server did, without what it
sent: an answer may hold parts of the request's signature.
"""

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from atoll.errors import InputError, printable, shown
from atoll.storage import real_path, reason_of, write_whole

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az", "file", "memory")
MAX_OBJECT = 64 << 20  # bytes that `get` returns unless told otherwise
PART = 8 << 20  # bytes per request: of this size, one takes no longer than the timeout even on a slow line
NUM_RETRIES = 10  # with waits that double from 0.1 s to 15 s
_memory: dict[str, Any] = {}  # the stores of memory://NAME, for the life of the process

T = TypeVar("T")


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


@dataclass(frozen=True)
class Store:
    """The objects below one URL. It holds no connection until it is used, and may be sent to other processes."""

    url: str
    timeout: float = 30
    retry_for: float = 60

    def get(self, key: str, limit: int = MAX_OBJECT) -> bytes:
        """Returns an object of at most `limit` bytes; raises FileNotFoundError if there is none."""
        return self.read(key, limit)[0]

    def read(self, key: str, limit: int = MAX_OBJECT) -> tuple[bytes, str]:
        """Returns an object of at most `limit` bytes and its etag, for `replace`."""
        content = bytearray()
        with self._request(key) as store:
            answer = _obstore().get(store, key)
            size, etag = answer.meta["size"], answer.meta["e_tag"] or ""
            if size > limit:
                raise InputError(f"{self.url}/{printable(key)} has {size:,} bytes, more than the {limit:,} it may have")
            for part in answer.stream(min_chunk_size=1 << 20):
                content += memoryview(part)
                if len(content) > size:
                    break
        self._check_length(key, len(content), size)
        return bytes(content), etag

    def get_to_file(self, key: str, path: Path, on_bytes: Callable[[int], object] = lambda num: None) -> None:
        """Downloads an object part by part; the file is there whole or not at all."""
        size, etag = self.head(key)

        def write(staged: Path) -> None:
            with staged.open("xb") as file:
                for start in range(0, size, PART):
                    part = self.get_range(key, start, min(PART, size - start))
                    file.write(part)
                    on_bytes(len(part))

        write_whole(path, write)
        if self.head(key) != (size, etag):
            path.unlink(missing_ok=True)
            raise InputError(f"{self.url}/{printable(key)} was replaced while it was read: start again")

    def get_range(self, key: str, start: int, size: int) -> bytes:
        """Returns `size` bytes of an object from `start` on."""
        if not size:
            return b""
        with self._request(key) as store:
            content = bytes(_obstore().get_range(store, key, start=start, length=size))
        self._check_length(key, len(content), size)
        return content

    def put(self, key: str, content: bytes) -> None:
        """Writes an object in the place of any other."""
        with self._request(key) as store:
            _obstore().put(store, key, content, chunk_size=PART, max_concurrency=4)

    def put_file(self, key: str, path: Path) -> None:
        """Uploads a file, in parts if it is large; it appears when the last of them has arrived."""
        with self._request(key) as store, path.open("rb") as file:
            _obstore().put(store, key, file, chunk_size=PART, max_concurrency=4)

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

    def replace(self, key: str, content: bytes, etag: str) -> bool:
        """Writes an object if the present one has this etag still; returns whether it did (see `create`)."""
        with self._request(key) as store:
            try:
                if self._folder is None:
                    _obstore().put(store, key, content, mode={"e_tag": etag}, use_multipart=False)
                    return True
                with _locked(self._folder):  # a file system has no conditional write
                    if self.head(key)[1] != etag:
                        return False
                    _obstore().put(store, key, content)
            except (_errors().PreconditionError, FileNotFoundError):
                return False
        return True

    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        """Returns the key and size of each object below a prefix, in order of keys."""
        found: list[tuple[str, int]] = []
        with self._request(prefix, everything=not prefix) as store:
            for page in _obstore().list(store, prefix or None):
                found += [(check_key(entry["path"]), entry["size"]) for entry in page]
        return sorted(found)

    def head(self, key: str) -> tuple[int, str]:
        """Returns the size and the etag of an object; raises FileNotFoundError if there is none."""
        with self._request(key) as store:
            about = _obstore().head(store, key)
        return about["size"], about["e_tag"] or ""

    def exists(self, key: str) -> bool:
        try:
            self.head(key)
        except FileNotFoundError:
            return False
        return True

    def delete(self, key: str) -> None:
        """Removes an object; one that is not there is no error."""
        with self._request(key) as store:
            try:
                _obstore().delete(store, key)
            except FileNotFoundError:
                return

    def _check_length(self, key: str, length: int, size: int) -> None:
        if length != size:
            raise InputError(f"{self.url}/{printable(key)} is truncated: the server sent {length:,} of {size:,} bytes")

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
        return store.from_url(
            self.url,
            client_options={
                "timeout": timedelta(seconds=self.timeout),
                "connect_timeout": timedelta(seconds=min(5, self.timeout)),
                **({"allow_http": True} if allow_http else {}),
            },
            retry_config={"max_retries": NUM_RETRIES, "retry_timeout": timedelta(seconds=self.retry_for)},
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "timeout": self.timeout, "retry_for": self.retry_for}  # no connection

    @contextmanager
    def _request(self, key: str, everything: bool = False) -> Iterator["ObjectStore"]:
        """Makes one sentence of whatever a store may raise, FileNotFoundError and InputError excepted."""
        place = self.url if everything else f"{self.url}/{check_key(key)}"
        errors = _errors()
        try:
            if self._folder is not None:
                real_path(self._folder / key, self._folder)  # no link leads out of it
            yield self._opened
        except FileNotFoundError as error:
            raise FileNotFoundError(f"there is no {place}") from error
        except (errors.PermissionDeniedError, errors.UnauthenticatedError):
            raise InputError(f"{self.url} refuses access: check the credentials in the environment") from None
        except (errors.BaseError, OSError, NotImplementedError) as error:
            # Not `from error`: its text holds the server's answer.
            raise InputError(f"{place} cannot be read or written ({_reason(error)}): check the server") from None


def _reason(error: Exception) -> str:
    """Returns what happened in a few words of ours."""
    if isinstance(error, OSError):
        return reason_of(error)
    text = str(error)
    if status := re.search(r"status code: (\d{3}(?: [A-Z][A-Za-z]+)*)", text):
        return f"the server answers {status[1]}"
    if "kind: Timeout" in text or "TimedOut" in text:
        return "the server does not answer in time"
    if "kind: Connect" in text:
        return "the server refuses the connection" if "ConnectionRefused" in text else "no connection"
    code = re.search(r"<Code>(\w{1,40})</Code>", text)
    return f"the server answers {code[1]}" if code else "its answer makes no sense"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
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
