"""Data sets from and to an object store: items and bytes equal those of local folders."""

import io
import json
import shutil
import tarfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atoll.cards import DATASET
from atoll.cli.main import main
from atoll.data.images import Transform
from atoll.data.local_copy import local_copy
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.shards import Dataset
from atoll.data.sources import Source, read_items
from atoll.encoders.codecs import load_codec
from atoll.encoders.text import load_text_encoder
from atoll.errors import InputError, StoreError
from atoll.object_store import Store, StorePath, open_store, place_of, upload
from atoll.partition.partition import assign_to, partition
from object_stores import SECRET, WrongServer, moto_server, use_server

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
    """Makes a folder of images with every kind of caption, and faults."""
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
    """Returns all files of a data set, by their path in it."""
    root = place_of(place)
    if isinstance(root, StorePath):
        return {str(path.relative_to(root)): path.get(1 << 30) for path in root.rglob("*")}
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def assert_same_files(one, other, but=()) -> None:
    mine, theirs = files_in(one), files_in(other)
    assert mine.keys() - set(but) == theirs.keys() - set(but)
    assert [name for name in mine if name not in but and mine[name] != theirs[name]] == []


@pytest.mark.parametrize("kind", ["folder", "tar", "table"])
def test_a_source_is_the_same(bucket, tmp_path, kind):
    make, name = {"folder": (make_folder, ""), "tar": (make_tar, "a.tar"), "table": (make_table, "x/a.parquet")}[kind]
    make(tmp_path / "images" / name)
    url = sent(tmp_path / "images", f"{bucket}/{kind}/images")
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


@pytest.mark.slow
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
    """Cut after any number of shards, or after the codec; the bytes equal an uninterrupted run's."""
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


def test_two_runs_that_begin_at_once(bucket, tmp_path, monkeypatch):
    """The second finds the first's card, written while it fitted its own codec; the first loses nothing."""
    import atoll.data.prepare as module

    make, out = module.make_codec, f"{bucket}/at-once/data"

    def make_late(*args, **options):
        monkeypatch.setattr(module, "make_codec", make)
        prepare(Source("shapes", num=40, size=16), out, SETTINGS, 0, progress=False)
        return make(*args, **options)

    monkeypatch.setattr(module, "make_codec", make_late)
    with pytest.raises(InputError, match="was begun otherwise"):
        prepare(Source("shapes", num=41, size=16), out, SETTINGS, 0, progress=False)
    prepare(Source("shapes", num=40, size=16), tmp_path / "data", SETTINGS, 0, progress=False)
    assert_same_files(tmp_path / "data", out)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    home = tmp_path_factory.mktemp("shapes")
    prepare(Source("shapes", num=40, size=16), home / "data", SETTINGS, 0, progress=False)
    shutil.copytree(home / "data", home / "partitioned")
    partition(home / "partitioned", 2, method="random", progress=False)
    return home


@contextmanager
def failing(methods, after, error):
    """Makes some of a store's methods fail after a number of calls."""
    count = [0]

    def wrapped(name):
        method = getattr(Store, name)

        def call(self, *args):
            count[0] += 1
            if count[0] > after:
                raise error
            return method(self, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in methods:
            patch.setattr(Store, name, wrapped(name))
        yield


@pytest.mark.parametrize("num", [3, 8, 12, 18])
def test_a_partition_that_was_cut_short(bucket, shapes, num):
    """It is cut after a number of writes; the next run completes it, from the staged clusters or from scratch."""
    url = sent(shapes / "data", f"{bucket}/cut/{num}")
    with failing(("put_file", "copy", "delete"), num, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        partition(url, 2, method="random", progress=False)
    partition(url, 2, method="random", progress=False)
    assert_same_files(shapes / "partitioned", url)


def test_hostile_objects(bucket, tmp_path):
    """A truncated or foreign shard, an invalid card: one sentence, as for a folder."""
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
    """Its failure ends the run: images are left out only for their own faults."""
    make_folder(tmp_path / "photos")
    make_tar(tmp_path / "tars" / "a.tar")
    make_table(tmp_path / "tables" / "a.parquet")
    for name in ("photos", "tars", "tables"):
        url = sent(tmp_path / name, f"{bucket}/failing/{name}")
        for after in (0, 1, 3):
            source = Source(url, size=16)
            with (
                failing(("get_range", "read"), after, StoreError("the server is gone")),
                pytest.raises(StoreError, match="the server is gone"),
            ):
                read_items(source.items(), TRANSFORM)


def test_a_local_copy_has_what_is_asked_for(bucket, shapes, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = sent(shapes / "partitioned", f"{bucket}/copy/data")
    assert local_copy(shapes / "data") == shapes / "data", "a folder is itself"
    folder = local_copy(url, 1, progress=False)
    assert len(Dataset.open(folder, 1)) == 20
    assert not (folder / "clusters" / "00").exists()
    load_codec(folder), load_text_encoder(folder)
    with failing(("get_to_file",), 0, AssertionError("nothing is to be copied again")):
        assert local_copy(url, 1, progress=False) == folder
    assert local_copy(f"{url}/", progress=False) == folder
    view, expected = Dataset.open(folder), Dataset.open(shapes / "partitioned")
    assert np.array_equal(view.column("latents")[:], expected.column("latents")[:])

    shard = folder / "clusters" / "01" / "00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")  # a damaged local copy is downloaded again
    local_copy(url, 1, progress=False)
    assert shard.read_bytes() == (shapes / "partitioned" / "clusters" / "01" / "00000.safetensors").read_bytes()

    with failing(("head", "read", "list_folder"), 0, StoreError("the server is gone")):
        with pytest.warns(UserWarning, match="the server is gone; the copy in .* is used as it is"):
            assert local_copy(url, 1, progress=False) == folder
        with pytest.raises(StoreError, match="the server is gone"):
            local_copy(f"{bucket}/copy/other", progress=False)

    partition(url, 4, method="random", progress=False)  # the data changes
    assert len(Dataset.open(local_copy(url, progress=False))) == 40
    assert sorted(path.name for path in (folder / "clusters").iterdir() if path.is_dir()) == ["00", "01", "02", "03"]
    store = open_store(url)
    whole = store.get("clusters/02/00000.safetensors")
    store.put("clusters/02/00000.safetensors", whole[:-1] + b"x")
    shutil.rmtree(folder)
    local_copy(url, 0, progress=False)
    with pytest.raises(InputError, match="02/00000.safetensors is damaged, since its SHA-256"):
        local_copy(url, progress=False)
    store.delete("clusters/02/00000.safetensors")
    with pytest.raises(InputError, match="02/00000.safetensors is missing"):
        local_copy(url, progress=False)
    with pytest.raises(InputError, match="has no cluster 7: there are 00, 01, 02, 03"):
        local_copy(url, 7, progress=False)


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
        patch.setattr("atoll.object_store._bucket", lambda url, _: open_store(url, 1, 0.3))
        with pytest.raises(SystemExit) as caught:
            main(["partition", out, "--experts", "2"])
    assert caught.value.code == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert "the server answers 500" in error
    assert SECRET not in error


def test_another_endpoint_in_the_environment_is_another_store(bucket, monkeypatch):
    """As when a notebook corrects it after a first attempt."""
    place = place_of(f"{bucket}/endpoint/a")
    assert place.create(b"here")
    with WrongServer(404) as (endpoint, requests), monkeypatch.context() as patch:
        use_server(patch, endpoint)
        with pytest.raises(FileNotFoundError):
            place.get(10)
        assert requests
    assert place.get(10) == b"here"
