"""`atoll sample`."""

import json
import os
import stat
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
MOST_IMAGES = 1_000_000  # of one run
MOST_BYTES = 16 << 20  # of prompts


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
    routing: str = defaults.ROUTING,
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
    """Make images of prompts. The same prompt, seed and settings make the same image.

    The folder --out may hold images of earlier runs: none is lost. Where a file of another content has the name of a
    new one, it is renamed first (NAME.png becomes NAME.1.png), so the plain name is always that of the newest.

    For example:
      atoll sample model "a pink ghost with a yellow party hat" "a robot" --num 4 --out samples
      atoll sample model "a pink ghost" --routing full --trace
      atoll sample model --prompts prompts.txt --max-resident 1

    Args:
        model: A folder that `atoll assemble` has made, or a hub id.
        prompt: What to make images of; - reads prompts from the standard input, one per line.
        prompts: A text file with one prompt per line; - for the standard input.
        negative: What images are steered away from; nothing in particular by default.
        num: Images per prompt.
        seed: The seed of the first image of each prompt; the next image has the next number.
        steps: Steps of the solver, at most 10,000.
        guidance: How strongly images follow the prompt, at least 0; 1 is no guidance. By default 2, or 1 for a model
            that has learned its guidance.
        solver: multistep, euler, heun, midpoint or dpm2m.
        routing: Which experts make an image: top1; topk:2, the two most probable; full; threshold:0.1, those of at
            least this probability; sample; or by_time:0.5, flow matching above this time and the others below.
        route_every: Ask the router once in this many evaluations.
        confident: Ask the router no more about an image once an expert has this probability.
        conversion: calibrated, exact or paper; by default calibrated for experts that predict noise and carry a
            calibration, and exact for all others.
        max_resident: How many experts may be in memory at a time; all by default.
        batch: Images at a time.
        device: auto, cpu, cuda or cuda:N.
        dtype: What experts compute in: float32, bfloat16 or float16; by default as they were saved.
        out: The folder for the images and grid.png.
        trace: Also write trace.json and trace.png: which experts made an image, and when.
        verify: First read every file of the model again, and compare it with its hash.
    """
    from tqdm import tqdm

    from atoll.errors import plural
    from atoll.plots.contact_sheet import ON_A_GRID, draw_grid
    from atoll.plots.trace import draw_trace, draw_traces
    from atoll.sampling.pipeline import AtollPipeline
    from atoll.sampling.trace import file_name, png_of, write_image, write_kept

    texts = _prompts(prompt, prompts)
    _check(len(texts), num, batch, seed, steps, guidance)
    with _made(out):
        jobs = [(text, seed + i) for text in texts for i in range(num)]
        drawn = {i * num for i in range(min(TRACED, len(texts)))} if trace else set()
        pipe = AtollPipeline.from_pretrained(
            model, max_resident=max_resident, dtype=dtype, device=device, conversion=conversion, verify=verify
        )
        earlier: list[Path | None] = []  # files of earlier runs, by the names that they have now
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
                    num_inference_steps=steps, guidance_scale=guidance, solver=solver, routing=routing,
                    route_every=route_every, confident=confident, batch_size=batch,
                    callback_on_step_end=tick, previews=PREVIEWS if drawn else 0, progress=False,
                )  # fmt: skip
                assert isinstance(made.images, list)
                for i, (image, (text, number), path) in enumerate(zip(made.images, some, made.trace, strict=True)):
                    name = file_name(text, number)
                    earlier.append(
                        write_image(
                            image, out / name, prompt=text, negative_prompt=negative, seed=number,
                            model=pipe.index.hash, settings=made.settings,
                        )
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
        images = plural(len(jobs), "image")
        what = images if len(jobs) <= ON_A_GRID else f"the first {ON_A_GRID} of {images}"
        about = _notes({"model": pipe.index.hash[:12], "seeds from": seed, **made.settings})
        grid = draw_grid(shown, [text for text, _ in jobs[: len(shown)]], f"{what} · {about}")
        earlier.append(write_kept(out / "grid.png", png_of(grid)))
        print(f"{out}: {images} of {plural(len(texts), 'prompt')}, and grid.png")
        if guidance is None and "learned_guidance" in made.settings:
            print(f"the model has learned guidance of {made.settings['learned_guidance']}: none was added to it")
        if trace:
            table = {"model": pipe.index.hash, "experts": pipe.objectives, "images": traces}
            earlier.append(write_kept(out / "trace.json", f"{json.dumps(table, indent=2)}\n".encode()))
            earlier.append(write_kept(out / "trace.png", png_of(draw_traces(panels))))
            print(f"{out / 'trace.png'}: which experts made {len(panels)} of them; all are in trace.json")
        if renamed := [path.name for path in earlier if path is not None]:
            print(f"{plural(len(renamed), 'file')} of earlier runs kept under other names, such as {renamed[0]}")


def _check(num_prompts: int, num: int, batch: int, seed: int, steps: int, guidance: float | None) -> None:
    """Refuses what is no number of anything, before the model is opened."""
    from atoll.errors import InputError, plural
    from atoll.sampling.pipeline import MOST_STEPS, check_guidance

    for name, value, least in (("num", num, 1), ("batch", batch, 1), ("seed", seed, 0)):
        if value < least:
            raise InputError(f"--{name} must be at least {least}, but is {value}")
    if not 1 <= steps <= MOST_STEPS:
        raise InputError(f"--steps must be a whole number from 1 to {MOST_STEPS}, but is {steps}")
    if guidance is not None:
        check_guidance(guidance)
    if num * num_prompts > MOST_IMAGES:
        raise InputError(
            f"--num {num} for {plural(num_prompts, 'prompt')} is more than {MOST_IMAGES:,} images: ask for fewer"
        )
    if seed + num > 2**63:
        raise InputError(f"--seed must be at most {2**63 - num}, but is {seed}")


@contextmanager
def _made(out: Path) -> Iterator[None]:
    """The folder is made before the work, and held while it lasts; if nothing came of that, it goes again."""
    from atoll.errors import InputError
    from atoll.storage import alone, reason_of

    try:
        new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError("it may not be written to")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {out} ({reason_of(error)}): choose another --out") from error
    try:
        with alone(out):
            yield
    finally:
        if new:
            with suppress(OSError):
                out.rmdir()  # if it is empty


def _prompts(arguments: Sequence[str], file: str | None) -> list[str]:
    """All prompts, each once."""
    from atoll.errors import InputError, plural

    given: list[str] = []
    for argument in arguments:
        given += _read("-") if argument == "-" else [argument]
    if file is not None:
        given += _read(file)
    if not given:
        raise InputError("there is no prompt: give one after the model, or --prompts FILE with one per line")
    texts = list(dict.fromkeys(given))
    if repeated := len(given) - len(texts):
        repeat = "repeats an earlier one and is" if repeated == 1 else "repeat an earlier one and are"
        warnings.warn(f"{repeated} of {plural(len(given), 'prompt')} {repeat} left out", stacklevel=3)
    return texts


def _read(file: str) -> list[str]:
    """The lines of a file, or of the standard input."""
    from atoll.errors import InputError
    from atoll.storage import KINDS, read_bytes, reason_of

    what = "the standard input" if file == "-" else file
    try:
        if file == "-":
            content = sys.stdin.buffer.read(MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                raise OSError(f"it is larger than {MOST_BYTES:,} bytes")
        else:
            kind = stat.S_IFMT(os.stat(file).st_mode)  # first, for the FIFO that a shell makes of <(...) has no path
            if kind != stat.S_IFREG:
                raise OSError(f"it is {KINDS.get(kind, 'something else')}, not a file")
            content = read_bytes(Path(os.path.realpath(file)), MOST_BYTES)  # a link too, for the user has named it
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {what} ({reason_of(error)}): give a file of UTF-8 text with one prompt per line, or - for the"
            " standard input"
        ) from error
    return [line.strip() for line in lines if line.strip()]


def _notes(values: dict[str, Any]) -> str:
    """What was set, in one line; what is left as it usually is goes without saying."""
    told = []
    for key, value in values.items():
        if value is not None and (key, value) != ("route_every", 1):
            shown = f"{value:g}" if isinstance(value, float) else ", ".join(value) if isinstance(value, list) else value
            told.append(f"{key.replace('_', ' ')} {shown}")
    return " · ".join(told)
