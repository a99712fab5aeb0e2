"""Which experts made an image, and when: stacked areas of their weights from noise to data."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from PIL import Image, ImageDraw
from torch import Tensor

from atoll.plots.canvas import (
    EDGE,
    FAINT,
    INK,
    LINE,
    PAPER,
    colour_of,
    draw_lines,
    font_of,
    scaled,
    shorten,
    whole_scale,
    wrap,
)

SHARP = 3  # areas are drawn so many times larger, and scaled down, for smooth edges


class Moment(Protocol):
    """A preview, of which the drawing needs the time alone."""

    @property
    def t(self) -> float: ...


class Trace(Protocol):
    """What is drawn of an image's trace (`atoll.sampling.trace.ImageTrace`)."""

    @property
    def times(self) -> Sequence[float]: ...
    @property
    def weights(self) -> Tensor: ...
    @property
    def shares(self) -> Sequence[float]: ...
    @property
    def previews(self) -> Sequence[Moment]: ...


def draw_traces(panels: Sequence[Image.Image]) -> Image.Image:
    """One below the other."""
    sheet = Image.new("RGB", (max(p.width for p in panels), sum(p.height for p in panels)), PAPER)
    y = 0
    for panel in panels:
        sheet.paste(panel, (0, y))
        if y:
            ImageDraw.Draw(sheet).line((EDGE, y, sheet.width - EDGE, y), LINE)
        y += panel.height
    return sheet


def draw_trace(
    trace: Trace,
    final: Image.Image,
    previews: Sequence[Image.Image],
    objectives: Sequence[str],
    title: str,
    notes: str = "",
) -> Image.Image:
    """The weights of the experts from noise to data as stacked areas, above them where the image was heading."""
    chart, high, gap = 784, 190, 6
    feet = [round((1 - preview.t) * (chart - 1)) for preview in trace.previews]
    room = min((after - foot - gap for foot, after in pairwise([*feet, chart + EDGE])), default=96)
    thumb = min(max(room, 16), 96)
    thumbs = thumb + 18 if previews else 0
    legend, side = 190, whole_scale(final.width, high + thumbs)
    left = EDGE + 30
    width = left + chart + 2 * EDGE + side + EDGE + legend + EDGE
    heads = wrap(title, width - 2 * EDGE, font_of(18), 2)
    top = EDGE + 24 * len(heads) + (24 if notes else 6)
    sheet = Image.new("RGB", (width, top + thumbs + high + 62), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw_lines(draw, (EDGE, EDGE - 6), heads, 24, INK, font_of(18))
    if notes:
        draw.text((EDGE, EDGE - 4 + 24 * len(heads)), notes, FAINT, font_of(13))

    base = top + thumbs
    for foot, image in zip(feet, previews, strict=True):
        sheet.paste(scaled(image, thumb), (left + foot, top))
        draw.line((left + foot, top + thumb + 4, left + foot, base - 4), FAINT)

    sheet.paste(_areas(trace, chart, high), (left, base))
    for share in (0, 0.5, 1):
        y = base + round((1 - share) * (high - 1))
        draw.line((left - 5, y, left - 1, y), FAINT)
        draw.text((left - 9, y), f"{share:g}", FAINT, font_of(12), anchor="rm")
    for i in range(6):
        x = left + round(i / 5 * (chart - 1))
        draw.line((x, base + high, x, base + high + 5), FAINT)
        draw.text((x, base + high + 8), f"{1 - i / 5:.1f}", FAINT, font_of(12), anchor="mt")
    low = base + high + 28
    draw.text((left, low), "noise", INK, font_of(13), anchor="lt")
    draw.text((left + chart / 2, low), "time t", FAINT, font_of(13), anchor="mt")
    draw.text((left + chart, low), "data", INK, font_of(13), anchor="rt")

    right = left + chart + 2 * EDGE
    sheet.paste(scaled(final, side), (right, base + high - side))
    _draw_legend(draw, trace, objectives, (right + side + EDGE, top, width - EDGE, base + high))
    return sheet


def _areas(trace: Trace, width: int, height: int) -> Image.Image:
    """The weights as areas on one another, expert 0 at the bottom; each stands until the next evaluation."""
    w, h = width * SHARP, height * SHARP
    canvas = Image.new("RGB", (w, h), PAPER)
    draw = ImageDraw.Draw(canvas)
    tops = trace.weights.double().cumsum(1).clamp(0, 1)  # [evaluations, K]
    # The first weights are as good as those at t = 1, the last stand until t = 0: no step is made without.
    edges = [0.0, *((1 - t) * (w - 1) for t in trace.times[1:]), float(w - 1)]
    spans = list(zip(pairwise(edges), tops.tolist(), strict=True))
    for k in reversed(range(tops.shape[1])):
        line = [(x, (1 - row[k]) * h) for ends, row in spans for x in ends]
        draw.polygon([(0, h), *line, (w - 1, h)], colour_of(k))
    return canvas.resize((width, height), Image.Resampling.LANCZOS)


def _draw_legend(
    draw: ImageDraw.ImageDraw,
    trace: Trace,
    objectives: Sequence[str],
    box: tuple[int, int, int, int],
) -> None:
    """In the order of the areas, with how much of the way each has led; those that led most, if not all have room."""
    left, top, right, bottom = box
    step, shares, font = 24, trace.shares, font_of(13)
    most = sorted(range(len(shares)), key=lambda k: -shares[k])[: (bottom - top) // step]
    y = bottom - step * len(most) + step // 2
    for k in sorted(most, reverse=True):
        used = shares[k] > 0
        ink = INK if used else FAINT
        share = "<1%" if 0 < shares[k] < 0.005 else f"{shares[k]:.0%}"
        draw.rectangle((left, y - 7, left + 13, y + 6), colour_of(k) if used else PAPER, colour_of(k))
        name = shorten(f"expert {k} · {objectives[k]}", right - left - 31 - font.getlength(share), font)
        draw.text((left + 21, y), name, ink, font, anchor="lm")
        draw.text((right, y), share, ink, font, anchor="rm")
        y += step
