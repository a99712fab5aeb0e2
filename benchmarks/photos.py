"""What a model of photographs gets out of the same CPU time, by its network and optimizer.

    atoll fetch cifar-10 --num 12000 --out images
    atoll prepare images/cifar-10.tar --size 32 --codec pca:4x12:lapped --flip --near-duplicates keep --out data
    python benchmarks/photos.py data --seconds 240 --seeds 3 --out run

Trains a monolith of each kind for as many steps as take SECONDS of one core, and makes images of captions with
guidance 2. KD is the kernel distance on EfficientNet features to images of the data set as its codec decodes them; the
seam ratio is that of benchmarks/codec.py. RUN/KIND-SEED.png shows the first 48 images, uncurated.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from codec import seam_ratio

from atoll.data.shards import Dataset
from atoll.data.view import decode_rows
from atoll.encoders.codecs import load_codec
from atoll.encoders.features import make_features
from atoll.experiments.images import bytes_of, tensor_of
from atoll.metrics.kernel import kernel_distance
from atoll.networks.expert import Expert
from atoll.plots.canvas import save_image
from atoll.plots.contact_sheet import contact_sheet
from atoll.sampling.assemble import assemble
from atoll.sampling.pipeline import AtollPipeline
from atoll.training.distributed import Distributed
from atoll.training.expert import ExpertTask, train_expert
from atoll.training.loop import Learner
from atoll.training.settings import ExpertSettings
from atoll.training.task import Batches

LONG = 10**9
PLAIN = ExpertSettings(
    "mini/1", batch=32, lr=2e-3, lr_schedule="cosine", save_every=LONG, eval_every=LONG, sample_every=0, device="cpu"
)
KINDS = {
    "adamw": PLAIN,
    "adamw local": replace(PLAIN, model="mini/1:local"),
    "muon": replace(PLAIN, optimizer="muon"),
    "muon local": replace(PLAIN, model="mini/1:local", optimizer="muon"),
    "muon local, 128": replace(PLAIN, model="mini/1:local", optimizer="muon", batch=128),
    "muon local, logit-normal": replace(PLAIN, model="mini/1:local", optimizer="muon", objective="fm-logit-normal"),
}


def steps_in(seconds: float, data: Path, settings: ExpertSettings) -> int:
    """Returns how many updates take so much time of one core, by a few of them."""
    task, distributed = ExpertTask(Dataset.open(data), settings, torch.device("cpu")), Distributed(settings)
    learner, times = Learner(task, settings, distributed), []
    batches = Batches(task, settings.batch, 0, distributed.share, distributed.device)
    for step in range(6):
        start = time.process_time()
        learner.backward(*batches.get(step))
        learner.update(1e-3, 0.9)
        times.append(time.process_time() - start)
    batches.close()
    return max(20, round(seconds / float(np.median(times[1:]))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder that atoll prepare has made")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--num", type=int, default=400, help="images per model")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS)[:4], choices=list(KINDS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    data, features = Dataset.open(args.data), make_features("efficientnet:96")
    rows = np.random.default_rng(0).permutation(len(data))
    real = features.extract(tensor_of(decode_rows(data, np.sort(rows[:2000])))).numpy()
    captions = data.strings("caption", rows[-args.num :])
    patch = load_codec(args.data).factor
    for seed in range(args.seeds):
        for kind in args.kinds:
            settings = replace(KINDS[kind], seed=seed)
            settings = replace(settings, steps=steps_in(args.seconds, args.data, settings))
            folder = args.out / f"{kind.replace(' ', '-').replace(',', '')}-{seed}"
            train_expert(args.data, None, settings, folder, progress=False)
            if not (model := args.out / f"{folder.name}-model").exists():
                assemble([folder], None, model, args.data)
            pipe = AtollPipeline.from_pretrained(model)
            made = bytes_of(pipe(captions, seed=list(range(args.num)), output_type="pt", progress=False).images)
            distance, deviation = kernel_distance(real, features.extract(tensor_of(made)).numpy())
            loss = Expert.load(folder).network.card["training"]["held_out"]["loss"]
            seams = seam_ratio(tensor_of(made), patch)
            save_image(contact_sheet(made[:48], f"{kind}, {settings.steps} steps"), args.out / f"{folder.name}.png")
            print(
                f"{kind:26} seed {seed} {settings.steps:6} steps  held-out loss {loss:.4f}  KD {distance:.3f} "
                f"(subsets {deviation:.3f})  seam ratio {seams:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
