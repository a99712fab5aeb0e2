"""`atoll reproduce`."""

from pathlib import Path
from typing import Annotated

import tyro


def reproduce(
    what: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")],
    data: Path,
    recipe: Path = Path("recipes/reproduce.toml"),
    seeds: int | None = None,
    out: Path = Path("reproduced"),
) -> None:
    """Repeat the papers' comparisons on your own data: train, sample and measure all that they need, at equal budget.

    Parts that several comparisons share are trained once. Interrupted, the same command goes on; with more seeds or
    other comparisons it does only what is missing.

    For example:
      atoll reproduce table1 table3 table4 --data data
      atoll reproduce clusters --data data --seeds 1
      atoll reproduce table1 --data data --recipe my.toml --out mine

    Args:
        what: table1 (monolith and routing policies), table3 (objectives, converted and combined), table4 (homogeneous
            and heterogeneous), threshold, clusters (k-means and random), experts (how many), conversion, router (with
            and without the text).
        data: What `atoll prepare` has made; it is copied, not changed.
        recipe: A TOML file with the settings of training and, in [study], how large the comparisons are.
        seeds: Of training, in place of the recipe's.
        out: The folder for all that is made, results.json, results.md and a picture of each comparison.
    """
    from dataclasses import replace

    from atoll.errors import InputError
    from atoll.evaluation.reproduce import Recipe
    from atoll.evaluation.reproduce import reproduce as repeat

    if not what:
        raise InputError("there is nothing to reproduce: name a comparison, such as table1")
    found = Recipe.read(recipe)
    if seeds is not None:
        found = replace(found, plan=replace(found.plan, seeds=seeds))
    repeat(what, data, out, found)
    print((out / "results.md").read_text(encoding="utf-8"))
    print(f"{out / 'results.md'}: this, with pictures beside it")
