"""`atoll sample`."""

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import tyro

from atoll.sampling import defaults

TRACED = 4  # prompts whose first image is on trace.png
PREVIEWS = 8


def sample(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    prompt: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")] = (),
    prompts: str | None = None,
    negative: str = "",
    num: int = 1,
    seed: int = 0,
    steps: int = defaults.STEPS,
    guidance: float | None = None,
    solver: str = defaults.SOLVER,
    routing: str | None = None,
    top_k: int | None = None,
    threshold: float | None = None,
    route_every: int = 1,
    confident: float | None = None,
    conversion: str | None = None,
    max_resident: int | None = None,
    batch: int = defaults.BATCH,
    device: str = "auto",
    dtype: str | None = None,
    out: Path = Path("samples"),
    trace: bool = False,
    verify: bool = False,
) -> None:
    """Make pictures of prompts. The same prompt, seed and settings make the same picture.

    For example:
      atoll sample model "a pink ghost with a yellow party hat" "a robot" --num 4 --out samples
      atoll sample model "a pink ghost" --routing full --trace
      atoll sample model --prompts prompts.txt --max-resident 1

    Args:
        model: A folder that `atoll assemble` has made, or a hub id.
        prompt: What to make pictures of; - reads prompts from the standard input, one a line.
        prompts: A file with one prompt a line; - for the standard input.
        negative: What pictures shall be led away from; nothing in particular by default.
        num: Pictures of each prompt.
        seed: Of the first picture of each prompt; the next has the next number.
        steps: Of the solver, at most 10,000.
        guidance: How strongly pictures follow the prompt; 1 is no guidance. By default 2, or 1 for a model that has
            learned its guidance.
        solver: multistep, euler, heun, midpoint or dpm2m.
        routing: Which experts make a picture: top1 (the default), topk, full, threshold, sample or by_time.
        top_k: How many, for topk, 2 by default; this alone chooses topk.
        threshold: Those of at least this probability, for threshold, 0.1 by default; this alone chooses threshold.
        route_every: Ask the router at every so many evaluations.
        confident: Ask it no more about a picture once an expert has this probability.
        conversion: calibrated, exact or paper; by default calibrated for experts that predict noise and carry a
            calibration, and exact for all others.
        max_resident: How many experts may be in memory at a time; all by default.
        batch: Pictures at a time.
        device: auto, cpu, cuda or cuda:N.
        dtype: What experts compute in: float32, bfloat16 or float16; by default as they were saved.
        out: The folder for the pictures and grid.png.
        trace: Also write trace.json and trace.png: which experts made a picture, and when.
        verify: First compare every file of the model with its hash.
    """
    from tqdm import tqdm

    from atoll.data.sheets import save_picture
    from atoll.errors import InputError
    from atoll.files import write_json
    from atoll.sampling.pipeline import MOST_STEPS, AtollPipeline
    from atoll.sampling.trace import ON_A_GRID, draw_grid, draw_trace, draw_traces, file_name, write_image

    given = _prompts(prompt, prompts)
    texts = list(dict.fromkeys(given))
    if len(texts) < len(given):
        warnings.warn(
            f"{len(given) - len(texts)} of {len(given)} prompts repeat an earlier one and are left out", stacklevel=2
        )
    for name, value, least in (("num", num, 1), ("batch", batch, 1), ("seed", seed, 0)):
        if value < least:
            raise InputError(f"--{name} must be at least {least}, but is {value}")
    if not 1 <= steps <= MOST_STEPS:
        raise InputError(f"--steps must be a whole number from 1 to {MOST_STEPS}, but is {steps}")
    with _made(out):
        jobs = [(text, seed + i) for text in texts for i in range(num)]
        drawn = {i * num for i in range(min(TRACED, len(texts)))} if trace else set()
        pipe = AtollPipeline.from_pretrained(
            model, max_resident=max_resident, dtype=dtype, device=device, conversion=conversion, verify=verify
        )
        shown: list[Any] = []
        panels: list[Any] = []
        traces: list[dict[str, Any]] = []
        batches = range(0, len(jobs), batch)
        with tqdm(total=len(batches) * steps, desc="sample", unit=" steps", disable=None, leave=False) as bar:

            def tick(*_: Any) -> None:
                bar.update()

            for first in batches:
                some = jobs[first : first + batch]
                made = pipe(
                    [text for text, _ in some], seed=[number for _, number in some], negative_prompt=negative,
                    num_inference_steps=steps, guidance_scale=guidance, solver=solver, routing=routing, top_k=top_k,
                    threshold=threshold, route_every=route_every, confident=confident, batch_size=batch,
                    callback_on_step_end=tick, previews=PREVIEWS if drawn else 0, progress=False,
                )  # fmt: skip
                assert isinstance(made.images, list)
                for i, (image, (text, number), path) in enumerate(zip(made.images, some, made.trace, strict=True)):
                    name = file_name(text, number)
                    write_image(
                        image, out / name, prompt=text, negative_prompt=negative, seed=number, model=pipe.index.hash,
                        settings=made.settings,
                    )  # fmt: skip
                    if len(shown) < ON_A_GRID:
                        shown.append(image)
                    if trace:
                        traces.append({"file": name, "prompt": text, "seed": number, **path.describe()})
                    if first + i in drawn:
                        import torch

                        previews = pipe.render(torch.stack([preview.x0 for preview in path.previews]))
                        notes = _notes({"seed": number, **made.settings})
                        panels.append(draw_trace(path, image, previews, pipe.objectives, text, notes))
        what = f"{len(jobs)} pictures" if len(jobs) <= ON_A_GRID else f"the first {ON_A_GRID} of {len(jobs)} pictures"
        about = _notes({"model": pipe.index.hash[:12], "seeds from": seed, **made.settings})
        save_picture(draw_grid(shown, [text for text, _ in jobs[: len(shown)]], f"{what} · {about}"), out / "grid.png")
        print(f"{out}: {len(jobs)} pictures of {len(texts)} prompts, and grid.png")
        if guidance is None and "learned_guidance" in made.settings:
            print(f"the model has learned guidance of {made.settings['learned_guidance']}: none was added to it")
        if trace:
            write_json(out / "trace.json", {"model": pipe.index.hash, "experts": pipe.objectives, "images": traces})
            save_picture(draw_traces(panels), out / "trace.png")
            print(f"{out / 'trace.png'}: which experts made {len(panels)} of them; all are in trace.json")


