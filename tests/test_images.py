"""Images of every kind and in every condition, and how each is handled."""

import io

import numpy as np
import pytest
from PIL import Image

from atoll.data import images
from atoll.data.images import Rejected, Transform, read_image

TRANSFORM = Transform(size=32, min_side=16)


def scene(width: int = 60, height: int = 40) -> Image.Image:
    """Returns red on the left, blue on the right and a green stripe on top, which shows the orientation."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 2] = (200, 30, 30)
    pixels[:, width // 2 :] = (30, 30, 200)
    pixels[: height // 4] = (30, 180, 30)
    return Image.fromarray(pixels)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def colours(pixels: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns the colours at the top, left and right, in steps that survive compression."""
    return tuple(tuple((pixels[y, x].astype(int) + 20) // 40) for y, x in ((3, 16), (24, 4), (24, 28)))


EXPECTED = colours(read_image(scene(), TRANSFORM).pixels)


@pytest.mark.parametrize(
    "content",
    [
        saved(scene(), "PNG"),
        saved(scene(), "JPEG", quality=95),
        saved(scene(), "WEBP", quality=95),
        saved(scene(), "BMP"),
        saved(scene(), "TIFF"),
        saved(scene().quantize(32), "PNG"),
        saved(scene().convert("CMYK"), "JPEG", quality=95),
        saved(scene().convert("RGBA"), "PNG"),
        saved(scene(), "GIF", save_all=True, append_images=[Image.new("RGB", (60, 40), "white")]),
    ],
    ids=["png", "jpeg", "webp", "bmp", "tiff", "palette", "cmyk", "rgba", "animated"],
)
def test_formats(content):
    picture = read_image(content, TRANSFORM)
    assert picture.pixels.shape == (32, 32, 3)
    assert colours(picture.pixels) == EXPECTED


def test_exif_rotation():
    turned = scene().transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it 90 degrees clockwise to view it
    assert colours(read_image(saved(turned, "JPEG", quality=95, exif=exif), TRANSFORM).pixels) == EXPECTED


def test_sixteen_bits():
    ramp = np.tile(np.linspace(0, 65535, 64).astype(np.uint16), (64, 1))
    pixels = read_image(saved(Image.fromarray(ramp), "PNG"), TRANSFORM).pixels
    assert pixels[16, 1, 0] < 20
    assert 110 < pixels[16, 16, 0] < 145
    assert pixels[16, 30, 0] > 235


def test_transparency_lies_on_white():
    image = scene().convert("RGBA")
    image.putalpha(Image.new("L", image.size, 0))
    image.paste(scene().crop((0, 0, 30, 40)), (0, 0))
    assert read_image(saved(image, "PNG"), TRANSFORM).pixels[24, 28].tolist() == [255, 255, 255]


def test_a_hundred_megapixels():
    huge = scene().resize((10_000, 10_000))
    assert colours(read_image(saved(huge, "JPEG"), TRANSFORM).pixels)[0] == EXPECTED[0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"this is not a picture", r"broken image \(cannot identify image file\)$"),
        (saved(scene(), "JPEG")[:300], "broken image"),
        (saved(scene(), "PNG")[:120], "broken image"),
        (saved(Image.new("RGB", (1, 1)), "PNG"), r"too small \(1x1"),
        (saved(scene(400, 40), "PNG"), r"too long \(400x40, aspect above 4\)"),
        (saved(Image.new("RGB", (64, 64), "white"), "PNG"), "blank image"),
        (saved(Image.new("RGB", (64, 64), "red"), "PNG"), "blank image"),
    ],
    ids=["empty", "text", "cut jpeg", "cut png", "1x1", "banner", "blank", "plain red"],
)
def test_rejected(content, reason):
    with pytest.raises(Rejected, match=reason):
        read_image(content, TRANSFORM)


def test_too_large_is_refused_unread(monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 1000)
    with pytest.raises(Rejected, match=r"too large \(60x40"):
        read_image(saved(scene(), "PNG"), TRANSFORM)


def test_any_bytes_are_rejected_not_raised():
    rng = np.random.default_rng(0)
    good = bytearray(saved(scene(), "JPEG"))
    for _ in range(200):
        damaged = bytearray(good)
        for place in rng.integers(2, len(good), 8):
            damaged[place] = rng.integers(256)
        try:
            read_image(bytes(damaged), TRANSFORM)
        except Rejected as error:
            assert str(error)


def test_formats_that_start_programs_are_not_read(monkeypatch):
    """An EPS is a program for Ghostscript, which PIL would start for it, whatever the file is called."""
    content = saved(scene(), "EPS")
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("a program was started"))
    with pytest.raises(Rejected, match="broken image"):
        read_image(content, TRANSFORM)


@pytest.mark.parametrize("upright", [False, True])
@pytest.mark.parametrize("place", [0, 20, 70, 140])
def test_a_smart_crop_has_the_detail_in_it(upright, place):
    rng = np.random.default_rng(0)
    pixels = rng.integers(100, 140, (60, 200, 3)).astype(np.uint8)
    pixels[:, place : place + 60] = rng.integers(0, 256, (60, 60, 3))
    image = Image.fromarray(pixels.transpose(1, 0, 2) if upright else pixels)
    smart, centre = (read_image(image, Transform(32, 16, smart_crop=smart)).pixels.std() for smart in (True, False))
    whole = read_image(Image.fromarray(pixels[:, place : place + 60]), TRANSFORM).pixels.std()
    assert smart > 0.9 * whole
    assert smart > 1.2 * centre or place == 70


def test_a_smart_crop_of_little_detail_is_the_centre():
    flat = Image.fromarray(np.full((40, 120, 3), 100, np.uint8))
    assert images.detailed_part(flat) == (0.5, 0.5) == images.detailed_part(scene(40, 40))
    assert images.detailed_part(scene(40, 41))[0] == 0.5
