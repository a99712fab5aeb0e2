"""What a model of photographs gets out of the same CPU time, by its codec, text encoder, network and optimizer.

    atoll fetch cifar-10 --num 6000 --out images
    atoll prepare images/cifar-10.tar --size 32 --codec pca:plain --near-duplicates keep --out old
    atoll prepare images/cifar-10.tar --size 32 --recipe photos --codec pca:4x12:lapped --near-duplicates keep --out new
    python benchmarks/photos.py images/cifar-10.tar laptop=old photos=new --seconds 150 --seeds 3 --out run

Trains a monolith of each KIND on its DATA for as many steps as take SECONDS of one core, and makes images of captions
with guidance 2. Steps are timed in turns, so that a busy machine slows all kinds alike, and printed; KIND=DATA@STEPS
gives them, so that seeds can be trained side by side (--first-seed) for as long.
KD is the kernel distance on EfficientNet features to the photographs themselves, at the data's size; *label* is the
share of images in which a linear classifier of these features, fitted to the photographs, sees the prompt's label; the
seam ratio is that of benchmarks/codec.py. RUN/KIND-SEED.png has the first 48 images, uncurated.
A kind whose model is in RUN already is measured, not trained again.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from codec import seam_ratio
from numpy.typing import NDArray

from atoll.data.images import Transform
from atoll.data.prepare import count
from atoll.data.shards import Dataset
from atoll.data.sources import Source, readers
from atoll.encoders.codecs import load_codec
from atoll.encoders.features import Features, make_features
from atoll.experiments.images import bytes_of, tensor_of
from atoll.metrics.kernel import kernel_distance
from atoll.metrics.labels import Reader
from atoll.networks.expert import Expert
from atoll.plots.canvas import save_image
from atoll.plots.contact_sheet import contact_sheet
from atoll.sampling.assemble import assemble
from atoll.sampling.pipeline import AtollPipeline
from atoll.training.distributed import Distributed
from atoll.training.expert import ExpertTask, train_expert
from atoll.training.loop import Learner
from atoll.training.settings import ExpertSettings, read_recipe
from atoll.training.task import Batches

LONG = 10**9
PHOTOS, LAPTOP = read_recipe("photos", ExpertSettings), read_recipe("laptop", ExpertSettings)
KINDS = {
    "laptop": LAPTOP,
    "photos": PHOTOS,
    "adamw": replace(PHOTOS, optimizer="adamw"),
    "not-local": replace(PHOTOS, model="96x4/1"),
    "logit-normal": replace(PHOTOS, objective="fm-logit-normal"),
    "wide": replace(PHOTOS, model="mini/1:local"),
    "coarse": replace(PHOTOS, model="96x4/2:local"),
}
LIMIT = 2600  # photographs that models are compared with


class Reference(NamedTuple):
    """Photographs as features, and a reader of labels fitted to most of them."""

    features: NDArray[np.float32]
    labels: list[str]
    reader: Reader
    share_read: float  # of labels of the photographs that it was not fitted to


def read_reference(place: str, size: int, network: Features) -> Reference:
    _, items = count(Source(place, "{label}", LIMIT), LIMIT, progress=False)
    with readers(0, Transform(size, 1, 4.0), 64) as read:
        samples = [(image.pixels, item.label) for item, image in read(items) if image is not None]
    np.random.default_rng(0).shuffle(samples)
    features = network.extract(tensor_of(np.stack([pixels for pixels, _ in samples]))).numpy()
    labels, half = [label for _, label in samples], len(samples) // 2
    reader = Reader.fit(features[:half], labels[:half])
    seen = reader.read(features[half:])
    right = float(np.mean([a == b for a, b in zip(seen, labels[half:], strict=True)]))
    return Reference(features, labels, Reader.fit(features, labels), right)


def timed(data: Path, settings: ExpertSettings) -> Iterator[float]:
    """Yields the seconds of one core that update after update takes."""
    task, distributed = ExpertTask(Dataset.open(data), settings, torch.device("cpu")), Distributed(settings)
    learner = Learner(task, settings, distributed)
    with closing(Batches(task, settings.batch, 0, distributed.share, distributed.device)) as batches:
        for step in range(LONG):
            start = time.process_time()
            learner.backward(*batches.get(step))
            learner.update(1e-3, 0.9)
            yield time.process_time() - start


def steps_in(seconds: float, kinds: Mapping[str, Path]) -> dict[str, int]:
    """Returns how many updates of each kind take so much time of one core, by a few of them in turns."""
    runs = [timed(data, of_benchmark(kind, 0)) for kind, data in kinds.items()]
    rounds = np.array([[next(run) for run in runs] for _ in range(14)])
    return {
        kind: max(20, round(seconds / median)) for kind, median in zip(kinds, np.median(rounds[2:], 0), strict=True)
    }


def of_benchmark(kind: str, seed: int) -> ExpertSettings:
    return replace(KINDS[kind], seed=seed, save_every=LONG, eval_every=LONG, sample_every=0, device="cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="the photographs, as for atoll prepare")
    parser.add_argument("kinds", nargs="+", metavar="KIND=DATA[@STEPS]", help=f"KIND is one of {', '.join(KINDS)}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=240, help="images per model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    given = [(kind, *rest.partition("@")[::2]) for kind, _, rest in (kind.partition("=") for kind in args.kinds)]
    pairs = [(kind, Path(data)) for kind, data, _ in given]
    if wrong := [kind for kind, _ in pairs if kind not in KINDS]:
        parser.error(f"{wrong[0]} is none of {', '.join(KINDS)}")
    steps = {kind: int(steps) for kind, _, steps in given if steps}
    steps |= steps_in(args.seconds, {kind: data for kind, data in pairs if kind not in steps})
    print(f"steps: {steps}", flush=True)
    network = make_features("efficientnet:96")
    first = Dataset.open(pairs[0][1])
    reference = read_reference(args.source, load_codec(first.folder).factor * first.card.latent_shape[1], network)
    print(f"labels read of {len(reference.labels)} photographs: {reference.share_read:.3f}")
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for kind, path in pairs:
            data = Dataset.open(path)
            folder, model = args.out / f"{kind}-{seed}", args.out / f"{kind}-{seed}-model"
            if not model.exists():
                train_expert(path, None, replace(of_benchmark(kind, seed), steps=steps[kind]), folder, progress=False)
                assemble([folder], None, model, path)
            rows = np.random.default_rng(0).permutation(len(data))[: args.num]
            captions, labels = data.strings("caption", rows), data.strings("label", rows)
            pipe = AtollPipeline.from_pretrained(model)
            made = bytes_of(pipe(captions, seed=list(range(args.num)), output_type="pt", progress=False).images)
            features = network.extract(tensor_of(made)).numpy()
            distance, deviation = kernel_distance(reference.features, features)
            right = np.mean([a == b for a, b in zip(reference.reader.read(features), labels, strict=True)])
            training = Expert.load(folder).network.card["training"]
            order = np.argsort(labels[:48], kind="stable")
            sheet = contact_sheet(made[order], f"{kind}, {training['steps']} steps")
            save_image(sheet, args.out / f"{kind}-{seed}.png")
            print(
                f"{kind:12} seed {seed} {training['steps']:6} steps  KD {distance:.3f} (subsets {deviation:.3f})  "
                f"label {right:.3f}  seam ratio {seam_ratio(tensor_of(made), load_codec(path).factor):.3f}  "
                f"held-out loss {training['held_out']['loss']:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
