"""Can an expert join and leave without a router that was trained with it?

    python benchmarks/hot_add.py --out hot_add [--kind owl] [--seed 0] [--quick]

Avatars without one kind of character are prepared, partitioned and trained as in `atoll demo`: four experts, one of
them DDPM, and a router. That kind alone is another data set with the same codec; its expert joins by the statistics on
its card, without training a router. The report is the share of images in which every attribute of the prompt is right:
before, with the new expert, after it has left, and with a router made from the cards alone. Rerun it to resume.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.cards import PARTITION, PartitionCard
from atoll.data.builtin import make
from atoll.data.download import write_samples
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.shards import Dataset
from atoll.data.sources import Source
from atoll.engines.local import Local
from atoll.engines.train_all import Part
from atoll.experiments.demo import BALANCE, FULL, LICENSE, NUM_EXPERTS, QUICK, SIZE, Plan
from atoll.experiments.graph import ModelNode, train
from atoll.experiments.images import bytes_of
from atoll.metrics.labels import are_right
from atoll.partition.partition import partition, place_in
from atoll.sampling.assemble import assemble
from atoll.sampling.folder import png_of
from atoll.sampling.pipeline import AtollPipeline
from atoll.storage import write_json, write_whole

BATCH = 100
NUM_OTHERS, NUM_NEW, NUM_UNSEEN = 200, 100, 40  # prompts
NEW_STEPS = 400  # of the new expert: one kind is learned faster than a cluster of several


def make_data(out: Path, pictures: int, kind: str) -> tuple[Path, Path]:
    """Returns the partitioned data set without the kind, and the data set of the kind alone, as a single cluster."""
    examples = list(make("avatars", pictures, SIZE, heldout="exclude"))
    old, new = out / "data", out / "new"
    for folder, own, codec in ((old, False, "pca"), (new, True, f"saved:{old}")):
        if (folder / "clusters" / PARTITION).exists():
            continue
        chosen = [example for example in examples if (kind in example.caption.split()) == own]
        samples = ((f"{i:06d}", png_of(example.image), example.caption) for i, example in enumerate(chosen))
        tar = out / f"{folder.name}.tar"
        write_whole(tar, partial(write_samples, samples=samples))
        prepare(Source(str(tar)), folder, PrepareSettings(SIZE, codec, near_duplicates="keep", license=LICENSE), 0,
                progress=False)  # fmt: skip
        if own:
            place_in(folder, NUM_EXPERTS, progress=False)
        else:
            partition(folder, NUM_EXPERTS, cap=BALANCE, progress=False)
    return old, new


def plan_parts(out: Path, old: Path, new: Path, plan: Plan, seed: int) -> tuple[list[Part], Part]:
    """Returns the parts trained without the kind, the router last, and the kind's expert."""
    sizes = PartitionCard.read(old / "clusters").sizes
    ddpm = min(range(NUM_EXPERTS), key=lambda k: sizes[k])
    every: dict[str, Any] = {"save_every": 50, "keep_every": 50, "seed": seed}  # checkpoints, for benchmarks/replay.py
    parts = [
        Part(
            f"expert {k}",
            out / "run" / f"expert_{k}",
            replace(plan.ddpm if k == ddpm else plan.expert, **every),
            old,
            k,
        )
        for k in range(NUM_EXPERTS)
    ]
    router = Part("router", out / "run" / "router", replace(plan.router, seed=seed), old)
    own = replace(plan.expert, steps=min(plan.expert.steps, NEW_STEPS), **every)
    added = Part("new expert", out / "new_expert", own, new, NUM_EXPERTS)
    return [*parts, router], added


def prompts_of(old: Path, new: Path, kind: str) -> dict[str, list[str]]:
    """Returns training captions of the kind and of all others, and captions of unseen combinations."""
    rng, chosen = np.random.default_rng(0), {}
    for name, data, num in (("others", old, NUM_OTHERS), ("new kind", new, NUM_NEW)):
        captions = sorted(set(Dataset.open(data).strings("caption")))
        chosen[name] = [captions[i] for i in rng.choice(len(captions), min(num, len(captions)), replace=False)]
    unseen = dict.fromkeys(example.caption for example in make("avatars", 400, SIZE, seed=1, heldout="only"))
    for name, own in (("others, unseen", False), ("new kind, unseen", True)):
        chosen[name] = [text for text in unseen if (kind in text.split()) == own][:NUM_UNSEEN]
    return chosen


def measure(model: Path, prompts: dict[str, list[str]]) -> dict[str, Any]:
    """Returns the share of images with every attribute right, and of evaluations routed to the last expert."""
    pipe = AtollPipeline(model)
    found: dict[str, Any] = {}
    for name, texts in prompts.items():
        made = pipe(texts, seed=list(range(len(texts))), output_type="latent", batch_size=BATCH, progress=False)
        latents = made.images
        assert isinstance(latents, torch.Tensor)
        images = np.concatenate([bytes_of(pipe.render(part, "pt")) for part in latents.split(BATCH)])
        led = [trace.shares[-1] for trace in made.trace]
        found[name] = {
            "right": float(np.mean(are_right(images, texts))),
            "led by the last expert": float(np.mean(led)),
            "latents": hashlib.sha256(latents.numpy().tobytes()).hexdigest(),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", default="owl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny networks: the figures mean nothing")
    options = parser.parse_args()
    out, plan = options.out, QUICK if options.quick else FULL
    torch.set_num_threads(1)
    old, new = make_data(out, plan.pictures * 6 // 5, options.kind)
    parts, added = plan_parts(out, old, new, plan, options.seed)
    train([ModelNode(out / "before", old, tuple(parts)), ModelNode(out / "with", old, (added,))], Local("cpu"))
    *experts, router = (part.folder for part in parts)
    prompts = prompts_of(old, new, options.kind)
    models = {
        "before": ([*experts], router),
        "with it": ([*experts, added.folder], router),
        "after": ([*experts], router),
        "with it, router from cards": ([*experts, added.folder], None),
        "router from cards": ([*experts], None),
    }
    results = {}
    for name, (folders, own) in models.items():
        folder = out / "models" / name.replace(", ", "-").replace(" ", "-")
        index = assemble(folders, own, folder, old, from_cards=own is None)
        results[name] = {"hash": index.hash, **measure(folder, prompts)}
        line = "  ".join(f"{key} {results[name][key]['right']:6.1%}" for key in prompts)
        print(f"{name:28} {line}", flush=True)
        write_json(out / "results.json", results)
    same = results["before"] == results["after"]
    print(f"before and after: {'equal to the bit' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
