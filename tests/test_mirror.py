"""A run's folder in an object store: another machine resumes it bit for bit, and the store may fail temporarily."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.errors import InputError
from atoll.object_store import Store, open_store
from atoll.training import loop, mirror
from atoll.training.mirror import Mirror
from test_loop import TOY, Toy, figures, weights

pytest.importorskip("obstore")
STEPS = replace(TOY, steps=36, keep_last=1, warmup=0)


def train(folder: Path, url: str | None = None, steps: int = 36) -> None:
    list(loop.train(lambda _: Toy(), replace(STEPS, steps=steps), folder, progress_bar=False, mirror_url=url))


@pytest.fixture
def url(tmp_path) -> str:
    return f"file://{tmp_path}/store/run"


def keys(url: str) -> list[str]:
    return [key for key, _ in open_store(url).list() if not key.startswith("tensorboard/")]


@pytest.mark.bits
def test_another_machine_resumes(tmp_path, url):
    """With the folder lost or older than the store's, the run ends as if it had not been interrupted."""
    train(tmp_path / "whole")
    train(tmp_path / "a", url, steps=12)
    shutil.copytree(tmp_path / "a", tmp_path / "stale")
    shutil.rmtree(tmp_path / "a")
    train(tmp_path / "b", url, steps=24)
    assert keys(url) == ["config.json", "metrics.jsonl", "model.safetensors", "run.json", "state/000000024.safetensors"]
    train(tmp_path / "stale", url)
    assert weights(tmp_path / "stale") == weights(tmp_path / "whole")
    assert figures(tmp_path / "stale") == figures(tmp_path / "whole")


def test_the_result_alone(tmp_path, url):
    train(tmp_path / "a", url, steps=8)
    Mirror(url, tmp_path / "b").restore(state=False)
    names = ("config.json", "model.safetensors", "run.json")
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    assert not (tmp_path / "b" / "state").exists()


def test_nothing_is_restored_from_half_an_upload(tmp_path, url):
    open_store(url).put("state/000000008.safetensors", b"half")
    train(tmp_path / "a", url, steps=4)
    assert "state/000000008.safetensors" not in keys(url)


def test_a_folder_that_is_ahead_stays(tmp_path, url):
    train(tmp_path / "a", url, steps=8)
    shutil.copytree(tmp_path / "a", tmp_path / "kept")
    train(tmp_path / "a", steps=16)
    before = weights(tmp_path / "a")
    Mirror(url, tmp_path / "a").restore()
    assert weights(tmp_path / "a") == before


def test_a_store_that_fails_for_a_while(tmp_path, url, monkeypatch, capsys):
    """Training continues without it, and everything is stored in the end."""
    monkeypatch.setattr(mirror, "AGAIN", 0.01)
    real, fails = Store.put_file, [3]

    def put_file(self, key, path):
        if fails[0]:
            fails[0] -= 1
            raise InputError("the server does not answer: check the server")
        real(self, key, path)

    monkeypatch.setattr(Store, "put_file", put_file)
    train(tmp_path / "a", url)
    assert capsys.readouterr().err.count("the server does not answer: check the server; training continues") == 3
    assert "model.safetensors" in keys(url)
    fails[0] = 10**9
    monkeypatch.setattr(mirror, "LONGEST", 0.0)
    with pytest.raises(InputError, match="the server does not answer"):
        train(tmp_path / "b", f"{url}-other")


def test_no_url(tmp_path):
    with pytest.raises(InputError, match="is no object store"):
        train(tmp_path / "a", "ftp://somewhere/run")