@contextmanager
def _made(out: Path) -> Iterator[None]:
    """The folder is made before the work; if nothing came of that, it goes again."""
    from atoll.errors import InputError
    from atoll.files import reason_of

    try:
        new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError("it may not be written to")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {out} ({reason_of(error)}): choose another --out") from error
    try:
        yield
    finally:
        if new:
            with suppress(OSError):
                out.rmdir()  # if it is empty


def _prompts(arguments: Sequence[str], file: str | None) -> list[str]:
    from atoll.errors import InputError

    texts: list[str] = []
    for argument in arguments:
        texts += _read("-") if argument == "-" else [argument]
    if file is not None:
        texts += _read(file)
    if not texts:
        raise InputError("there is no prompt: give one after the model, or --prompts FILE with one a line")
    return texts


def _read(file: str) -> list[str]:
    """The lines of a file, or of the standard input."""
    from atoll.errors import InputError
    from atoll.files import reason_of

    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        what = "the standard input" if file == "-" else file
        raise InputError(f"cannot read {what} ({reason_of(error)}): give text in UTF-8, a prompt a line") from error
    return [line.strip() for line in lines if line.strip()]


def _notes(values: dict[str, Any]) -> str:
    """What was set, in one line; what is left as it usually is goes without saying."""
    told = []
    for key, value in values.items():
        if value is not None and (key, value) != ("route_every", 1):
            shown = f"{value:g}" if isinstance(value, float) else ", ".join(value) if isinstance(value, list) else value
            told.append(f"{key.replace('_', ' ')} {shown}")
    return " · ".join(told)
