"""What a run leaves behind: which experts made an image and when, as numbers and pictures, and PNGs that say how."""

import hashlib
import io
import json
import math
import os
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw, ImageFont, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile, PngInfo
from torch import Tensor

from atoll.errors import InputError
from atoll.plots.contact_sheet import FAINT, INK, PAPER, colour_of
from atoll.storage import open_regular, parse_json, read_bytes, reason_of, write_whole

LINE, EDGE = "#d5dbe1", 24
SHARP = 3  # areas are drawn so many times larger, and scaled down, for smooth edges
ON_A_GRID = 100
MOST_TOLD = 2000  # characters of a text that is drawn or becomes a name: more have no room
MOST_PIXELS = 1 << 26  # of a PNG whose texts are read

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class Preview(NamedTuple):
    """Where an image was heading at t."""

    t: float
    x0: Tensor  # latents [C, S, S]


@dataclass(frozen=True, eq=False)
class ImageTrace:
    """Each evaluation of the velocity of one image."""

    times: tuple[float, ...]  # from 1 down
    weights: Tensor  # [evaluations, K]; rows sum to 1
    previews: tuple[Preview, ...] = ()

    @property
    def shares(self) -> list[float]:
        """How much of the way each expert has led: its weight, averaged over the evaluations."""
        return [float(share) for share in self.weights.mean(0)]

    def describe(self) -> dict[str, Any]:
        """For a JSON file."""
        evaluations = [
            {"t": round(t, 6), "weights": [round(float(w), 6) for w in row]}
            for t, row in zip(self.times, self.weights, strict=True)
        ]
        return {"shares": [round(share, 6) for share in self.shares], "evaluations": evaluations}


# --- files --------------------------------------------------------------------------------------------------------


def file_name(prompt: str, seed: int) -> str:
    """A name for any text, safe on any disk; what is lost of a text comes back as a hash.

    The hash follows two dashes, which no text has in its name: a text without a hash never has the name of another.
    """
    plain = unicodedata.normalize("NFKD", prompt[:MOST_TOLD]).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:60].strip("-")
    if slug.replace("-", " ") != prompt or not slug:
        mark = hashlib.sha256(prompt.encode("utf-8", "backslashreplace")).hexdigest()[:12]
        slug = f"{slug or 'prompt'}--{mark}"
    return f"{slug}-{seed}.png"


def write_image(
    image: Image.Image, path: Path, *, prompt: str, negative_prompt: str, seed: int, model: str, settings: Mapping
) -> Path | None:
    """Writes a PNG that says how it was made, as `write_kept` does; `read_metadata` reads it."""
    about = PngInfo()
    texts = {
        "prompt": prompt,
        "negative_prompt": negative_prompt,
        "seed": str(seed),
        "model": model,
        "settings": json.dumps(dict(settings), ensure_ascii=False),
    }
    for key, text in texts.items():
        # PNG ends a text at a zero; half characters, as a terminal may give them, are no UTF-8.
        about.add_itxt(key, text.replace("\0", " ").encode("utf-8", "backslashreplace").decode())
    return write_kept(path, png_of(image, about))


def png_of(image: Image.Image, about: PngInfo | None = None) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", pnginfo=about)
    return file.getvalue()


def write_kept(path: Path, content: bytes) -> Path | None:
    """Writes a file. Another that has its name gets the next free one first, NAME.1.png, which is returned.

    So the newest file has the plain name, and nothing is lost. The same content again leaves all as it is.
    """
    try:
        if read_bytes(path, len(content)) == content:
            return None
    except OSError:
        pass  # there is none, or another
    kept = None
    if os.path.lexists(path) and not path.is_dir():
        names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
        kept = next(name for name in names if not os.path.lexists(name))
        try:
            os.rename(path, kept)
        except OSError as error:
            raise InputError(f"cannot rename {path} ({reason_of(error)}): choose another --out") from error
    write_whole(path, lambda staged: staged.write_bytes(content))
    return kept


