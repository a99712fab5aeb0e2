"""Contact sheets, grids of images, and a map of the clusters."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from atoll.plots.canvas import EDGE, FAINT, INK, blank, colour_of, font_of, paste_grid, whole_scale, wrap

ON_A_GRID = 100
Images = NDArray[np.uint8]  # [N, S, S, 3]


def contact_sheet(images: Images, title: str, notes: Sequence[str] = ()) -> Image.Image:
    """Draws a grid of images, wider than high, under a title and a few lines of notes."""
    num, size = images.shape[:2]
    columns = min(num, 13, math.ceil(math.sqrt(num * 1.8)))
    gap, top = 6, 46 + 19 * len(notes)
    cell = whole_scale(size, (960 if size <= 64 else 1440) // columns - gap)
    rows = math.ceil(num / columns)
    sheet, draw = blank(max(columns * (cell + gap) + gap, 420), top + rows * (cell + gap) + gap)
    draw.text((gap + 4, 10), title, INK, font_of(20))
    draw.text((gap + 4, 38), "\n".join(" ".join(note[:130].split()) for note in notes), FAINT, font_of(14), spacing=5)
    paste_grid(sheet, images, gap, top, cell, gap, columns)
    return sheet


def draw_grid(images: Sequence[Image.Image], captions: Sequence[str], notes: str = "", across: int = 0) -> Image.Image:
    """Draws images with their captions below; neighbours with the same caption share it."""
    pairs = list(zip(images, captions, strict=True))[:ON_A_GRID]
    groups = [(caption, [image for image, _ in own]) for caption, own in groupby(pairs, key=lambda pair: pair[1])]
    most = max(len(own) for _, own in groups)
    across = across or (min(len(groups), math.ceil(math.sqrt(1.6 * len(groups) / most))) if most <= 6 else 1)
    cell, gap, columns = whole_scale(images[0].width, 160 if len(images) <= 24 else 112), 12, min(most, 10)
    font, small = font_of(13), font_of(12)
    group_width = columns * (cell + gap) - gap
    width = 2 * EDGE + across * (group_width + 2 * gap) - 2 * gap
    texts = [wrap(caption, group_width, font, 4) for caption, _ in groups]
    images_height = math.ceil(most / columns) * (cell + gap)
    height = images_height + 17 * max(map(len, texts)) + gap  # of each group
    foot = wrap(notes, width - 2 * EDGE, small, 3) if notes else []
    bottom = EDGE + math.ceil(len(groups) / across) * height
    sheet, draw = blank(width, bottom + 16 * len(foot) + (EDGE if foot else gap))
    for i, ((_, own), lines) in enumerate(zip(groups, texts, strict=True)):
        left, top = EDGE + i % across * (group_width + 2 * gap), EDGE + i // across * height
        paste_grid(sheet, own, left, top, cell, gap, columns)
        draw.text((left, top + images_height - 6), "\n".join(lines), INK, font)
    draw.text((EDGE, bottom), "\n".join(foot), FAINT, small)
    return sheet


def draw_samples(rows: Mapping[str, Images], captions: Sequence[str], title: str = "") -> Image.Image:
    """Draws a row of images per model and a column per caption, with the captions below."""
    num = min(len(captions), *(len(row) for row in rows.values()))
    cell = whole_scale(max(row.shape[1] for row in rows.values()), 128)
    gap, font, small = 8, font_of(14), font_of(11)
    names = [wrap(name, 200, font, 3) for name in rows]
    widest = max(font.getlength(line) for lines in names for line in lines)
    left, top = EDGE + round(widest) + 16, EDGE + (32 if title else 0)
    texts = [wrap(caption, cell + gap - 4, small, 6) for caption in captions[:num]]
    bottom = top + len(rows) * (cell + gap)
    sheet, draw = blank(left + num * (cell + gap) + EDGE, bottom + 15 * max(map(len, texts)) + EDGE)
    draw.text((EDGE, EDGE - 8), title, INK, font_of(20))
    for i, (name, images) in enumerate(zip(names, rows.values(), strict=True)):
        y = top + i * (cell + gap)
        draw.text((left - 16, y + cell // 2), "\n".join(name), INK, font, anchor="rm", align="right")
        paste_grid(sheet, images[:num], left, y, cell, gap, num)
    for j, lines in enumerate(texts):
        draw.text((left + j * (cell + gap), bottom), "\n".join(lines), FAINT, small)
    return sheet


def cluster_map(
    features: NDArray[np.float64], clusters: NDArray[np.int64], images: Images, names: Sequence[str]
) -> Image.Image:
    """Draws images on the features' first two principal axes, without overlap, framed in their cluster's colour."""
    side, frame = 960, 3
    cell = int(np.clip(side / (1.6 * math.sqrt(len(features))), 36, 120))  # few images are shown large
    centred = features - features.mean(0)
    points = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
    low, high = points.min(0), points.max(0)
    spread = (points - low) / np.maximum(high - low, 1e-9)
    ranks = points.argsort(0).argsort(0) / max(len(points) - 1, 1)
    # Placed mostly by rank: spreads out dense regions, while gaps remain visible.
    slots = ((spread + 2 * ranks) / 3 * (side // (cell + 2) - 1)).astype(int)
    sheet, draw = blank(side + 24, side + 56 + 22 * math.ceil(len(names) / 4))
    draw.text((12, 10), "what each expert will see", INK, font_of(20))
    for i in np.unique(slots, axis=0, return_index=True)[1]:
        x, y = (12 + slots[i, 0] * (cell + 2), 44 + slots[i, 1] * (cell + 2))
        draw.rectangle((x, y, x + cell - 1, y + cell - 1), colour_of(int(clusters[i])))
        paste_grid(sheet, images[i : i + 1], x + frame, y + frame, cell - 2 * frame, 0, 1)
    for i, name in enumerate(names):
        x, y = 12 + i % 4 * (side // 4), side + 50 + 22 * (i // 4)
        draw.rectangle((x, y + 2, x + 14, y + 16), colour_of(i))
        draw.text((x + 20, y), name, INK, font_of(14))
    return sheet
