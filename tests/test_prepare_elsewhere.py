"""Images that are read and encoded by other processes: the bytes of the data set stay the same."""

import io
import os
import pickle
import secrets
import subprocess
import sys
from pathlib import Path

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


def by_value(function, values):
    """Calls a function that was sent here, on values that were, as another machine would."""
    sent_here = pickle.dumps(function)
    for value in values:
        yield pickle.loads(pickle.dumps(pickle.loads(sent_here)(pickle.loads(pickle.dumps(value)))))


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

    def gone(function, values):
        values = list(values)
        (tmp_path / "photos").rename(tmp_path / "moved")
        yield from map(function, values)

    with pytest.raises(
        InputError, match="a worker of the cluster does not see .*photos: put the images into an object"
    ):
        prepare(Source(str(tmp_path / "photos")), tmp_path / "data", SETTINGS, 0, progress=False, run_elsewhere=gone)


@pytest.mark.slow
def test_a_cluster_that_loses_workers_and_a_node(tmp_path):
    """10 workers are killed at random and a node with all that it holds: the bytes stay the same, nothing is left."""
    pytest.importorskip("ray")
    environment = os.environ | {  # Ray reads them when it is first imported, so it is a process of its own
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "300",  # on a busy machine
        "RAY_worker_niceness": "0",  # else it waits for all that the machine does besides
        "OMP_NUM_THREADS": "1",
    }
    script = Path(__file__).parent / "ray_faults.py"
    run = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "killed 10 workers and a node" in run.stdout
    assert_same_files(tmp_path / "local", tmp_path / "ray")
    names = {path.name for path in (tmp_path / "ray" / "shards").iterdir()}
    assert names == {*(f"{i:05d}.safetensors" for i in range(6)), "SHA256SUMS"}
