"""Does a text encoder that knows what words mean help with prompts whose words are in no caption of the data?

    atoll fetch fashion-mnist --num 5000 --out images
    python benchmarks/text.py --fashion images/fashion-mnist.tar --out run      # about 20 minutes of one core

A small monolith per text encoder and seed, on Fashion-MNIST and on the built-in avatars, all else equal. Fashion-MNIST:
the share of samples whose garment a linear classifier of `simple` features reads as asked (10% is chance), for
captions as in training, other forms of the same words, and other words. Avatars: the share in which every attribute is
right, for combinations kept from training, and the share with the right kind where another word stands for it.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from atoll.cli.main import main as atoll
from atoll.data.builtin.avatars import caption_of, combinations, is_heldout, read_avatars
from atoll.data.shards import Dataset
from atoll.encoders.codec import to_uint8
from atoll.encoders.features import make_features
from atoll.metrics.labels import Reader
from atoll.sampling.pipeline import AtollPipeline

TONES = ("dark", "grey", "light")
GARMENTS = {  # as in the captions, another form of the same word, and other words
    "t-shirt": ("a {} t-shirt", "{} t-shirts", "a {} top", "a {} undershirt"),
    "trousers": ("{} trousers", "a {} trouser", "{} pants", "{} leggings"),
    "pullover": ("a {} pullover", "{} pullovers", "a {} sweater", "a {} sweatshirt"),
    "dress": ("a {} dress", "{} dresses", "a {} gown", "a {} robe"),
    "coat": ("a {} coat", "{} coats", "a {} overcoat", "a {} raincoat"),
    "sandal": ("a {} sandal", "{} sandals", "a {} flip-flop", "{} heels"),
    "shirt": ("a {} shirt", "{} shirts", "a {} blouse", "a {} polo"),
    "sneaker": ("a {} sneaker", "{} sneakers", "a {} trainer", "a {} shoe"),
    "bag": ("a {} bag", "{} bags", "a {} handbag", "a {} backpack"),
    "ankle_boot": ("a {} ankle boot", "{} ankle boots", "{} wellingtons", "{} galoshes"),
}
KINDS = {"cat": "kitten", "robot": "android", "frog": "toad", "ghost": "phantom", "bear": "grizzly", "owl": "bird"}


def train(source: Sequence[str], name: str, text: str, seed: int, steps: int, out: Path) -> tuple[Dataset, Path]:
    """Returns the data set and the model, made unless they exist."""
    suffix = text.replace(":", "-")
    data, run, model = (out / f"{part}-{suffix}" for part in (name, f"run-{name}-{seed}", f"model-{name}-{seed}"))
    if not (data / "dataset.json").exists():
        atoll(["prepare", *source, "--text", text, "--workers", "0", "--out", str(data)])
    if not model.exists():
        options = ["--cluster", "all", "--model", "xs", "--steps", str(steps), "--seed", str(seed), "--out", str(run)]
        atoll(["train", str(data), *options])
        atoll(["assemble", str(run), "--data", str(data), "--out", str(model)])
    return Dataset.open(data), model


def sample(model: Path, prompts: Sequence[str]) -> Tensor:
    """Returns an image per prompt, in [0, 1]; the i-th has the seed i."""
    pipe = AtollPipeline.from_pretrained(model)
    seeds = list(range(len(prompts)))
    return torch.as_tensor(
        pipe(prompts, seed=seeds, num_inference_steps=16, output_type="pt", progress=False, batch_size=60).images
    )


def measure_fashion(data: Dataset, model: Path, num: int) -> list[float]:
    features = make_features("simple")
    reader = Reader.fit(data.column("features")[np.arange(len(data))].astype(np.float64), data.strings("label"))
    shares = []
    for part in (slice(0, 1), slice(1, 2), slice(2, 4)):
        cases = [
            (garment, template.format(tone))
            for garment, templates in GARMENTS.items()
            for template in templates[part]
            for tone in TONES
        ]
        cases *= max(1, num // len(cases))
        images = sample(model, [prompt for _, prompt in cases])
        labels = reader.read(features.extract(images * 2 - 1).numpy())
        shares.append(float(np.mean([label == garment for label, (garment, _) in zip(labels, cases, strict=True)])))
    return shares


def measure_avatars(model: Path, num: int) -> list[float]:
    cases = [attributes for attributes in combinations() if is_heldout(attributes)]
    random.Random(0).shuffle(cases)
    captions = [caption_of(attributes) for attributes in cases[:num]]
    others = [" ".join(KINDS.get(word, word) for word in caption.split()) for caption in captions]
    plain, other = (read_avatars(to_uint8(sample(model, prompts) * 2 - 1)) for prompts in (captions, others))
    right = np.mean([seen == asked for seen, asked in zip(plain, cases, strict=False)])
    kind = np.mean([seen["kind"] == asked["kind"] for seen, asked in zip(other, cases, strict=False)])
    return [float(right), float(kind)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fashion", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", nargs="+", default=["words", "words:256x48", "wordllama"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--num", type=int, default=240, help="samples per figure")
    args = parser.parse_args()
    print(f"{'text encoder':16}{'seed':>6}{'captions':>10}{'forms':>10}{'words':>10}{'avatars':>10}{'kinds':>10}")
    for text in args.texts:
        for seed in range(args.seeds):
            fashion = [str(args.fashion), "--near-duplicates", "keep"]
            data, model = train(fashion, "fashion", text, seed, args.steps, args.out)
            clothes = measure_fashion(data, model, args.num)
            _, model = train(["avatars", "--num", "3000"], "avatars", text, seed, args.steps, args.out)
            shares = [*clothes, *measure_avatars(model, args.num)]
            print(f"{text:16}{seed:6}" + "".join(f"{share:10.1%}" for share in shares), flush=True)


if __name__ == "__main__":
    main()
