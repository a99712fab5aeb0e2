"""`atoll convert`."""

from pathlib import Path
from typing import Annotated, Literal

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
    """Turn a published checkpoint into an expert, or an expert into a model that diffusers loads.

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
        label: The class that a DiT or SiT shall make images of; by default none.
        as_is: Keep a DiT or SiT exactly as it is, an expert without text, rather than a start for training.
        data: A prepared data set, for its latents and text encoder: then the expert can be assembled with others.
        cluster: With --data, the number of the cluster that the expert answers for, or all.
        objective: What a checkpoint was trained on, where it does not say: fm, ddpm, x0 or v.
        kind: dit or sit, where neither the file nor its name tells.
        fit: How AdaLN-Single takes the place of DiT's modulation: curve is best, docs/convert.md has the figures.
        text_dim: Width of the text embeddings to come; by default as in --data, as the checkpoint reads, or 768.
        size: Side of the latents; by default as in --data, or as the checkpoint takes.
        heads: Of attention, where neither a config nor the width tells.
        license: The checkpoint's, if it is not that of the published one.
        calibrate: With --as-is and --data, how many held-out images show how far it can be trusted; 0 for none.
        seed: Of weights that the checkpoint does not have.
    """
    from atoll.cli.train import parse_cluster
    from atoll.convert import Options
    from atoll.errors import printable
    from atoll.training.convert import convert_checkpoint

    options = Options(label, as_is, text_dim, size, heads, kind, fit, objective, license, seed)
    lines = convert_checkpoint(checkpoint, out, options, to, data, parse_cluster(cluster), calibrate)
    print(*map(printable, lines), sep="\n")
