"""Charts: bars with whiskers, and the experts' weights over sampling time as stacked areas."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageColor, ImageDraw
from torch import Tensor

from atoll.plots.canvas import EDGE, FAINT, INK, LINE, blank, colour_of, font_of, scaled, shorten, whole_scale, wrap

BAR, GAP, WIDTH, NAME_WIDTH, LEGEND_WIDTH = 22, 7, 460, 180, 190


class Bar(NamedTuple):
    """One model's figure; None if it has none."""

    name: str
    is_reference: bool  # drawn in grey
    value: float | None = None
    error: float = 0.0
    text: str = "none"


Panel = tuple[str, str, Sequence[Bar]]  # a figure's title, note, and a bar per model


def draw_panels(panels: Sequence[Panel]) -> Image.Image:
    """Draws panels in two columns."""
    columns = min(2, len(panels))
    height = 80 + max(len(bars) for _, _, bars in panels) * (BAR + GAP)
    sheet, draw = blank(EDGE + columns * (WIDTH + EDGE), EDGE + math.ceil(len(panels) / columns) * height)
    for i, panel in enumerate(panels):
        _draw_panel(draw, *panel, EDGE + i % columns * (WIDTH + EDGE), EDGE + i // columns * height)
    return sheet


def _draw_panel(draw: ImageDraw.ImageDraw, title: str, note: str, bars: Sequence[Bar], left: int, top: int) -> None:
    head, small = font_of(14), font_of(12)
    draw.text((left, top + 34), "\n".join(wrap(title, WIDTH, head, 2)), INK, head, anchor="ld", spacing=3)
    draw.text((left, top + 37), note, FAINT, small)
    names = [shorten(bar.name, NAME_WIDTH, small) for bar in bars]
    zero = left + max(round(small.getlength(name)) for name in names) + 10
    largest = max([*((bar.value or 0) + bar.error for bar in bars), 1e-12])
    scale = (left + WIDTH - zero - 110) / largest
    colours = map(colour_of, range(len(bars)))
    for i, (bar, name) in enumerate(zip(bars, names, strict=True)):
        y = top + 60 + i * (BAR + GAP)
        middle = y + BAR // 2
        draw.text((zero - 8, middle), name, INK, small, anchor="rm")
        colour = LINE if bar.is_reference else next(colours)
        if bar.value is None:
            draw.text((zero, middle), bar.text, FAINT, small, anchor="lm")
            continue
        end, reach = zero + round(scale * max(bar.value, 0)), round(scale * bar.error)
        draw.rectangle((zero, y, max(end, zero + 1), y + BAR), colour)
        if reach:
            low, high = max(zero, end - reach), end + reach
            for line in ((low, middle, high, middle), *((x, middle - 4, x, middle + 4) for x in (low, high))):
                draw.line(line, INK)
        draw.text((end + reach + 8, middle), bar.text, INK, small, anchor="lm")


def draw_traces(panels: Sequence[Image.Image]) -> Image.Image:
    """Stacks traces of one model vertically."""
    return Image.fromarray(np.concatenate([np.asarray(panel) for panel in panels]))


def draw_trace(
    times: Sequence[float],
    weights: Tensor,
    final: Image.Image,
    previews: Sequence[tuple[float, Image.Image]],
    objectives: Sequence[str],
    title: str,
    notes: str = "",
) -> Image.Image:
    """Draws the experts' weights [evaluations, K] from noise to data, with previews of the image above them."""
    chart, high = 784, 190
    feet = [round((1 - t) * (chart - 1)) for t, _ in previews]
    thumb = max(16, min([96, *(after - foot - 6 for foot, after in pairwise([*feet, chart + EDGE]))]))
    side, left = whole_scale(final.width, thumb + 18 + high), EDGE + 30
    right = left + chart + 2 * EDGE
    width = right + side + EDGE + LEGEND_WIDTH + EDGE
    heads = wrap(title, width - 2 * EDGE, font_of(18), 2)
    top = EDGE + 24 * (len(heads) + 1)
    base = top + thumb + 18
    low = base + high
    sheet, draw = blank(width, low + 62)
    draw.line((EDGE, low + 61, width - EDGE, low + 61), LINE)
    draw.text((EDGE, EDGE - 6), "\n".join(heads), INK, font_of(18), spacing=6)
    draw.text((EDGE, EDGE - 4 + 24 * len(heads)), notes, FAINT, font_of(13))
    for foot, (_, image) in zip(feet, previews, strict=True):
        sheet.paste(scaled(image, thumb), (left + foot, top))
        draw.line((left + foot, top + thumb + 4, left + foot, base - 4), FAINT)
    sheet.paste(_areas(times, weights, chart, high), (left, base))
    for share in (0, 0.5, 1):
        y = base + round((1 - share) * (high - 1))
        draw.line((left - 5, y, left - 1, y), FAINT)
        draw.text((left - 9, y), f"{share:g}", FAINT, font_of(12), anchor="rm")
    for i in range(6):
        x = left + round(i / 5 * (chart - 1))
        draw.line((x, low, x, low + 5), FAINT)
        draw.text((x, low + 8), f"{1 - i / 5:.1f}", FAINT, font_of(12), anchor="mt")
    draw.text((left, low + 28), "noise", INK, font_of(13), anchor="lt")
    draw.text((left + chart // 2, low + 28), "time t", FAINT, font_of(13), anchor="mt")
    draw.text((left + chart, low + 28), "data", INK, font_of(13), anchor="rt")
    sheet.paste(scaled(final, side), (right, low - side))
    _draw_legend(draw, weights.mean(0).tolist(), objectives, right + side + EDGE, top, low)
    return sheet


def _areas(times: Sequence[float], weights: Tensor, width: int, height: int) -> Image.Image:
    """Draws the weights as stacked areas, expert 0 at the bottom, each constant until the next evaluation."""
    tops = weights.double().cumsum(1).numpy()[:, :-1]  # [evaluations, K - 1]; the last expert's is always 1
    # The first weights hold from t = 1 on, the last ones until t = 0.
    evaluation = np.searchsorted(1 - np.array(times[1:]), (np.arange(width) + 0.5) / width, "right")
    heights = 1 - (np.arange(height) + 0.5) / height
    expert = (tops[evaluation] <= heights[:, None, None]).sum(2)  # [height, width]
    colours = [ImageColor.getrgb(colour_of(k)) for k in range(weights.shape[1])]
    return Image.fromarray(np.array(colours, np.uint8)[expert])


def _draw_legend(
    draw: ImageDraw.ImageDraw, shares: Sequence[float], objectives: Sequence[str], left: int, top: int, bottom: int
) -> None:
    """Draws a legend in the order of the areas, with mean weights; only of the largest, if there is no room for all."""
    step, font, right = 24, font_of(13), left + LEGEND_WIDTH
    most = sorted(range(len(shares)), key=lambda k: -shares[k])[: (bottom - top) // step]
    for i, k in enumerate(sorted(most)):
        y = bottom - step * i - step // 2
        ink, fill = (INK, colour_of(k)) if shares[k] > 0 else (FAINT, None)
        share = "<1%" if 0 < shares[k] < 0.005 else f"{shares[k]:.0%}"
        draw.rectangle((left, y - 7, left + 13, y + 6), fill, colour_of(k))
        name = shorten(f"expert {k} · {objectives[k]}", right - left - 31 - font.getlength(share), font)
        draw.text((left + 21, y), name, ink, font, anchor="lm")
        draw.text((right, y), share, ink, font, anchor="rm")
