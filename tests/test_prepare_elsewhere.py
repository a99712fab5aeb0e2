"""Images that are read and encoded by other processes: the bytes of the data set stay the same."""

import io
import pickle
import random
import secrets

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


@pytest.fixture(scope="module")
def cluster():
    """Three nodes of two logical CPUs each, with token authentication."""
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        import ray
        from ray.cluster_utils import Cluster

        room = {"num_cpus": 2, "object_store_memory": 80 << 20}
        cluster = Cluster(initialize_head=True, head_node_args={**room, "include_dashboard": False})
        for _ in range(2):
            cluster.add_node(**room)
        ray.init(cluster.address, log_to_driver=False, logging_level="error")
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_a_cluster_that_loses_workers_and_a_node(cluster, tmp_path, monkeypatch):
    """10 workers are killed at random and a node with all that it holds: the bytes stay the same, nothing is left."""
    import psutil

    from atoll.engines.settings import EngineSettings

    monkeypatch.setattr(module, "BATCH", 32)
    engine, killed, chance = EngineSettings("ray").open("cpu"), [], random.Random(0)

    def kill_some(function, values):
        for i, result in enumerate(engine.map(function, values)):
            if i % 4 == 2 and len(killed) < 10:
                workers = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::")]
                if workers:
                    victim = chance.choice(workers)
                    victim.kill()
                    killed.append(victim.pid)
            if i == 20:
                cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
            yield result

    source = Source("shapes", num=2600, size=16)
    card = prepare(source, tmp_path / "ray", SETTINGS, 0, progress=False, device="cpu", run_elsewhere=kill_some)
    assert len(killed) == 10
    assert prepare(source, tmp_path / "local", SETTINGS, 0, progress=False, device="cpu") == card
    assert_same_files(tmp_path / "local", tmp_path / "ray")
    names = {path.name for path in (tmp_path / "ray" / "shards").iterdir()}
    assert names == {*(f"{i:05d}.safetensors" for i in range(6)), "SHA256SUMS"}
