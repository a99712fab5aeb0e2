"""Converts published checkpoints to experts: each format is recognised by its keys, and converted by a key table."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from atoll.cards import CONFIG
from atoll.convert import tables
from atoll.convert.dit import DIT_LICENSE, convert_dit
from atoll.convert.ledger import Converted, Options
from atoll.convert.paris import convert_paris
from atoll.convert.pixart import convert_pixart
from atoll.diffusion.transfer import Calibration
from atoll.errors import InputError, printable
from atoll.networks.dit import DiT
from atoll.networks.expert import CALIBRATION, REPORT, Expert
from atoll.networks.published import Source, read_source
from atoll.networks.stored import WEIGHTS
from atoll.storage import reason_of, write_json

__all__ = ["REPORT", "Converted", "Options", "check_out", "convert", "describe", "save"]
CLASS_OPTIONS = ("label", "as_is", "kind", "fit")  # only for DiT and SiT
TERMS = {DIT_LICENSE: ": for non-commercial use only, with attribution, and so is what is trained from it"}
CONVERTERS: dict[tables.Format, Callable[[Source, Options, tables.Format], Converted]] = {
    tables.DIT: convert_dit,
    tables.DIFFUSERS_DIT: convert_dit,
    tables.PIXART: convert_pixart,
    tables.DIFFUSERS_PIXART: convert_pixart,
    tables.PARIS_EXPERT: convert_paris,
    tables.PARIS_ROUTER: convert_paris,
}


def convert(path: str | Path, options: Options = Options()) -> Converted:  # noqa: B008
    """Returns a network with the checkpoint's weights, and a record of what became of every key."""
    source = read_source(Path(path))
    format = recognise(source)
    for name in CLASS_OPTIONS:
        if name in options.chosen and CONVERTERS[format] is not convert_dit:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} is for DiT and SiT, but {path} is a {format.name}: leave it out")
    try:
        converted = CONVERTERS[format](source, options, format)
        converted = replace(converted, options=options, license=options.license or converted.license)
        json.dumps(converted.report, allow_nan=False)
    except InputError:
        raise
    except (RuntimeError, ValueError, IndexError, OverflowError, MemoryError) as error:  # shapes of no published file
        reason = printable(reason_of(error), 300)
        raise InputError(
            f"{path} cannot be converted ({reason}): its weights do not fit together, give another copy"
        ) from error
    return converted


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


def check_out(out: str | Path, files: tuple[str, ...] = (CONFIG, WEIGHTS, CALIBRATION, REPORT)) -> None:
    """Raises unless `out` is new, empty or an earlier conversion: only these files, including the last one."""
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file: choose a folder")
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    if names and (files[-1] not in names or names - set(files)):
        raise InputError(f"--out {out} holds something else than an earlier conversion: choose another folder")


def save(
    converted: Converted,
    out: str | Path,
    space: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    calibration: Calibration | None = None,
) -> None:
    """Writes the network and the report beside it.

    `space` has the "latent_space" and "text_encoder" of a data set, which make it a complete expert that can be
    assembled with others; `data` describes the expert's data. Without `space`, it is a bare network for `--init`.
    """
    check_out(out)
    folder, network = Path(out), converted.network
    for name in (CONFIG, CALIBRATION):  # an earlier conversion stops being an expert
        (folder / name).unlink(missing_ok=True)
    write_json(folder / REPORT, converted.report)
    card: dict[str, Any] = {"license": converted.license}
    if converted.objective is None:
        card |= {"training": {"converted": converted.init}}
        network.card = card | ({"latent_space": space["latent_space"]} if space else {})
        network.save_pretrained(folder)
        return
    assert isinstance(network, DiT)
    network.card = {"objective": asdict(converted.objective), "init": converted.init, **card}
    if space is None:
        network.save_pretrained(folder)
        return
    network.card = {**network.card, **space, "data": data or {}}
    Expert(network, converted.objective, calibration).save(folder)


def describe(converted: Converted, out: str | Path) -> list[str]:
    """Returns a summary of the conversion, as lines to print."""
    config, ledger, objective, residual = (
        converted.network.config, converted.ledger, converted.objective, converted.residual
    )  # fmt: skip
    size = f"{config.hidden_size} wide, {config.depth} blocks, {config.num_heads} heads, patches of {config.patch_size}"
    latents, text = [config.in_channels, config.input_size, config.input_size], f"text {config.text_dim} wide"
    lines = [
        f"{ledger.source.path}: {converted.format}, {size}",
        f"{out}: {converted.num_parameters / 1e6:.2f}M parameters, latents {latents}, "
        f"{'no text' if config.text_dim is None else text}",
    ]
    if objective is not None:
        lines.append(f"predicts {objective.prediction} on the schedule {objective.schedule}")
    keys = f"{len(ledger.consumed)} consumed, {len(ledger.dropped)} dropped, {len(ledger.initialised)} initialised"
    lines += [f"keys: {keys} (see {REPORT})", *(f"note: {note}" for note in converted.notes)]
    if residual is not None:
        off = residual["by_block"]
        lines.append(f"modulation: off by {sum(off) / len(off):.1%} on average, {max(off):.1%} at most")
    return [*lines, f"licence: {converted.license}{TERMS.get(converted.license, '')}"]