def read_metadata(path: str | Path) -> dict[str, Any]:
    """prompt, negative_prompt, seed, model (its hash) and settings of a PNG that `write_image` has written."""
    try:
        with open_regular(Path(path)) as file, Image.open(file, formats=("PNG",)) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError("it is too large")
            image.load()
            found = dict(image.text) if isinstance(image, PngImageFile) else {}
        keys = ("prompt", "negative_prompt", "seed", "model", "settings")
        about: dict[str, Any] = {key: str(found[key]) for key in keys}
        return {**about, "seed": int(about["seed"]), "settings": parse_json(about["settings"].encode())}
    except (KeyError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise InputError(f"{path} does not say how it was made: give a PNG that `atoll sample` has made") from error
    except OSError as error:
        raise InputError(f"cannot read {path} ({reason_of(error)}): give a PNG that `atoll sample` has made") from error


# --- pictures -----------------------------------------------------------------------------------------------------


def draw_grid(images: Sequence[Image.Image], captions: Sequence[str], notes: str = "") -> Image.Image:
    """Images with their captions below; those of one caption that come one after another share a line of it."""
    groups: list[tuple[str, list[Image.Image]]] = []
    for image, caption in list(zip(images, captions, strict=True))[:ON_A_GRID]:
        if not groups or groups[-1][0] != caption:
            groups.append((caption, []))
        groups[-1][1].append(image)
    most = max(len(group) for _, group in groups)
    cell, gap = _cell(images[0].width, 160 if len(images) <= 24 else 112), 12
    across = max(1, min(len(groups), math.ceil(math.sqrt(1.6 * len(groups) / most)))) if most <= 6 else 1
    columns = min(most, 10)
    group_width = columns * (cell + gap) - gap
    font, small = _font(13), _font(12)
    width = 2 * EDGE + across * (group_width + 2 * gap) - 2 * gap
    texts = [_wrapped(caption, group_width, font, 3) for caption, _ in groups]
    rows = [range(first, min(first + across, len(groups))) for first in range(0, len(groups), across)]
    heights = [
        max(math.ceil(len(groups[i][1]) / columns) * (cell + gap) + 17 * max(1, len(texts[i])) for i in row) + gap
        for row in rows
    ]
    told = _wrapped(notes, width - 2 * EDGE, small, 3) if notes else []
    sheet = Image.new("RGB", (width, EDGE + sum(heights) + 16 * len(told) + (EDGE if told else gap)), PAPER)
    draw = ImageDraw.Draw(sheet)
    y = EDGE
    for row, height in zip(rows, heights, strict=True):
        for place, i in enumerate(row):
            left = EDGE + place * (group_width + 2 * gap)
            for j, image in enumerate(groups[i][1]):
                sheet.paste(_scaled(image, cell), (left + j % columns * (cell + gap), y + j // columns * (cell + gap)))
            below = y + math.ceil(len(groups[i][1]) / columns) * (cell + gap) - 6
            for j, line in enumerate(texts[i]):
                draw.text((left, below + 17 * j), line, INK, font)
        y += height
    for j, line in enumerate(told):
        draw.text((EDGE, y + 16 * j), line, FAINT, small)
    return sheet


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
    trace: ImageTrace,
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
    legend, side = 190, _cell(final.width, high + thumbs)
    left = EDGE + 30
    width = left + chart + 2 * EDGE + side + EDGE + legend + EDGE
    heads = _wrapped(title, width - 2 * EDGE, _font(18), 2)
    top = EDGE + 24 * len(heads) + (24 if notes else 6)
    sheet = Image.new("RGB", (width, top + thumbs + high + 62), PAPER)
    draw = ImageDraw.Draw(sheet)
    for j, line in enumerate(heads):
        draw.text((EDGE, EDGE - 6 + 24 * j), line, INK, _font(18))
    if notes:
        draw.text((EDGE, EDGE - 4 + 24 * len(heads)), notes, FAINT, _font(13))

    base = top + thumbs
    for foot, image in zip(feet, previews, strict=True):
        sheet.paste(_scaled(image, thumb), (left + foot, top))
        draw.line((left + foot, top + thumb + 4, left + foot, base - 4), FAINT)

    sheet.paste(_areas(trace, chart, high), (left, base))
    for share in (0, 0.5, 1):
        y = base + round((1 - share) * (high - 1))
        draw.line((left - 5, y, left - 1, y), FAINT)
        draw.text((left - 9, y), f"{share:g}", FAINT, _font(12), anchor="rm")
    for i in range(6):
        x = left + round(i / 5 * (chart - 1))
        draw.line((x, base + high, x, base + high + 5), FAINT)
        draw.text((x, base + high + 8), f"{1 - i / 5:.1f}", FAINT, _font(12), anchor="mt")
    low = base + high + 28
    draw.text((left, low), "noise", INK, _font(13), anchor="lt")
    draw.text((left + chart / 2, low), "time t", FAINT, _font(13), anchor="mt")
    draw.text((left + chart, low), "data", INK, _font(13), anchor="rt")

    right = left + chart + 2 * EDGE
    sheet.paste(_scaled(final, side), (right, base + high - side))
    _draw_legend(draw, trace, objectives, (right + side + EDGE, top, width - EDGE, base + high))
    return sheet


def _areas(trace: ImageTrace, width: int, height: int) -> Image.Image:
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
    trace: ImageTrace,
    objectives: Sequence[str],
    box: tuple[int, int, int, int],
) -> None:
    """In the order of the areas, with how much of the way each has led; those that led most, if not all have room."""
    left, top, right, bottom = box
    step, shares, font = 24, trace.shares, _font(13)
    most = sorted(range(len(shares)), key=lambda k: -shares[k])[: (bottom - top) // step]
    y = bottom - step * len(most) + step // 2
    for k in sorted(most, reverse=True):
        used = shares[k] > 0
        ink = INK if used else FAINT
        share = "<1%" if 0 < shares[k] < 0.005 else f"{shares[k]:.0%}"
        draw.rectangle((left, y - 7, left + 13, y + 6), colour_of(k) if used else PAPER, colour_of(k))
        name = _shortened(f"expert {k} · {objectives[k]}", right - left - 31 - font.getlength(share), font)
        draw.text((left + 21, y), name, ink, font, anchor="lm")
        draw.text((right, y), share, ink, font, anchor="rm")
        y += step


def _cell(size: int, most: int) -> int:
    """Small images grow by a whole factor, so that their pixels stay square."""
    return size * max(1, most // size) if size <= most else most


def _resampling(size: int, cell: int) -> Image.Resampling:
    return Image.Resampling.NEAREST if cell >= size and cell % size == 0 else Image.Resampling.LANCZOS


def _scaled(image: Image.Image, cell: int) -> Image.Image:
    return image.resize((cell, cell), _resampling(image.width, cell))


def _wrapped(text: str, width: float, font: Font, most: int) -> list[str]:
    """The text in lines that fit, accents taken off, for the built-in font has none; cut after `most` lines."""
    plain = unicodedata.normalize("NFKD", text[:MOST_TOLD])[:MOST_TOLD]
    plain = "".join(
        char for char in plain if not unicodedata.combining(char) and (char.isprintable() or char.isspace())
    )
    lines: list[str] = []
    rest = " ".join(plain.split()) or "(no text)"
    while rest and len(lines) < most - 1:
        num = _fitting(rest, width, font)
        if num < len(rest) and (space := rest.rfind(" ", 0, num + 1)) > 0:
            num = space
        lines.append(rest[:num])
        rest = rest[num:].lstrip()
    return [*lines, _shortened(rest, width, font)] if rest else lines


def _shortened(text: str, width: float, font: Font) -> str:
    """The text, or as much of its beginning as fits."""
    if font.getlength(text) <= width:
        return text
    return f"{text[: _fitting(text, width - font.getlength(' ...'), font)].rstrip()} ..."


def _fitting(text: str, width: float, font: Font) -> int:
    """How many characters of the text fit, at least 1: found by halving, for each length is measured as a whole."""
    return max(1, bisect_right(range(1, len(text) + 1), width, key=lambda num: font.getlength(text[:num])))


def _font(size: int) -> Font:
    return ImageFont.load_default(size)
