"""What a run leaves behind: which experts made an image and when, as numbers, and PNGs that say how."""

import hashlib
import io
import json
import os
import re
import unicodedata
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from atoll.errors import InputError
from atoll.storage import open_regular, parse_json, read_bytes, reason_of, write_whole

MOST_CHARACTERS = 2000  # of a prompt that becomes a name: more have no room


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
        """Returns how much of the way each expert has led: its weight, averaged over the evaluations."""
        return list(self.weights.mean(0).tolist())

    def describe(self) -> dict[str, Any]:
        """Returns what a JSON file says of it."""
        evaluations = [
            {"t": round(t, 6), "weights": [round(w, 6) for w in row]}
            for t, row in zip(self.times, self.weights.tolist(), strict=True)
        ]
        return {"shares": [round(share, 6) for share in self.shares], "evaluations": evaluations}


# --- files --------------------------------------------------------------------------------------------------------


def file_name(prompt: str, seed: int) -> str:
    """Returns a name for any text, safe on any disk; what is lost of a text comes back as a hash.

    The hash follows two dashes, which no text has in its name: a text without a hash never has the name of another.
    """
    plain = unicodedata.normalize("NFKD", prompt[:MOST_CHARACTERS]).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:60].strip("-")
    if slug.replace("-", " ") != prompt or not slug:
        mark = hashlib.sha256(prompt.encode("utf-8", "backslashreplace")).hexdigest()[:12]
        slug = f"{slug or 'prompt'}--{mark}"
    return f"{slug}-{seed}.png"


def write_image(image: Image.Image, path: Path, **about: Any) -> Path | None:
    """Writes a PNG that says how it was made, as `write_kept` does; `read_metadata` reads it."""
    texts = PngInfo()
    for key, value in about.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        # PNG ends a text at a zero; half characters, as a terminal may give them, are no UTF-8.
        texts.add_itxt(key, text.replace("\0", " ").encode("utf-8", "backslashreplace").decode())
    return write_kept(path, png_of(image, texts))


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
    """Returns prompt, negative_prompt, seed, model (its hash) and settings of a PNG that `write_image` has written."""
    try:
        with open_regular(Path(path)) as file, Image.open(file, formats=("PNG",)) as image:
            image.load()
            texts = dict(getattr(image, "text", {}))
        about = {key: str(texts[key]) for key in ("prompt", "negative_prompt", "model")}
        return {**about, **{key: parse_json(texts[key].encode()) for key in ("seed", "settings")}}
    except (KeyError, ValueError, SyntaxError, OSError, Image.DecompressionBombError) as error:
        raise InputError(
            f"{path} does not say how it was made ({reason_of(error)}): give a PNG that `atoll sample` has made"
        ) from error
