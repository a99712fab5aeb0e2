"""Static checks of a submission, before anything in it is run: files, formats, sizes, and whether its card fits."""

import os
import re
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from atoll.cards import CONFIG, ExpertCard, require_fit
from atoll.data.view import DatasetView
from atoll.diffusion.objective import OBJECTIVES
from atoll.errors import InputError, plural, shown
from atoll.federation.gate import Gate
from atoll.networks.expert import CALIBRATION, Expert
from atoll.networks.stored import WEIGHTS
from atoll.storage import open_regular, reason_of, size_of

RUN, CHECKPOINTS = "run.json", "checkpoints"
FILES = (CONFIG, WEIGHTS, CALIBRATION, RUN)


def check_files(folder: Path, gate: Gate) -> dict[str, int]:
    """Returns the size of each file, without reading any; raises InputError for an unexpected or too large one."""
    limits = dict.fromkeys(FILES, gate.max_other) | {WEIGHTS: gate.max_weights}
    sizes: dict[str, int] = {}
    num_checkpoints = 0
    for place, name in _names(folder, gate.max_checkpoints + len(FILES) + 1):
        path = folder / place / name
        is_checkpoint = place == CHECKPOINTS and re.fullmatch(r"[0-9]{9,12}\.safetensors", name) is not None
        if not is_checkpoint and (place or name not in FILES):
            raise InputError(f"{shown(str(path.relative_to(folder)))} is not a file of a submission: leave it out")
        if path.is_symlink():
            raise InputError(f"{place}{'/' * bool(place)}{name} is a link: submit the file itself")
        try:
            open_regular(path, folder).close()
            size = size_of(path, folder)
        except OSError as error:
            raise InputError(f"{place}{'/' * bool(place)}{name} cannot be read ({reason_of(error)})") from error
        if size > (limit := gate.max_checkpoint if is_checkpoint else limits[name]):
            raise InputError(f"{place}{'/' * bool(place)}{name} has {size:,} bytes, and the gate allows {limit:,}")
        sizes[f"{place}/{name}" if place else name] = size
        num_checkpoints += is_checkpoint
    for name in FILES:
        if name not in sizes:
            raise InputError(f"there is no {name}: submit what `atoll train` has made")
    if num_checkpoints > gate.max_checkpoints:
        raise InputError(f"there are {num_checkpoints} checkpoints, and the gate allows {gate.max_checkpoints}")
    return sizes


def _names(folder: Path, most: int) -> list[tuple[str, str]]:
    """Returns (folder, name) of all files, at most `most` per folder; the only subfolder is that of checkpoints."""
    names = []
    for place in ("", CHECKPOINTS):
        where = folder / place if place else folder
        if place and (where.is_symlink() or not where.is_dir()):
            continue
        with os.scandir(where) as entries:
            own = sorted(entry.name for entry in islice(entries, most + 1))
        if len(own) > most:
            raise InputError(f"there are more than {plural(most, 'file')}: leave out what is not part of a submission")
        names += [
            (place, name) for name in own if (place, name) != ("", CHECKPOINTS) or where.joinpath(name).is_symlink()
        ]
    return names


def check_expert(
    folder: Path, slot: int, gate: Gate, view: DatasetView, private: bool
) -> tuple[Expert, dict[str, Any]]:
    """Returns the expert and its figures; raises InputError unless its card fits the slot and its weights are valid."""
    card, data = ExpertCard.read(folder), view.data.card
    require_fit(CONFIG, card, data.latent_space, data.text, "the charter")
    if card.text_encoder is None:
        raise InputError(
            "the expert does not read the text, but the federation's prompts are texts: train one that does"
        )
    if card.cluster != slot:
        raise InputError(f"its card says that it is the expert of cluster {shown(card.cluster)}, not of slot {slot}")
    if not private and (card.data is None or card.data.fingerprint != view.fingerprint):
        raise InputError(f"its card names other data than those of slot {slot} (the fingerprint is another)")
    if gate.licenses is not None and card.license not in gate.licenses:
        allowed = ", ".join(gate.licenses)
        raise InputError(f"its licence {shown(card.license)} is not one that the charter allows: {allowed}")
    first = None if card.init is None else card.init.get("fingerprint")
    if first != gate.init or (card.init is None) != (gate.init is None):
        begun = "random weights" if gate.init is None else f"those of fingerprint {gate.init[:12]}"
        raise InputError(f"its first weights are not those that the charter demands: {begun}")
    expert = Expert.load(folder)
    names = [name for name, known in OBJECTIVES.items() if known == expert.objective]
    if gate.objectives is not None and not set(names) & set(gate.objectives):
        allowed = ", ".join(gate.objectives)
        raise InputError(f"its objective ({', '.join(names) or 'one without a name'}) is not allowed here: {allowed}")
    if kinds := {tensor.dtype for tensor in expert.network.state_dict().values()} - {torch.float32}:
        raise InputError(f"its weights are of {kinds.pop()}: submit them in float32, as training writes them")
    if expert.calibration is None or expert.prior is None or expert.prior.covariance is None:
        raise InputError(f"its {CALIBRATION} lacks what routers and samplers need: train it with this version of atoll")
    num = sum(p.numel() for p in expert.network.parameters())
    return expert, {"parameters": num, "objective": names[0] if names else None, "license": card.license}


def nearest_copy(
    expert: Expert, start: dict[str, torch.Tensor] | None, others: dict[str, dict[str, torch.Tensor]]
) -> tuple[str, float] | None:
    """Returns which of the others' weights is nearest, and its distance in lengths of the expert's own update.

    The update is measured from the initial weights `start`; without them, from zero.
    """
    own = {name: p.detach().double() for name, p in expert.network.named_parameters()}
    shapes = {name: p.shape for name, p in own.items()}
    length = sum(float((p - start[name].double() if start else p).square().sum()) for name, p in own.items()) ** 0.5
    distances = {
        who: sum(float((p - weights[name].double()).square().sum()) for name, p in own.items()) ** 0.5
        / max(length, 1e-30)
        for who, weights in others.items()
        if {name: weights[name].shape for name in weights if name in shapes} == shapes
    }
    return min(distances.items(), key=lambda pair: pair[1]) if distances else None
