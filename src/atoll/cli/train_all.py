"""`atoll train-all`."""

from pathlib import Path
from typing import Annotated

import tyro

from atoll.training.settings import ExpertSettings


def train_all(
    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    out: Path,
    settings: Annotated[ExpertSettings, tyro.conf.arg(name="")],
    objectives: str | None = None,
    experts: str = "all",
    router: bool = False,
    at_a_time: int | None = None,
    recipe: Path | None = None,
) -> None:
    """Train all experts of a partition on one machine, a process each. Interrupted, the same command goes on.

    As many run at a time as the machine has GPUs, or cores if it has none. One that crashes is started again from its
    last state; the others do not notice.

    For example:
      atoll train-all data --objectives 2ddpm:6fm --steps 2000 --out run
      atoll train-all data --objectives 0=ddpm,3=ddpm,*=fm --recipe recipes/laptop.toml --router --out run
      atoll train-all data --experts 0,2 --out run

    Args:
        data: A folder that `atoll prepare` and `atoll partition` have made.
        out: The folder to make: OUT/expert_0, OUT/expert_1 and so on, and OUT/router.
        settings: How to train each.
        objectives: Which expert gets which objective: one name for all, 2ddpm:6fm for the first two and the other six,
            or 0=ddpm,3=ddpm,*=fm by number; --objective for all by default.
        experts: Which experts to train: all, or numbers such as 0,2.
        router: Train the router too, as one more process; its settings are the recipe's, or else the experts'.
        at_a_time: How many to train at a time.
        recipe: A TOML file with settings in tables [expert] and [router]; flags win over it.
    """
    from atoll.training.everyone import train_everyone

    told = train_everyone(data, out, settings, objectives, experts, router, at_a_time, recipe)
    print(*told, sep="\n")
