"""Reading avatars: from pixels back to the attributes of their caption, for any image, generated ones above all.

The nearest of all clean images is looked for, first by the background, then the character, then its hat.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from atoll.data.builtin.avatars import (
    ATTRIBUTES,
    BACKGROUND,
    BACKGROUNDS,
    EYES,
    FRAME,
    INKS,
    MOUTHS,
    NONE,
    RISES,
    SIZES,
    Array,
    Pose,
    paint,
    palette_of,
    rgb,
)
from atoll.errors import InputError


class Look(NamedTuple):
    """The shape of a character, whatever its colours, mouth and hat."""

    kind: str
    eyewear: str
    eyes: str
    rise: float


LOOKS = [
    Look(kind, eyewear, eyes, rise)
    for kind, eyewear, eyes, rise in product(ATTRIBUTES["kind"], ATTRIBUTES["eyewear"], sorted(set(EYES)), RISES)
    if eyewear != "sunglasses" or eyes == EYES[0]  # nobody sees the eyes behind sunglasses
]


def _shares(look: Look, hat: str, size: int) -> Array:
    """The share of each ink in each pixel, [S S, inks]: the mean over the mouths, and a little soft.

    Softness costs nothing on crisp images; crisp templates take a blurred face for one with other glasses.
    """
    attributes = {"kind": look.kind, "eyewear": look.eyewear, "hat": hat}
    poses = [Pose(look.eyes, mouth, look.rise) for mouth in MOUTHS]
    images = [paint(attributes, pose, np.eye(INKS, dtype=np.float32), size) for pose in poses]
    mean = np.mean(images, 0, dtype=np.float32)
    soft = (size / FRAME) ** 2 / 4  # the same blur, in units of the frame, at any size
    for _ in range(2):
        padded = np.pad(mean, ((1, 1), (0, 0), (0, 0)), mode="edge")
        mean = (soft * (padded[:-2] + padded[2:]) + (1 - 2 * soft) * padded[1:-1]).swapaxes(0, 1)
    return mean.reshape(size * size, INKS)


class Templates(NamedTuple):
    """What every look under every hat is made of, and which pixels [S S] tell what."""

    background: NDArray[np.bool_]  # the pixels where nothing is ever drawn
    hat: NDArray[np.bool_]  # the pixels that a hat may change
    bare: Array  # [looks, other pixels, inks]
    hatted: Array  # [looks, hats, hat's pixels, inks]


@lru_cache(maxsize=2)
def _templates(size: int) -> Templates:
    shares = np.stack([[_shares(look, hat, size) for hat in ATTRIBUTES["hat"]] for look in LOOKS])
    background = shares[..., BACKGROUND].min((0, 1)) > 0.999
    hat = np.ptp(shares, 1).max((0, 2)) > 0.001
    return Templates(background, hat, shares[:, 0, ~hat], shares[:, :, hat])


@lru_cache
def _plain_palette(colour: str, hat_colour: str, background: str) -> Array:
    return palette_of({"colour": colour, "hat_colour": hat_colour, "background": background})


@lru_cache(maxsize=2 * len(BACKGROUNDS))
def _characters(background: str, size: int) -> Array:
    """Every look in every colour, [looks colours, pixels 3], where no hat is."""
    palettes = np.stack([_plain_palette(colour, NONE, background) for colour in ATTRIBUTES["colour"]])
    return (_templates(size).bare[:, None] @ palettes).reshape(len(LOOKS) * len(palettes), -1)


def _nearest(images: Array, templates: Array) -> NDArray[np.intp]:
    """Which of templates [T, D] is nearest to each of images [B, D]."""
    return np.argmin((templates**2).sum(1) - 2 * images @ templates.T, 1)


def _read_hat(pixels: Array, hatted: Array, colour: str, background: str) -> tuple[str, str]:
    """The hat that fits best, of one look's hats [hats, pixels, inks], and its colour."""
    colours = ATTRIBUTES["hat_colour"][1:]
    palettes = np.stack([_plain_palette(colour, hat_colour, background) for hat_colour in colours])
    templates = hatted[:, None] @ palettes  # [hats, colours, pixels, 3]
    hat, hat_colour = divmod(int(((templates - pixels) ** 2).sum((2, 3)).argmin()), len(colours))
    return ATTRIBUTES["hat"][hat], colours[hat_colour] if hat else NONE


def _pixels_of(images: Sequence[Image.Image] | NDArray[np.generic]) -> Array:
    """[B, S, S, 3] in [0, 1], with S at most 32."""
    if not isinstance(images, np.ndarray):
        images = np.stack([np.asarray(image.convert("RGB")) for image in images])
    if images.ndim != 4 or images.shape[3] != 3 or images.shape[1] != images.shape[2]:
        raise InputError(f"avatars to be read are square and RGB, [B, S, S, 3], not of shape {list(images.shape)}")
    if images.shape[1] < SIZES[0]:
        raise InputError(f"avatars to be read are at least {SIZES[0]} pixels wide, not {images.shape[1]}")
    pixels = images.astype(np.float32)
    if images.dtype == np.uint8:
        pixels /= 255
    return pixels if pixels.shape[1] <= FRAME else np.stack([_shrink(image) for image in pixels])


def _shrink(image: Array) -> Array:
    """An image [S, S, 3] at 32 x 32; Pillow resizes numbers one channel at a time."""
    channels = [Image.fromarray(image[..., c]) for c in range(3)]
    return np.stack([np.asarray(c.resize((FRAME, FRAME), Image.Resampling.BOX)) for c in channels], -1)


def read_avatars(images: Sequence[Image.Image] | NDArray[np.generic]) -> list[dict[str, str]]:
    """The attributes seen in each image: images, or an array [B, S, S, 3] of bytes or of numbers in [0, 1]."""
    if not len(images):
        return []
    pixels = _pixels_of(images)
    size, colours = pixels.shape[1], ATTRIBUTES["colour"]
    pixels = pixels.reshape(len(pixels), size * size, 3)
    templates = _templates(size)
    corners = pixels[:, templates.background].mean(1)
    grounds = _nearest(corners, np.stack([rgb(code) for code in BACKGROUNDS.values()]))
    characters, hats = pixels[:, ~templates.hat].reshape(len(pixels), -1), pixels[:, templates.hat]
    found: list[dict[str, str]] = [{} for _ in pixels]
    for ground, background in enumerate(BACKGROUNDS):
        rows = np.flatnonzero(grounds == ground)
        for row, nearest in zip(rows, _nearest(characters[rows], _characters(background, size)), strict=True):
            look, colour = divmod(nearest, len(colours))
            hat = _read_hat(hats[row], templates.hatted[look], colours[colour], background)
            values = LOOKS[look].kind, colours[colour], LOOKS[look].eyewear, *hat, background
            found[row] = dict(zip(ATTRIBUTES, values, strict=True))
    return found


def read_avatar(image: Image.Image | NDArray[np.generic]) -> dict[str, str]:
    """The attributes seen in one image: an image, or an array [S, S, 3]."""
    return read_avatars([image] if isinstance(image, Image.Image) else image[None])[0]
