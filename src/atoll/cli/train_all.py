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

    As many run at a time as there are GPUs, or cores if there are none. One that crashes, or whose node dies, is
    started again from its last checkpoint; the others do not notice.

    For example:
      atoll train-all data --objectives 2ddpm:6fm --steps 2000 --out run
      atoll train-all data --objectives 1ddpm:2fm:1ddpm:4fm --recipe laptop --router --router.steps 500 --out run
      atoll train-all data --init pretrained --dry-run --out run
      atoll train-all data --experts 0,2 --out run
      atoll train-all data --model 3b/2 --shard --gpus-per-expert 8 --engine ray --out /shared/run
      atoll train-all s3://bucket/data --engine ray --mirror s3://bucket/run --out run

    Args:
        data: A folder that `atoll prepare` and `atoll partition` have made, or its URL in an object store.
        out: The folder to make: OUT/expert_0, OUT/expert_1 and so on, and OUT/router.
        settings: How to train each expert.
        router_settings: How to train the router, if it is trained.
        objectives: Which expert gets which objective: one name for all, or 2ddpm:6fm for the first two and the other
            six; --objective for all by default.
        experts: Which experts to train: all, or numbers such as 0,2.
        init: A folder with first weights for all experts (another expert, or what `atoll convert` has made), or
            0=FOLDER,*=FOLDER by number; experts that are not named begin from random weights.
        router: Train the router too, as one more process; --router.steps and so on are its settings.
        engine: Where they run.
        cpus_per_expert: Cores of each; with --device cpu, a process for every --threads of them.
        gpus_per_expert: GPUs of each, with a process per GPU; one by default where there are any.
        mirror: A URL of an object store, such as s3://bucket/run, to keep the folders in as well: nodes that
            share no folder resume from there.
        recipe: One that comes with atoll, such as laptop, or a TOML file: settings of the experts in its table
            [expert], of the router in [router], of both above them; flags win over it.
        dry_run: Print what each would be trained with, the memory it needs and how many run at a time, and stop.
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
