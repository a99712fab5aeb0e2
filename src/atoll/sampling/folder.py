"""`atoll sample`: writes images of prompts to a folder, each a PNG whose metadata says how it was made."""

import hashlib
import io
import json
import os
import re
import sys
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tqdm import tqdm

from atoll.errors import InputError, plural
from atoll.plots.charts import draw_trace, draw_traces
from atoll.plots.contact_sheet import ON_A_GRID, draw_grid
from atoll.sampling.pipeline import AtollPipeline
from atoll.sampling.settings import MAX_IMAGES, Sampling
from atoll.storage import open_regular, parse_json, read_bytes, reason_of, work_folder, write_whole

NUM_TRACED = 4  # prompts whose first image is on trace.png
NUM_PREVIEWS = 8
MAX_BYTES = 16 << 20  # of prompts
MOST_CHARACTERS = 2000  # of a prompt that are considered for a file name


def sample_to_folder(
    model: str,
    prompts: Sequence[str],
    out: Path,
    settings: Sampling,
    *,
    num: int = 1,
    seed: int = 0,
    negative: str = "",
    trace: bool = False,
    route_every: int = 1,
    confident: float | None = None,
    **opening: Any,
) -> Iterator[str]:
    """Samples `num` images per prompt, and draws a grid of them; yields lines for the user.

    No image of an earlier run is lost: a file with the same name but other content is renamed first. `opening` are
    options of the pipeline: max_resident, dtype, device and verify.
    """
    if not 1 <= num <= MAX_IMAGES // max(len(prompts), 1):
        raise InputError(f"--num must be at least 1 and give at most {MAX_IMAGES:,} images in all, but is {num}")
    if not 0 <= seed <= 2**63 - num:
        raise InputError(f"--seed must be from 0 to {2**63 - num}, but is {seed}")
    with work_folder(out):
        pipe = AtollPipeline.from_pretrained(model, conversion=settings.conversion, **opening)
        jobs = [(prompt, seed + i) for prompt in prompts for i in range(num)]
        on_trace = range(0, min(NUM_TRACED, len(prompts)) * num if trace else 0, num)
        renamed: list[Path | None] = []
        images: list[Any] = []
        panels: list[Any] = []
        traces: list[dict[str, Any]] = []
        starts = range(0, len(jobs), settings.batch)
        num_steps = len(starts) * pipe.settle(settings).steps
        with tqdm(total=num_steps, desc="sample", unit=" steps", disable=None, leave=False) as bar:
            for start in starts:
                batch = jobs[start : start + settings.batch]
                output = pipe(
                    [prompt for prompt, _ in batch], seed=[number for _, number in batch], negative_prompt=negative,
                    num_inference_steps=settings.steps, guidance_scale=settings.guidance, solver=settings.solver,
                    routing=settings.routing, route_every=route_every, confident=confident, batch_size=settings.batch,
                    callback_on_step_end=lambda *_: bar.update(), previews=NUM_PREVIEWS if trace else 0, progress=False,
                )  # fmt: skip
                assert isinstance(output.images, list)
                for (prompt, number), image, path in zip(batch, output.images, output.trace, strict=True):
                    name, place = file_name(prompt, number), len(traces)
                    renamed.append(
                        write_image(
                            image, out / name, prompt=prompt, negative_prompt=negative, seed=number,
                            model=pipe.index.hash, settings=output.settings,
                        )
                    )  # fmt: skip
                    images += [image] if place < ON_A_GRID else []
                    traces.append({"file": name, "prompt": prompt, "seed": number, **path.describe()} if trace else {})
                    if place in on_trace:
                        views = pipe.render(torch.stack([preview.x0 for preview in path.previews]))
                        notes = _in_one_line({"seed": number, **output.settings})
                        ways = [(preview.t, view) for preview, view in zip(path.previews, views, strict=True)]
                        panels.append(draw_trace(path.times, path.weights, image, ways, pipe.objectives, prompt, notes))
        count = plural(len(jobs), "image")
        what = count if len(jobs) <= ON_A_GRID else f"the first {ON_A_GRID} of {count}"
        notes = _in_one_line({"model": pipe.index.hash[:12], "seeds from": seed, **output.settings})
        grid = draw_grid(images, [prompt for prompt, _ in jobs[: len(images)]], f"{what} · {notes}")
        renamed.append(write_kept(out / "grid.png", png_of(grid)))
        yield f"{out}: {count} of {plural(len(prompts), 'prompt')}, and grid.png"
        if settings.guidance is None and "learned_guidance" in output.settings:
            yield f"the model has learned guidance of {output.settings['learned_guidance']}: none was added to it"
        if trace:
            table = {"model": pipe.index.hash, "experts": pipe.objectives, "images": traces}
            renamed.append(write_kept(out / "trace.json", f"{json.dumps(table, indent=2)}\n".encode()))
            renamed.append(write_kept(out / "trace.png", png_of(draw_traces(panels))))
            yield f"{out / 'trace.png'}: which experts made {len(panels)} of them; all are in trace.json"
        if names := [path.name for path in renamed if path is not None]:
            yield f"{plural(len(names), 'file')} of earlier runs kept under other names, such as {names[0]}"


