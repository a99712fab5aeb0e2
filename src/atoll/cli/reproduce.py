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

    Parts that several comparisons share are trained once. Rerun the command to resume; with
    more seeds or other comparisons it does only what is missing.

    For example:
      atoll reproduce table4 table4-scratch --data fashion-mnist --pretrain mnist --out fashion
      atoll reproduce clusters --data data --originals photos/ --seeds 1
      atoll reproduce table1 --data data --recipe my.toml --out mine
      atoll reproduce table4 --recipe reproduce_paper --dry-run

    Args:
        what: table1 (monolith and routing policies), table2 (compute), table3 (objectives, converted and combined),
            table4 (homogeneous and heterogeneous), both also as table3-scratch and table4-scratch without first
            weights; threshold (in time), init, adaln, conversion, router (with and without the text); clusters
            (k-means and random), experts (how many), flops (checkpoints on the way), correlation (same seeds), student.
        data: What `atoll prepare` has made, which is copied, not changed; or the name of a set, which is fetched:
            fashion-mnist, mnist, cifar-10, emoji, or a built-in one: avatars, shapes, digits.
        recipe: One that comes with atoll or a TOML file, with the settings of training and, in [study], how large the
            comparisons are; reproduce_paper, reproduce_paper_table1 and reproduce_ddm have the papers' own settings.
        seeds: Of training, in place of the recipe's.
        pretrain: The set that the DiT is trained on from which experts start, by name, in place of the recipe's; or a
            published DiT's file, which is then converted.
        originals: What a prepared folder was made of, to compare with the images themselves, as the papers do.
        dry_run: Print the parts, models and rows of the plan with their FLOPs, memory and time, and every command it
            stands for, and do nothing else.
        engine: Where parts are trained and models are measured.
        out: The folder for all that is made, results.json, results.md and images of each comparison.
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
