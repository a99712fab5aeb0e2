"""`atoll evaluate`."""

from pathlib import Path
from typing import Annotated

import tyro

from atoll.sampling import defaults


def evaluate(
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL... DATA")],
    num: int = 1000,
    seeds: int = 1,
    seed: int = 0,
    features: tuple[str, ...] = ("efficientnet",),
    metrics: tuple[str, ...] = (),
    clip: str | None = None,
    split: str | None = None,
    cluster: int | None = None,
    neighbours: int = 5,
    reference: int = 10_000,
    varied: int = 50,
    each: int = 4,
    routing: str = defaults.ROUTING,
    guidance: float | None = None,
    steps: int = defaults.STEPS,
    solver: str = defaults.SOLVER,
    conversion: str | None = None,
    batch: int = 50,
    device: str = "auto",
    out: Path = Path("evaluation"),
) -> None:
    """Measure how good the images of one or several models are, against the data that they were trained on.

    Interrupted, the same command resumes; with a larger --num it makes only the images that are missing. A warning
    tells where a figure cannot be trusted on this data.

    For example:
      atoll evaluate model data
      atoll evaluate model monolith data --num 2000 --seeds 3
      atoll evaluate model data --features simple --metrics frechet accuracy --routing topk:2 --out top2
      atoll evaluate model data --features inception:pt_inception-2015-12-05-6726825d.pth \\
        clip:openai/clip-vit-base-patch32 --clip openai/clip-vit-base-patch32

    Args:
        folders: One or several models that `atoll assemble` has made, compared in one table; then the data that
            `atoll prepare` has made: its captions are the prompts, its images the reference.
        num: Images per model and seed.
        seeds: How many seeds; with several, figures are means, with errors over the seeds.
        seed: The first seed.
        features: Networks that images are compared by: efficientnet, efficientnet:96, simple, dino:HUB_ID_OR_FOLDER,
            clip:HUB_ID_OR_FOLDER, inception:FILE.
        metrics: Any of frechet, kernel, coverage, diversity, clip, accuracy, labels, flops; by default all that can be
            measured.
        clip: The CLIP of the CLIP score, as a hub id or a folder.
        split: Whose captions are prompts: held_out (the default where something is held out), train or all.
        cluster: The number of a cluster, to take only its captions and images.
        neighbours: How many neighbours of an image count, for precision, recall, density and coverage.
        reference: Images of the training data to compare with, at most.
        varied: Prompts of which several images are made, for diversity.
        each: Images of each of these prompts.
        routing: Which experts make an image: top1, topk:2, full, threshold:0.1, sample, by_time, or oracle: the expert
            of the cluster that the caption's own image is in.
        guidance: How strongly images follow the prompt, at least 0; 1 is no guidance. By default 2, or 1 for a model
            that has learned its guidance.
        steps: Steps of the solver.
        solver: multistep, euler, heun, midpoint or dpm2m; for a model of one expert also ancestral or ddim, which are
            on its own schedule.
        conversion: calibrated, exact or paper; by default what suits each expert.
        batch: Images at a time.
        device: auto, cpu, cuda or cuda:N.
        out: The folder for results.json, results.md, samples.png, metrics.png and all images.
    """
    from atoll.errors import InputError
    from atoll.experiments.evaluate import evaluate as measure
    from atoll.experiments.evaluate import name_contenders
    from atoll.experiments.measure import MetricSettings
    from atoll.experiments.tables import render_table
    from atoll.sampling.settings import Sampling

    if len(folders) < 2:
        raise InputError("there is nothing to evaluate: give one or several models, and then the data")
    *models, data = folders
    settings = MetricSettings(
        num=num, seeds=seeds, first_seed=seed, features=features, metrics=metrics, split=split, clip=clip,
        neighbours=neighbours, num_reference=reference, varied=varied, each=each, device=device,
    )  # fmt: skip
    sampling = Sampling(steps, guidance, solver, routing, conversion, batch)
    results = measure(name_contenders(models, sampling), data, out, settings, cluster)
    print(render_table(results).split("\n\n")[1])
    print(f"{out / 'results.md'}: this table with what it takes to repeat it; samples.png and metrics.png beside it")
