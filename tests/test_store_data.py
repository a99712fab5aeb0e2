"""Data sets from and to an object store: the items and bytes are those of folders of this machine."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from object_stores import SECRET, WrongServer, moto_server, use_server
from PIL import Image

from atoll.cards import DATASET
from atoll.cli.main import main
from atoll.data.images import Transform
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.shards import Dataset
from atoll.data.sources import Source, read_items
from atoll.errors import InputError, StoreError
from atoll.object_store import StorePath, open_store, place_of, upload
from atoll.partition.partition import assign_to, partition

pytest.importorskip("obstore")
SETTINGS = PrepareSettings(size=16, codec="pca:plain", holdout=0.1)
TRANSFORM = Transform(16, 8)


@pytest.fixture(scope="module")
def bucket():
    with moto_server() as url:
        yield url


def jpeg(seed, size=24):
    rng, file = np.random.default_rng(seed), io.BytesIO()
    pixels = rng.integers(0, 255, (4, 4, 3)).astype(np.uint8)
    Image.fromarray(pixels).resize((size, size + 3)).save(file, "JPEG")
    return file.getvalue()


def make_folder(place: Path) -> None:
    """Images with every kind of caption, and faults."""
    for name in ("cats", "dogs", "annotations"):
        (place / name).mkdir(parents=True)
    for i in range(12):
        (place / "cats" / f"{i}.jpg").write_bytes(jpeg(i))
        (place / "cats" / f"{i}.txt").write_text(f"cat number {i}")
        (place / "dogs" / f"d {i}é.jpg").write_bytes(jpeg(100 + i))
    rows = [json.dumps({"file_name": f"d {i}é.jpg", "text": [f"dog {i}", f"hound {i}"]}) for i in range(12)]
    (place / "dogs" / "metadata.jsonl").write_text("\n".join(rows))
    (place / "cats" / "copy.jpg").write_bytes(jpeg(3))
    (place / "cats" / "copy.json").write_text('{"caption": "a copy"}')
    (place / "cats" / "broken.jpg").write_bytes(b"no image")
    (place / "cats" / "broken.txt").write_text("broken")
    (place / "cats" / "empty.jpg").write_bytes(b"")
    (place / "alone.jpg").write_bytes(jpeg(50))
    (place / ".hidden.jpg").write_bytes(jpeg(51))


def make_tar(path: Path, num: int = 20) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for i in range(num):
            for name, content in ((f"{i:04d}.jpg", jpeg(200 + i)), (f"{i:04d}.txt", f"sample {i}".encode())):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


def make_table(path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"image": [jpeg(300 + i) for i in range(20)], "text": [f"row {i}" for i in range(20)]})
    parquet.write_table(table, path, row_group_size=7)


def sent(folder: Path, url: str) -> str:
    upload(folder, StorePath(url))
    return url


def files_in(place) -> dict[str, bytes]:
    """All files of a data set, by their path in it."""
    root = place_of(place)
    if isinstance(root, StorePath):
        return {str(path.relative_to(root)): path.get(1 << 30) for path in root.rglob("*")}
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def assert_same_files(one, other, but=()) -> None:
    mine, theirs = files_in(one), files_in(other)
    assert mine.keys() - set(but) == theirs.keys() - set(but)
    assert [name for name in mine if name not in but and mine[name] != theirs[name]] == []


@pytest.mark.parametrize("make", [make_folder, lambda p: make_tar(p / "a.tar"), lambda p: make_table(p / "x" / "a.parquet")],
                         ids=["folder", "tar", "table"])  # fmt: skip
def test_a_source_is_the_same(bucket, tmp_path, request, make):
    make(tmp_path / "images")
    url = sent(tmp_path / "images", f"{bucket}/{request.node.callspec.id}/images")
    here, there = Source(str(tmp_path / "images"), size=16), Source(url, size=16)
    assert here.kind == there.kind
    mine, theirs = list(here.items()), list(there.items())
    assert len(mine) >= 20
    strip = lambda item: (item.key, item.where[2:], item.caption, item.label, item.fault, item.more)  # noqa: E731
    assert [strip(item) for item in mine] == [strip(item) for item in theirs]
    assert list(there.items()) == theirs, "the second listing is remembered"
    for (a, x), (b, y) in zip(read_items(mine, TRANSFORM), read_items(theirs, TRANSFORM), strict=True):
        assert strip(a) == strip(b)
        assert (x is None) == (y is None)
        assert x is None or (x.digest, x.origin) == (y.digest, y.origin)
    assert here.describe() == there.describe()


def test_prepare_and_partition_make_the_same_bytes(bucket, tmp_path):
    make_folder(tmp_path / "photos")
    url = sent(tmp_path / "photos", f"{bucket}/whole/photos")
    here, there = tmp_path / "data", f"{bucket}/whole/data"
    card = prepare(Source(str(tmp_path / "photos"), size=16), here, SETTINGS, progress=False)
    assert prepare(Source(url, size=16), there, SETTINGS, progress=False) == card
    assert card.counts.rejected == 4
    assert_same_files(here, there)
    assert prepare(Source(url, size=16), there, SETTINGS, progress=False) == card, "run again, it is done"
    remote = Dataset.open(there)
    assert isinstance(remote.folder, StorePath)
    assert remote.strings("caption") == Dataset.open(here).strings("caption")

    told = partition(here, 3, fine=8, progress=False)
    assert partition(there, 3, fine=8, progress=False)[2:-2] == told[2:-2]
    assert_same_files(here, there)
    for experts in (2, 3):  # once more, from clusters
        partition(here, experts, method="random", progress=False)
        partition(there, experts, method="random", progress=False)
        assert_same_files(here, there)
    assert len(Dataset.open(there, 1)) == len(Dataset.open(here, 1))


def test_assign(bucket, tmp_path):
    prepare(Source("shapes", num=60, size=16), tmp_path / "a", SETTINGS, 0, progress=False)
    partition(tmp_path / "a", 2, progress=False)
    upload(tmp_path / "a", StorePath(f"{bucket}/assign/a"))
    settings = PrepareSettings(size=16, codec=f"saved:{tmp_path}/a")
    for out in (tmp_path / "b", f"{bucket}/assign/b"):
        prepare(Source("shapes", num=40, size=16, seed=1), out, settings, 0, progress=False)
    assign_to(tmp_path / "b", tmp_path / "a" / "clusters", progress=False)
    assign_to(f"{bucket}/assign/b", f"{bucket}/assign/a/clusters", progress=False)
    assert_same_files(tmp_path / "b", f"{bucket}/assign/b")


def test_a_run_that_was_cut_short_is_resumed(bucket, tmp_path, monkeypatch):
    """After any number of shards, and after the codec; bytes are those of a run that was not."""
    import atoll.data.prepare as module

    monkeypatch.setattr(module, "CHUNK", 64)
    source, out = Source("shapes", num=300, size=16), f"{bucket}/resumed/data"
    prepare(source, tmp_path / "data", SETTINGS, 0, progress=False)
    assert len(Dataset.open(tmp_path / "data").shards) > 4
    add, left = module.ShardWriter.add, [0, 1, 2]

    def add_some(self, *args):
        if budget[0] == 0:
            raise KeyboardInterrupt
        budget[0] -= 1
        add(self, *args)

    monkeypatch.setattr(module.ShardWriter, "add", add_some)
    for num in left:
        budget = [num]
        with pytest.raises(KeyboardInterrupt):
            prepare(source, out, SETTINGS, 0, progress=False)
        with pytest.raises(InputError, match="is not finished: rerun the same"):
            Dataset.open(out)
    budget = [-1]
    prepare(source, out, SETTINGS, 0, progress=False)
    assert_same_files(tmp_path / "data", out)
    with pytest.raises(InputError, match="was begun otherwise"):
        prepare(Source("shapes", num=301, size=16), out, SETTINGS, 0, progress=False)


@pytest.mark.parametrize("step", range(12))
def test_a_partition_that_was_cut_short(bucket, tmp_path, monkeypatch, step):
    """At each request that changes something, the data is whole, or the next partition makes it so."""
    home = tmp_path / "data"
    prepare(Source("shapes", num=40, size=16), home, SETTINGS, 0, progress=False)
    url = f"{bucket}/cut/{step}"
    upload(home, StorePath(url))
    partition(home, 2, method="random", progress=False)
    from atoll.object_store import Store

    count = [0]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        for name in ("put_file", "copy", "delete"):

            def failing(self, *args, method=getattr(Store, name)):
                count[0] += 1
                if count[0] > 2 * step:
                    raise KeyboardInterrupt
                return method(self, *args)

            patch.setattr(Store, name, failing)
        partition(url, 2, method="random", progress=False)
    partition(url, 2, method="random", progress=False)
    assert_same_files(home, url)


def test_hostile_objects(bucket, tmp_path):
    """A shard that is cut short or another's, a card that is none: one sentence, as of a folder."""
    prepare(Source("shapes", num=40, size=16), tmp_path / "data", SETTINGS, 0, progress=False)
    url = sent(tmp_path / "data", f"{bucket}/hostile/data")
    store = open_store(url)
    whole = store.get("shards/00000.safetensors")
    for content in (whole[:-1], whole[:100], whole[:3], b"", b"\xff" * 50):
        store.put("shards/00000.safetensors", content)
        with pytest.raises(InputError, match="is truncated or not a shard"):
            Dataset.open(url)
    store.delete("shards/00000.safetensors")
    with pytest.raises(InputError, match="lacks '00000.safetensors' of its 1 shards"):
        Dataset.open(url)
    store.put(DATASET, b"{")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        Dataset.open(url)
    with pytest.raises(InputError, match="there is no s3://lake/nothing/dataset.json"):
        Dataset.open(f"{bucket}/nothing")
    with pytest.raises(InputError, match="is not empty and not a data set"):
        prepare(Source("shapes", num=40, size=16), f"{url}/shards", SETTINGS, 0, progress=False)
    with pytest.raises(InputError, match="there is no s3://lake/nothing: give a folder"):
        list(Source(f"{bucket}/nothing").items())


