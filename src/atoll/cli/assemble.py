"""`atoll assemble`."""

from pathlib import Path
from typing import Annotated

import tyro


def assemble(
    experts: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="EXPERT")],
    out: Path,
    router: Path | None = None,
    data: Path | None = None,
    allow_missing: bool = False,
    without_router: bool = False,
    from_cards: bool = False,
    step: int | None = None,
) -> None:
    """Join separately trained experts and a router into one model, after checking that they fit.

    For example:
      atoll assemble run --data data --out model
      atoll assemble expert_0 expert_1 expert_2 --router router --data data --out model
      atoll assemble monolith --data data --out baseline
      atoll assemble run --data data --step 500 --out early

    Args:
        experts: Folders that `atoll train` has made, in any order, or one that `atoll train-all` has made.
        out: The folder to make; an older model there is replaced, if nothing else lies in it.
        router: What `atoll train-router` has made; by default router/ beside the experts. One expert needs none.
        data: The data set of the experts, for its codec and text encoder; its pictures are not needed.
        allow_missing: Do without an expert for some of the clusters.
        without_router: Several experts of the same data, which `atoll sample --routing by_time` takes turns with.
        from_cards: Need no router: make one of the statistics that experts carry. Experts of clusters that a router
            does not know join it in the same way, without this flag.
        step: Take experts as they were after so many steps, from the checkpoints that `atoll train --keep-every` kept;
            the router stays as it is.
    """
    from tempfile import TemporaryDirectory

    from atoll.errors import InputError
    from atoll.sampling.assemble import assemble as put_together
    from atoll.sampling.assemble import expert_folders

    with TemporaryDirectory(dir=out.parent if out.parent.is_dir() else None) as place:
        folders = list(experts)
        if step is not None:
            from atoll.training.snapshot import take_snapshots

            if data is None:
                raise InputError("--step measures experts on their own data: give --data, cut into their clusters")
            router = router or next((run / "router" for run in folders if (run / "router").is_dir()), None)
            runs = [expert for run in folders for expert in (expert_folders(run) or [run])]
            folders = take_snapshots(runs, step, data, Path(place))
        index = put_together(folders, router, out, data, allow_missing=allow_missing, without_router=without_router,
                             from_cards=from_cards)  # fmt: skip
    kinds = ", ".join(f"{k} {kind or 'missing'}" for k, kind in enumerate(index.objectives))
    noun = "expert" if index.num_experts == 1 else "experts"
    shape = "x".join(map(str, index.latent_space.shape))
    print(f"{out}: {index.num_experts} {noun} ({kinds}), latents {shape}, licence {index.license}")
    print(f"hash: {index.hash}")
    print(f'next: atoll sample {out} "a prompt"')
