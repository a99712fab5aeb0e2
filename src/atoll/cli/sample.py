"""`atoll sample`."""

from pathlib import Path
from typing import Annotated

import tyro

from atoll.sampling.settings import Sampling


def sample(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    settings: Annotated[Sampling, tyro.conf.arg(name="")],
    prompt: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")] = (),
    prompts: str | None = None,
    negative: str = "",
    num: int = 1,
    seed: int = 0,
    route_every: int = 1,
    confident: float | None = None,
    max_resident: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    out: Path = Path("samples"),
    trace: bool = False,
    verify: bool = False,
) -> None:
    """Generate images from prompts. The same prompt, seed and settings give the same image.

    The folder --out may hold images of earlier runs: none is lost. Where a file of another content has the name of a
    new one, it is renamed first (NAME.png becomes NAME.1.png), so the plain name is always that of the newest.

    For example:
      atoll sample model "a pink ghost with a yellow party hat" "a robot" --num 4 --out samples
      atoll sample model "a pink ghost" --routing full --trace
      atoll sample model --prompts prompts.txt --max-resident 1

    Args:
        model: A folder that `atoll assemble` has made, a hub id, or the URL or folder of a federation.
        settings: How images are made.
        prompt: What to make images of; - reads prompts from the standard input, one per line.
        prompts: A text file with one prompt per line; - for the standard input.
        negative: What images are steered away from; nothing in particular by default.
        num: Images per prompt.
        seed: The seed of the first image of each prompt; the next image has the next number.
        route_every: Ask the router once in this many evaluations.
        confident: Ask the router no more about an image once an expert has this probability.
        max_resident: How many experts may be in memory at a time; all by default.
        device: auto, cpu, cuda or cuda:N.
        dtype: What experts compute in: float32, bfloat16 or float16; by default as they were saved.
        out: The folder for the images and grid.png.
        trace: Also write trace.json and trace.png: which experts made an image, and when.
        verify: First read every file of the model again, and compare it with its hash.
    """
    from atoll.sampling.folder import read_prompts, sample_to_folder

    lines = sample_to_folder(
        model, read_prompts(prompt, prompts), out, settings, num=num, seed=seed, negative=negative, trace=trace,
        route_every=route_every, confident=confident, max_resident=max_resident, device=device, dtype=dtype,
        verify=verify,
    )  # fmt: skip
    print(*lines, sep="\n")
