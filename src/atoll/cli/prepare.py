"""`atoll prepare`."""

from pathlib import Path
from typing import Annotated

import tyro


def prepare(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")],
    out: Path,
    size: int = 32,
    num: int | None = None,
    codec: str = "pca",
    text: str = "words",
    features: str = "simple",
    template: str | None = None,
    holdout: float = 0.05,
    near_duplicates: str = "auto",
    min_side: int | None = None,
    max_aspect: float = 4.0,
    license: str = "unknown",
    seed: int = 0,
    workers: int | None = None,
    device: str = "auto",
) -> None:
    """Make a data set of images with captions. Rerun the command to resume.

    For example:
      atoll prepare avatars --num 4000 --out data
      atoll prepare photos/ --size 64 --features efficientnet --out data
      atoll prepare tars/ --size 256 --codec vae:stabilityai/sd-vae-ft-mse \\
        --text clip:openai/clip-vit-large-patch14 --features dino:facebook/dinov2-large --out data
      atoll prepare flowers/ --template "a photo of a {label}" --out data

    Args:
        source: A folder of images (NAME.txt beside NAME.jpg, or metadata.jsonl / .csv with file_name and text, or
            class folders with --template), a folder of WebDataset .tar files, Parquet or Arrow files, or one of the
            built-in avatars, shapes, digits.
        out: The folder to make.
        size: Images are scaled and cropped to SIZE x SIZE pixels.
        num: How many images: the first of a built-in data set; of any other source a random choice, by SEED and
            their names, whatever their order. Some of these may still be left out, as any others.
        codec: pixels, pca, pca:8x40 (8x8 patches as 40 numbers), vae:HUB_ID_OR_FOLDER, or saved:DATA for that of
            another data set.
        text: words, or clip:HUB_ID_OR_FOLDER.
        features: What images are clustered by: simple, efficientnet, efficientnet:SIZE,
            dino:HUB_ID_OR_FOLDER or clip:HUB_ID_OR_FOLDER.
        template: Makes captions of folder names: "a photo of a {label}".
        holdout: The share of images kept from training, chosen by their content.
        near_duplicates: drop or keep them; auto drops, but keeps those of a built-in data set.
        min_side: Images with a shorter side are left out; half of SIZE by default.
        max_aspect: Images that are longer than this times their width are left out.
        license: Goes into dataset.json and travels with all that is made of the data.
        seed: Of a built-in data set, and of the choice of NUM images of any other.
        workers: Processes that read images; one per core by default, 0 for none.
        device: Where codec and features are computed: auto, cpu or cuda.
    """
    from atoll.data.prepare import PrepareSettings
    from atoll.data.prepare import prepare as make
    from atoll.data.sources import Source

    settings = PrepareSettings(size, codec, text, features, holdout, near_duplicates, min_side, max_aspect, license)
    place = Source(source, template, num, size, seed)
    card = make(place, out, settings, workers, device=device)
    counts, shape = card.counts, "x".join(map(str, card.latent_shape))
    print(f"{out}: {counts.rows} images ({counts.held_out} held out), {counts.rejected} rejected, latents {shape}")
    if counts.rejected:
        print(f"why: {out / 'rejected.jsonl'}")
    print(f"next: atoll partition {out} --experts 4")