def read_prompts(arguments: Sequence[str], file: str | None) -> list[str]:
    """Returns each prompt once: the arguments, with - for the lines of standard input, and the lines of the file."""
    given = [line for prompt in arguments for line in (_read_lines("-") if prompt == "-" else [prompt])]
    given += [] if file is None else _read_lines(file)
    if not given:
        raise InputError("there is no prompt: give one after the model, or --prompts FILE with one per line")
    prompts = list(dict.fromkeys(given))
    if repeated := len(given) - len(prompts):
        repeat = "repeats an earlier one and is" if repeated == 1 else "repeat an earlier one and are"
        warnings.warn(f"{repeated} of {plural(len(given), 'prompt')} {repeat} left out", stacklevel=3)
    return prompts


def _read_lines(file: str) -> list[str]:
    try:
        if Path(file).is_fifo() and not file.startswith("/dev/fd/"):  # a shell's <(...), which always has a writer
            raise OSError("it is a FIFO, not a file")
        with nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as source:
            content = source.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise OSError(f"it is larger than {MAX_BYTES:,} bytes")
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {'the standard input' if file == '-' else file} ({reason_of(error)}): give a file of UTF-8 "
            "text with one prompt per line, or - for the standard input"
        ) from error
    return [line.strip() for line in lines if line.strip()]


def _in_one_line(settings: dict[str, Any]) -> str:
    """Returns the settings that are set, without the default of route_every, as one line."""
    notes = []
    for key, value in settings.items():
        if value is not None and (key, value) != ("route_every", 1):
            text = f"{value:g}" if isinstance(value, float) else ", ".join(value) if isinstance(value, list) else value
            notes.append(f"{key.replace('_', ' ')} {text}")
    return " · ".join(notes)


# --- files --------------------------------------------------------------------------------------------------------


def file_name(prompt: str, seed: int) -> str:
    """Returns a file name for any text, safe on any disk; if the text cannot be recovered from it, with a hash.

    The hash follows two dashes, which no slug contains, so names with and without a hash never collide.
    """
    plain = unicodedata.normalize("NFKD", prompt[:MOST_CHARACTERS]).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:60].strip("-")
    if slug.replace("-", " ") != prompt or not slug:
        mark = hashlib.sha256(prompt.encode("utf-8", "backslashreplace")).hexdigest()[:12]
        slug = f"{slug or 'prompt'}--{mark}"
    return f"{slug}-{seed}.png"


def write_image(image: Image.Image, path: Path, **about: Any) -> Path | None:
    """Writes a PNG with metadata on how it was made, with `write_kept`; `read_metadata` reads the metadata."""
    return write_kept(path, described_png(image, **about))


def described_png(image: Image.Image, **about: Any) -> bytes:
    texts = PngInfo()
    for key, value in about.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        # PNG ends a text at a zero byte; lone surrogates, as from a terminal, cannot be encoded as UTF-8.
        texts.add_itxt(key, text.replace("\0", " ").encode("utf-8", "backslashreplace").decode())
    return png_of(image, texts)


def png_of(image: Image.Image, about: PngInfo | None = None) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", pnginfo=about)
    return file.getvalue()


def write_kept(path: Path, content: bytes) -> Path | None:
    """Writes a file; first renames an existing one to the next free name, NAME.1.png, and returns that name.

    So the newest file has the plain name, and nothing is lost. If the content is the same, nothing changes.
    """
    try:
        if read_bytes(path, len(content)) == content:
            return None
    except OSError:
        pass  # there is no file, or a larger one
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
    """Returns prompt, negative_prompt, seed, model (its hash) and settings from a PNG that `write_image` wrote."""
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
