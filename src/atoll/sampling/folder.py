"""`atoll sample`: images of prompts in a folder, each a PNG that says how it was made."""

import json
import os
import stat
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from atoll.errors import InputError, plural
from atoll.plots.charts import draw_trace, draw_traces
from atoll.plots.contact_sheet import ON_A_GRID, draw_grid
from atoll.sampling.pipeline import AtollPipeline
from atoll.sampling.settings import MAX_IMAGES, Sampling
from atoll.sampling.trace import file_name, png_of, write_image, write_kept
from atoll.storage import KINDS, read_bytes, reason_of, work_folder

NUM_TRACED = 4  # prompts whose first image is on trace.png
NUM_PREVIEWS = 8
MAX_BYTES = 16 << 20  # of prompts


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
    """Makes `num` images per prompt, and a grid of them; yields what there is to tell.

    No image of an earlier run is lost: where a file of another content has the name of a new one, it is renamed first.
    `opening` is how the model is opened: max_resident, dtype, device and verify.
    """
    _check_counts(len(prompts), num, seed)
    with work_folder(out):
        pipe = AtollPipeline.from_pretrained(model, conversion=settings.conversion, **opening)
        jobs = [(prompt, seed + i) for prompt in prompts for i in range(num)]
        on_trace = range(0, min(NUM_TRACED, len(prompts)) * num if trace else 0, num)
        renamed: list[Path | None] = []
        images: list[Any] = []
        panels: list[Any] = []
        traces: list[dict[str, Any]] = []
        starts = range(0, len(jobs), settings.batch)
        with tqdm(total=len(starts) * settings.steps, desc="sample", unit=" steps", disable=None, leave=False) as bar:
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


def _check_counts(num_prompts: int, num: int, seed: int) -> None:
    for name, value, least in (("num", num, 1), ("seed", seed, 0)):
        if value < least:
            raise InputError(f"--{name} must be at least {least}, but is {value}")
    if num * num_prompts > MAX_IMAGES:
        raise InputError(
            f"--num {num} for {plural(num_prompts, 'prompt')} is more than {MAX_IMAGES:,} images: ask for fewer"
        )
    if seed + num > 2**63:
        raise InputError(f"--seed must be at most {2**63 - num}, but is {seed}")


def read_prompts(arguments: Sequence[str], file: str | None) -> list[str]:
    """Returns each prompt once: the arguments, where - stands for the standard input, and the lines of the file."""
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
        if file == "-":
            content = sys.stdin.buffer.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise OSError(f"it is larger than {MAX_BYTES:,} bytes")
        else:
            kind = stat.S_IFMT(os.stat(file).st_mode)  # first, for the FIFO that a shell makes of <(...) has no path
            if kind != stat.S_IFREG:
                raise OSError(f"it is {KINDS.get(kind, 'something else')}, not a file")
            content = read_bytes(Path(os.path.realpath(file)), MAX_BYTES)  # a link too, for the user has named it
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {'the standard input' if file == '-' else file} ({reason_of(error)}): give a file of UTF-8 "
            "text with one prompt per line, or - for the standard input"
        ) from error
    return [line.strip() for line in lines if line.strip()]


def _in_one_line(settings: dict[str, Any]) -> str:
    """Returns the settings that are not as usual."""
    notes = []
    for key, value in settings.items():
        if value is not None and (key, value) != ("route_every", 1):
            text = f"{value:g}" if isinstance(value, float) else ", ".join(value) if isinstance(value, list) else value
            notes.append(f"{key.replace('_', ' ')} {text}")
    return " · ".join(notes)
