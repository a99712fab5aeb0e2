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
    """Convert a published checkpoint to an expert, or an expert to a model that diffusers loads.

    Supports DiT and SiT (.pt), PixArt-alpha (.pth), folders of diffusers' DiTTransformer2DModel and
    PixArtTransformer2DModel, and Paris: an expert, its router, or with --to model all of it. No code in a file is run.

    For example:
      atoll convert DiT-XL-2-256x256.pt --out init
      atoll train data --cluster 3 --init init --out expert_3
      atoll convert DiT-XL-2-256x256.pt --as-is --label 207 --data data --cluster 3 --out expert_3
      atoll convert paris --to model --out model
      atoll convert expert_3 --to diffusers --out transformer

    Args:
        checkpoint: A file or a folder.
        out: Output folder; conversion.json in it records what became of every key. Replaces only earlier conversions.
        to: expert, diffusers (a PixArtTransformer2DModel folder), or model (all of Paris).
        label: The class that a DiT or SiT is fixed to; by default none.
        as_is: Keep a DiT or SiT exactly as it is, as an expert without text, instead of preparing it for training.
        data: A prepared data set, for its latents and text encoder, so that the expert can be assembled with others.
        cluster: With --data, the number of the expert's cluster, or all.
        objective: The checkpoint's training objective, if the checkpoint does not record it: fm, ddpm, x0 or v.
        kind: dit or sit, if neither the file nor its name tells.
        fit: How AdaLN-Single is fitted to DiT's modulation: curve is best, docs/convert.md has the figures.
        text_dim: Width of the text embeddings; by default that of --data, that of the checkpoint, or 768.
        size: Side of the latents; by default that of --data, or that of the checkpoint.
        heads: Number of attention heads, if it follows neither from a config nor from the width.
        license: The checkpoint's licence, if it differs from that of the published one.
        calibrate: With --as-is and --data, the number of held-out images for the calibration; 0 for none.
        seed: Random seed for weights that the checkpoint does not have.
    """
    from atoll.cli.train import parse_cluster
    from atoll.convert import Options
    from atoll.errors import printable
    from atoll.training.convert import convert_checkpoint

    options = Options(label, as_is, text_dim, size, heads, kind, fit, objective, license, seed)
    lines = convert_checkpoint(checkpoint, out, options, to, data, parse_cluster(cluster), calibrate)
    print(*map(printable, lines), sep="\n")