def test_a_server_that_fails_leaves_no_image_out(bucket, tmp_path, monkeypatch):
    """Its failure ends the run: an image is left out for what it is alone."""
    make_folder(tmp_path / "photos")
    make_tar(tmp_path / "tars" / "a.tar")
    make_table(tmp_path / "tables" / "a.parquet")
    from atoll.object_store import Store

    get_range, read = Store.get_range, Store.read
    for name in ("photos", "tars", "tables"):
        url = sent(tmp_path / name, f"{bucket}/failing/{name}")
        for fails_at in (1, 2, 4):
            count = [0]

            def failing(self, *args, method):
                count[0] += 1
                if count[0] >= fails_at:
                    raise StoreError("the server is gone")
                return method(self, *args)

            with monkeypatch.context() as patch:
                patch.setattr(Store, "get_range", lambda self, *args: failing(self, *args, method=get_range))
                patch.setattr(Store, "read", lambda self, *args: failing(self, *args, method=read))
                with pytest.raises(StoreError, match="the server is gone"):
                    read_items(Source(url, size=16).items(), TRANSFORM)


def test_the_command_says_no_secret(bucket, tmp_path, capsys, monkeypatch):
    out = f"{bucket}/secret/data"
    assert main(["prepare", "shapes", "--num", "40", "--size", "16", "--codec", "pca:plain", "--out", out]) in (0, None)
    assert main(["partition", out, "--experts", "2"]) in (0, None)
    said = capsys.readouterr()
    assert f"next: atoll partition {out} --experts 4" in said.out
    assert not any(SECRET.encode() in content for content in files_in(out).values())
    assert SECRET not in said.out + said.err
    with WrongServer(500, SECRET) as (endpoint, _), monkeypatch.context() as patch:
        use_server(patch, endpoint)
        patch.setattr("atoll.object_store._bucket", lambda url: open_store(url, 1, 0.3))
        with pytest.raises(SystemExit) as caught:
            main(["partition", out, "--experts", "2"])
    assert caught.value.code == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert "the server answers 500" in error
    assert SECRET not in error
