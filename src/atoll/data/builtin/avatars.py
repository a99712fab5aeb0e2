"""Avatars: little characters, always at the same place, whose captions say exactly what is in the image.

"a green robot with round glasses and a red crown on a yellow background". An image is drawn as vector shapes
in a 32 x 32 frame whatever its size. Every pixel of a drawing is a mixture of a few inks, so a drawing is kept
once as the share of each ink in each pixel, and an image in given colours is a few small matrix products.
`read_avatars` goes the other way: from the pixels of any image back to the attributes of its caption.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw

from atoll.errors import InputError

Array = NDArray[np.float32]
Point = tuple[float, float]
Points = Sequence[Point]

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
    """Yields every avatar there is; a hat has a colour, and no other attribute depends on another."""
    for values in product(*ATTRIBUTES.values()):
        attributes = dict(zip(ATTRIBUTES, values, strict=True))
        if (attributes["hat"] == NONE) == (attributes["hat_colour"] == NONE):
            yield attributes


def caption_of(attributes: Mapping[str, str]) -> str:
    """Returns the one caption of these attributes."""
    kind, colour, eyewear, hat, hat_colour, background = (attributes[name] for name in ATTRIBUTES)
    worn = [eyewear] if eyewear != NONE else []
    worn += [f"a {hat_colour} {hat}"] if hat != NONE else []
    wearing = f" with {' and '.join(worn)}" if worn else ""
    return f"{'an' if colour == 'orange' else 'a'} {colour} {kind}{wearing} on a {background} background"


@lru_cache
def _by_caption() -> dict[str, dict[str, str]]:
    return {caption_of(attributes): attributes for attributes in combinations()}


def attributes_of(caption: str) -> dict[str, str]:
    """Returns the attributes that a caption names: the inverse of `caption_of`."""
    if caption not in _by_caption():
        raise InputError(f"{caption!r} is not an avatar's caption: one is 'a green robot on a yellow background'")
    return dict(_by_caption()[caption])


def is_heldout(attributes: Mapping[str, str]) -> bool:
    """Returns whether this combination is one of the tenth kept from training, by a hash that never changes."""
    return hashlib.sha256(caption_of(attributes).encode()).digest()[0] < 256 / 10


# --- inks: what a drawing is made of ---

INKS = 14
LINE, BODY, SHADE, LIGHT, HAT_LINE, HAT, HAT_SHADE, TRIM, INK, WHITE, LENS, ROSE, GOLD = range(1, INKS)
BACKGROUND = 0
FIXED = {INK: "#2a2438", WHITE: "#ffffff", LENS: "#e8f6ff", ROSE: "#f0587a", GOLD: "#f9a928"}
MIXED = {  # so much of one ink, and the rest of another
    LINE: (0.36, BODY, INK), SHADE: (0.84, BODY, INK), LIGHT: (0.42, BODY, WHITE),
    HAT_LINE: (0.3, HAT, INK), HAT_SHADE: (0.8, HAT, INK),
}  # fmt: skip


@lru_cache
def rgb(code: str) -> Array:
    return (np.array(ImageColor.getrgb(code)) / 255).astype(np.float32)


def palette_of(attributes: Mapping[str, str], jitter: NDArray[np.float64] | None = None) -> Array:
    """Returns the colour of each ink, [inks, 3]; jitter [3, 3] multiplies those of body, hat and background."""
    body, hat, background = jitter if jitter is not None else np.ones((3, 3))
    inks = np.zeros((INKS, 3), np.float32)
    for ink, code in FIXED.items():
        inks[ink] = rgb(code)
    inks[BACKGROUND] = rgb(BACKGROUNDS[attributes["background"]]) * background
    inks[BODY] = rgb(COLOURS[attributes["colour"]]) * body
    if attributes["hat_colour"] != NONE:
        inks[HAT] = rgb(COLOURS[attributes["hat_colour"]]) * hat
        inks[TRIM] = rgb(TRIMS[attributes["hat_colour"]]) * hat
    for ink, (share, one, other) in MIXED.items():
        inks[ink] = share * inks[one] + (1 - share) * inks[other]
    return np.minimum(inks, 1)


# --- shapes: tuples of a method of Canvas, the points that place it, and its other arguments ---

Shape = tuple[Any, ...]


class Canvas:
    """A sheet of ink numbers, several times finer than the image; 0 is where nothing is drawn."""

    def __init__(self, size: int, rise: float) -> None:
        self.size, self.rise, self.fine = size, rise, max(4, 256 // size)
        self.scale = size * self.fine / FRAME
        self.sheet = Image.new("L", (size * self.fine,) * 2)
        self.pen = ImageDraw.Draw(self.sheet)

    def _at(self, points: Points) -> list[Point]:
        return [(x * self.scale - 0.5, (y - self.rise) * self.scale - 0.5) for x, y in points]

    def ellipse(self, centre: Points, radii: Any, ink: int, line: int | None = None, width: float = 1) -> None:
        """Draws an ellipse, with its line around it when one is given."""
        rx, ry = radii if isinstance(radii, tuple) else (radii, radii)
        if line is not None:
            self.ellipse(centre, (rx + width, ry + width), line)
        [(x, y)] = centre
        self.pen.ellipse(self._at([(x - rx, y - ry), (x + rx, y + ry)]), fill=ink)

    def polygon(self, points: Points, ink: int, line: int | None = None, width: float = 1) -> None:
        if line is not None:
            self.stroke([*points, points[0]], line, 2 * width)
        self.pen.polygon(self._at(points), fill=ink)

    def box(self, corners: Points, radius: float, ink: int, line: int | None = None, width: float = 1) -> None:
        """Draws a rectangle with round corners."""
        (x0, x1), (y0, y1) = (sorted(ends) for ends in zip(*corners, strict=True))
        if line is not None:
            self.box([(x0 - width, y0 - width), (x1 + width, y1 + width)], radius + width, line)
        self.pen.rounded_rectangle(self._at([(x0, y0), (x1, y1)]), radius * self.scale, fill=ink)

    def stroke(self, points: Points, ink: int, width: float) -> None:
        """Draws a line of round ends and joints."""
        self.pen.line(self._at(points), fill=ink, width=round(width * self.scale))
        for point in points:
            self.ellipse([point], width / 2, ink)


def _arc(centre: Point, radii: Point, first: float, last: float, num: int = 25) -> list[Point]:
    """Returns points along an ellipse; 0 degrees is to the right, 90 below."""
    (x, y), (rx, ry) = centre, radii
    return [(x + rx * math.cos(a), y + ry * math.sin(a)) for a in np.radians(np.linspace(first, last, num))]


def _moved(shapes: Sequence[Shape], x: float, y: float) -> list[Shape]:
    return [(method, [(x + a, y + b) for a, b in points], *rest) for method, points, *rest in shapes]


def _pair(method: str, points: Points, *rest: Any) -> list[Shape]:
    """Returns a shape at the left and its mirror image at the right."""
    return [(method, points, *rest), (method, [(FRAME - x, y) for x, y in points], *rest)]


# --- the characters ---

ANATOMY = {  # half the distance between the eyes, their height, and those of the mouth and the hat
    "bear": (4.2, 17.6, 22.6, 12.0), "cat": (4.5, 18.4, 22.6, 13.0), "frog": (6.8, 14.4, 22.4, 12.6),
    "ghost": (4.0, 17.6, 22.6, 11.6), "owl": (4.3, 17.6, 22.2, 12.2), "robot": (4.2, 17.8, 22.4, 11.8),
}  # fmt: skip
_SHOULDERS: list[Shape] = [
    ("ellipse", [(MIDDLE, 34)], (8, 8), BODY, LINE),
    ("ellipse", [(MIDDLE, 34.5)], (4.6, 6), LIGHT),
]
_CAT_EAR, _OWL_TUFT = [(6.6, 17.0), (6.4, 7.2), (14.2, 12.6)], [(6.8, 18.0), (5.0, 8.0), (15.0, 11.6)]
_FEATHER: Shape = ("stroke", [(-0.7, 0), (0, 0.7), (0.7, 0)], SHADE, 0.6)
_GHOST = [
    *_arc((MIDDLE, 18.4), (9.2, 8.8), -180, 0, 33),
    *((x, 27.6 + 2.0 * abs(math.sin((x - 6.8) / 18.4 * 3 * math.pi))) for x in np.linspace(25.2, 6.8, 61)),
]
# Parts with lines are drawn first, and then without, where they are one with each other.
CHARACTERS: dict[str, list[Shape]] = {
    "bear": [
        *_SHOULDERS,
        *_pair("ellipse", [(7.9, 11.6)], 3.2, BODY, LINE),
        ("ellipse", [(MIDDLE, 18.4)], (9.4, 8.0), BODY, LINE),
        *_pair("ellipse", [(7.9, 11.6)], 3.2, BODY),
        *_pair("ellipse", [(7.9, 11.6)], 1.7, LIGHT),
        ("ellipse", [(MIDDLE, 18.4)], (9.4, 8.0), BODY),
        ("ellipse", [(MIDDLE, 22.0)], (4.4, 3.3), LIGHT),
        ("ellipse", [(MIDDLE, 20.3)], (1.6, 1.1), INK),
    ],
    "cat": [
        *_SHOULDERS,
        *_pair("polygon", _CAT_EAR, BODY, LINE),
        ("ellipse", [(MIDDLE, 19.0)], (10.0, 7.4), BODY, LINE),
        *_pair("polygon", _CAT_EAR, BODY),
        *_pair("polygon", [(8.0, 14.0), (8.0, 9.8), (11.6, 12.4)], ROSE),
        *_pair("stroke", [(8.2, 20.6), (3.2, 20.0)], LINE, 0.7),
        *_pair("stroke", [(8.2, 22.6), (3.2, 23.0)], LINE, 0.7),
        ("polygon", [(14.8, 20.4), (17.2, 20.4), (MIDDLE, 21.8)], ROSE),
    ],
    "frog": [
        *_SHOULDERS,
        *_pair("ellipse", [(9.2, 14.4)], 3.8, BODY, LINE),
        ("ellipse", [(MIDDLE, 20.8)], (11.2, 6.2), BODY, LINE),
        *_pair("ellipse", [(9.2, 14.4)], 3.8, BODY),
        ("ellipse", [(MIDDLE, 20.8)], (11.2, 6.2), BODY),
        ("ellipse", [(MIDDLE, 23.4)], (8.4, 3.2), LIGHT),
        *_pair("ellipse", [(7.4, 20.6)], (1.5, 0.9), ROSE),
    ],
    "ghost": [("polygon", _GHOST, BODY, LINE), *_pair("ellipse", [(9.6, 21.4)], (1.6, 1.0), ROSE)],
    "owl": [
        ("ellipse", [(MIDDLE, 23.0)], (9.4, 11.0), BODY, LINE),
        *_pair("polygon", _OWL_TUFT, BODY, LINE),
        ("ellipse", [(MIDDLE, 18.2)], (9.8, 7.6), BODY, LINE),
        *_pair("polygon", _OWL_TUFT, BODY),
        ("ellipse", [(MIDDLE, 30.0)], (5.4, 5.0), LIGHT),
        *(_moved([_FEATHER], x, y)[0] for x, y in ((14.0, 28.0), (18.0, 28.0), (16.0, 30.4))),
        *_pair("ellipse", [(11.7, 17.6)], 4.4, LIGHT),
    ],
    "robot": [
        ("box", [(8.4, 28.4), (23.6, 36.0)], 2.4, SHADE, LINE),
        ("box", [(12.6, 25.0), (19.4, 29.0)], 0.5, SHADE, LINE),
        *_pair("stroke", [(5.0, 17.0), (5.0, 10.2)], LINE, 1.1),
        *_pair("ellipse", [(5.0, 9.6)], 1.2, ROSE, LINE, 0.8),
        *_pair("box", [(3.6, 15.4), (6.4, 21.6)], 0.8, SHADE, LINE),
        ("box", [(7.2, 11.6), (24.8, 25.8)], 2.6, BODY, LINE),
        ("box", [(9.0, 14.0), (23.0, 24.2)], 2.0, LIGHT),
        ("ellipse", [(MIDDLE, 30.6)], 1.0, GOLD),
    ],
}
EYES = ("left", "right", "left", "right", "shut")  # a fifth of them blink
MOUTHS = ("smile", "open", "small")
RISES = (-0.5, 0.0, 0.5)


def _mouths(wide: float, half: float, small: float) -> tuple[list[Shape], ...]:
    return (
        [("stroke", _arc((0, -1.2), (wide, 1.8), 15, 165), INK, 0.9)],
        [("polygon", _arc((0, -0.5), (half, 2.0), 0, 180), ROSE, INK, 0.5)],
        [("stroke", _arc((0, -0.8), (small, 0.9), 10, 170), INK, 0.9)],
    )


# Around the middle of the mouth, in the order of MOUTHS.
MOUTH_SHAPES: dict[str, tuple[list[Shape], ...]] = {
    **dict.fromkeys(("bear", "cat", "ghost"), _mouths(2.2, 1.5, 0.9)),
    "frog": _mouths(6.0, 3.6, 3.0),
    "owl": tuple([("polygon", [(-1.5, -2.0), (1.5, -2.0), (0, y)], GOLD, LINE, 0.5)] for y in (1.6, 2.6, 2.1)),
    "robot": (
        [("stroke", _arc((0, -1.4), (3.0, 1.8), 20, 160), INK, 0.9)],
        [
            ("box", [(-3.2, -1.0), (3.2, 1.0)], 0.6, WHITE, INK, 0.5),
            ("stroke", [(-1.1, -0.8), (-1.1, 0.8)], INK, 0.4),
            ("stroke", [(1.1, -0.8), (1.1, 0.8)], INK, 0.4),
        ],
        [("stroke", [(-2.2, 0), (2.2, 0)], INK, 0.9)],
    ),
}
_TIPS = [(-6.2, -6.4), (-3.2, -3.6), (0, -7.8), (3.2, -3.6), (6.2, -6.4), (5.6, 0), (-5.6, 0)]
_SLOPE = 5.2 / 9
# Around the middle of the brim.
HATS: dict[str, list[Shape]] = {
    "top hat": [
        ("polygon", [(-5.0, -9.6), (5.0, -9.6), (4.4, -1), (-4.4, -1)], HAT, HAT_LINE, 0.8),
        ("box", [(-7.4, -1.6), (7.4, 0)], 0.8, HAT, HAT_LINE, 0.8),
        ("box", [(-4.5, -4.2), (4.5, -1.8)], 0, TRIM),
    ],
    "cap": [
        ("ellipse", [(0, -7.2)], 0.8, TRIM, HAT_LINE, 0.7),
        ("polygon", _arc((0, -0.4), (6.6, 6.6), -180, 0, 33), HAT, HAT_LINE, 0.8),
        ("ellipse", [(1.6, -2.8)], (2.6, 2.0), TRIM),
        ("box", [(-1.0, -1.4), (11.0, 0.2)], 0.8, HAT_SHADE, HAT_LINE, 0.8),
    ],
    "crown": [
        ("polygon", _TIPS, HAT, HAT_LINE, 0.8),
        ("box", [(-5.5, -1.8), (5.5, 0)], 0, HAT_SHADE),
        *(("ellipse", [tip], 1.0, TRIM, HAT_LINE, 0.7) for tip in _TIPS[:5:2]),
    ],
    "party hat": [
        ("polygon", [(0, -9), (5.2, 0), (-5.2, 0)], HAT, HAT_LINE, 0.8),
        *(
            ("polygon", [(-(9 + a) * _SLOPE, a), ((9 + a) * _SLOPE, a), ((9 + b) * _SLOPE, b), (-(9 + b) * _SLOPE, b)],
             TRIM)
            for a, b in ((-6.4, -4.8), (-2.8, -1.2))
        ),
        ("ellipse", [(0, -9)], 1.4, TRIM, HAT_LINE, 0.7),
    ],
}  # fmt: skip
_LENS = [(-3.2, -2.0), (3.2, -2.0), (2.8, 1.2), (1.2, 2.2), (-1.2, 2.2), (-2.8, 1.2)]
EYEWEAR: dict[str, list[Shape]] = {
    "round glasses": [("ellipse", [(0, 0)], 2.8, LENS, INK, 1.0)],
    "sunglasses": [("polygon", _LENS, INK, INK, 0.5), ("stroke", [(-1.8, 0.6), (-0.2, -1.2)], WHITE, 0.8)],
}


def _mouth(kind: str, mouth: str) -> list[Shape]:
    return _moved(MOUTH_SHAPES[kind][MOUTHS.index(mouth)], MIDDLE, ANATOMY[kind][2])


def _eye(kind: str, eyes: str, x: float, y: float) -> list[Shape]:
    if eyes == "shut":
        return [("stroke", _arc((x, y + 0.8), (1.5, 1.5), 200, 340), INK, 0.9)]
    look = x + {"left": -0.5, "right": 0.5}[eyes] * (1.4 if kind in ("frog", "owl") else 1)
    if kind in ("frog", "owl"):
        around: list[Shape] = [("ellipse", [(x, y)], 2.7, WHITE)]
        return [*around, ("ellipse", [(look, y)], 1.7, INK), ("ellipse", [(look - 0.6, y - 0.6)], 0.6, WHITE)]
    if kind == "robot":
        pupil: Shape = ("box", [(look - 1.5, y - 1.7), (look + 1.5, y + 1.7)], 0.7, INK)
        return [pupil, ("ellipse", [(look - 0.5, y - 0.7)], 0.6, WHITE)]
    return [("ellipse", [(look, y)], (1.6, 1.9), INK), ("ellipse", [(look - 0.5, y - 0.7)], 0.7, WHITE)]


def _eyes(kind: str, eyewear: str, eyes: str) -> list[Shape]:
    apart, y, *_ = ANATOMY[kind]
    xs = (MIDDLE - apart, MIDDLE + apart)
    glasses: list[Shape] = []
    if eyewear != NONE:
        bridge, width = (1.8, 1.2) if eyewear == "sunglasses" else (0.6, 1.0)
        glasses = [("stroke", [(x, y - bridge) for x in xs], INK, width)]
        glasses += [shape for x in xs for shape in _moved(EYEWEAR[eyewear], x, y)]
    seen = [shape for x in xs for shape in _eye(kind, eyes, x, y)] if eyewear != "sunglasses" else []
    return [*glasses, *seen]


def _hat(kind: str, hat: str) -> list[Shape]:
    brow: list[Shape] = [("box", [(-5, -1), (5, 3)], 0, BODY)] if kind == "frog" else []  # for the hat to sit on
    return _moved([*brow, *HATS[hat]], MIDDLE, ANATOMY[kind][3])


# --- images ---


def _pick(values: Sequence[Any], chance: float) -> Any:
    return values[int(chance * len(values))]


class Pose(NamedTuple):
    """What a caption does not tell."""

    eyes: str = "left"
    mouth: str = "smile"
    rise: float = 0.0


@lru_cache(maxsize=1024)
def _layer(
    shapes_of: Callable[..., Sequence[Shape]], size: int, rise: float, *what: str
) -> tuple[Array, Array, list[int]]:
    """Returns what a drawing leaves of each pixel [S, S, 1], the share of each ink in it [S, S, inks], and the inks."""
    canvas = Canvas(size, rise)
    for method, *arguments in shapes_of(*what):
        getattr(canvas, method)(*arguments)
    labels = np.asarray(canvas.sheet).reshape(size, canvas.fine, size, canvas.fine)
    inks = [int(ink) for ink in np.unique(labels) if ink]
    shares = np.stack([(labels == ink).mean((1, 3), dtype=np.float32) for ink in inks], -1)
    return 1 - shares.sum(-1, keepdims=True), shares, inks


def paint(attributes: Mapping[str, str], pose: Pose, palette: Array, size: int) -> Array:
    """Returns the image [S, S, C] in a palette [inks, C]."""
    kind, eyewear, hat = attributes["kind"], attributes["eyewear"], attributes["hat"]
    layers = [_layer(CHARACTERS.__getitem__, size, pose.rise, kind)]
    layers.append(_layer(_mouth, size, pose.rise, kind, pose.mouth))
    if hat != NONE:
        layers.append(_layer(_hat, size, pose.rise, kind, hat))
    eyes = NONE if eyewear == "sunglasses" else pose.eyes
    layers.append(_layer(_eyes, size, pose.rise, kind, eyewear, eyes))
    pixels = np.broadcast_to(palette[BACKGROUND], (size, size, palette.shape[1]))
    for rest, shares, inks in layers:
        pixels = pixels * rest + shares @ palette[inks]
    return pixels


def choose_avatar(rng: np.random.Generator, heldout: str = "include") -> dict[str, str]:
    """Returns random attributes, every value as likely as its neighbours.

    A background never has the colour of what stands before it.
    """
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
    """Returns the image [S, S, 3] of these attributes, in a random pose and light; without rng, in the plain ones."""
    pose, jitter = Pose(), None
    if rng is not None:
        chance = rng.random(15)
        pose = Pose(_pick(EYES, chance[0]), _pick(MOUTHS, chance[1]), _pick(RISES, chance[2]))
        jitter = 0.95 + 0.03 * chance[3:12].reshape(3, 3) + 0.07 * chance[12:, None]  # hue and brightness
    pixels = paint(attributes, pose, palette_of(attributes, jitter), size)
    return (pixels * 255 + 0.5).astype(np.uint8)


# --- reading: the nearest of all clean images, first by the background, then the character, then its hat ---

# The shape of a character, whatever its colours, mouth and hat: kind, eyewear, eyes and rise.
LOOKS = [
    (kind, eyewear, eyes, rise)
    for kind, eyewear, eyes, rise in product(ATTRIBUTES["kind"], ATTRIBUTES["eyewear"], sorted(set(EYES)), RISES)
    if eyewear != "sunglasses" or eyes == EYES[0]  # nobody sees the eyes behind sunglasses
]
BODIES, HAT_COLOURS = ATTRIBUTES["colour"], ATTRIBUTES["hat_colour"][1:]


def _shares(kind: str, eyewear: str, eyes: str, rise: float, hat: str, size: int) -> Array:
    """Returns the share of each ink in each pixel, [S S, inks]: the mean over the mouths, and a little soft.

    Softness costs nothing on crisp images; crisp templates take a blurred face for one with other glasses.
    """
    attributes = {"kind": kind, "eyewear": eyewear, "hat": hat}
    inks = np.eye(INKS, dtype=np.float32)
    images = [paint(attributes, Pose(eyes, mouth, rise), inks, size) for mouth in MOUTHS]
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
    background = shares[..., BACKGROUND].min((0, 1)) > 0.999
    hat = np.ptp(shares, 1).max((0, 2)) > 0.001
    return Templates(background, hat, shares[:, 0, ~hat], shares[:, :, hat])


@lru_cache
def _palette(colour: str, hat_colour: str, background: str) -> Array:
    return palette_of({"colour": colour, "hat_colour": hat_colour, "background": background})


@lru_cache(maxsize=2 * len(BACKGROUNDS))
def _characters(background: str, size: int) -> Array:
    """Returns every look in every colour, [looks colours, pixels 3], where no hat is."""
    palettes = np.stack([_palette(colour, NONE, background) for colour in BODIES])
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
    if images.shape[1] < SIZES[0]:
        raise InputError(f"avatars to be read are at least {SIZES[0]} pixels wide, not {images.shape[1]}")
    pixels = images.astype(np.float32) / np.float32(255 if images.dtype == np.uint8 else 1)
    if images.shape[1] > FRAME:
        pixels = np.stack([_shrink(image) for image in pixels])
    size = pixels.shape[1]
    pixels = pixels.reshape(len(pixels), size * size, 3)
    templates = _templates(size)
    corners = pixels[:, templates.background].mean(1)
    grounds = _nearest(corners, np.stack([rgb(code) for code in BACKGROUNDS.values()]))
    characters, hats = pixels[:, ~templates.hat].reshape(len(pixels), -1), pixels[:, templates.hat]
    attributes: list[dict[str, str]] = [{} for _ in pixels]
    for ground, background in enumerate(BACKGROUNDS):
        rows = np.flatnonzero(grounds == ground)
        for row, nearest in zip(rows, _nearest(characters[rows], _characters(background, size)), strict=True):
            look, colour = divmod(nearest, len(BODIES))
            hat = _read_hat(hats[row], templates.hatted[look], BODIES[colour], background)
            values = LOOKS[look][0], BODIES[colour], LOOKS[look][1], *hat, background
            attributes[row] = dict(zip(ATTRIBUTES, values, strict=True))
    return attributes
