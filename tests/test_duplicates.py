"""Duplicates: which images count as the same, and which do not."""

import io

import numpy as np
from PIL import Image

from atoll.data.builtin import make
from atoll.data.duplicates import Duplicates
from atoll.data.images import CroppedImage, Transform, read_image

TRANSFORM = Transform(size=64, min_side=16)


def photo(seed: int) -> Image.Image:
    """Returns an image with the spectrum of a photograph."""
    rng = np.random.default_rng(seed)
    layers = [
        np.asarray(
            Image.fromarray(rng.integers(0, 256, (n, n, 3), np.uint8)).resize((256, 256), Image.Resampling.BICUBIC)
        )
        for n in (3, 6, 12, 48)
    ]
    return Image.fromarray(np.average(layers, 0, [4, 3, 2, 1]).astype(np.uint8))


def read(image: Image.Image, kind: str = "BMP", **options: object) -> CroppedImage:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return read_image(buffer.getvalue(), TRANSFORM)


def add(seen: Duplicates, picture: CroppedImage) -> None:
    seen.add(picture.digest, picture.likeness, picture.thumb)


def find(seen: Duplicates, picture: CroppedImage) -> str:
    return seen.find(picture.digest, picture.likeness, picture.thumb)


def test_copies_are_found_and_others_are_not():
    seen = Duplicates(near=True)
    originals = [photo(seed) for seed in range(40)]
    for image in originals:
        picture = read(image)
        assert find(seen, picture) == ""
        add(seen, picture)
    assert all(find(seen, read(image)) == "exact duplicate" for image in originals)
    copies = {
        "compressed": [read(image, "JPEG", quality=60) for image in originals],
        "smaller": [read(image.resize((150, 150))) for image in originals],
        "larger": [read(image.resize((400, 400))) for image in originals],
        "brighter": [read(Image.eval(image, lambda value: min(255, value + 3))) for image in originals],
    }
    for name, pictures in copies.items():
        found = np.mean([find(seen, picture) != "" for picture in pictures])
        assert found > 0.95, name
    assert not any(find(seen, read(photo(seed))) for seed in range(1000, 1100))


def test_exact_alone():
    seen = Duplicates(near=False)
    picture, copy = read(photo(0)), read(photo(0), "JPEG", quality=60)
    add(seen, picture)
    assert find(seen, picture) == "exact duplicate"
    assert find(seen, copy) == ""


def test_many():
    """The tables grow, and all entries are found again."""
    seen, rng = Duplicates(near=True), np.random.default_rng(0)
    thumb = np.zeros((8, 8, 3), np.uint8)
    names = [rng.bytes(16) for _ in range(20_000)]
    for name in names:
        seen.add(name, int.from_bytes(name[:8], "big"), thumb)
    assert all(seen.find(name, 0, thumb) == "exact duplicate" for name in names)
    assert not any(
        seen.find(rng.bytes(16), int(rng.integers(1 << 63)), thumb) == "exact duplicate" for _ in range(2000)
    )


def test_avatars_differ():
    """Avatars share a pose; those with different attributes are no duplicates, as far as 32 pixels can tell."""
    seen, different, mistaken = Duplicates(near=True), {}, 0
    for example in make("avatars", 400, 64, 0)[:]:
        picture = read(example.image)
        if find(seen, picture) and example.caption not in different:
            mistaken += 1
        different[example.caption] = True
        add(seen, picture)
    assert mistaken < 0.05 * 400
