"""Decodes an image to a square of pixels, with hashes for filtering, splitting and finding duplicates.

Does not import torch, so that worker processes start quickly.
"""

import hashlib
import io
import re
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from atoll.errors import printable

DETAIL = 32  # pixels of the shorter side, for measuring detail
MAX_PIXELS = 250_000_000  # larger images are rejected unread: decoding would take a gigabyte
Image.MAX_IMAGE_PIXELS = None  # our own limit is checked first, from the header
# The format is read from the file's bytes, not its name. Only some of PIL's 40 formats are allowed, since others start
# external programs (EPS: Ghostscript). AVIF is not in every build of PIL.
Image.init()
_USUAL = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO", "TGA", "QOI")
LANCZOS = Image.Resampling.LANCZOS
FORMATS: list[str] = [name for name in _USUAL if name in Image.OPEN]


@dataclass(frozen=True)
class Transform:
    """How an image is scaled and cropped to size x size pixels, and which images are rejected."""

    size: int
    min_side: int  # the shorter side, in pixels
    max_aspect: float = 4.0  # longer side / shorter side: a centre crop of a banner shows little of it
    min_contrast: float = 2.0  # standard deviation of a channel's pixels, out of 255: less is a blank page
    feature_size: int = 0  # features are computed from the image at this size, if it is larger
    smart_crop: bool = False  # the part with most detail, not the centre


class CroppedImage(NamedTuple):
    """An image that passed the filters."""

    pixels: NDArray[np.uint8]  # [size, size, 3]
    digest: bytes  # 16-byte hash of the pixels
    thumb: NDArray[np.uint8]  # [8, 8, 3]
    likeness: int  # 64-bit perceptual hash
    origin: bytes  # 16-byte hash of the original content, independent of `size`
    large: NDArray[np.uint8] | None = None  # [feature_size, feature_size, 3], if that is larger than size


class Rejected(Exception):
    """The reason why an image was rejected, in a few words."""


def read_image(source: bytes | Image.Image, transform: Transform) -> CroppedImage:
    """Decodes an image, rotates it upright, converts it to RGB, filters, scales and crops it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # damaged metadata of a good image
            image = Image.open(io.BytesIO(source), formats=FORMATS) if isinstance(source, bytes) else source
            check_shape(image, transform)
            lossy = source if isinstance(source, bytes) and image.format in ("JPEG", "MPO") else None
            side = max(transform.size, transform.feature_size)
            image.draft("RGB", (2 * side, 2 * side))  # a JPEG is decoded no larger than needed
            whole = upright(image)
            sides = dict.fromkeys((transform.size, side))  # one or two
            centre = detailed_part(whole) if transform.smart_crop else (0.5, 0.5)
            pixels, *large = (np.asarray(ImageOps.fit(whole, (n, n), LANCZOS, centering=centre)) for n in sides)
            origin = _name(lossy or whole.tobytes())  # lossless copies have the same hash
    except Rejected:
        raise
    except Exception as error:  # PIL raises almost anything on damaged files
        reason = re.sub(r" ?<.*>", "", str(error)) or type(error).__name__  # without addresses: the same in every run
        raise Rejected(f"broken image ({printable(reason[:80])})" if source else "empty file") from error
    if pixels.std((0, 1)).max() < transform.min_contrast:
        raise Rejected("blank image")
    thumb = np.asarray(Image.fromarray(pixels).resize((8, 8), Image.Resampling.BOX))
    return CroppedImage(pixels, _name(pixels.tobytes()), thumb, likeness_of(pixels), origin, *large)


def _name(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def check_shape(image: Image.Image, transform: Transform) -> None:
    width, height = image.size
    short, long = sorted((width, height))
    if width * height > MAX_PIXELS:
        raise Rejected(f"too large ({width}x{height}, more than {MAX_PIXELS // 1_000_000} megapixels)")
    if short < transform.min_side:
        raise Rejected(f"too small ({width}x{height}, shorter side below {transform.min_side})")
    if long > transform.max_aspect * short:
        raise Rejected(f"too long ({width}x{height}, aspect above {transform.max_aspect:g})")


def upright(image: Image.Image) -> Image.Image:
    """Returns the image in RGB, rotated according to EXIF."""
    image = ImageOps.exif_transpose(image)
    if image.mode in ("I;16", "I;16B", "I;16L", "I", "F"):
        deep = np.asarray(image).astype(np.float64)
        top = 65535 if image.mode != "F" or deep.max() > 1 else 1
        image = Image.fromarray((deep.clip(0, top) * (255 / top)).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(paper, image)
    return image.convert("RGB")


def detailed_part(image: Image.Image) -> tuple[float, float]:
    """Returns the position of the largest square with the most detail, from 0 to 1 along each side (PIL's `centering`).

    Detail is the difference between neighbouring pixels of a small copy. Off-centre squares must have more detail, by
    up to a third at the ends, since subjects tend to be near the middle.
    """
    width, height = image.size
    short = min(width, height)
    small = image.convert("L").resize([max(DETAIL, round(side * DETAIL / short)) for side in (width, height)], LANCZOS)
    grey = np.asarray(small, dtype=np.float64)
    detail = np.hypot(np.diff(grey, axis=0, append=grey[-1:]), np.diff(grey, axis=1, append=grey[:, -1:]))
    along = int(height > width)  # 0: the square moves along the width
    sums = np.concatenate([[0], np.cumsum(detail.sum(along))])
    squares = sums[DETAIL:] - sums[:-DETAIL]
    places = np.linspace(0, 1, len(squares)) if len(squares) > 1 else np.array([0.5])
    best = float(places[np.argmax((squares + 1e-9) * (1 - abs(places - 0.5) / 2))])
    return (0.5, best) if along else (best, 0.5)


def likeness_of(pixels: NDArray[np.uint8]) -> int:
    """Returns a perceptual hash: one bit per low frequency of the grey image, set if it is above their median."""
    grey = np.asarray(Image.fromarray(pixels).convert("L").resize((32, 32), Image.Resampling.BOX), dtype=np.float64)
    low = (_COSINES @ grey @ _COSINES.T).flatten()
    return int.from_bytes(np.packbits(low > np.median(low)).tobytes(), "big")


_COSINES = np.cos(np.pi / 32 * (np.arange(32) + 0.5) * np.arange(1, 9)[:, None])  # 8 x 32: without the mean
