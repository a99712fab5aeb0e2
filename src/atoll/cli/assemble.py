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
        experts: Folders from `atoll train`, in any order, or one folder from `atoll train-all`.
        out: Output folder; replaces an existing model there, provided the folder holds nothing else.
        router: Output of `atoll train-router`; by default router/ beside the experts. A single expert needs none.
        data: The experts' data set, for its codec and text encoder; its images are not needed.
        allow_missing: Allow clusters without an expert.
        without_router: Combine several experts of the same data, for `atoll sample --routing by_time`.
        from_cards: Build the router from the statistics stored with each expert, without training. Experts whose
            cluster a given router does not know are added to it in this way without this flag.
        step: Use the experts as of this step, from checkpoints kept by `atoll train --keep-every`; the router is not
            affected.
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
