"""Pictures of pictures: contact sheets, and a map on which clusters can be seen."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from atoll.storage import write_whole

INK, PAPER, FAINT = "#22313f", "#ffffff", "#6b7885"
COLOURS = ["#0f7173", "#e4572e", "#f0b429", "#5b4b9a", "#3f88c5", "#7fb069", "#c2185b", "#8d6e63", "#111111",
           "#9be564", "#ff9f9f", "#00b8d9", "#b388ff", "#8a8d0f", "#ff7ad9", "#9aa5b1"]  # fmt: skip


def colour_of(cluster: int) -> str:
    return COLOURS[cluster % len(COLOURS)]


def save_picture(picture: Image.Image, path: Path) -> None:
    write_whole(path, lambda staged: picture.save(staged, "PNG"))


def contact_sheet(images: NDArray[np.uint8], title: str, notes: Sequence[str] = ()) -> Image.Image:
    """A grid of pictures, wider than high, under a title and a few lines of notes."""
    num, size = len(images), images.shape[1]
    width = 960 if size <= 64 else 1440
    columns = min(num, 13, math.ceil(math.sqrt(num * 1.8)))
    cell = _whole_scale(size, width // columns - 6)
    gap, top = 6, 46 + 19 * len(notes)
    rows = math.ceil(num / columns)
    sheet = Image.new("RGB", (max(columns * (cell + gap) + gap, 420), top + rows * (cell + gap) + gap), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((gap + 4, 10), title, INK, _font(20))
    for i, note in enumerate(notes):
        draw.text((gap + 4, 38 + 19 * i), note[:130], FAINT, _font(14))
    for i, picture in enumerate(images):
        place = (gap + i % columns * (cell + gap), top + i // columns * (cell + gap))
        sheet.paste(_scaled(picture, cell), place)
    return sheet


def sample_sheet(real: NDArray[np.uint8], made: NDArray[np.uint8], captions: Sequence[str], title: str) -> Image.Image:
    """Real pictures, below each what was made of its caption, and below both the caption."""
    size, columns, gap = real.shape[1], min(6, len(real)), 8
    cell = _whole_scale(size, 150)
    high = 2 * cell + 68
    sheet = Image.new("RGB", (gap + columns * (cell + gap), 68 + math.ceil(len(real) / columns) * high), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((gap, 10), title, INK, _font(20))
    draw.text((gap, 38), "above: held out; below: made from its caption", FAINT, _font(14))
    for i, (above, below, caption) in enumerate(zip(real, made, captions, strict=True)):
        x, y = gap + i % columns * (cell + gap), 66 + i // columns * high
        sheet.paste(_scaled(above, cell), (x, y))
        sheet.paste(_scaled(below, cell), (x, y + cell + 2))
        lines = textwrap.wrap("".join(filter(str.isprintable, caption[:1000])), max(8, cell // 6))  # 4 of them show
        for j, line in enumerate(lines[:4]):
            draw.text((x, y + 2 * cell + 4 + 14 * j), line, FAINT, _font(11))
    return sheet


def cluster_map(
    points: NDArray[np.float64], clusters: NDArray[np.int64], images: NDArray[np.uint8], names: Sequence[str]
) -> Image.Image:
    """Pictures at their places in two dimensions, framed in the colour of their cluster; none lies on another."""
    side, frame = 960, 3
    cell = int(np.clip(side / (1.6 * math.sqrt(len(points))), 36, 120))  # few pictures are shown large
    low, high = points.min(0), points.max(0)
    spread = (points - low) / np.maximum(high - low, 1e-9)
    ranks = points.argsort(0).argsort(0) / max(len(points) - 1, 1)
    unit = (spread + 2 * ranks) / 3  # mostly by rank: crowds are pulled apart, and gaps can still be seen
    slots = side // (cell + 2)
    canvas = Image.new("RGB", (side + 24, side + 56 + 22 * math.ceil(len(names) / 4)), PAPER)
    draw = ImageDraw.Draw(canvas)
    draw.text((12, 10), "what each expert will see", INK, _font(20))
    taken: set[tuple[int, int]] = set()
    for place, cluster, picture in zip(unit, clusters, images, strict=True):
        slot = (int(place[0] * (slots - 1)), int(place[1] * (slots - 1)))
        if slot in taken:
            continue
        taken.add(slot)
        x, y = 12 + slot[0] * (cell + 2), 44 + slot[1] * (cell + 2)
        draw.rectangle((x, y, x + cell - 1, y + cell - 1), colour_of(int(cluster)))
        canvas.paste(_scaled(picture, cell - 2 * frame), (x + frame, y + frame))
    for i, name in enumerate(names):
        x, y = 12 + i % 4 * (side // 4), side + 50 + 22 * (i // 4)
        draw.rectangle((x, y + 2, x + 14, y + 16), colour_of(i))
        draw.text((x + 20, y), name, INK, _font(14))
    return canvas


def flat_map(features: NDArray[np.float64]) -> NDArray[np.float64]:
    """The two directions in which features vary most: [n, 2]."""
    centred = features - features.mean(0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    return np.asarray(centred @ directions[:2].T)


def _whole_scale(size: int, most: int) -> int:
    """Small pictures grow by a whole factor, so that their pixels stay square."""
    return size * max(1, most // size) if size <= most else most


def _scaled(picture: NDArray[np.uint8], cell: int) -> Image.Image:
    image = Image.fromarray(picture)
    grows = cell >= image.width and cell % image.width == 0
    return image.resize((cell, cell), Image.Resampling.NEAREST if grows else Image.Resampling.LANCZOS)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
