"""Avatars: little characters, always at the same place, whose captions say exactly what is in the image.

"a green robot with round glasses and a red crown on a yellow background". An image is drawn as vector shapes
in a 32 x 32 frame whatever its size. Every pixel of a drawing is a mixture of a few inks, so a drawing is kept
once as the share of each ink in each pixel, and an image in given colours is a few small matrix products.
`avatar_reader.py` goes the other way: from pixels back to the attributes of the caption.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from atoll.errors import InputError, unknown

Array = NDArray[np.float32]
Point = tuple[float, float]
T = TypeVar("T")

FRAME = 32  # the unit of every length below: an image is 32 units wide
MIDDLE = FRAME / 2
SIZES = (16, 256)

COLOURS = {
    "orange": "#f6893d", "yellow": "#f8c83c", "green": "#58b868", "blue": "#4a90e2", "purple": "#9a6ae0",
    "pink": "#f27bae", "red": "#e2434b", "white": "#fbf8f2", "black": "#3b3650",
}  # fmt: skip
TRIMS = {  # the bands, stripes and jewels of a hat
    "red": "#ffc9ae", "yellow": "#fff2bd", "green": "#c9efc0", "blue": "#c3e2ff", "white": "#b3acc9",
    "black": "#9a93b5",
}  # fmt: skip
BACKGROUNDS = {  # paler than the characters, or darker, so that these stand out
    "yellow": "#ffe08a", "green": "#b4e3ae", "blue": "#aed8f8", "purple": "#d0bdf5", "pink": "#ffc3d4",
    "black": "#2b2a45",
}  # fmt: skip
NONE = "none"
HELDOUT = ("include", "exclude", "only")
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "kind": ("bear", "cat", "frog", "ghost", "owl", "robot"),
    "colour": ("orange", "yellow", "green", "blue", "purple", "pink"),
    "eyewear": (NONE, "round glasses", "sunglasses"),
    "hat": (NONE, "top hat", "cap", "crown", "party hat"),
    "hat_colour": (NONE, *TRIMS),
    "background": tuple(BACKGROUNDS),
}


# --- captions ---


def combinations() -> Iterator[dict[str, str]]:
    """Every avatar there is. A background never has the colour of what stands before it."""
    for values in product(*ATTRIBUTES.values()):
        attributes = dict(zip(ATTRIBUTES, values, strict=True))
        hat_colour, background = attributes["hat_colour"], attributes["background"]
        dressed = (attributes["hat"] == NONE) == (hat_colour == NONE)
        if dressed and background not in (attributes["colour"], hat_colour):
            yield attributes


def caption_of(attributes: Mapping[str, str]) -> str:
    """The one caption of these attributes."""
    if set(attributes) != set(ATTRIBUTES):
        raise InputError(f"an avatar has the attributes {', '.join(ATTRIBUTES)}, not {', '.join(attributes)}")
    for name, value in attributes.items():
        if value not in ATTRIBUTES[name]:
            raise unknown(name, value, ATTRIBUTES[name])
    hat, hat_colour = attributes["hat"], attributes["hat_colour"]
    if (hat == NONE) != (hat_colour == NONE):
        raise InputError(f"hat {hat!r} and hat_colour {hat_colour!r} do not go together: give both or neither")
    worn = [attributes["eyewear"]] if attributes["eyewear"] != NONE else []
    worn += [f"a {hat_colour} {hat}"] if hat != NONE else []
    article = "an" if attributes["colour"][0] in "aeiou" else "a"
    wearing = f" with {' and '.join(worn)}" if worn else ""
    return f"{article} {attributes['colour']} {attributes['kind']}{wearing} on a {attributes['background']} background"


def _one_of(name: str) -> str:
    return f"(?P<{name}>{'|'.join(value for value in ATTRIBUTES[name] if value != NONE)})"


_CAPTION = re.compile(
    f"an? {_one_of('colour')} {_one_of('kind')}"
    f"(?: with {_one_of('eyewear')})?(?: (?:with|and) a {_one_of('hat_colour')} {_one_of('hat')})?"
    f" on a {_one_of('background')} background"
)


def attributes_of(caption: str) -> dict[str, str]:
    """The inverse of `caption_of`."""
    found = _CAPTION.fullmatch(caption)
    attributes = {name: found[name] or NONE for name in ATTRIBUTES} if found else {}
    if not attributes or caption_of(attributes) != caption:
        raise InputError(f"{caption!r} is not an avatar's caption: one is 'a green robot on a yellow background'")
    return attributes


def is_heldout(attributes: Mapping[str, str]) -> bool:
    """Whether this combination is one of the tenth kept from training, by a hash that never changes."""
    return hashlib.sha256(caption_of(attributes).encode()).digest()[0] < 256 / 10


# --- inks: what a drawing is made of ---

INKS = 14
LINE, BODY, SHADE, LIGHT, HAT_LINE, HAT, HAT_SHADE, TRIM, INK, WHITE, LENS, ROSE, GOLD = range(1, INKS)
BACKGROUND = 0


@lru_cache
def rgb(code: str) -> Array:
    return np.array([int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)], np.float32)


_INK, _WHITE = rgb("#2a2438"), rgb("#ffffff")
_FIXED = {INK: _INK, WHITE: _WHITE, LENS: rgb("#e8f6ff"), ROSE: rgb("#f0587a"), GOLD: rgb("#f9a928")}


def palette_of(attributes: Mapping[str, str], jitter: NDArray[np.float64] | None = None) -> Array:
    """The colour of each ink, [inks, 3]; jitter [3, 3] multiplies the body's, the hat's and the background's."""
    body, hat, background = jitter if jitter is not None else np.ones((3, 3))
    inks = np.empty((INKS, 3), np.float32)
    for ink, colour in _FIXED.items():
        inks[ink] = colour
    inks[BACKGROUND] = rgb(BACKGROUNDS[attributes["background"]]) * background
    inks[BODY] = rgb(COLOURS[attributes["colour"]]) * body
    inks[LINE] = 0.36 * inks[BODY] + 0.64 * _INK
    inks[SHADE] = 0.84 * inks[BODY] + 0.16 * _INK
    inks[LIGHT] = 0.42 * inks[BODY] + 0.58 * _WHITE
    if attributes["hat_colour"] == NONE:
        inks[[HAT, HAT_LINE, HAT_SHADE, TRIM]] = 0
    else:
        inks[HAT] = rgb(COLOURS[attributes["hat_colour"]]) * hat
        inks[HAT_LINE] = 0.3 * inks[HAT] + 0.7 * _INK
        inks[HAT_SHADE] = 0.8 * inks[HAT] + 0.2 * _INK
        inks[TRIM] = rgb(TRIMS[attributes["hat_colour"]]) * hat
    return np.minimum(inks, 1)


