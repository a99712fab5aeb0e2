"""`atoll train`."""

from pathlib import Path
from typing import Annotated

import tyro

from atoll.training.settings import ExpertSettings


def train(
    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    out: Path,
    settings: Annotated[ExpertSettings, tyro.conf.arg(name="")],
    cluster: str = "all",
    init: Path | None = None,
    mirror: str | None = None,
    recipe: str | None = None,
    dry_run: bool = False,
) -> None:
    """Train an expert on one cluster or, with --cluster all, the monolith.

    Only DATA/dataset.json, DATA/text_encoder, DATA/vae and the cluster's own folder are needed. Rerun the command to
    resume.

    For example:
      atoll train data --cluster 3 --objective ddpm --model xl/2 --out expert_3
      atoll train data --cluster all --steps 20000 --batch 256 --out monolith
      atoll train data --cluster 0 --recipe laptop --lr 5e-4 --out expert_0
      atoll train data --cluster 0 --model xl/2 --dry-run --out expert_0
      accelerate launch --num_processes 4 -m atoll.cli.main train data --cluster 3 --out expert_3

    Args:
        data: A folder from `atoll prepare` and `atoll partition`, a copy of one cluster of it, or its URL in an object
            store, from which the cluster is copied and verified once.
        out: Output folder: the expert, its metrics and checkpoints.
        settings: How to train.
        cluster: The number of a cluster, or all.
        init: A folder with initial weights: another expert, or the output of `atoll convert`.
        mirror: URL in an object store, such as s3://bucket/run, to mirror the folder to, so that another machine can
            resume from there.
        recipe: A built-in recipe, such as laptop, or a TOML file with settings in its table [expert]; flags override
            it.
        dry_run: Print the settings, model size, memory and time needed, and stop.
    """
    from atoll.data.local_copy import local_copy
    from atoll.training.expert import train_expert

    del recipe  # read before the flags were: main.py
    number = parse_cluster(cluster)
    print(
        *train_expert(local_copy(data, number), number, settings, out, init, dry_run=dry_run, mirror=mirror), sep="\n"
    )


def parse_cluster(text: str) -> int | None:
    from atoll.errors import InputError

    if text == "all":
        return None
    if not text.isdecimal():
        raise InputError(f"--cluster must be a number or all, but is {text!r}")
    return int(text)
