"""The original images of a data set, which the papers compare with, so that the codec's losses count.

A data set holds only latents, so its source is read again; images are identified by the digest of their pixels.
"""

from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from atoll.cards import hash_of
from atoll.data.prepare import transform_of
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source, readers
from atoll.data.view import DatasetView
from atoll.encoders.features import make_features
from atoll.errors import InputError
from atoll.storage import write_whole


class Originals:
    """Rows of a data set as pixels, read from its source once and cached in the folder."""

    def __init__(self, source: str, view: DatasetView, rows: NDArray[np.int64], folder: Path, progress: bool) -> None:
        self.view, self.rows, self.progress = view, np.unique(rows), progress
        card = view.data.card.source
        self.source = Source(source, card.template, card.num, view.data.card.settings.size, card.seed or 0,
                             card.caption_column)  # fmt: skip
        self.path = folder / f"{hash_of([view.fingerprint, self.rows.tolist()])[:32]}.npy"

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Returns images [n, S, S, 3]."""
        return np.array(self._images[np.searchsorted(self.rows, rows)])

    @cached_property
    def _images(self) -> NDArray[np.uint8]:
        if not self.path.exists():
            write_whole(self.path, self._write)
        return np.load(self.path, mmap_mode="r")

    def _write(self, staged: Path) -> None:
        card = self.view.data.card
        about = card.settings
        settings = PrepareSettings(
            about.size, holdout=about.holdout, min_side=about.min_side, max_aspect=about.max_aspect
        )
        transform = transform_of(settings, make_features(card.features.spec).size)
        digests = self.view.data.column("digest")[self.rows]
        places = {digest.tobytes(): place for place, digest in enumerate(digests)}
        shape = (len(self.rows), about.size, about.size, 3)
        images = np.lib.format.open_memmap(staged, "w+", np.uint8, shape)
        missing = set(places.values())
        with readers(0, transform, 0) as read:
            items = tqdm(self.source.items(), "originals", card.source.items, disable=None if self.progress else True)
            for _, image in read(items):
                if image is not None and (place := places.get(image.digest)) is not None:
                    images[place] = image.pixels
                    missing.discard(place)
                    if not missing:
                        break
        if missing:
            raise InputError(
                f"{self.source.place} lacks {len(missing)} of {len(self.rows)} images of {self.view.name}: give the "
                "source that the data was prepared from, or compare with decoded latents"
            )
        images.flush()
