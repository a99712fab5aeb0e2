"""Summarises a data set in a few lines and one contact sheet: `atoll inspect`."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from atoll.data.shards import Dataset, cluster_folders
from atoll.data.view import decode_rows
from atoll.plots.contact_sheet import contact_sheet
from atoll.storage import open_regular, parse_json, reason_of

ON_A_SHEET = 96
MAX_LINE = 1 << 20  # bytes of a line of rejected.jsonl


def describe(data: Dataset) -> Iterator[str]:
    """Yields lines with counts, splits, sizes, rejections and the licence."""
    card, counts, source = data.card, data.card.counts, data.card.source
    present = "" if len(data) == counts.rows else f" ({len(data)} of them here)"
    yield f"{data.folder}: {counts.rows} images{present} of {source.items} in {source.name} ({source.kind})"
    yield f"  split     {counts.train} to train on, {counts.held_out} held out"
    shape, flip = " x ".join(map(str, card.latent_shape)), ", also mirrored" if card.settings.flip else ""
    pixels = f"{card.settings.size} x {card.settings.size} pixels"
    yield f"  images    {pixels}, as latents {shape} by {card.codec.spec}{flip}"
    num_tokens, num_features = (data.column(name)[:1].shape[1] for name in ("tokens", "features"))
    several = f", up to {source.captions} captions per image" if source.captions > 1 else ""
    yield f"  text      {card.text.spec}, up to {num_tokens} tokens{several}"
    yield f"  features  {card.features.spec}, {num_features} numbers"
    size = sum(shard.path.stat().st_size for shard in data.shards)
    yield f"  on disk   {size / 1e6:.1f} MB, {size / len(data):.0f} bytes per image"
    yield f"  license   {card.license}"
    yield f"  rejected  {counts.rejected}"
    for reason, num in _reasons(data.folder).most_common(8):
        yield f"            {num:7} {reason}"
    clusters = cluster_folders(data.folder)
    if clusters:
        sizes = ", ".join(str(len(Dataset.open(data.folder, cluster))) for cluster in clusters)
        yield f"  clusters  {len(clusters)}: {sizes}"
    for caption in data.strings("caption", range(min(3, len(data)))):
        yield f"  caption   {''.join(filter(str.isprintable, caption[:100]))}"


def _reasons(folder: Path) -> Counter[str]:
    """Returns the number of rejected images for each reason."""
    reasons = Counter[str]()
    try:
        with open_regular(folder / "rejected.jsonl") as file:
            while line := file.readline(MAX_LINE):
                reasons[str(parse_json(line)["reason"]).split(" (")[0][:200]] += 1
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError) as error:
        reasons[f"of them: rejected.jsonl cannot be read ({reason_of(error)})"] += 1
    return reasons


def draw_sheet(data: Dataset, seed: int = 0) -> Image.Image:
    """Returns a contact sheet of images chosen at random."""
    rows = np.sort(np.random.default_rng(abs(seed)).choice(len(data), min(ON_A_SHEET, len(data)), replace=False))
    captions = data.strings("caption", rows[:2])
    return contact_sheet(decode_rows(data, rows), f"{data.folder.name}: {len(data)} images", captions)