class Canvas:
    """A sheet of ink numbers, several times finer than the image; 0 is where nothing is drawn."""

    def __init__(self, size: int, rise: float) -> None:
        self.size = size
        self.fine = max(4, 256 // size)
        self.scale = size * self.fine / FRAME
        self.rise = rise
        self.sheet = Image.new("L", (size * self.fine,) * 2)
        self.pen = ImageDraw.Draw(self.sheet)

    def _at(self, points: Sequence[Point]) -> list[Point]:
        return [(x * self.scale - 0.5, (y - self.rise) * self.scale - 0.5) for x, y in points]

    def ellipse(self, centre: Point, radii: Point | float, ink: int, line: int | None = None, width: float = 1) -> None:
        """An ellipse, with its line around it when one is given."""
        rx, ry = radii if isinstance(radii, tuple) else (radii, radii)
        if line is not None:
            self.ellipse(centre, (rx + width, ry + width), line)
        (x, y) = centre
        (x0, y0), (x1, y1) = self._at([(x - rx, y - ry), (x + rx, y + ry)])
        self.pen.ellipse((x0, y0, x1, y1), fill=ink)

    def polygon(self, points: Sequence[Point], ink: int, line: int | None = None, width: float = 1) -> None:
        if line is not None:
            self.stroke([*points, points[0]], line, 2 * width)
        self.pen.polygon(self._at(points), fill=ink)

    def box(self, low: Point, high: Point, radius: float, ink: int, line: int | None = None, width: float = 1) -> None:
        """A rectangle with round corners."""
        (x0, y0), (x1, y1) = low, high
        if line is not None:
            self.box((x0 - width, y0 - width), (x1 + width, y1 + width), radius + width, line)
        (x0, y0), (x1, y1) = self._at([low, high])
        self.pen.rounded_rectangle((x0, y0, x1, y1), radius * self.scale, fill=ink)

    def stroke(self, points: Sequence[Point], ink: int, width: float) -> None:
        """A line of round ends and joints."""
        self.pen.line(self._at(points), fill=ink, width=round(width * self.scale))
        for point in points:
            self.ellipse(point, width / 2, ink)

    def arc(self, centre: Point, radii: Point, degrees: Point, ink: int, width: float) -> None:
        """A part of an ellipse; 0 degrees is to the right, 90 below."""
        angles = np.radians(np.linspace(*degrees, 25))
        (x, y), (rx, ry) = centre, radii
        self.stroke([(x + rx * math.cos(a), y + ry * math.sin(a)) for a in angles], ink, width)

    def layer(self) -> "Layer":
        fine, size = self.fine, self.size
        labels = np.asarray(self.sheet).reshape(size, fine, size, fine)
        inks = [ink for ink in np.unique(labels) if ink]
        shares = np.stack([(labels == ink).mean((1, 3), dtype=np.float32) for ink in inks], -1)  # [S, S, inks]
        ys, xs = (np.flatnonzero(shares.any((axis, 2))) for axis in (1, 0))
        part = slice(ys[0], ys[-1] + 1), slice(xs[0], xs[-1] + 1)
        shares = shares[part]
        return Layer(part, np.array(inks), shares.reshape(-1, len(inks)), 1 - shares.sum(-1, keepdims=True))


class Layer(NamedTuple):
    """A drawing, cut to its bounding box."""

    part: tuple[slice, slice]
    inks: NDArray[np.intp]  # [inks]
    shares: Array  # [h w, inks]
    through: Array  # [h, w, 1]: how much of what lies below is seen

    def over(self, pixels: Array, palette: Array) -> None:
        """Draw over pixels [S, S, C], with a palette [inks, C]."""
        below = pixels[self.part]
        below *= self.through
        below += (self.shares @ palette[self.inks]).reshape(below.shape)


# --- the characters ---


class Anatomy(NamedTuple):
    """Where a kind keeps its eyes, its mouth and its hat."""

    eyes: tuple[float, float]  # half the distance between the eyes, and their height
    mouth: float
    hat: float


ANATOMY = {
    "bear": Anatomy((4.2, 17.6), 22.6, 12.0),
    "cat": Anatomy((4.5, 18.4), 22.6, 13.0),
    "frog": Anatomy((6.8, 14.4), 22.4, 12.6),
    "ghost": Anatomy((4.0, 17.6), 22.6, 11.6),
    "owl": Anatomy((4.3, 17.6), 22.4, 12.2),
    "robot": Anatomy((4.2, 17.8), 22.4, 11.8),
}


Shape = tuple[Any, ...]  # a method of Canvas, and what it is called with


def _pair(method: str, *arguments: Any) -> list[Shape]:
    """Returns a shape at the left and its mirror image at the right."""
    first, *rest = arguments
    if method == "box":  # given by its two corners
        (x0, y0), (x1, y1), *rest = arguments
        return [(method, *arguments), (method, (FRAME - x1, y0), (FRAME - x0, y1), *rest)]
    mirrored = (FRAME - first[0], first[1]) if isinstance(first, tuple) else [(FRAME - x, y) for x, y in first]
    return [(method, *arguments), (method, mirrored, *rest)]


_SHOULDERS: list[Shape] = [
    ("ellipse", (MIDDLE, 34), (8, 8), BODY, LINE),
    ("ellipse", (MIDDLE, 34.5), (4.6, 6), LIGHT),
]
_CAT_EAR, _OWL_TUFT = [(6.6, 17.0), (6.4, 7.2), (14.2, 12.6)], [(6.8, 18.0), (5.0, 8.0), (15.0, 11.6)]
_GHOST = [
    *((MIDDLE + 9.2 * math.cos(a), 18.4 + 8.8 * math.sin(a)) for a in np.linspace(-math.pi, 0, 33)),
    *((x, 27.6 + 2.0 * abs(math.sin((x - 6.8) / 18.4 * 3 * math.pi))) for x in np.linspace(25.2, 6.8, 61)),
]
# Parts with lines are drawn first, and then without, where they are one with each other.
CHARACTERS: dict[str, list[Shape]] = {
    "bear": [
        *_SHOULDERS,
        *_pair("ellipse", (7.9, 11.6), 3.2, BODY, LINE),
        ("ellipse", (MIDDLE, 18.4), (9.4, 8.0), BODY, LINE),
        *_pair("ellipse", (7.9, 11.6), 3.2, BODY),
        *_pair("ellipse", (7.9, 11.6), 1.7, LIGHT),
        ("ellipse", (MIDDLE, 18.4), (9.4, 8.0), BODY),
        ("ellipse", (MIDDLE, 22.0), (4.4, 3.3), LIGHT),
        ("ellipse", (MIDDLE, 20.3), (1.6, 1.1), INK),
    ],
    "cat": [
        *_SHOULDERS,
        *_pair("polygon", _CAT_EAR, BODY, LINE),
        ("ellipse", (MIDDLE, 19.0), (10.0, 7.4), BODY, LINE),
        *_pair("polygon", _CAT_EAR, BODY),
        *_pair("polygon", [(8.0, 14.0), (8.0, 9.8), (11.6, 12.4)], ROSE),
        *_pair("stroke", [(8.2, 20.6), (3.2, 20.0)], LINE, 0.7),
        *_pair("stroke", [(8.2, 22.6), (3.2, 23.0)], LINE, 0.7),
        ("polygon", [(14.8, 20.4), (17.2, 20.4), (MIDDLE, 21.8)], ROSE),
    ],
    "frog": [
        *_SHOULDERS,
        *_pair("ellipse", (9.2, 14.4), 3.8, BODY, LINE),
        ("ellipse", (MIDDLE, 20.8), (11.2, 6.2), BODY, LINE),
        *_pair("ellipse", (9.2, 14.4), 3.8, BODY),
        ("ellipse", (MIDDLE, 20.8), (11.2, 6.2), BODY),
        ("ellipse", (MIDDLE, 23.4), (8.4, 3.2), LIGHT),
        *_pair("ellipse", (7.4, 20.6), (1.5, 0.9), ROSE),
    ],
    "ghost": [("polygon", _GHOST, BODY, LINE), *_pair("ellipse", (9.6, 21.4), (1.6, 1.0), ROSE)],
    "owl": [
        ("ellipse", (MIDDLE, 23.0), (9.4, 11.0), BODY, LINE),
        *_pair("polygon", _OWL_TUFT, BODY, LINE),
        ("ellipse", (MIDDLE, 18.2), (9.8, 7.6), BODY, LINE),
        *_pair("polygon", _OWL_TUFT, BODY),
        ("ellipse", (MIDDLE, 30.0), (5.4, 5.0), LIGHT),
        *(
            ("stroke", [(x - 0.7, y), (x, y + 0.7), (x + 0.7, y)], SHADE, 0.6)
            for x, y in ((14.0, 28.0), (18.0, 28.0), (16.0, 30.4))
        ),
        *_pair("ellipse", (11.7, 17.6), 4.4, LIGHT),
    ],
    "robot": [
        ("box", (8.4, 28.4), (23.6, 36.0), 2.4, SHADE, LINE),
        ("box", (12.6, 25.0), (19.4, 29.0), 0.5, SHADE, LINE),
        *_pair("stroke", [(5.0, 17.0), (5.0, 10.2)], LINE, 1.1),
        *_pair("ellipse", (5.0, 9.6), 1.2, ROSE, LINE, 0.8),
        *_pair("box", (3.6, 15.4), (6.4, 21.6), 0.8, SHADE, LINE),
        ("box", (7.2, 11.6), (24.8, 25.8), 2.6, BODY, LINE),
        ("box", (9.0, 14.0), (23.0, 24.2), 2.0, LIGHT),
        ("ellipse", (MIDDLE, 30.6), 1.0, GOLD),
    ],
}

EYES = ("left", "right", "left", "right", "shut")  # a fifth of them blink
MOUTHS = ("smile", "open", "small")
RISES = (-0.5, 0.0, 0.5)


def _character(canvas: Canvas, kind: str) -> None:
    for method, *arguments in CHARACTERS[kind]:
        getattr(canvas, method)(*arguments)


def _mouth(canvas: Canvas, kind: str, mouth: str) -> None:
    y = ANATOMY[kind].mouth
    if kind == "owl":
        drop = {"smile": 1.6, "open": 2.6, "small": 2.1}[mouth]
        canvas.polygon([(14.5, y - 2.2), (17.5, y - 2.2), (MIDDLE, y - 0.2 + drop)], GOLD, LINE, 0.5)
        return
    if kind == "robot":
        if mouth == "smile":
            canvas.arc((MIDDLE, y - 1.4), (3.0, 1.8), (20, 160), INK, 0.9)
        elif mouth == "open":
            canvas.box((12.8, y - 1.0), (19.2, y + 1.0), 0.6, WHITE, INK, 0.5)
            for x in (14.9, 17.1):
                canvas.stroke([(x, y - 0.8), (x, y + 0.8)], INK, 0.4)
        else:
            canvas.stroke([(13.8, y), (18.2, y)], INK, 0.9)
        return
    wide = 6.0 if kind == "frog" else 2.2
    if mouth == "smile":
        canvas.arc((MIDDLE, y - 1.2), (wide, 1.8), (15, 165), INK, 0.9)
    elif mouth == "open":
        half = wide * 0.6 if kind == "frog" else 1.5
        shape = [(MIDDLE + half * math.cos(a), y - 0.5 + 2.0 * math.sin(a)) for a in np.linspace(0, math.pi, 25)]
        canvas.polygon(shape, ROSE, INK, 0.5)
    else:
        half = wide * 0.5 if kind == "frog" else 0.9
        canvas.arc((MIDDLE, y - 0.8), (half, 0.9), (10, 170), INK, 0.9)


def _eye(canvas: Canvas, kind: str, centre: Point, eyes: str) -> None:
    x, y = centre
    look = -0.5 if eyes == "left" else 0.5
    if eyes == "shut":
        canvas.arc((x, y + 0.8), (1.5, 1.5), (200, 340), INK, 0.9)
    elif kind in ("frog", "owl"):
        canvas.ellipse((x, y), 2.7, WHITE)
        canvas.ellipse((x + 1.4 * look, y), 1.7, INK)
        canvas.ellipse((x + 1.4 * look - 0.6, y - 0.6), 0.6, WHITE)
    elif kind == "robot":
        canvas.box((x + look - 1.5, y - 1.7), (x + look + 1.5, y + 1.7), 0.7, INK)
        canvas.ellipse((x + look - 0.5, y - 0.7), 0.6, WHITE)
    else:
        canvas.ellipse((x + look, y), (1.6, 1.9), INK)
        canvas.ellipse((x + look - 0.5, y - 0.7), 0.7, WHITE)


def _eyes(canvas: Canvas, kind: str, eyewear: str, eyes: str) -> None:
    apart, y = ANATOMY[kind].eyes
    xs = (MIDDLE - apart, MIDDLE + apart)
    if eyewear == "round glasses":
        canvas.stroke([(xs[0], y - 0.6), (xs[1], y - 0.6)], INK, 1.0)
        for x in xs:
            canvas.ellipse((x, y), 2.8, LENS, INK, 1.0)
    if eyewear != "sunglasses":
        for x in xs:
            _eye(canvas, kind, (x, y), eyes)
        return
    canvas.stroke([(xs[0], y - 1.8), (xs[1], y - 1.8)], INK, 1.2)
    for x in xs:
        lens = [(x - 3.2, y - 2.0), (x + 3.2, y - 2.0), (x + 2.8, y + 1.2), (x + 1.2, y + 2.2), (x - 1.2, y + 2.2)]
        canvas.polygon([*lens, (x - 2.8, y + 1.2)], INK, INK, 0.5)
        canvas.stroke([(x - 1.8, y + 0.6), (x - 0.2, y - 1.2)], WHITE, 0.8)


def _hat(canvas: Canvas, kind: str, hat: str) -> None:
    x, y = MIDDLE, ANATOMY[kind].hat
    if kind == "frog":  # a brow for the hat to sit on
        canvas.box((x - 5, y - 1), (x + 5, y + 3), 0, BODY)
    if hat == "top hat":
        canvas.polygon([(x - 5.0, y - 9.6), (x + 5.0, y - 9.6), (x + 4.4, y - 1), (x - 4.4, y - 1)], HAT, HAT_LINE, 0.8)
        canvas.box((x - 7.4, y - 1.6), (x + 7.4, y), 0.8, HAT, HAT_LINE, 0.8)
        canvas.box((x - 4.5, y - 4.2), (x + 4.5, y - 1.8), 0, TRIM)
    elif hat == "cap":
        dome = [(x + 6.6 * math.cos(a), y - 0.4 + 6.6 * math.sin(a)) for a in np.linspace(-math.pi, 0, 33)]
        canvas.ellipse((x, y - 7.2), 0.8, TRIM, HAT_LINE, 0.7)
        canvas.polygon(dome, HAT, HAT_LINE, 0.8)
        canvas.ellipse((x + 1.6, y - 2.8), (2.6, 2.0), TRIM)
        canvas.box((x - 1.0, y - 1.4), (x + 11.0, y + 0.2), 0.8, HAT_SHADE, HAT_LINE, 0.8)
    elif hat == "crown":
        tips = [(-6.2, -6.4), (-3.2, -3.6), (0, -7.8), (3.2, -3.6), (6.2, -6.4), (5.6, 0), (-5.6, 0)]
        canvas.polygon([(x + a, y + b) for a, b in tips], HAT, HAT_LINE, 0.8)
        canvas.box((x - 5.5, y - 1.8), (x + 5.5, y), 0, HAT_SHADE)
        for a, b in tips[:5:2]:
            canvas.ellipse((x + a, y + b), 1.0, TRIM, HAT_LINE, 0.7)
    elif hat == "party hat":
        slope = 5.2 / 9
        canvas.polygon([(x, y - 9), (x + 5.2, y), (x - 5.2, y)], HAT, HAT_LINE, 0.8)
        for top, bottom in ((-6.4, -4.8), (-2.8, -1.2)):
            half, wider = (9 + top) * slope, (9 + bottom) * slope
            stripe = [(x - half, y + top), (x + half, y + top), (x + wider, y + bottom), (x - wider, y + bottom)]
            canvas.polygon(stripe, TRIM)
        canvas.ellipse((x, y - 9), 1.4, TRIM, HAT_LINE, 0.7)


# --- images ---


def _pick(values: Sequence[T], chance: float) -> T:
    return values[int(chance * len(values))]


class Pose(NamedTuple):
    """What a caption does not tell."""

    eyes: str = "left"
    mouth: str = "smile"
    rise: float = 0.0


@lru_cache(maxsize=1024)
def _layer(draw: Callable[..., None], size: int, rise: float, *what: str) -> Layer:
    canvas = Canvas(size, rise)
    draw(canvas, *what)
    return canvas.layer()


def paint(attributes: Mapping[str, str], pose: Pose, palette: Array, size: int) -> Array:
    """The image [S, S, C] in a palette [inks, C]."""
    kind, eyewear, hat = attributes["kind"], attributes["eyewear"], attributes["hat"]
    pixels = np.empty((size, size, palette.shape[1]), np.float32)
    pixels[:] = palette[BACKGROUND]
    _layer(_character, size, pose.rise, kind).over(pixels, palette)
    _layer(_mouth, size, pose.rise, kind, pose.mouth).over(pixels, palette)
    if hat != NONE:
        _layer(_hat, size, pose.rise, kind, hat).over(pixels, palette)
    eyes = NONE if eyewear == "sunglasses" else pose.eyes
    _layer(_eyes, size, pose.rise, kind, eyewear, eyes).over(pixels, palette)
    return pixels


def choose_avatar(rng: np.random.Generator, heldout: str = "include") -> dict[str, str]:
    """Random attributes, every value as likely as its neighbours where the background allows."""
    if heldout not in HELDOUT:
        raise unknown("heldout", heldout, HELDOUT)
    while True:
        chance = rng.random(len(ATTRIBUTES))
        attributes = {name: _pick(values, u) for (name, values), u in zip(ATTRIBUTES.items(), chance, strict=True)}
        bare = attributes["hat"] == NONE
        attributes["hat_colour"] = NONE if bare else _pick(ATTRIBUTES["hat_colour"][1:], chance[4])
        taken = attributes["colour"], attributes["hat_colour"]
        attributes["background"] = _pick([name for name in BACKGROUNDS if name not in taken], chance[5])
        if heldout == "include" or is_heldout(attributes) == (heldout == "only"):
            return attributes


def draw_avatar(
    attributes: Mapping[str, str], size: int = FRAME, rng: np.random.Generator | None = None
) -> NDArray[np.uint8]:
    """The image [S, S, 3] of these attributes, in a random pose and light; without rng, in the plain ones."""
    caption_of(attributes)  # refuses what is not an avatar
    if not SIZES[0] <= size <= SIZES[1]:
        raise InputError(f"avatars are drawn from {SIZES[0]} to {SIZES[1]} pixels wide, not {size}")
    pose, jitter = Pose(), None
    if rng is not None:
        chance = rng.random(15)
        pose = Pose(_pick(EYES, chance[0]), _pick(MOUTHS, chance[1]), _pick(RISES, chance[2]))
        jitter = 0.95 + 0.03 * chance[3:12].reshape(3, 3) + 0.07 * chance[12:, None]  # hue and brightness
    pixels = paint(attributes, pose, palette_of(attributes, jitter), size)
    return (pixels * 255 + 0.5).astype(np.uint8)
