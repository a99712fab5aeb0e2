"""Which images have been seen before, exactly or nearly, in about 40 bytes per image."""

from array import array

import numpy as np
from numpy.typing import NDArray

from atoll.data.images import CroppedImage
from atoll.data.shards import Shard

BANDS, BAND_BITS = 4, 16
MAX_DIFFERENT_BITS = 8  # of 64; two likenesses that differ in at most 3 are sure to agree in one of four bands
MAX_DIFFERENCE = 4.0  # mean difference of two thumbs, of 255
MAX_CANDIDATES = 256  # a band, newest first: keeps low-entropy data from costing quadratic time


class Duplicates:
    """Images by digest (exact) and, if `near`, by likeness and thumb (copies rescaled or compressed anew)."""

    def __init__(self, near: bool) -> None:
        self.near = near
        self._exact = _Set()
        self._likeness = array("Q")
        self._next = [array("i") for _ in range(BANDS)]
        self._last = np.full((BANDS, 1 << BAND_BITS), -1, np.int32)
        self._shards: list[Shard] = []  # where the thumbs of finished shards lie
        self._starts: list[int] = []
        self._fresh: list[NDArray[np.uint8]] = []  # of the shard being made

    def find(self, digest: bytes, likeness: int, thumb: NDArray[np.uint8]) -> str:
        """One of "exact", "near" and "", which is: not seen yet."""
        if _name(digest) in self._exact:
            return "exact"
        return "near" if self.near and self._has_near(likeness, thumb) else ""

    def add(self, digest: bytes, likeness: int, thumb: NDArray[np.uint8]) -> None:
        self._exact.add(_name(digest))
        if not self.near:
            return
        row = len(self._likeness)
        self._likeness.append(likeness)
        self._fresh.append(thumb)
        for band, key in enumerate(_bands(likeness)):
            self._next[band].append(int(self._last[band, key]))
            self._last[band, key] = row

    def add_new(self, image: CroppedImage) -> str:
        """Adds an image that was not seen before; of another, returns what it is."""
        name = image.digest, image.likeness, image.thumb
        if kind := self.find(*name):
            return f"{kind} duplicate"
        self.add(*name)
        return ""

    def close_shard(self, shard: Shard) -> None:
        """What was added since the last call now lies in this file."""
        if self.near and shard.num_rows:
            self._starts.append(len(self._likeness) - shard.num_rows)
            self._shards.append(shard)
        self._fresh = []

    def _has_near(self, likeness: int, thumb: NDArray[np.uint8]) -> bool:
        seen: set[int] = set()
        for band, key in enumerate(_bands(likeness)):
            row = int(self._last[band, key])
            for _ in range(MAX_CANDIDATES):
                if row < 0:
                    break
                if row not in seen:
                    seen.add(row)
                    different = (self._likeness[row] ^ likeness).bit_count()
                    if different <= MAX_DIFFERENT_BITS and _difference(self._thumb(row), thumb) <= MAX_DIFFERENCE:
                        return True
                row = self._next[band][row]
        return False

    def _thumb(self, row: int) -> NDArray[np.uint8]:
        stored = len(self._likeness) - len(self._fresh)
        if row >= stored:
            return self._fresh[row - stored]
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        thumb: NDArray[np.uint8] = self._shards[part].take("thumb", np.array([row - self._starts[part]]))[0]
        return thumb


class _Set:
    """A set of 64-bit names, 16 bytes each at most: a table with open addressing."""

    def __init__(self) -> None:
        self._table = np.zeros(1 << 12, np.uint64)
        self._num = 0

    def _slot(self, name: int) -> int:
        mask = len(self._table) - 1
        slot = name & mask
        while self._table[slot] not in (0, name):
            slot = (slot + 1) & mask
        return slot

    def __contains__(self, name: int) -> bool:
        return int(self._table[self._slot(name)]) == name

    def add(self, name: int) -> None:
        if 2 * (self._num + 1) > len(self._table):
            old = self._table[self._table != 0]
            self._table = np.zeros(2 * len(self._table), np.uint64)
            for kept in old.tolist():
                self._table[self._slot(kept)] = kept
        slot = self._slot(name)
        self._num += int(self._table[slot] == 0)
        self._table[slot] = name


def _name(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") or 1


def _bands(likeness: int) -> list[int]:
    return [(likeness >> (BAND_BITS * band)) & ((1 << BAND_BITS) - 1) for band in range(BANDS)]


def _difference(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    return float(np.abs(one.astype(np.int16) - other).mean())
