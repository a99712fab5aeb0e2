"""The page of a model on the Hugging Face hub: README.md, which starts with the hub's metadata."""

import json
import os
from pathlib import Path

from atoll.cards import ExpertCard, ModelIndex
from atoll.errors import printable
from atoll.storage import read_bytes, write_text

README, SAMPLES = "README.md", "samples.png"
CREDITS = "CREDITS.md"  # who trained what, written by a federation
MAX_README = 1 << 20
TEXT = """
# {title}
{samples}
A text-to-image model of {experts}, each trained in isolation on its own cluster of the data and mixed by a router at
sampling time, as in [decentralized diffusion models](https://arxiv.org/abs/2603.06741). It was assembled by Atoll.

    pip install atoll
    atoll sample THIS_MODEL "a prompt"

```python
from atoll import AtollPipeline

pipe = AtollPipeline.from_pretrained("THIS_MODEL")
pipe("a prompt", seed=0).images[0].save("image.png")
```

## Who trained what

| expert | objective | data | cluster | images | samples seen | held-out loss | licence |
|---|---|---|---|---|---|---|---|
{rows}

Images are {side} x {side} pixels. Codec: `{codec}`; text encoder: `{text}`. Licence of the whole: {license}.

Hash of the model: `{hash}`.
"""


def model_card(folder: Path, index: ModelIndex, samples: bool = False) -> str:
    """Returns the page of the model in `folder`; with `samples`, it shows samples.png."""
    rows, datasets, bases = [], [], []
    for part in index.experts:
        if part is None or not (folder / part.folder).is_dir():
            rows.append("| missing | | | | | | | |")
            continue
        card = ExpertCard.read(folder / part.folder)
        data, training = card.data, card.training or {}
        held_out = training.get("held_out")
        loss = held_out.get("loss") if isinstance(held_out, dict) else None
        cells = [part.folder, part.objective.name, data and data.name, part.cluster, data and data.pictures,
                 training.get("samples"), f"{loss:.4f}" if isinstance(loss, float) else None, card.license]  # fmt: skip
        rows.append("| " + " | ".join("" if value is None else cell(value) for value in cells) + " |")
        datasets += [data.name] if data and data.name else []
        bases += [str(card.init["name"])] if card.init and "name" in card.init else []
    head = {
        "library_name": "atoll",
        "pipeline_tag": "text-to-image",
        "license": index.license if " " not in index.license and index.license != "unknown" else "other",
        "datasets": sorted(set(datasets)),
        "base_model": sorted(set(bases)),
        "tags": ["diffusion", "decentralized-diffusion", "mixture-of-experts"],
    }
    lines = [f"{key}: {printable(json.dumps(value, ensure_ascii=False))}" for key, value in head.items() if value]
    space = index.latent_space
    num = index.num_experts
    text = TEXT.format(
        title="A decentralized diffusion model" if num > 1 else "A diffusion model",
        samples=f"\n![what it makes]({SAMPLES})\n" if samples else "",
        experts=f"{num} experts" if num > 1 else "one expert",
        rows="\n".join(rows), side=space.shape[1] * space.codec.factor, codec=cell(space.codec.spec),
        text=cell(index.text_encoder.spec), license=cell(index.license), hash=index.hash,
    )  # fmt: skip
    return "\n".join(["---", *lines, "---", text])


def cell(value: object) -> str:
    """Returns an untrusted value as one table cell, without markup or line breaks."""
    return printable(str(value), 200).translate({ord(mark): f"\\{mark}" for mark in "|`[]<>*_"})


def write_model_card(folder: Path, index: ModelIndex, out: Path | None = None) -> None:
    """Writes the page, to `out` or to the folder itself, unless someone has edited it."""
    out = out or folder
    if is_ours(folder, index) or not os.path.lexists(folder / README):
        write_text(out / README, model_card(folder, index, (out / SAMPLES).is_file()))


def has_its_credits(folder: Path, index: ModelIndex) -> bool:
    """Returns whether CREDITS.md belongs to the model in the folder, by its hash."""
    try:
        return f"`{index.hash}`" in read_bytes(folder / CREDITS, MAX_README).decode()
    except (OSError, ValueError):
        return False


def is_ours(folder: Path, index: ModelIndex) -> bool:
    """Returns whether README.md is unchanged since `write_model_card` wrote it."""
    try:
        page = read_bytes(folder / README, MAX_README).decode()
        return page in (model_card(folder, index, samples) for samples in (False, True))
    except (OSError, ValueError):
        return False
