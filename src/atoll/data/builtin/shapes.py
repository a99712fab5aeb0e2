"""Shapes: one or two flat shapes anywhere in the frame, and the caption that says exactly which.

"a large red ring on a navy background". Shapes never touch each other or the edge of the image, and of two
the caption names the left one first.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

SIZES = (16, 1024)

COLOURS = {
    "red": "#e5383b", "orange": "#f77f00", "yellow": "#fcca2e", "green": "#38a34a", "blue": "#2f7fe0",
    "purple": "#8e44c9", "pink": "#f48fb8", "white": "#fdfcf8", "black": "#1d1b26",
}  # fmt: skip
BACKGROUNDS = {
    "white": "#fdfcf8", "black": "#1d1b26", "navy": "#1f2d5c", "teal": "#2b8c8c", "grey": "#a9adb8",
    "beige": "#ecdcc0",
}  # fmt: skip
SHAPES = ("circle", "ring", "square", "triangle", "star", "cross", "heart", "diamond")
RADII = {"small": (0.10, 0.13), "large": (0.22, 0.25)}  # of the circle around a shape, as a part of the frame
GAP = 0.02  # between a shape and another, or the edge
TWO = 0.4  # the part of scenes with two shapes
HARD_TO_SEE = {("black", "navy"), ("green", "teal")}


def _polar(angles: NDArray[np.float64], radii: NDArray[np.float64] | float = 1.0) -> NDArray[np.float64]:
    """Points around the origin; angles turn clockwise from the top."""
    return np.stack([radii * np.sin(angles), -radii * np.cos(angles)], -1)


def _cross() -> NDArray[np.float64]:
    arm, reach = 0.32, math.sqrt(1 - 0.32**2)
    quarter = np.array([(-arm, -reach), (arm, -reach), (arm, -arm)])
    turns = [np.array([(c, -s), (s, c)]) for c, s in ((1, 0), (0, 1), (-1, 0), (0, -1))]
    return np.concatenate([quarter @ turn.T for turn in turns])


def _heart() -> NDArray[np.float64]:
    a = np.linspace(0, 2 * math.pi, 65)[:-1]
    x = 16 * np.sin(a) ** 3
    y = -(13 * np.cos(a) - 5 * np.cos(2 * a) - 2 * np.cos(3 * a) - np.cos(4 * a))
    return np.stack([x, y - 2.5], -1) / 18.2


# Corners within a circle of radius 1 around the origin; a ring and a circle have none.
CORNERS = {
    "square": _polar(np.radians([45, 135, 225, 315])),
    "triangle": _polar(np.radians([0, 120, 240])),
    "star": _polar(np.radians(np.arange(0, 360, 36)), np.array([1, 0.42] * 5)),
    "cross": _cross(),
    "heart": _heart(),
    "diamond": _polar(np.radians([0, 90, 180, 270]), np.array([1, 0.66] * 2)),
}


def caption_of(attributes: Mapping[str, str]) -> str:
    """The one caption of these attributes."""
    things = [f"{attributes['size']} {attributes['colour']} {attributes['shape']}"]
    if "second_shape" in attributes:
        things.append(f"{attributes['second_size']} {attributes['second_colour']} {attributes['second_shape']}")
    return f"a {' and a '.join(things)} on a {attributes['background']} background"


def draw_shapes(rng: np.random.Generator, size: int = 32) -> tuple[dict[str, str], Image.Image]:
    """A random scene: its attributes and its image."""
    chance = iter(rng.random(10).tolist())

    def pick(values: Sequence[str]) -> str:
        return values[int(next(chance) * len(values))]

    background = pick(tuple(BACKGROUNDS))
    colours = [name for name in COLOURS if name != background and (name, background) not in HARD_TO_SEE]
    attributes = {"background": background}
    radii, names = [], list(SHAPES)
    for prefix in ("", "second_") if next(chance) < TWO else ("",):
        word = pick(tuple(RADII))
        low, high = RADII[word]
        radii.append(low + next(chance) * (high - low))
        attributes |= {f"{prefix}size": word, f"{prefix}colour": pick(colours), f"{prefix}shape": pick(names)}
        names.remove(attributes[f"{prefix}shape"])
    fine = 4 if size <= 256 else 2
    image = Image.new("RGB", (size * fine,) * 2, BACKGROUNDS[background])
    for prefix, radius, centre in zip(("", "second_"), radii, _places(rng, radii), strict=False):
        colour, shape = COLOURS[attributes[f"{prefix}colour"]], attributes[f"{prefix}shape"]
        _draw(image, shape, centre, radius, colour)
    return attributes, image.reduce(fine)


def _places(rng: np.random.Generator, radii: Sequence[float]) -> NDArray[np.float64]:
    """A centre for each circle, [num, 2]: within the frame, from left to right, apart from each other."""
    margin = np.array(radii)[:, None] + GAP
    while True:
        tries = margin + rng.random((16, len(radii), 2)) * (1 - 2 * margin)
        if len(radii) == 1:
            return tries[0]
        x, y = (tries[:, 1] - tries[:, 0]).T
        good = np.flatnonzero((x > 0) & (np.hypot(x, y) > sum(radii) + GAP))
        if len(good):
            return tries[good[0]]


def _draw(image: Image.Image, shape: str, centre: NDArray[np.float64], radius: float, colour: str) -> None:
    pen, scale = ImageDraw.Draw(image), image.width
    if shape in CORNERS:
        points = (centre + radius * CORNERS[shape]) * scale - 0.5
        pen.polygon([(x, y) for x, y in points.tolist()], fill=colour)
        return
    box = [*((centre - radius) * scale - 0.5), *((centre + radius) * scale - 0.5)]
    if shape == "ring":
        pen.ellipse(box, outline=colour, width=round(0.38 * radius * scale))
    else:
        pen.ellipse(box, fill=colour)
