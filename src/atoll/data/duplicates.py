"""Finds exact and near duplicates, using about 300 bytes of memory per image."""

from array import array
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

BANDS, BAND_BITS = 4, 16
MAX_DIFFERENT_BITS = 8  # of 64; two hashes that differ in at most 3 bits are sure to agree in one of four bands
MAX_DIFFERENCE = 4.0  # mean difference of two thumbnails, out of 255
MAX_CANDIDATES = 256  # per band, the most recent: avoids quadratic time on low-entropy data


class Duplicates:
    """An index of images by digest (exact) and, if `near`, by perceptual hash and thumbnail (rescaled or recompressed
    copies)."""

    def __init__(self, near: bool) -> None:
        self.near = near
        self._digests: set[int] = set()
        self._likeness, self._thumbs = array("Q"), bytearray()
        self._rows: defaultdict[tuple[int, int], array[int]] = defaultdict(lambda: array("i"))  # by (band, its bits)

    def find(self, digest: bytes, likeness: int, thumb: NDArray[np.uint8]) -> str:
        """Returns "exact duplicate", "near duplicate", or "" for a new image."""
        if _name(digest) in self._digests:
            return "exact duplicate"
        return "near duplicate" if self.near and self._has_near(likeness, thumb) else ""

    def add(self, digest: bytes, likeness: int, thumb: NDArray[np.uint8]) -> None:
        self._digests.add(_name(digest))
        if self.near:
            for key in _bands(likeness):
                self._rows[key].append(len(self._likeness))
            self._likeness.append(likeness)
            self._thumbs += thumb.tobytes()

    def _has_near(self, likeness: int, thumb: NDArray[np.uint8]) -> bool:
        rows = {row for key in _bands(likeness) if key in self._rows for row in self._rows[key][-MAX_CANDIDATES:]}
        similar = [row for row in rows if (self._likeness[row] ^ likeness).bit_count() <= MAX_DIFFERENT_BITS]
        thumbs = np.array([np.frombuffer(self._thumbs, np.uint8, thumb.size, row * thumb.size) for row in similar])
        differences = np.abs(thumbs.astype(np.int16) - thumb.reshape(-1)).mean(-1) if similar else np.empty(0)
        return bool((differences <= MAX_DIFFERENCE).any())


def _name(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


def _bands(likeness: int) -> list[tuple[int, int]]:
    return [(band, (likeness >> (BAND_BITS * band)) & ((1 << BAND_BITS) - 1)) for band in range(BANDS)]
