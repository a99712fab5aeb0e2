"""`atoll convert`: turns a published checkpoint into an expert or a model, or exports an expert to diffusers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from atoll.convert import Converted, Options, check_out, convert, describe, save
from atoll.convert.diffusers_export import export
from atoll.data.shards import Dataset
from atoll.data.view import DatasetView
from atoll.diffusion.transfer import Calibration
from atoll.encoders.text import TextEncoder, load_text_encoder
from atoll.errors import InputError
from atoll.networks.text_prior import TextPrior
from atoll.sampling.assemble import assemble_paris
from atoll.storage import resolved
from atoll.training.held_out import evaluate_expert


def convert_checkpoint(
    checkpoint: Path,
    out: Path,
    options: Options,
    to: str = "expert",
    data: Path | None = None,
    cluster: int | None = None,
    calibrate: int = 128,
) -> Sequence[str]:
    """Converts to an expert, to diffusers or to a model of all Paris experts; returns lines to print.

    With `data`, the expert is for this data set's latents, text encoder and cluster, and can be assembled with others.
    """
    if to != "expert" and (data is not None or cluster is not None):
        raise InputError(f"--data and --cluster are for --to expert, not --to {to}: leave them out")
    if options.as_is and (options.text_dim is not None or options.fit != "curve"):
        raise InputError("--text-dim and --fit are for an expert that shall read text: leave them out with --as-is")
    if calibrate < 0:
        raise InputError(f"--calibrate must be 0 or more, but is {calibrate}")
    checkpoint = resolved(checkpoint)  # follows a link, since the user named it
    if resolved(out) in (checkpoint, *checkpoint.parents):
        raise InputError(f"--out {out} holds the checkpoint itself: choose another folder")
    if to == "diffusers":
        if options != Options():
            raise InputError("--to diffusers takes an expert as it is: leave out everything but --out")
        return export(checkpoint, out)
    if to == "model":
        return assemble_paris(checkpoint, out, options)
    check_out(out)
    if data is not None:
        converted = _convert_for(data, cluster, checkpoint, out, options, calibrate)
    elif cluster is not None:
        raise InputError("--cluster is of a data set: give it with --data")
    else:
        converted = convert(checkpoint, options)
        save(converted, out)
    return [*describe(converted, out), f"next: {_next_step(converted, out, data)}"]


def _convert_for(
    data: Path, cluster: int | None, checkpoint: Path, out: Path, options: Options, calibrate: int
) -> Converted:
    dataset, text = Dataset.open(data, cluster), load_text_encoder(data)
    card, shape = dataset.card, dataset.card.latent_shape
    if options.input_size not in (None, shape[1]) or options.text_dim not in (None, text.dim):
        raise InputError(
            f"--size and --text-dim are those of {data}, {shape[1]} and {text.dim}: leave them out with --data"
        )
    converted = convert(checkpoint, replace(options, text_dim=text.dim, input_size=shape[1]))
    config = converted.network.config
    if [config.in_channels, config.input_size, config.input_size] != list(shape):
        raise InputError(f"{checkpoint} takes {config.in_channels} channels, but the latents of {data} are {shape}")
    if config.text_dim not in (None, text.dim):
        raise InputError(f"{checkpoint} reads text {config.text_dim} wide, but that of {data} is {text.dim} wide")
    space = {"latent_space": card.latent_space.values(), "text_encoder": card.text.values()}
    calibration = _calibration(converted, dataset, text, calibrate) if options.as_is and calibrate > 0 else None
    save(converted, out, space, {"name": card.source.name, "cluster": cluster}, calibration)
    return converted


def _next_step(converted: Converted, out: Path, data: Path | None) -> str:
    if converted.objective is None:
        return f"atoll assemble EXPERT ... --router {out} --data DATA --out MODEL"
    starts = any(name.startswith("text_embed") for name in converted.ledger.initialised)  # text layers are untrained
    if data is not None and not starts:
        return f"atoll assemble {out} ... --data {data} --out MODEL"
    if converted.options.as_is:
        return "give --data as well, and it can be assembled with other experts"
    return f"atoll train {data or 'DATA'} --cluster K --init {out} --out EXPERT"


def _calibration(converted: Converted, data: Dataset, text: TextEncoder, num: int) -> Calibration:
    """Measures the calibration of a text-free network's x0 on held-out images of its cluster."""
    assert converted.objective is not None
    view, nothing = DatasetView(data), torch.zeros(text.dim)
    prior = TextPrior(view.mean.float(), torch.zeros(text.dim, *view.shape), nothing, nothing, 0.0)
    with torch.no_grad():
        return evaluate_expert(
            lambda x, t, *_: converted.network(x, t), converted.objective, view, text,
            torch.device("cpu"), num, min(num, 16), prior,
        ).calibration  # fmt: skip
