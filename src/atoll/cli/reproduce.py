"""`atoll reproduce`."""

from pathlib import Path
from typing import Annotated

import tyro

from atoll.engines.settings import EngineSettings


def reproduce(
    what: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")],
    data: str | None = None,
    recipe: str = "reproduce",
    seeds: int | None = None,
    pretrain: str | None = None,
    originals: str | None = None,
    dry_run: bool = False,
    engine: Annotated[EngineSettings, tyro.conf.arg(name="")] = EngineSettings(),  # noqa: B008
    out: Path = Path("reproduced"),
) -> None:
    """Repeat the papers' comparisons: train, sample and measure everything they need, at equal budget.

    Models shared by several comparisons are trained once. Rerun the command to resume; with more seeds or other
    comparisons, only what is missing is run.

    For example:
      atoll reproduce table4 table4-scratch --data fashion-mnist --pretrain mnist --out fashion
      atoll reproduce clusters --data data --originals photos/ --seeds 1
      atoll reproduce table1 --data data --recipe my.toml --out mine
      atoll reproduce table4 --recipe reproduce_paper --dry-run

    Args:
        what: table1 (monolith and routing policies), table2 (compute), table3 (objectives, converted and combined),
            table4 (homogeneous and heterogeneous), both also as table3-scratch and table4-scratch without pretrained
            weights; threshold (in time), init, adaln, conversion, router (with and without the text); clusters
            (k-means and random), experts (how many), flops (intermediate checkpoints), correlation (same seeds),
            student.
        data: A folder from `atoll prepare`, which is copied, not changed; or the name of a data set to download:
            fashion-mnist, mnist, cifar-10, emoji; or a built-in one: avatars, shapes, digits.
        recipe: A built-in recipe or a TOML file, with training settings and, in [study], the size of the comparisons;
            reproduce_paper, reproduce_paper_table1 and reproduce_ddm have the papers' own settings.
        seeds: Number of training seeds; overrides the recipe.
        pretrain: Name of the data set on which the experts' initial DiT is pretrained, overriding the recipe; or a
            published DiT checkpoint, which is then converted.
        originals: The source of a prepared folder, to compare with the original images, as the papers do.
        dry_run: Print the plan's training runs, models and table rows with their FLOPs, memory and time, and the
            equivalent commands, and stop.
        engine: Where models are trained and measured.
        out: Output folder for everything: models, results.json, results.md and images of each comparison.
    """
    from dataclasses import replace

    from atoll.errors import InputError
    from atoll.experiments.reproduce import reproduce as repeat
    from atoll.experiments.studies import Recipe

    if not what:
        raise InputError("there is nothing to reproduce: name a comparison, such as table1")
    content = Recipe.read(recipe)
    if seeds is not None:
        content = replace(content, plan=replace(content.plan, seeds=seeds))
    if pretrain is not None:
        is_file = Path(pretrain).is_file()
        first = replace(content.pretrain, checkpoint=pretrain) if is_file else replace(content.pretrain, data=pretrain)
        content = replace(content, pretrain=first)
    if dry_run:
        from atoll.experiments.dry_run import describe_plan

        print(*describe_plan(what, content), sep="\n")
        return
    if data is None:
        raise InputError("there is no data to work with: give --data, a prepared folder or a set such as fashion-mnist")
    repeat(what, data, out, content, engine.open(content.expert.device), originals=originals)
    print((out / "results.md").read_text(encoding="utf-8"))
    print(f"{out / 'results.md'}: this, with pictures beside it")
