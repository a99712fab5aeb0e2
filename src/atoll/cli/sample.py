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

    Images of earlier runs in the --out folder are kept: if a new image needs the name of an existing file with other
    content, that file is renamed first (NAME.png becomes NAME.1.png), so the plain name is always the newest.

    For example:
      atoll sample model "a pink ghost with a yellow party hat" "a robot" --num 4 --out samples
      atoll sample model "a pink ghost" --routing full --trace
      atoll sample model --prompts prompts.txt --max-resident 1

    Args:
        model: A folder from `atoll assemble`, a hub id, or the URL or folder of a federation.
        settings: How images are generated.
        prompt: The prompts; - reads them from standard input, one per line.
        prompts: A text file with one prompt per line; - for standard input.
        negative: Negative prompt; empty by default.
        num: Images per prompt.
        seed: Seed of the first image of each prompt; each further image adds 1.
        route_every: Run the router only once per this many model evaluations.
        confident: Stop running the router for an image once an expert reaches this probability.
        max_resident: How many experts may be in memory at once; all by default.
        device: auto, cpu, cuda or cuda:N.
        dtype: Precision of the experts: float32, bfloat16 or float16; by default as saved.
        out: Output folder for the images and grid.png.
        trace: Also write trace.json and trace.png: which experts contributed to each image, and when.
        verify: Rehash every file of the model and compare with the recorded hashes first.
    """
    from atoll.sampling.folder import read_prompts, sample_to_folder

    lines = sample_to_folder(
        model, read_prompts(prompt, prompts), out, settings, num=num, seed=seed, negative=negative, trace=trace,
        route_every=route_every, confident=confident, max_resident=max_resident, device=device, dtype=dtype,
        verify=verify,
    )  # fmt: skip
    print(*lines, sep="\n")
