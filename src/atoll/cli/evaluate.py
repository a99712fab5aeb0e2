"""`atoll evaluate`."""

from pathlib import Path
from typing import Annotated

import tyro

from atoll.engines.settings import EngineSettings
from atoll.experiments.settings import MetricSettings
from atoll.sampling.settings import Sampling


def evaluate(
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL... DATA")],
    settings: Annotated[MetricSettings, tyro.conf.arg(name="")],
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = Sampling(batch=50),  # noqa: B008
    cluster: int | None = None,
    engine: Annotated[EngineSettings, tyro.conf.arg(name="")] = EngineSettings(),  # noqa: B008
    out: Path = Path("evaluation"),
) -> None:
    """Measure the images of one or several models against the data they were trained on.

    Rerun the command to resume; with a larger --num, only the missing images are generated. A warning says which
    figures cannot be trusted on this data.

    For example:
      atoll evaluate model data
      atoll evaluate model monolith data --num 2000 --seeds 3
      atoll evaluate model data --features simple --metrics frechet accuracy --routing topk:2 --out top2
      atoll evaluate model data --features inception:pt_inception-2015-12-05-6726825d.pth \\
        clip:openai/clip-vit-base-patch32 --clip openai/clip-vit-base-patch32

    Args:
        folders: One or several models from `atoll assemble`, compared in one table; then the data set from
            `atoll prepare`, or its URL: its captions are the prompts, its images the reference.
        settings: What is measured.
        sampling: How images are generated.
        cluster: Use only the captions and images of this cluster.
        engine: Where images are generated and measured: local, one model after the other in this process; ray,
            several models in parallel.
        out: Output folder for results.json, results.md, samples.png, metrics.png and all images.
    """
    from atoll.data.local_copy import local_copy
    from atoll.errors import InputError
    from atoll.experiments.evaluate import evaluate as measure
    from atoll.experiments.evaluate import name_contenders
    from atoll.experiments.tables import render_table

    if len(folders) < 2:
        raise InputError("there is nothing to evaluate: give one or several models, and then the data")
    *models, place = folders
    data = local_copy(place, cluster)
    where = engine.open(settings.device) if engine.engine == "ray" else None
    results = measure(name_contenders(models, sampling), data, out, settings, cluster, engine=where)
    print(render_table(results).split("\n\n")[1])
    print(f"{out / 'results.md'}: this table with what it takes to repeat it; samples.png and metrics.png beside it")
