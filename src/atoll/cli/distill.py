"""`atoll distill`."""

from pathlib import Path
from typing import Annotated

import tyro

from atoll.engines.settings import EngineSettings
from atoll.errors import InputError
from atoll.training.settings import DistillSettings


def distill(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    out: Path,
    settings: Annotated[DistillSettings, tyro.conf.arg(name="")],
    init: Path | None = None,
    allow_missing: bool = False,
    engine: Annotated[EngineSettings, tyro.conf.arg(name="")] = EngineSettings(),  # noqa: B008
    cpus: int = 1,
    gpus: int | None = None,
    cluster: int | None = None,
    reuse: Path | None = None,
    recipe: str | None = None,
    dry_run: bool = False,
) -> None:
    """Distil an ensemble into one dense model, so that sampling costs as much as with one model.

    Rerun the command to resume. The result is an ordinary expert, for all of the data.

    For example:
      atoll distill model data --student b/2 --out dense
      atoll distill model data --student mini --guidance 4 --out dense
      atoll distill model data --steps-out 4 --init model/expert_0 --out quick
      atoll distill model data --steps-out 1 --init model/expert_0 --reuse quick --out quickest
      atoll distill model data --teacher router --max-resident 1 --init model/expert_0 --out dense
      atoll distill /shared/model /shared/data --student b/2 --engine ray --gpus 8 --out /shared/dense
      atoll assemble dense --data data --out dense-model

    Args:
        model: The teacher: a folder from `atoll assemble`, or a hub id.
        data: A folder from `atoll prepare`; it must also be partitioned if the teacher is chosen by label.
        out: Output folder: the student, its metrics and checkpoints.
        settings: How to train.
        init: A folder with initial weights: an expert of the teacher, or the output of `atoll convert`.
        allow_missing: Accept a teacher with missing experts: images of their clusters are left out, or their routing
            weight goes to the other experts.
        engine: Where it runs: local, in this process; ray, as a job on a node that has room for it.
        cpus: Cores of the Ray job; with --device cpu, one process per --threads cores.
        gpus: GPUs of the Ray job, one process each; 1 by default if there are any.
        cluster: Distil only the expert of this cluster; the student replaces it in an ensemble of students.
        reuse: A student of at least as many --steps-out, whose stored teacher trajectories are reused.
        recipe: A built-in recipe, such as laptop, or a TOML file with settings in its table [student]; flags
            override it.
        dry_run: Print the settings, model size, memory and time needed, and stop.
    """
    from atoll.data.local_copy import local_copy
    from atoll.training.distill import distill as train_student

    del recipe  # read before the flags were: main.py
    if engine.engine == "ray":
        from atoll.engines.engine import Resources
        from atoll.engines.train_all import Part, train_one
        from atoll.object_store import place_of

        if dry_run:
            raise InputError("--dry-run looks at this machine: leave --engine out")
        student = Part(
            "student", out, settings, place_of(data), cluster, init=init, teacher=Path(model),
            allow_missing=allow_missing, reuse=reuse,
        )  # fmt: skip
        print(*train_one(student, engine.open(settings.device), Resources(cpus, gpus)), sep="\n")
        return
    if (cpus, gpus) != (1, None):
        raise InputError("--cpus and --gpus are of a job on a cluster: add --engine ray, or use `accelerate launch`")
    print(
        *train_student(model, local_copy(data), settings, out, init, allow_missing, cluster, reuse, dry_run=dry_run),
        sep="\n",
    )
