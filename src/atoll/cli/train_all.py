"""`atoll train-all`."""

from pathlib import Path
from typing import Annotated

import tyro

from atoll.engines.settings import EngineSettings
from atoll.training.settings import ExpertSettings, RouterSettings


def train_all(
    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    out: Path,
    settings: Annotated[ExpertSettings, tyro.conf.arg(name="")],
    router_settings: Annotated[RouterSettings, tyro.conf.arg(name="router")],
    objectives: str | None = None,
    experts: str = "all",
    init: str | None = None,
    router: bool = False,
    engine: Annotated[EngineSettings, tyro.conf.arg(name="")] = EngineSettings(),  # noqa: B008
    cpus_per_expert: int = 1,
    gpus_per_expert: int | None = None,
    mirror: str | None = None,
    recipe: str | None = None,
    dry_run: bool = False,
) -> None:
    """Train all experts of a partition, on this machine or a Ray cluster. Rerun the command to resume.

    As many run in parallel as there are GPUs, or cores if there are none. An expert that crashes, or whose node dies,
    is restarted from its last checkpoint; the others are not affected.

    For example:
      atoll train-all data --objectives 2ddpm:6fm --steps 2000 --out run
      atoll train-all data --objectives 1ddpm:2fm:1ddpm:4fm --recipe laptop --router --router.steps 500 --out run
      atoll train-all data --init pretrained --dry-run --out run
      atoll train-all data --experts 0,2 --out run
      atoll train-all data --model 3b/2 --shard --gpus-per-expert 8 --engine ray --out /shared/run
      atoll train-all s3://bucket/data --engine ray --mirror s3://bucket/run --out run

    Args:
        data: A folder from `atoll prepare` and `atoll partition`, or its URL in an object store.
        out: Output folder: OUT/expert_0, OUT/expert_1 and so on, and OUT/router.
        settings: How to train each expert.
        router_settings: How to train the router, with --router.
        objectives: Each expert's objective: one name for all, or 2ddpm:6fm for the first two and the other six; by
            default --objective for all.
        experts: Which experts to train: all, or numbers such as 0,2.
        init: A folder with initial weights for all experts (another expert, or the output of `atoll convert`), or
            0=FOLDER,*=FOLDER by number; experts that are not named start from random weights.
        router: Train the router too, as one more process; --router.steps and so on are its settings.
        engine: Where they run.
        cpus_per_expert: Cores per expert; with --device cpu, one process per --threads cores.
        gpus_per_expert: GPUs per expert, one process each; 1 by default if there are any.
        mirror: URL in an object store, such as s3://bucket/run, to mirror the folders to, so that nodes without a
            shared folder can resume from there.
        recipe: A built-in recipe, such as laptop, or a TOML file with the experts' settings in its table [expert], the
            router's in [router], and those of both above them; flags override it.
        dry_run: Print each one's settings and memory, and how many run in parallel, and stop.
    """
    from atoll.engines.engine import Resources
    from atoll.engines.train_all import train_all as train
    from atoll.object_store import place_of

    del recipe  # read before the flags were: main.py
    chosen, resources = router_settings if router else None, Resources(cpus_per_expert, gpus_per_expert)
    where = engine.open(settings.device)
    lines = train(
        place_of(data), out, settings, objectives, experts, init, chosen, where, resources, mirror, dry_run=dry_run
    )
    print(*lines, sep="\n")
