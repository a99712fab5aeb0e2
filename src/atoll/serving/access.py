"""Authenticates clients by API keys, of which a file holds only the hashes, and enforces each key's limits.

    {"keys": [{"name": "alice", "sha256": "9f86d0...", "per_minute": 60, "in_flight": 8}]}

A key is any text that cannot be guessed; `printf %s "$KEY" | sha256sum` gives its hash. Without a key file, each
address is a separate client without limits.
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

MAX_CLIENTS = 10_000  # addresses remembered at once


class Key(Card):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    per_minute: Annotated[int, Field(ge=1, le=10**9)] | None = None  # images, or samples of an expert; None: unlimited
    in_flight: Annotated[int, Field(ge=1, le=10**9)] | None = None


class KeyFile(Card):
    keys: list[Key]


class Client:
    """A client and its usage."""

    def __init__(self, name: str, key: Key | None = None) -> None:
        self.name, self.key = name, key
        self.held = self.used = 0  # now, and in total
        self._left, self._seen = float((key and key.per_minute) or 0), time.monotonic()

    @contextmanager
    def hold(self, num: int) -> Iterator[None]:
        """Counts `num` images against the client's limits while they are generated; raises BusyError beyond them."""
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
    """Identifies clients, by key or by address."""

    def __init__(self, file: Path | None = None) -> None:
        self.file, self._clients = file, dict[str, Client]()
        self.reload()

    def reload(self) -> None:
        """Rereads the file. Clients whose key is unchanged keep their usage."""
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
        """Returns the client of a request; None if keys are required and this is not one of them."""
        if self.file is None:
            if len(self._clients) >= MAX_CLIENTS:
                self._clients = {name: client for name, client in self._clients.items() if client.held}
            return self._clients.setdefault(address, Client(address))
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        # Looked up by hash, so that neither the file nor the lookup's timing reveals anything about a key.
        return self._clients.get(hashlib.sha256(key.strip().encode()).hexdigest())

    @property
    def held(self) -> int:
        """Returns how many images are in flight over all clients."""
        return sum(client.held for client in self._clients.values())

    def usage(self) -> Iterator[tuple[str, int, int]]:
        """Yields the name, number in flight and total usage of each client with a key."""
        for client in self._clients.values():
            if client.key is not None:
                yield client.name, client.held, client.used
