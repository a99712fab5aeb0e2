"""Training for a federation: lease a slot, download only its images, train, keep the lease alive, submit."""

import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from atoll.cards import CONFIG, hash_of
from atoll.errors import InputError
from atoll.federation.create import JOINED, bring, data_folder
from atoll.federation.keys import Identity
from atoll.federation.lease import Holding, claim
from atoll.federation.roles import Federation
from atoll.federation.submission import check_license, list_submissions, submit
from atoll.federation.verify import is_refused, list_verdicts
from atoll.storage import read_json
from atoll.training.checkpoint import saved
from atoll.training.expert import train_expert
from atoll.training.settings import MAY_CHANGE, ExpertSettings


def contribute(
    federation: Federation,
    identity: Identity,
    settings: ExpertSettings,
    *,
    slot: int | None = None,
    data: Path | None = None,
    license: str | None = None,
    progress: bool = True,
) -> Sequence[str]:
    """Trains and submits an expert for one slot; returns lines for the user. Rerun it to resume."""
    charter, store = federation.charter, federation.store
    own = _own_data(federation, identity, data, slot)
    if own is not None:
        slot, data = own
    settings = prepare_settings(federation, settings, private=data is not None)
    if charter.gate.objectives is not None and settings.objective not in charter.gate.objectives:
        allowed = ", ".join(charter.gate.objectives)
        raise InputError(f"the objective {settings.objective} is not accepted here: {allowed} is")
    wanted = wanted_slots(federation) if slot is None else [federation.slot(slot).number]
    if slot is None and not wanted:
        return [
            f"every slot of {federation.place} has an expert or a submission",
            f"next: atoll federation status {federation.place}",
        ]
    for found in map(federation.slot, wanted):
        check_license(charter, found.license, license or charter.license)
        if found.author is not None and (found.author.key != identity.key or data is None):
            raise InputError(f"slot {found.number} is for {found.author.name}'s own images: only they can train for it")
    run = run_name(settings, identity if data is not None else None)
    holding = claim(
        store, wanted, identity, lambda number: run, settings.steps, charter.lease, federation.cache / "leases"
    )
    if holding is None:
        what = "all slots are" if slot is None else f"slot {slot} is"
        raise InputError(
            f"{what} held by others: see `atoll federation status {federation.place}`, and try again later"
        )
    number = holding.lease.slot
    out = federation.cache / "runs" / f"{number:04d}-{run}"
    print(f"slot {number} ({federation.slot(number).name}) is yours while this runs; the run is kept in {out}")
    with holding.beating(lambda: _step(out)):
        folder = data_folder(federation, federation.slot(number)) if data is None else data
        mirror = None if data is not None else f"{federation.url}/runs/{number:04d}/{run}"
        lines = train_expert(folder, number, settings, out, progress=progress, mirror=mirror)
        holding.check()
        if not (out / CONFIG).exists():  # it was stopped by a signal
            _release(holding, out)
            return lines
        key = submit(
            federation, identity, number, out, license=license or charter.license, held=holding.lease.held,
            private=data is not None,
        )  # fmt: skip
    _release(holding, out)
    return [
        *lines,
        f"submitted {key.id[:12]} for slot {number}, signed by {identity.person.name} ({identity.key[:8]})",
        f"next: atoll federation status {federation.place}, and a verifier runs `atoll federation verify`",
    ]


def _own_data(
    federation: Federation, identity: Identity, data: Path | None, slot: int | None
) -> tuple[int, Path] | None:
    """Returns the slot and the folder of the contributor's own images, if there are any for this slot."""
    if data is not None:
        found, folder = bring(federation, identity, data)
        return found.number, folder
    path = federation.folder / JOINED
    if not path.exists():
        return None
    joined = read_json(path, f"run `atoll federation join {federation.place} --data MINE` again")
    folder = Path(str(joined.get("data")))
    if slot is not None and joined.get("slot") != slot:
        return None
    if not folder.is_dir():
        raise InputError(f"the images that this machine has joined with are not in {folder}: join again")
    return int(joined["slot"]), folder


def prepare_settings(federation: Federation, settings: ExpertSettings, private: bool) -> ExpertSettings:
    """Returns settings under which a run can be resumed and verified by others.

    Checkpoints are kept as often as the charter demands for replays. Samples are not drawn: they would show held-out
    images to all who can read the store.
    """
    every = federation.charter.gate.segment_steps
    kept = {} if private else {"keep_every": every, "save_every": every}
    return replace(settings, **kept, sample_every=0)  # type: ignore[arg-type]


def run_name(settings: ExpertSettings, owner: Identity | None) -> str:
    """Returns the name of a run: equal settings give the same run, which anyone can resume bit for bit.

    On images that only its `owner` has, the name also depends on the owner's key.
    """
    fixed = {name: value for name, value in asdict(settings).items() if name not in MAY_CHANGE or name == "steps"}
    return str(hash_of([fixed, None if owner is None else owner.key])[:16])


def wanted_slots(federation: Federation) -> list[int]:
    """Returns the charter's slots that have neither an expert nor a submission that may become one, in random order."""
    verdicts = list_verdicts(federation.store)
    open_ = {key.slot for key in list_submissions(federation.store) if not is_refused(federation, verdicts[key])}
    numbers = [slot.number for slot in federation.charter.slots if slot.number not in open_]
    accepted = federation.experts(numbers)
    wanted = [number for number in numbers if number not in accepted]
    random.shuffle(wanted)  # so that contributors who start together do not all try the same
    return wanted


def _step(out: Path) -> int:
    checkpoints = saved(out / "state")
    return int(checkpoints[-1].stem) if checkpoints else 0


def _release(holding: Holding, out: Path) -> None:
    holding.release(_step(out))


def training_defaults(settings: ExpertSettings, usual: ExpertSettings) -> dict[str, Any]:
    """Returns the settings that differ from the `usual` ones, for the charter."""
    return {name: value for name, value in asdict(settings).items() if value != getattr(usual, name)}
