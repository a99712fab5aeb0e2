"""Bars with whiskers: one panel per figure, one bar per model."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image, ImageDraw

from atoll.plots.canvas import EDGE, FAINT, INK, LINE, PAPER, colour_of, draw_lines, font_of, shorten, wrap

BAR, GAP, WIDTH = 22, 7, 460
NAME_WIDTH = 180


class Bar(NamedTuple):
    """One model's figure; without a value, the model has none."""

    name: str
    value: float | None = None
    error: float = 0.0
    text: str = "none"
    is_reference: bool = False  # drawn in grey


class Panel(NamedTuple):
    """One figure of all models."""

    title: str
    note: str
    bars: Sequence[Bar]


def draw_panels(panels: Sequence[Panel]) -> Image.Image:
    """Draws panels in two columns."""
    columns = min(2, len(panels))
    height = 80 + max(len(panel.bars) for panel in panels) * (BAR + GAP)
    sheet = Image.new("RGB", (EDGE + columns * (WIDTH + EDGE), EDGE + math.ceil(len(panels) / columns) * height), PAPER)
    draw = ImageDraw.Draw(sheet)
    for i, panel in enumerate(panels):
        _draw_panel(draw, panel, EDGE + i % columns * (WIDTH + EDGE), EDGE + i // columns * height)
    return sheet


def _draw_panel(draw: ImageDraw.ImageDraw, panel: Panel, left: int, top: int) -> None:
    head, small = font_of(14), font_of(12)
    lines = wrap(panel.title, WIDTH, head, 2)
    draw_lines(draw, (left, top + 17 * (2 - len(lines))), lines, 17, INK, head)
    draw.text((left, top + 37), panel.note, FAINT, small)
    names = [shorten(bar.name, NAME_WIDTH, small) for bar in panel.bars]
    zero = left + max(round(small.getlength(name)) for name in names) + 10
    room = left + WIDTH - zero - 110
    largest = max([*((bar.value or 0) + bar.error for bar in panel.bars), 1e-12])
    colours = iter(map(colour_of, range(len(panel.bars))))
    for i, (bar, name) in enumerate(zip(panel.bars, names, strict=True)):
        y = top + 60 + i * (BAR + GAP)
        middle = y + BAR // 2
        draw.text((zero - 8, middle), name, INK, small, anchor="rm")
        colour = LINE if bar.is_reference else next(colours)
        if bar.value is None:
            draw.text((zero, middle), bar.text, FAINT, small, anchor="lm")
            continue
        end, reach = zero + round(room * max(bar.value, 0) / largest), round(room * bar.error / largest)
        draw.rectangle((zero, y, max(end, zero + 1), y + BAR), colour)
        if reach:
            low, high = max(zero, end - reach), end + reach
            draw.line((low, middle, high, middle), INK)
            for x in (low, high):
                draw.line((x, middle - 4, x, middle + 4), INK)
        draw.text((end + reach + 8, middle), bar.text, INK, small, anchor="lm")
