"""Can an expert of a kind that no other expert has seen join through the store, and leave without a trace?

    python benchmarks/federation_hot_add.py walk --data demo/data

A newcomer brings images of a new kind of character to the federation that benchmarks/federation_walk.py left in WALK:
bats, which are owls that hang upside down, so that the demo's reader can read them after a rotation. Neither the codec,
nor the router, nor any expert has seen one. They open a slot, train and submit an expert, and two verifiers accept it;
nothing else is trained. Later the same verifiers remove it. The report is the share of images in which every attribute
of the prompt is right, each time with the model that anyone gets from the store.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hashlib
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from federation_walk import World, finish
from PIL import Image

from atoll.data.builtin import make
from atoll.data.builtin.avatars import attributes_of, draw_avatar
from atoll.data.shards import Dataset, cluster_folders
from atoll.experiments.demo import FULL, SIZE, Judge
from atoll.experiments.images import bytes_of
from atoll.federation.roles import url_of
from atoll.metrics.labels import are_right
from atoll.sampling.assemble import find_model
from atoll.sampling.pipeline import AtollPipeline
from atoll.storage import write_json

KIND, NEW = "owl", "bat"
NUM_OTHERS, NUM_NEW, NUM_UNSEEN = 200, 100, 40  # prompts
STEPS = 400  # of the new expert
BATCH = 100


def draw_bats(captions: list[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(9)
    for i, caption in enumerate(captions):
        Image.fromarray(draw_avatar(attributes_of(caption), SIZE, rng)[::-1]).save(folder / f"{i:06d}.png")
        (folder / f"{i:06d}.txt").write_text(renamed(caption))


def renamed(caption: str) -> str:
    return caption.replace(f" {KIND} ", f" {NEW} ")


def measure(model: Path, prompts: dict[str, list[str]]) -> dict[str, Any]:
    """Returns the share of images with every attribute right, and the hashes of model and latents."""
    pipe = AtollPipeline(model)
    found: dict[str, Any] = {"hash": pipe.index.hash}
    for name, texts in prompts.items():
        asked = [renamed(text) if name.startswith("new") else text for text in texts]
        latents = pipe(
            asked, seed=list(range(len(texts))), output_type="latent", batch_size=BATCH, progress=False
        ).images
        assert isinstance(latents, torch.Tensor)
        images = np.concatenate([bytes_of(pipe.render(part, "pt")) for part in latents.split(BATCH)])
        if name.startswith("new"):
            images = np.ascontiguousarray(images[:, ::-1])
        found[name] = {
            "right": float(np.mean(are_right(images, texts))),
            "latents": hashlib.sha256(latents.numpy().tobytes()).hexdigest(),
        }
    return found


def main(walk: Annotated[Path, tyro.conf.Positional], data: Path, url: str | None = None) -> None:
    """Adds an expert to a federation, and removes it.

    Args:
        walk: The output folder of benchmarks/federation_walk.py.
        data: The data set of that federation.
        url: URL of its store; WALK/store by default.
    """
    torch.set_num_threads(1)
    world = World(walk, url_of(url or walk / "store"))
    own = [text for text in Dataset.open(data).strings("caption") if KIND in text.split()]
    draw_bats(own, walk / "bats")
    unseen = dict.fromkeys(example.caption for example in make("avatars", 400, SIZE, seed=1, heldout="only"))
    judge = Judge(data, FULL)
    prompts = {
        "others": judge.seen[:NUM_OTHERS],
        "new kind": sorted(set(own))[:NUM_NEW],
        "new kind, unseen": [text for text in unseen if KIND in text.split()][:NUM_UNSEEN],
    }
    results = {}

    def look(name: str) -> None:
        os.environ |= world.environment("eve")
        results[name] = measure(find_model(world.url), prompts)
        print(f"{name:10}", *(f"{key} {results[name][key]['right']:6.1%}" for key in prompts), sep="  ", flush=True)
        write_json(walk / "hot_add.json", results)

    look("before")
    print(world.run("fred", "join", "--name", "fred", "--data", walk / "bats", "--new-slot"))
    print(world.run("fred", "train", "--steps", STEPS).splitlines()[-2])
    print(*map(finish, [world.start(name, "verify") for name in ("vera", "walt")]), sep="\n")
    look("with it")
    slot = len(cluster_folders(data))  # the first one that is not in the charter
    for name in ("vera", "walt"):
        print(world.run(name, "rollback", slot, "--to", "none"))
    look("after")
    print(f"before and after: {'equal to the bit' if results['before'] == results['after'] else 'DIFFERENT'}")
    same = results["before"]["others"]["latents"] == results["with it"]["others"]["latents"]
    print(f"images of other kinds with it: {'the same to the bit' if same else 'others'}")


if __name__ == "__main__":
    tyro.cli(main)
