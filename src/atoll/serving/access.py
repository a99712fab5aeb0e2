"""Who may ask: API keys from a file, which holds only their hashes, and what each of them may use.

    {"keys": [{"name": "alice", "sha256": "9f86d0...", "per_minute": 60, "in_flight": 8}]}

A key is any text that cannot be guessed; `printf %s "$KEY" | sha256sum` gives its hash. Without a file, each address is
a client of its own, without limits.
"""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from atoll.cards import Card
from atoll.errors import InputError
from atoll.serving.scheduler import BusyError
from atoll.storage import read_json

MAX_CLIENTS = 10_000  # addresses that are remembered at a time


class Key(Card):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    per_minute: Annotated[int, Field(ge=1, le=10**9)] | None = None  # images, or samples of an expert; None: any
    in_flight: Annotated[int, Field(ge=1, le=10**9)] | None = None


class KeyFile(Card):
    keys: list[Key]


class Client:
    """One who asks, and what it has used."""

    def __init__(self, name: str, key: Key | None = None) -> None:
        self.name, self.key = name, key
        self.held = self.used = 0  # now, and in all
        self._left, self._seen = float((key and key.per_minute) or 0), time.monotonic()

    @contextmanager
    def hold(self, num: int) -> Iterator[None]:
        """Counts `num` images against the client's limits while they are made; raises BusyError beyond them."""
        key = self.key
        if key is not None and key.in_flight is not None and self.held + num > key.in_flight:
            raise BusyError(f"key {self.name!r} may have {key.in_flight} in flight, and has {self.held}", 1)
        if key is not None and key.per_minute is not None:
            now, pace = time.monotonic(), key.per_minute / 60
            self._left, self._seen = min(key.per_minute, self._left + (now - self._seen) * pace), now
            if num > self._left:
                wait = (min(num, key.per_minute) - self._left) / pace
                raise BusyError(f"key {self.name!r} may ask for {key.per_minute} per minute, and has used them", wait)
            self._left -= num
        self.held += num
        self.used += num
        try:
            yield
        finally:
            self.held -= num


class Access:
    """Who is who, by key or by address."""

    def __init__(self, file: Path | None = None) -> None:
        self.file, self._clients = file, dict[str, Client]()
        self.reload()

    def reload(self) -> None:
        """Reads the file again. Clients whose key is as before keep what they have used."""
        if self.file is None:
            return
        advice = 'give a file such as {"keys": [{"name": "alice", "sha256": "..."}]}'
        found = KeyFile.parse(read_json(self.file, advice), str(self.file))
        for what in ("name", "sha256"):
            if len({getattr(key, what) for key in found.keys}) < len(found.keys):
                raise InputError(f"{self.file} has two keys of the same {what}: give each its own")
        before, self._clients = self._clients, {}
        for key in found.keys:
            known = before.get(key.sha256)
            self._clients[key.sha256] = known if known and known.key == key else Client(key.name, key)

    def client(self, authorization: str | None, address: str) -> Client | None:
        """Returns who asks; None: there are keys, and this is none of them."""
        if self.file is None:
            if len(self._clients) >= MAX_CLIENTS:
                self._clients = {name: client for name, client in self._clients.items() if client.held}
            return self._clients.setdefault(address, Client(address))
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        # By its hash, so that neither the file nor the time that a look takes tells anything of a key.
        return self._clients.get(hashlib.sha256(key.strip().encode()).hexdigest())

    @property
    def held(self) -> int:
        """Returns how many images are in flight, of all clients."""
        return sum(client.held for client in self._clients.values())

    def usage(self) -> Iterator[tuple[str, int, int]]:
        """Yields the name, what is in flight and what was used in all, of each client with a key."""
        for client in self._clients.values():
            if client.key is not None:
                yield client.name, client.held, client.used
