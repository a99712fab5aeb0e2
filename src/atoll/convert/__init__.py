"""Published checkpoints as experts: each format is recognised by its keys, and converted by a table of them."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from atoll.convert import dit, paris, pixart, tables
from atoll.convert.common import Converted, Options, check_free
from atoll.diffusion.transfer import Calibration
from atoll.errors import InputError, printable
from atoll.networks.dit import DiT
from atoll.networks.expert import CALIBRATION, REPORT, Expert
from atoll.networks.published import Source, read_source
from atoll.networks.stored import CONFIG, WEIGHTS
from atoll.storage import reason_of, write_json

__all__ = ["REPORT", "Converted", "Options", "check_out", "convert", "describe", "save"]
CLASS_FLAGS = {"label": "--label", "as_is": "--as-is", "kind": "--kind", "fit": "--fit"}  # of DiT and SiT alone
TERMS = {dit.DIT_LICENSE: ": for non-commercial use only, with attribution, and so is what is trained from it"}


CONVERTERS: dict[tables.Format, Callable[[Source, Options, Any], Converted]] = {
    tables.DIT: dit.convert_original,
    tables.DIFFUSERS_DIT: dit.convert_dit,
    tables.PIXART: pixart.convert_pixart,
    tables.DIFFUSERS_PIXART: pixart.convert_pixart,
    tables.PARIS_EXPERT: paris.convert_expert,
    tables.PARIS_ROUTER: paris.convert_router,
}


def recognise(source: Source) -> tables.Format:
    for known in CONVERTERS:
        if all(key in source.weights for key in known.marks):
            return known
    if source.config.get("model") in (DiT.__name__, "Router"):
        raise InputError(f"{source.path} is one of Atoll's already: use it as it is, or give an expert --to diffusers")
    some = printable(", ".join(key[:100] for key in sorted(source.weights)[:3]), 300)
    raise InputError(
        f"{source.path} is none of the known checkpoints (its keys begin with {some}): "
        f"known are {', '.join(known.name for known in CONVERTERS)}"
    )


def convert(path: str | Path, options: Options = Options()) -> Converted:  # noqa: B008
    """Returns a network of the checkpoint's weights, with the record of what became of every key."""
    source = read_source(Path(path))
    format = recognise(source)
    for name, flag in CLASS_FLAGS.items():
        if name in options.chosen and not isinstance(format, tables.DiTFormat):
            raise InputError(f"{flag} is for DiT and SiT, but {path} is a {format.name}: leave it out")
    try:
        converted = CONVERTERS[format](source, options, format)
        converted = replace(converted, options=options, license=options.license or converted.license)
        json.dumps(converted.report, allow_nan=False)
    except InputError:
        raise
    except (RuntimeError, ValueError, IndexError, OverflowError, MemoryError) as error:  # no published file's shapes
        raise InputError(
            f"{path} cannot be converted ({printable(reason_of(error), 300)}): its weights do not fit together, "
            "give another copy"
        ) from error
    return converted


def check_out(out: str | Path) -> None:
    """Refuses, before the work, to write over anything but an earlier conversion."""
    check_free(Path(out), (CONFIG, WEIGHTS, CALIBRATION, REPORT), REPORT)


def save(
    converted: Converted,
    out: str | Path,
    space: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    calibration: Calibration | None = None,
) -> None:
    """Writes the network and the report beside it.

    `space` is the "latent_space" and the "text_encoder" of a data set: with them an expert is whole, and can be
    assembled with others; `data` is what it answers for. Without, it is a bare network to start training from.
    """
    check_out(out)
    folder, fresh = Path(out), not Path(out).exists()
    network, objective, license = converted.network, converted.objective, converted.license
    try:
        for name in () if fresh else (CONFIG, CALIBRATION):  # what an earlier conversion left is no expert any more
            (folder / name).unlink(missing_ok=True)
        write_json(folder / REPORT, converted.report)
        if isinstance(network, DiT) and objective is not None and space is not None:
            Expert(
                network, objective, space["latent_space"], space["text_encoder"], data or {}, init=converted.init,
                license=license, calibration=calibration,
            ).save(folder)  # fmt: skip
            return
        if objective is not None:
            network.card = {"objective": asdict(objective), "init": converted.init, "license": license}
        else:
            latents = {"latent_space": space["latent_space"]} if space else {}
            network.card = {"license": license, "training": {"converted": converted.init}, **latents}
        network.save_pretrained(folder)
    except (InputError, OSError) as error:
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot write {out} ({reason_of(error)}): choose another folder") from error


def describe(converted: Converted, out: str | Path) -> list[str]:
    """Returns what a person wants to know of it, in a few lines."""
    config, ledger = converted.network.config, converted.ledger
    size = f"{config.hidden_size} wide, {config.depth} blocks, {config.num_heads} heads, patches of {config.patch_size}"
    lines = [
        f"{converted.source.path}: {converted.format}, {size}",
        f"{out}: {converted.num_parameters / 1e6:.2f}M parameters, latents {config.in_channels}x{config.input_size}"
        f"x{config.input_size}, {'no text' if config.text_dim is None else f'text {config.text_dim} wide'}",
    ]
    if converted.objective is not None:
        lines.append(f"predicts {converted.objective.prediction} on the schedule {converted.objective.schedule}")
    lines.append(
        f"keys: {len(ledger.consumed)} consumed, "
        f"{len(ledger.dropped)} dropped, {len(ledger.started)} of the network initialised (see {REPORT})"
    )
    lines += [f"dropped: {key}, {why}" for key, why in list(ledger.dropped.items())[:4]]
    lines += [f"note: {note}" for note in converted.notes]
    if converted.residual is not None:
        off = converted.residual["by_block"]
        lines.append(
            f"modulation: off by {sum(off) / len(off):.1%} on average, {max(off):.1%} in block {off.index(max(off))}"
            + (f", {converted.residual['output']:.1%} at the output" if "output" in converted.residual else "")
        )
    lines.append(f"licence: {converted.license}{TERMS.get(converted.license, '')}")
    return lines
