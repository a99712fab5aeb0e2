"""The quality of photographs for equal CPU time, by codec, text encoder, network and optimizer.

    atoll fetch cifar-10 --num 6000 --out images
    atoll prepare images/cifar-10.tar --size 32 --codec pca:plain --near-duplicates keep --out old
    atoll prepare images/cifar-10.tar --size 32 --recipe photos --codec pca:4x12:lapped --near-duplicates keep --out new
    python benchmarks/photos.py images/cifar-10.tar laptop=old photos=new --seeds 3 --guidance 2 4 --out run

Trains a monolith of each KIND on its DATA for as many steps as take SECONDS of one core, and samples captions at each
GUIDANCE. Steps are timed in turns, so that other load slows all kinds alike, and their number is printed;
KIND=DATA@STEPS sets it, so that seeds can be trained in parallel (--first-seed) for equally long.
KD is the kernel distance on EfficientNet features to the photographs themselves, at the data's size; *label* is the
share of images in which a linear classifier of these features, fitted to the photographs, sees the prompt's label; the
seam ratio is that of benchmarks/codec.py. RUN has a grid of the first 48 images of each kind, uncurated.
A kind whose model is already in RUN is only measured; `--models MODEL=DATA` measures any others.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.adam import AdamW
from atoll.data.images import Transform
from atoll.data.prepare import count
from atoll.data.shards import Dataset
from atoll.data.sources import Source, readers
from atoll.encoders.codecs import load_codec
from atoll.encoders.features import Features, make_features
from atoll.encoders.refiner import seam_ratio
from atoll.experiments.images import bytes_of, tensor_of
from atoll.metrics.kernel import kernel_distance
from atoll.metrics.labels import Reader
from atoll.networks.expert import Expert
from atoll.plots.canvas import save_image
from atoll.plots.contact_sheet import contact_sheet
from atoll.sampling.assemble import assemble
from atoll.sampling.pipeline import AtollPipeline
from atoll.training.distributed import Distributed
from atoll.training.expert import ExpertTask
from atoll.training.loop import Learner, train
from atoll.training.settings import ExpertSettings, read_recipe
from atoll.training.task import Batch, Batches, seeded

LONG = 10**9
PHOTOS, LAPTOP = read_recipe("photos", ExpertSettings), read_recipe("laptop", ExpertSettings)
KINDS = {
    "laptop": LAPTOP,
    "photos": PHOTOS,
    "adamw": replace(PHOTOS, optimizer="adamw"),
    "not-local": replace(PHOTOS, model="96x4/1"),
    "uniform": replace(PHOTOS, objective="fm"),
    "wide": replace(PHOTOS, model="mini/1:local"),
    "coarse": replace(PHOTOS, model="96x4/2:local"),
    "batch-16": replace(PHOTOS, batch=16),
    "batch-64": replace(PHOTOS, batch=64),
    "ema-none": replace(PHOTOS, ema=0.0),
    "ema-short": replace(PHOTOS, ema=0.95),  # averages about 20 steps; the default the last tenth of the run
    "aligned": PHOTOS,
}
LIMIT = 2600  # photographs that models are compared with


class AlignedTask(ExpertTask):
    """Representation alignment (Yu et al. 2024): tokens after half of the blocks also learn the image's features.

    The network that projects their mean to the features is not part of the expert, so it is updated here, one step
    late.
    """

    WEIGHT = 0.5

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        features = torch.tensor(np.asarray(self.view.data.column("features")[:], np.float32))
        self.targets = F.normalize(features - features.mean(0))
        width = self.network.config.hidden_size
        with seeded("projection", self.settings.seed):
            self.project = nn.Sequential(nn.Linear(width, 256), nn.SiLU(), nn.Linear(256, features.shape[1]))
        self.adamw = AdamW(self.project.parameters(), (0.9, 0.99))
        self.tokens: list[Tensor] = []
        half = self.network.config.depth // 2
        self.network.blocks[half - 1].register_forward_hook(lambda *call: self.tokens.append(call[-1]))

    def labels_of(self, indices: NDArray[np.int64]) -> Tensor:
        return torch.as_tensor(indices)

    def loss(self, network: nn.Module, batch: Batch, host: Batch) -> Tensor:
        self.adamw.step(1e-3)
        self.adamw.clear_gradients()
        self.tokens.clear()
        loss = super().loss(network, batch, host)
        likeness = F.cosine_similarity(self.project(self.tokens[0].mean(1)), self.targets[batch.labels])
        return loss + self.WEIGHT * (1 - likeness)


def make_task(kind: str, data: Path, settings: ExpertSettings, device: torch.device) -> ExpertTask:
    return (AlignedTask if kind == "aligned" else ExpertTask)(Dataset.open(data), settings, device)


class Reference(NamedTuple):
    """Features of photographs, and a reader of labels fitted to most of them."""

    features: NDArray[np.float32]
    labels: list[str]
    reader: Reader
    share_read: float  # the reader's accuracy on photographs that it was not fitted to


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


def timed(kind: str, data: Path) -> Iterator[float]:
    """Yields the CPU seconds of one update after another."""
    settings = of_benchmark(kind, 0)
    task, distributed = make_task(kind, data, settings, torch.device("cpu")), Distributed(settings)
    learner = Learner(task, settings, distributed)
    with closing(Batches(task, settings.batch, 0, distributed.share, distributed.device)) as batches:
        for step in range(LONG):
            start = time.process_time()
            learner.backward(*batches.get(step))
            learner.update(1e-3, 0.9)
            yield time.process_time() - start


def steps_in(seconds: float, kinds: Mapping[str, Path]) -> dict[str, int]:
    """Returns how many updates of each kind take `seconds` of one core, by timing a few of each in turns."""
    runs = [timed(kind, data) for kind, data in kinds.items()]
    rounds = np.array([[next(run) for run in runs] for _ in range(14)])
    return {
        kind: max(20, round(seconds / median)) for kind, median in zip(kinds, np.median(rounds[2:], 0), strict=True)
    }


def of_benchmark(kind: str, seed: int) -> ExpertSettings:
    return replace(KINDS[kind], seed=seed, save_every=LONG, eval_every=LONG, sample_every=0, device="cpu")


def judge(
    name: str, model: Path, data: Path, reference: Reference, network: Features, args: argparse.Namespace
) -> None:
    """Prints the metrics of a model's images of captions at each guidance, and draws the first 48."""
    dataset, pipe = Dataset.open(data), AtollPipeline.from_pretrained(model)
    rows = np.random.default_rng(0).permutation(len(dataset))[: args.num]
    captions, labels = dataset.strings("caption", rows), dataset.strings("label", rows)
    order = np.argsort(labels[:48], kind="stable")
    for scale in args.guidance:
        output = pipe(
            captions, seed=list(range(args.num)), guidance_scale=scale, batch_size=16, output_type="pt", progress=False
        )
        made = bytes_of(output.images)
        features = network.extract(tensor_of(made)).numpy()
        distance, deviation = kernel_distance(reference.features, features)
        right = np.mean([a == b for a, b in zip(reference.reader.read(features), labels, strict=True)])
        save_image(contact_sheet(made[order], name), args.out / f"{name.replace(' ', '-')}-guidance-{scale:g}.png")
        print(
            f"{name:24} guidance {scale:g}  KD {distance:.3f} (subsets {deviation:.3f})  label {right:.3f}  "
            f"seam ratio {seam_ratio(tensor_of(made), load_codec(data).factor):.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="the photographs, as for atoll prepare")
    parser.add_argument(
        "kinds", nargs="*", default=[], metavar="KIND=DATA[@STEPS]", help=f"KIND is one of {', '.join(KINDS)}"
    )
    parser.add_argument("--models", nargs="+", default=[], metavar="MODEL=DATA", help="folders of `atoll assemble`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=240, help="images per model")
    parser.add_argument("--guidance", type=float, nargs="+", default=[2.0], help="each model is judged at each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    given = [(kind, *rest.partition("@")[::2]) for kind, _, rest in (kind.partition("=") for kind in args.kinds)]
    kinds = {kind: Path(data) for kind, data, _ in given}
    models = {Path(model): Path(data) for model, _, data in (spec.partition("=") for spec in args.models)}
    if not kinds and not models:
        parser.error("give kinds to train, or --models to judge")
    network = make_features("efficientnet:96")
    space = Dataset.open([*kinds.values(), *models.values()][0]).card.latent_space
    size = space.shape[-1] * space.codec.factor
    reference = read_reference(args.source, size, network)
    print(f"the classifier reads {reference.share_read:.3f} of photographs that it has not seen")
    for model, data in models.items():
        judge(model.name, model, data, reference, network, args)
    open_kinds = {kind: Path(data) for kind, data, number in given if not number}
    steps = {kind: int(number) for kind, _, number in given if number} | steps_in(args.seconds, open_kinds)
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for kind, path in kinds.items():
            folder, model = args.out / f"{kind}-{seed}", args.out / f"{kind}-{seed}-model"
            if not model.exists():
                settings = replace(of_benchmark(kind, seed), steps=steps[kind])
                train(partial(make_task, kind, path, settings), settings, folder, progress_bar=False)
                assemble([folder], None, model, path)
            training = Expert.load(folder).network.card["training"]
            name = f"{kind} {seed} {training['steps']} steps"
            print(f"{name:24} held-out loss {training['held_out']['loss']:.4f}")
            judge(name, model, path, reference, network, args)


if __name__ == "__main__":
    main()
