"""Leases: a contributor holds a slot for as long as its heartbeats arrive.

A lease is one object, created only if there is none and replaced only if nobody else has replaced it. The age of its
last heartbeat is measured by the store's own clock alone (when it wrote the lease, and when it wrote a probe just now),
so the contributors' clocks do not matter.
"""

import fcntl
import os
import random
import secrets
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from atoll.cards import Card, Count
from atoll.errors import InputError, StoreError
from atoll.federation.keys import Identity, Person
from atoll.object_store import Store
from atoll.storage import make_folder, parse_json

MAX_LEASE = 1 << 16  # bytes
BEATS = 4  # per lease time
KEPT = 50  # holders listed in a lease


class Held(Card):
    """A person who has worked on a run, and from which step on."""

    person: Person
    step: Count


class Lease(Card):
    slot: Count
    holder: Person
    nonce: str  # of this holding, so that no two leases are the same bytes
    beat: Count
    run: Annotated[str, Field(max_length=80)]  # of runs/SLOT/RUN, where checkpoints are
    step: Count
    steps: Count
    released: bool = False
    held: list[Held] = Field(default_factory=list)  # who has worked on this run, the present holder last

    @classmethod
    def read(cls, store: Store, slot: int) -> tuple["Lease | None", str]:
        """Returns a slot's lease with its etag; None if it is missing or unreadable."""
        try:
            content, etag = store.read(key_of(slot), MAX_LEASE)
        except FileNotFoundError:
            return None, ""
        with suppress(ValueError):
            lease = cls.parse(parse_json(content), key_of(slot))
            return (lease if lease.slot == slot else None), etag
        return None, etag


def key_of(slot: int) -> str:
    return f"leases/{slot:04d}.json"


def age_of(store: Store, slot: int, now: float | None = None) -> float:
    """Returns the seconds since a lease's last heartbeat, by the store's clock."""
    return (clock(store) if now is None else now) - store.modified(key_of(slot))


def clock(store: Store) -> float:
    """Returns the current time by the store's clock."""
    key = f"clock/{secrets.token_hex(8)}"
    store.put(key, secrets.token_bytes(8))
    try:
        return store.modified(key)
    finally:
        store.delete(key)


def claim(
    store: Store,
    slots: Iterable[int],
    identity: Identity,
    run_of: Callable[[int], str],
    steps: int,
    lease_time: float,
    folder: Path,
) -> "Holding | None":
    """Leases the first of these slots that is free, released or expired; returns None if others hold all of them.

    Of any number of contributors who try at once, exactly one gets it. `folder` records what this machine holds, so
    that a new process can immediately take over from one that was killed.
    """
    for slot in slots:
        memory = Memory.open(folder, slot)
        if memory is None:
            continue  # another process of this machine is at work on it
        lease, etag = Lease.read(store, slot)
        run = run_of(slot)
        held: list[Held] = []
        if lease is not None:
            mine = lease.nonce == memory.nonce
            if not lease.released and not mine and age_of(store, slot) <= lease_time:
                memory.close()
                continue
            held = lease.held if lease.run == run else []
        last = lease.step if lease is not None and lease.run == run else 0
        if not held or held[-1].person != identity.person:
            held = [*held, Held(person=identity.person, step=last)][-KEPT:]
        new = Lease(
            slot=slot, holder=identity.person, nonce=secrets.token_hex(16), beat=0, run=run, step=last, steps=steps,
            held=held,
        )  # fmt: skip
        memory.write(new.nonce)
        if _write(store, new, etag):
            return Holding(store, new, lease_time, memory)
        memory.close()
    return None


class Memory:
    """A file with the nonce of this machine's lease of a slot, open and locked while a process works on it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.nonce = os.pread(handle, 64, 0).decode(errors="replace")

    @classmethod
    def open(cls, folder: Path, slot: int) -> "Memory | None":
        make_folder(folder)
        handle = os.open(folder / f"{slot:04d}.lease", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        return cls(handle)

    def write(self, nonce: str) -> None:
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, nonce.encode(), 0)

    def close(self) -> None:
        os.close(self._handle)


def _write(store: Store, lease: Lease, etag: str) -> bool:
    """Writes a lease in place of the one with this etag, or of none; returns whether it was stored."""
    content = lease.model_dump_json().encode()
    key = key_of(lease.slot)
    if store.replace(key, content, etag) if etag else store.create(key, content):
        return True
    with suppress(FileNotFoundError):  # False may mean that an earlier attempt succeeded and its response was lost
        return store.get(key, MAX_LEASE) == content
    return False


class Holding:
    """A lease that this process holds, kept alive by a thread."""

    def __init__(self, store: Store, lease: Lease, lease_time: float, memory: Memory) -> None:
        self.store, self.lease, self.lease_time, self._memory = store, lease, lease_time, memory
        self.lost = ""  # why it is no longer ours
        self._guard, self._end = threading.Lock(), threading.Event()

    @contextmanager
    def beating(self, progress: Callable[[], int], on_lost: Callable[[], object] | None = None) -> Iterator["Holding"]:
        """Sends heartbeats until the block ends; `on_lost` is called once if another has taken the slot."""

        def run() -> None:
            while not self._end.wait(self.lease_time / BEATS * random.uniform(0.9, 1.0)):
                with suppress(StoreError):  # a store that fails now may recover in time
                    self.beat(progress())
                if self.lost:
                    (on_lost or stop_this_process)()
                    return

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._end.set()
            thread.join(timeout=30)

    def beat(self, step: int, **changes: Any) -> bool:
        """Sends a heartbeat with the step reached; returns whether the slot is still ours."""
        with self._guard:
            present, etag = Lease.read(self.store, self.lease.slot)
            if present is None or present.nonce != self.lease.nonce:
                who = "nobody" if present is None else present.holder.name
                self.lost = (
                    f"the lease of slot {self.lease.slot} was taken over by {who}, since no heartbeat came in time"
                )
                return False
            new = present.model_copy(update={"beat": present.beat + 1, "step": max(step, present.step), **changes})
            if _write(self.store, new, etag):
                self.lease = new
            return True

    def release(self, step: int) -> None:
        """Releases the slot."""
        self.beat(step, released=True)
        self._memory.close()

    def check(self) -> None:
        if self.lost:
            raise InputError(f"{self.lost}: run the command again to lease another slot")


def stop_this_process() -> None:
    """Ends training at its next step, with a checkpoint, as Ctrl-C would."""
    os.kill(os.getpid(), signal.SIGTERM)
