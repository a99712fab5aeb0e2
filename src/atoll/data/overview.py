"""What a data set holds, in a few lines and one picture: `atoll inspect`."""

import json
from collections import Counter
from collections.abc import Iterator

import numpy as np
from PIL import Image

from atoll.data.shards import Dataset
from atoll.data.sheets import contact_sheet, decode_rows

ON_A_SHEET = 96


def describe(data: Dataset) -> Iterator[str]:
    """Counts, splits, sizes, what was rejected, the licence."""
    about, counts = data.about, data.about["counts"]
    source, settings = about["source"], about["settings"]
    yield f"{data.folder}: {counts['rows']} pictures of {source['items']} in {source['name']} ({source['kind']})"
    yield f"  split     {counts['train']} to train on, {counts['held_out']} held out"
    shape = " x ".join(map(str, about["latent_shape"]))
    yield f"  pictures  {settings['size']} x {settings['size']} pixels, as latents {shape} by {about['codec']['spec']}"
    tokens, features = data.column("tokens"), data.column("features")
    lengths = (tokens[: min(len(tokens), 10_000)] != 0).sum(1)
    yield f"  text      {about['text']['spec']}, {lengths.mean():.1f} of {tokens.parts[0].shape[1]} tokens used (mean)"
    yield f"  features  {about['features']['spec']}, {features.parts[0].shape[1]} numbers"
    size = data.size_on_disk()
    yield f"  on disk   {size / 1e6:.1f} MB, {size / len(data):.0f} bytes a picture"
    yield f"  license   {about['license']}"
    yield f"  rejected  {counts['rejected']}"
    reasons = Counter[str]()
    with (data.folder / "rejected.jsonl").open(encoding="utf-8") as file:
        for line in file:
            reasons[json.loads(line)["reason"].split(" (")[0]] += 1
    for reason, num in reasons.most_common(8):
        yield f"            {num:7} {reason}"
    clusters = sorted((data.folder / "clusters").glob("[0-9]*"))
    if clusters:
        sizes = ", ".join(str(len(Dataset.open(data.folder, int(cluster.name)))) for cluster in clusters)
        yield f"  clusters  {len(clusters)}: {sizes}"
    yield "  captions  " + " | ".join(data.texts("caption", range(min(3, len(data)))))


def draw_sheet(data: Dataset, seed: int = 0) -> Image.Image:
    """A contact sheet of pictures chosen at random."""
    rows = np.sort(np.random.default_rng(seed).choice(len(data), min(ON_A_SHEET, len(data)), replace=False))
    captions = data.texts("caption", rows[:2])
    return contact_sheet(decode_rows(data, rows), f"{data.folder.name}: {len(data)} pictures", captions)
