"""Images side by side: contact sheets, grids, and a map on which clusters can be seen."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from atoll.plots.canvas import (
    EDGE,
    FAINT,
    INK,
    PAPER,
    colour_of,
    draw_lines,
    font_of,
    save_picture,
    scaled,
    shorten,
    whole_scale,
    wrap,
)

__all__ = ["cluster_map", "contact_sheet", "draw_grid", "draw_samples", "flat_map", "sample_sheet", "save_picture"]

ON_A_GRID = 100
Images = NDArray[np.uint8]  # [N, S, S, 3]


def contact_sheet(images: NDArray[np.uint8], title: str, notes: Sequence[str] = ()) -> Image.Image:
    """A grid of images, wider than high, under a title and a few lines of notes."""
    num, size = len(images), images.shape[1]
    width = 960 if size <= 64 else 1440
    columns = min(num, 13, math.ceil(math.sqrt(num * 1.8)))
    cell = whole_scale(size, width // columns - 6)
    gap, top = 6, 46 + 19 * len(notes)
    rows = math.ceil(num / columns)
    sheet = Image.new("RGB", (max(columns * (cell + gap) + gap, 420), top + rows * (cell + gap) + gap), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((gap + 4, 10), title, INK, font_of(20))
    for i, note in enumerate(notes):
        draw.text((gap + 4, 38 + 19 * i), note[:130], FAINT, font_of(14))
    for i, image in enumerate(images):
        place = (gap + i % columns * (cell + gap), top + i // columns * (cell + gap))
        sheet.paste(scaled(image, cell), place)
    return sheet


def draw_grid(
    images: Sequence[Image.Image], captions: Sequence[str], notes: str = "", across: int | None = None
) -> Image.Image:
    """Images with their captions below; those of one caption that come one after another share a line of it."""
    groups: list[tuple[str, list[Image.Image]]] = []
    for image, caption in list(zip(images, captions, strict=True))[:ON_A_GRID]:
        if not groups or groups[-1][0] != caption:
            groups.append((caption, []))
        groups[-1][1].append(image)
    most = max(len(group) for _, group in groups)
    cell, gap = whole_scale(images[0].width, 160 if len(images) <= 24 else 112), 12
    if across is None:
        across = max(1, min(len(groups), math.ceil(math.sqrt(1.6 * len(groups) / most)))) if most <= 6 else 1
    columns = min(most, 10)
    group_width = columns * (cell + gap) - gap
    font, small = font_of(13), font_of(12)
    width = 2 * EDGE + across * (group_width + 2 * gap) - 2 * gap
    texts = [wrap(caption, group_width, font, 4) for caption, _ in groups]
    rows = [range(first, min(first + across, len(groups))) for first in range(0, len(groups), across)]
    heights = [
        max(math.ceil(len(groups[i][1]) / columns) * (cell + gap) + 17 * max(1, len(texts[i])) for i in row) + gap
        for row in rows
    ]
    foot = wrap(notes, width - 2 * EDGE, small, 3) if notes else []
    sheet = Image.new("RGB", (width, EDGE + sum(heights) + 16 * len(foot) + (EDGE if foot else gap)), PAPER)
    draw = ImageDraw.Draw(sheet)
    y = EDGE
    for row, height in zip(rows, heights, strict=True):
        for place, i in enumerate(row):
            left = EDGE + place * (group_width + 2 * gap)
            for j, image in enumerate(groups[i][1]):
                sheet.paste(scaled(image, cell), (left + j % columns * (cell + gap), y + j // columns * (cell + gap)))
            below = y + math.ceil(len(groups[i][1]) / columns) * (cell + gap) - 6
            draw_lines(draw, (left, below), texts[i], 17, INK, font)
        y += height
    draw_lines(draw, (EDGE, y), foot, 16, FAINT, small)
    return sheet


def sample_sheet(real: Images, made: Images, captions: Sequence[str], title: str) -> Image.Image:
    """Draws held-out images, below each what was made of its caption, and below both the caption."""
    return draw_samples({"held out": real, "made": made}, captions, title)


def draw_samples(rows: Mapping[str, Images], captions: Sequence[str], title: str = "") -> Image.Image:
    """Draws a row of images per model and a column per caption, which stands below."""
    num = min(len(captions), *(len(row) for row in rows.values()))
    cell = whole_scale(max(row.shape[1] for row in rows.values()), 128)
    gap, font, small = 8, font_of(14), font_of(11)
    names = [shorten(name, 200, font) for name in rows]
    left, top = EDGE + max(round(font.getlength(name)) for name in names) + 16, EDGE + (32 if title else 0)
    texts = [wrap(caption, cell + gap - 4, small, 6) for caption in captions[:num]]
    bottom = top + len(rows) * (cell + gap)
    size = (left + num * (cell + gap) + EDGE, bottom + 14 * max(map(len, texts)) + EDGE)
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((EDGE, EDGE - 8), title, INK, font_of(20))
    for i, (name, images) in enumerate(zip(names, rows.values(), strict=True)):
        y = top + i * (cell + gap)
        draw.text((left - 16, y + cell // 2), name, INK, font, anchor="rm")
        for j, image in enumerate(images[:num]):
            sheet.paste(scaled(image, cell), (left + j * (cell + gap), y))
    for j, lines in enumerate(texts):
        draw_lines(draw, (left + j * (cell + gap), bottom), lines, 14, FAINT, small)
    return sheet


def cluster_map(
    points: NDArray[np.float64], clusters: NDArray[np.int64], images: NDArray[np.uint8], names: Sequence[str]
) -> Image.Image:
    """Pictures at their places in two dimensions, framed in the colour of their cluster; none lies on another."""
    side, frame = 960, 3
    cell = int(np.clip(side / (1.6 * math.sqrt(len(points))), 36, 120))  # few images are shown large
    low, high = points.min(0), points.max(0)
    spread = (points - low) / np.maximum(high - low, 1e-9)
    ranks = points.argsort(0).argsort(0) / max(len(points) - 1, 1)
    unit = (spread + 2 * ranks) / 3  # mostly by rank: crowds are pulled apart, and gaps can still be seen
    slots = side // (cell + 2)
    canvas = Image.new("RGB", (side + 24, side + 56 + 22 * math.ceil(len(names) / 4)), PAPER)
    draw = ImageDraw.Draw(canvas)
    draw.text((12, 10), "what each expert will see", INK, font_of(20))
    taken: set[tuple[int, int]] = set()
    for place, cluster, image in zip(unit, clusters, images, strict=True):
        slot = (int(place[0] * (slots - 1)), int(place[1] * (slots - 1)))
        if slot in taken:
            continue
        taken.add(slot)
        x, y = 12 + slot[0] * (cell + 2), 44 + slot[1] * (cell + 2)
        draw.rectangle((x, y, x + cell - 1, y + cell - 1), colour_of(int(cluster)))
        canvas.paste(scaled(image, cell - 2 * frame), (x + frame, y + frame))
    for i, name in enumerate(names):
        x, y = 12 + i % 4 * (side // 4), side + 50 + 22 * (i // 4)
        draw.rectangle((x, y + 2, x + 14, y + 16), colour_of(i))
        draw.text((x + 20, y), name, INK, font_of(14))
    return canvas


def flat_map(features: NDArray[np.float64]) -> NDArray[np.float64]:
    """The two directions in which features vary most: [n, 2]."""
    centred = features - features.mean(0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    return np.asarray(centred @ directions[:2].T)
