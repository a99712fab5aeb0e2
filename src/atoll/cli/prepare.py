"""`atoll prepare`."""

from functools import partial
from typing import Annotated

import tyro

from atoll.data.settings import PrepareSettings
from atoll.engines.settings import EngineSettings


def prepare(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")],
    out: str,
    settings: Annotated[PrepareSettings, tyro.conf.arg(name="")],
    num: int | None = None,
    template: str | None = None,
    caption_column: str | None = None,
    seed: int = 0,
    workers: int | None = None,
    device: str = "auto",
    engine: Annotated[EngineSettings, tyro.conf.arg(name="")] = EngineSettings(),  # noqa: B008
    recipe: str | None = None,
) -> None:
    """Encode images and captions as a data set for training. Rerun the command to resume.

    For example:
      atoll prepare avatars --num 4000 --out data
      atoll prepare photos/ --recipe photos --out data
      atoll prepare tars/ --size 256 --codec vae:stabilityai/sd-vae-ft-mse \\
        --text clip:openai/clip-vit-large-patch14 --features dino:facebook/dinov2-large --out data
      atoll prepare flowers/ --template "a photo of a {label}" --out data
      atoll prepare s3://bucket/photos --out s3://bucket/data
      atoll prepare s3://bucket/photos --engine ray --out s3://bucket/data

    Args:
        source: A folder of images (NAME.txt or NAME.json beside NAME.jpg; metadata.jsonl, .csv or .parquet with
            file_name and caption; captions.txt or results.csv as in Flickr8k; captions_*.json as in COCO; class
            folders with --template), a folder of WebDataset .tar files, Parquet or Arrow files, or one of the built-in
            avatars, shapes, digits. Folders and files may also be in an object store: s3://, gs:// or az://.
        out: Output folder, or its URL in an object store.
        settings: How images are prepared.
        num: How many images: the first ones of a built-in data set; of any other source a random selection, which
            depends on SEED and the images' names but not on their order. The usual filters then apply to them.
        template: Makes captions from folder names: "a photo of a {label}".
        caption_column: The key or column with captions: by default the first of caption, text, prompt, description.
            A list of texts, or several rows per image, are several captions, of which each training step draws one.
        seed: Random seed of a built-in data set, or for selecting NUM images of any other source.
        workers: Number of processes that read images; one per core by default, 0 for none.
        device: Where codec and features are computed: auto, cpu or cuda.
        engine: Where images are read and encoded; with Ray, on all nodes of the cluster. Shards are written here.
        recipe: A built-in recipe, such as photos, or a TOML file with settings in its table [prepare]; flags
            override it.
    """
    from atoll.data.prepare import prepare as make
    from atoll.data.sources import Source
    from atoll.engines.engine import encode

    del recipe  # read before the flags were: main.py
    place = Source(source, template, num, settings.size, seed, caption_column)
    elsewhere = partial(encode, engine.open(device)) if engine.engine == "ray" else None
    card = make(place, out, settings, workers, device=device, run_elsewhere=elsewhere)
    counts, shape = card.counts, "x".join(map(str, card.latent_shape))
    print(f"{out}: {counts.rows} images ({counts.held_out} held out), {counts.rejected} rejected, latents {shape}")
    if counts.rejected:
        print(f"why: {out.rstrip('/')}/rejected.jsonl")
    print(f"next: atoll partition {out} --experts 4")
