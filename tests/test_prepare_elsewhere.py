"""Images read and encoded by other processes: the data set has the same bytes."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image

import atoll.data.prepare as module
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source
from atoll.errors import InputError
from test_store_data import assert_same_files, make_folder

SETTINGS = PrepareSettings(size=16, codec="pca:plain", holdout=0.1, flip=True)


def by_value(function, values, then=None):
    """Calls functions on values, both sent by pickling as to other machines."""
    sent = [pickle.dumps(step) for step in (function, then) if step]
    for value in values:
        for step in sent:
            value = pickle.loads(step)(pickle.loads(pickle.dumps(value)))  # noqa: PLW2901
        yield pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("source", ["folder", "shapes"])
def test_the_bytes_are_the_same(source, tmp_path, monkeypatch):
    """With duplicates, faults and several captions, in several shards."""
    monkeypatch.setattr(module, "CHUNK", 64)
    if source == "folder":
        make_folder(tmp_path / "photos")
        for i in range(80):
            pixels = np.random.default_rng(i // 2).integers(0, 255, (4, 4, 3)).astype(np.uint8)  # every other a copy
            file = io.BytesIO()
            Image.fromarray(pixels).resize((20, 20)).save(file, "PNG")
            (tmp_path / "photos" / "cats" / f"more{i}.png").write_bytes(file.getvalue())
            (tmp_path / "photos" / "cats" / f"more{i}.txt").write_text(f"one of {i // 2}")
    place = Source(str(tmp_path / "photos") if source == "folder" else source, num=None if source == "folder" else 200)
    card = prepare(place, tmp_path / "here", SETTINGS, 0, progress=False)
    assert card.counts.rejected > 40 or source == "shapes"
    assert prepare(place, tmp_path / "there", SETTINGS, 0, progress=False, run_elsewhere=by_value) == card
    assert_same_files(tmp_path / "here", tmp_path / "there")
    assert len(list((tmp_path / "here" / "shards").iterdir())) > 2


def test_a_worker_that_does_not_see_the_images(tmp_path):
    make_folder(tmp_path / "photos")

    def gone(function, values, then=None):
        values = list(values)
        (tmp_path / "photos").rename(tmp_path / "moved")
        yield from map(function, values)

    with pytest.raises(
        InputError, match="a worker of the cluster does not see .*photos: put the images into an object"
    ):
        prepare(Source(str(tmp_path / "photos")), tmp_path / "data", SETTINGS, 0, progress=False, run_elsewhere=gone)
