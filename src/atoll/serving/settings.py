"""The default limits of serving. A separate module, so that `atoll serve --help` need not import torch."""

from dataclasses import dataclass

from atoll.config import check_counts
from atoll.errors import InputError

MOST_WAITING = 1_000_000


@dataclass(frozen=True)
class Limits:
    """Limits on concurrent work, the queue, and single requests."""

    images: int = 16
    """Images in flight per model, at most; fewer if memory does not suffice."""
    waiting: int = 64
    """Images that may wait for a place; beyond that, requests get 429 with Retry-After."""
    memory: float = 0.25
    """The share of this machine's memory that images in flight may take."""
    n: int = 10
    """Images per request."""
    steps: int = 200
    """Steps per image."""
    body: int = 64 << 10
    """Bytes of a request."""
    connections: int = 512
    """Open connections; beyond that, requests get 503."""
    patience: float = 20.0
    """Seconds that a client may take to send a request, or to read a piece of the response."""
    drain: float = 120.0
    """Seconds that requests in flight have to finish after SIGTERM."""

    def __post_init__(self) -> None:
        check_counts(
            self, images=4096, waiting=MOST_WAITING, n=1000, steps=10_000, body=16 << 20, connections=100_000
        )  # fmt: skip
        if not 0 < self.memory <= 1:
            raise InputError(f"memory must be a share above 0 and at most 1, but is {self.memory}")
        for name in ("patience", "drain"):
            if not 0 < getattr(self, name) <= 86_400:
                raise InputError(f"{name} must lie above 0 and be at most 86400 seconds, but is {getattr(self, name)}")
