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

from atoll.data.builtin import avatars
from atoll.data.builtin.avatars import ATTRIBUTES, BACKGROUNDS, FRAME, INKS, NONE, Array, Pose
from atoll.errors import InputError

# The shape of a character, whatever its colours, mouth and hat: kind, eyewear, eyes and rise.
LOOKS = [
    (kind, eyewear, eyes, rise)
    for kind, eyewear, eyes, rise in product(
        ATTRIBUTES["kind"], ATTRIBUTES["eyewear"], sorted(set(avatars.EYES)), avatars.RISES
    )
    if eyewear != "sunglasses" or eyes == avatars.EYES[0]  # nobody sees the eyes behind sunglasses
]
COLOURS, HAT_COLOURS = ATTRIBUTES["colour"], ATTRIBUTES["hat_colour"][1:]


def _shares(kind: str, eyewear: str, eyes: str, rise: float, hat: str, size: int) -> Array:
    """Returns the share of each ink in each pixel, [S S, inks]: the mean over the mouths, and a little soft.

    Softness costs nothing on crisp images; crisp templates take a blurred face for one with other glasses.
    """
    attributes = {"kind": kind, "eyewear": eyewear, "hat": hat}
    inks = np.eye(INKS, dtype=np.float32)
    images = [avatars.paint(attributes, Pose(eyes, mouth, rise), inks, size) for mouth in avatars.MOUTHS]
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
    shares = np.stack([[_shares(*look, hat, size) for hat in ATTRIBUTES["hat"]] for look in LOOKS])
    background = shares[..., avatars.BACKGROUND].min((0, 1)) > 0.999
    hat = np.ptp(shares, 1).max((0, 2)) > 0.001
    return Templates(background, hat, shares[:, 0, ~hat], shares[:, :, hat])


@lru_cache
def _palette(colour: str, hat_colour: str, background: str) -> Array:
    return avatars.palette_of({"colour": colour, "hat_colour": hat_colour, "background": background})


@lru_cache(maxsize=2 * len(BACKGROUNDS))
def _characters(background: str, size: int) -> Array:
    """Returns every look in every colour, [looks colours, pixels 3], where no hat is."""
    palettes = np.stack([_palette(colour, NONE, background) for colour in COLOURS])
    return (_templates(size).bare[:, None] @ palettes).reshape(len(LOOKS) * len(palettes), -1)


def _nearest(images: Array, templates: Array) -> NDArray[np.intp]:
    """Returns which of templates [T, D] is nearest to each of images [B, D]."""
    return np.argmin((templates**2).sum(1) - 2 * images @ templates.T, 1)


def _read_hat(pixels: Array, hatted: Array, colour: str, background: str) -> tuple[str, str]:
    """Returns the hat that fits best, of one look's hats [hats, pixels, inks], and its colour."""
    palettes = np.stack([_palette(colour, hat_colour, background) for hat_colour in HAT_COLOURS])
    templates = hatted[:, None] @ palettes  # [hats, colours, pixels, 3]
    hat, hat_colour = divmod(int(((templates - pixels) ** 2).sum((2, 3)).argmin()), len(palettes))
    return ATTRIBUTES["hat"][hat], HAT_COLOURS[hat_colour] if hat else NONE


def _shrink(image: Array) -> Array:
    """Returns an image [S, S, 3] at 32 x 32; Pillow resizes numbers one channel at a time."""
    channels = [Image.fromarray(image[..., c]) for c in range(3)]
    return np.stack([np.asarray(c.resize((FRAME, FRAME), Image.Resampling.BOX)) for c in channels], -1)


def read_avatars(images: Sequence[Image.Image] | NDArray[np.generic]) -> list[dict[str, str]]:
    """Returns the attributes seen in images, or in an array [B, S, S, 3] of bytes or of numbers in [0, 1]."""
    if not len(images):
        return []
    if not isinstance(images, np.ndarray):
        images = np.stack([np.asarray(image.convert("RGB")) for image in images])
    if images.shape[1] < avatars.SIZES[0]:
        raise InputError(f"avatars to be read are at least {avatars.SIZES[0]} pixels wide, not {images.shape[1]}")
    pixels = images.astype(np.float32) / np.float32(255 if images.dtype == np.uint8 else 1)
    if images.shape[1] > FRAME:
        pixels = np.stack([_shrink(image) for image in pixels])
    size = pixels.shape[1]
    pixels = pixels.reshape(len(pixels), size * size, 3)
    templates = _templates(size)
    corners = pixels[:, templates.background].mean(1)
    grounds = _nearest(corners, np.stack([avatars.rgb(code) for code in BACKGROUNDS.values()]))
    characters, hats = pixels[:, ~templates.hat].reshape(len(pixels), -1), pixels[:, templates.hat]
    attributes: list[dict[str, str]] = [{} for _ in pixels]
    for ground, background in enumerate(BACKGROUNDS):
        rows = np.flatnonzero(grounds == ground)
        for row, nearest in zip(rows, _nearest(characters[rows], _characters(background, size)), strict=True):
            look, colour = divmod(nearest, len(COLOURS))
            hat = _read_hat(hats[row], templates.hatted[look], COLOURS[colour], background)
            values = LOOKS[look][0], COLOURS[colour], LOOKS[look][1], *hat, background
            attributes[row] = dict(zip(ATTRIBUTES, values, strict=True))
    return attributes
