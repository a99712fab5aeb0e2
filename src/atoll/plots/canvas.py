"""Shared by all plots: colours, fonts, text that fits, and images at a readable size."""

import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from atoll.storage import write_whole

INK, PAPER, FAINT, LINE = "#22313f", "#ffffff", "#6b7885", "#d5dbe1"
COLOURS = ["#0f7173", "#e4572e", "#f0b429", "#5b4b9a", "#3f88c5", "#7fb069", "#c2185b", "#8d6e63", "#111111",
           "#9be564", "#ff9f9f", "#00b8d9", "#b388ff", "#8a8d0f", "#ff7ad9", "#9aa5b1"]  # fmt: skip
EDGE = 24  # pixels of margin
MOST_CHARACTERS = 2000  # of a text that are considered; there is no room for more

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
font_of = ImageFont.load_default
Pictures = Sequence[Image.Image] | NDArray[np.uint8]


def colour_of(cluster: int) -> str:
    return COLOURS[cluster % len(COLOURS)]


def blank(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """Returns a white image, and an object that draws on it."""
    sheet = Image.new("RGB", (width, height), PAPER)
    return sheet, ImageDraw.Draw(sheet)


def save_image(picture: Image.Image, path: Path) -> None:
    write_whole(path, lambda staged: picture.save(staged, "PNG"))


def wrap(text: str, width: float, font: Font, most: int) -> list[str]:
    """Returns the text as at most `most` lines that fit, without accents, which the built-in font lacks."""
    plain = unicodedata.normalize("NFKD", text[:MOST_CHARACTERS])[:MOST_CHARACTERS]
    plain = "".join(c for c in plain if not unicodedata.combining(c) and (c.isprintable() or c.isspace()))
    lines: list[str] = []
    rest = " ".join(plain.split()) or "(no text)"
    while rest and len(lines) < most - 1:
        num = _num_fitting(rest, width, font)
        if num < len(rest) and (space := rest.rfind(" ", 0, num + 1)) > 0:
            num = space
        lines.append(rest[:num])
        rest = rest[num:].lstrip()
    return [*lines, shorten(rest, width, font)] if rest else lines


def shorten(text: str, width: float, font: Font) -> str:
    """Returns the text, truncated with an ellipsis if it does not fit."""
    if font.getlength(text) <= width:
        return text
    return f"{text[: _num_fitting(text, width - font.getlength(' ...'), font)].rstrip()} ..."


def _num_fitting(text: str, width: float, font: Font) -> int:
    """Returns how many characters fit, at least 1, by bisection, since only whole strings can be measured."""
    return max(1, bisect_right(range(1, len(text) + 1), width, key=lambda num: font.getlength(text[:num])))


def whole_scale(size: int, most: int) -> int:
    """Returns the side to draw an image at: small ones grow by a whole factor, so that their pixels stay equal."""
    return size * (most // size) if size <= most else most


def scaled(image: Image.Image | NDArray[np.uint8], cell: int) -> Image.Image:
    """Returns the image resized to `cell` x `cell` pixels."""
    own = Image.fromarray(np.asarray(image))
    grows = cell % own.width == 0
    return own.resize((cell, cell), Image.Resampling.NEAREST if grows else Image.Resampling.LANCZOS)


def paste_grid(sheet: Image.Image, images: Pictures, left: int, top: int, cell: int, gap: int, columns: int) -> None:
    """Pastes images row by row, `gap` pixels apart."""
    for i, image in enumerate(images):
        row, column = divmod(i, columns)
        sheet.paste(scaled(image, cell), (left + column * (cell + gap), top + row * (cell + gap)))
