"""`atoll convert`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro


def convert(
    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")],
    out: Path,
    to: Literal["expert", "diffusers", "model"] = "expert",
    label: int | None = None,
    as_is: bool = False,
    data: Path | None = None,
    cluster: str = "all",
    objective: str | None = None,
    kind: Literal["dit", "sit"] | None = None,
    fit: Literal["curve", "mean", "point"] = "curve",
    text_dim: int | None = None,
    size: int | None = None,
    heads: int | None = None,
    license: str | None = None,
    calibrate: int = 128,
    seed: int = 0,
) -> None:
    """Make an expert of a published checkpoint, or of an expert what diffusers loads.

    Known are DiT and SiT (.pt), PixArt-alpha (.pth), the folders of diffusers' DiTTransformer2DModel and
    PixArtTransformer2DModel, and Paris: an expert, its router, or with --to model all of it. No code in a file is run.

    For example:
      atoll convert DiT-XL-2-256x256.pt --out init
      atoll train data --cluster 3 --init init --out expert_3
      atoll convert DiT-XL-2-256x256.pt --as-is --label 207 --data data --cluster 3 --out expert_3
      atoll convert paris --to model --out model
      atoll convert expert_3 --to diffusers --out transformer

    Args:
        checkpoint: A file or a folder.
        out: The folder to make; conversion.json in it says what became of every key. Nothing else is written over.
        to: expert, diffusers (a PixArtTransformer2DModel's folder), or model (of all of Paris).
        label: The class that a DiT or SiT shall make pictures of; by default none.
        as_is: Keep a DiT or SiT exactly as it is, an expert without text, rather than a start for training.
        data: A prepared data set, for its latents and texts: then the expert can be assembled with others.
        cluster: With --data, the number of the cluster that the expert answers for, or all.
        objective: What a checkpoint was trained on, where it does not say: fm, ddpm, x0 or v.
        kind: dit or sit, where neither the file nor its name tells.
        fit: How AdaLN-Single takes the place of DiT's modulation: curve is best, docs/convert.md has the figures.
        text_dim: Width of the texts to come; by default as in --data, as the checkpoint reads, or 768.
        size: Side of the latents; by default as in --data, or as the checkpoint takes.
        heads: Of attention, where neither a config nor the width tells.
        license: The checkpoint's, if it is not that of the published one.
        calibrate: With --as-is and --data, how many held-out pictures show how far it can be trusted; 0 for none.
        seed: Of weights that the checkpoint does not have.
    """
    from atoll.convert import Wanted
    from atoll.errors import InputError, printable
    from atoll.storage import resolved

    wanted = Wanted(label, as_is, text_dim, size, heads, kind, fit, objective, license, seed)
    if to != "expert" and (data is not None or cluster != "all"):
        raise InputError(f"--data and --cluster are for --to expert, not --to {to}: leave them out")
    if as_is and (text_dim is not None or fit != "curve"):
        raise InputError("--text-dim and --fit are for an expert that shall read text: leave them out with --as-is")
    if calibrate < 0:
        raise InputError(f"--calibrate must be 0 or more, but is {calibrate}")
    checkpoint = resolved(checkpoint)  # a link is followed, for the user has named it
    if resolved(out) in (checkpoint, *checkpoint.parents):
        raise InputError(f"--out {out} holds the checkpoint itself: choose another folder")
    if to == "diffusers":
        from atoll.convert.diffusers_export import export

        if wanted != Wanted():
            raise InputError("--to diffusers takes an expert as it is: leave out everything but --out")
        print(*map(printable, export(checkpoint, out)), sep="\n")
        return
    if to == "model":
        from atoll.sampling.paris import assemble_paris

        print(*map(printable, assemble_paris(checkpoint, out, wanted)), sep="\n")
        return
    print(*map(printable, _make_expert(checkpoint, out, wanted, data, cluster, calibrate)), sep="\n")


def _make_expert(
    checkpoint: Path, out: Path, wanted: Any, data: Path | None, cluster: str, calibrate: int
) -> list[str]:
    from dataclasses import replace

    from atoll.cli.train import parse_cluster
    from atoll.convert import check_out, convert, describe, save
    from atoll.errors import InputError

    check_out(out)
    number = parse_cluster(cluster)
    if data is None:
        if number is not None:
            raise InputError("--cluster is of a data set: give it with --data")
        converted = convert(checkpoint, wanted)
        save(converted, out)
        next_step = f"next: atoll train DATA --cluster K --init {out} --out EXPERT"
    else:
        from atoll.data.shards import Dataset
        from atoll.encoders.text import load_text_encoder

        dataset = Dataset.open(data, number)
        about = dataset.about
        shape, text = about["latent_shape"], load_text_encoder(data).dim
        if wanted.input_size not in (None, shape[1]) or wanted.text_dim not in (None, text):
            raise InputError(
                f"--size and --text-dim are those of {data}, {shape[1]} and {text}: leave them out with --data"
            )
        converted = convert(checkpoint, replace(wanted, text_dim=text, input_size=shape[1]))
        config = converted.network.config
        if [config.in_channels, config.input_size, config.input_size] != list(shape):
            raise InputError(f"{checkpoint} takes {config.in_channels} channels, but the latents of {data} are {shape}")
        if config.text_dim not in (None, text):
            raise InputError(f"{checkpoint} reads text {config.text_dim} wide, but that of {data} is {text} wide")
        space = {"latent_space": {"shape": list(shape), "codec": about["codec"]}, "text_encoder": about["text"]}
        calibration = _calibrated(converted, dataset, calibrate) if wanted.as_is and calibrate > 0 else None
        save(converted, out, space, {"name": about["source"]["name"], "cluster": number}, calibration)
        next_step = f"next: atoll assemble {out} ... --data {data} --out MODEL"
        if any(name.startswith("text_embed") for name in converted.ledger.started):
            next_step = f"next: atoll train {data} --cluster K --init {out} --out EXPERT"
    if converted.objective is None:
        next_step = f"next: atoll assemble EXPERT ... --router {out} --data DATA --out MODEL"
    elif wanted.as_is and data is None:
        next_step = "next: give --data as well, and it can be assembled with other experts"
    return [*describe(converted, out), next_step]


def _calibrated(converted: Any, data: Any, num: int) -> Any:
    """How far the x0 of a network without text can be trusted, on held-out pictures of the data it shall answer for."""
    import torch
    from torch import Tensor, nn

    from atoll.data.view import Rows
    from atoll.encoders.text import load_text_encoder
    from atoll.networks.text_prior import TextPrior
    from atoll.training.calibrate import judge

    class Deaf(nn.Module):
        def forward(self, x: Tensor, t: Tensor, text: Tensor, mask: Tensor) -> Tensor:
            found: Tensor = converted.network(x, t)
            return found

    rows, text = Rows(data), load_text_encoder(data.folder)
    nothing = torch.zeros(text.dim)
    silent = TextPrior(rows.mean.float(), torch.zeros(text.dim, *rows.shape), nothing, nothing, 0.0)
    with torch.no_grad():
        found = judge(Deaf(), converted.objective, rows, text, torch.device("cpu"), num, min(num, 16), silent)
    return found.calibration
