"""Where do conversions of a DDPM expert differ? Power by spatial frequency of what each makes, beside real images.

    python benchmarks/spectra.py OUT/seed_0/models/cluster-ddpm-pretrained OUT/data/kmeans_4 --cluster 0 \\
      --originals OUT/pictures/fashion-mnist.tar --out spectra [--against OUT/seed_0/models/cluster-fm-pretrained]

Rings of the Fourier transform of grey images less their mean, over those of held-out originals: above 1 is too much
power (grain), below 1 too little (smooth). Beside them: kernel and Frechet distance on both kinds of features, also
after a blur of one pixel, which takes grain away and leaves the rest, and the spread of the images' mean brightness.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.encoders.features import make_features
from atoll.experiments.evaluate import Contender, Evaluation
from atoll.experiments.images import tensor_of
from atoll.experiments.settings import MetricSettings
from atoll.metrics.frechet import Moments, frechet_distance
from atoll.metrics.kernel import kernel_distance
from atoll.plots.canvas import save_image
from atoll.plots.contact_sheet import draw_samples
from atoll.sampling.settings import Sampling

CONVERSIONS = ("calibrated", "exact", "paper", "paper-damped")
NETWORKS = ("simple", "efficientnet:96")


def power(images: NDArray[np.uint8], rings: int = 8) -> NDArray[np.float64]:
    """The mean power of each ring of frequencies, the lowest first."""
    grey = images.mean(3) / 255
    spectrum = np.abs(np.fft.fft2(grey - grey.mean((1, 2), keepdims=True))) ** 2
    f = np.fft.fftfreq(grey.shape[1])
    radius = np.hypot(f[:, None], f[None])
    ring = np.minimum((radius / 0.5 * rings).astype(int), rings)
    return np.array([spectrum[:, ring == k].mean() for k in range(rings)])


def blurred(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    kernel = torch.tensor([1.0, 2, 1])
    weight = (kernel[:, None] * kernel / 16).expand(3, 1, 3, 3)
    soft = torch.nn.functional.conv2d(torch.nn.functional.pad(x, (1, 1, 1, 1), mode="replicate"), weight, groups=3)
    return soft.round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--against", type=Path, help="a flow-matching model of the same data")
    parser.add_argument("--cluster", type=int)
    parser.add_argument("--originals")
    parser.add_argument("--num", type=int, default=150)
    parser.add_argument("--guidance", type=float, default=1.6)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    settings = MetricSettings(num=given.num, features=("simple",), metrics=("frechet",), reference_split="held_out",
                              originals=given.originals, split="held_out")  # fmt: skip
    evaluation = Evaluation(given.data, given.out, settings, cluster=given.cluster, progress=False)
    how = Sampling(guidance=given.guidance, steps=given.steps, batch=150)
    contenders = {} if given.against is None else {"FM": Contender("FM", given.against, how)}
    for name in CONVERSIONS:
        sampling = Sampling(guidance=given.guidance, steps=given.steps, batch=150, conversion=name)
        contenders[name] = Contender(name, given.model, sampling)
    real = evaluation.reference.load()
    sets = {"real, of training": evaluation.real_images(evaluation._others[: given.num]).load()}
    sets |= {name: evaluation._usual_images(one, evaluation.open(one), 0).load() for name, one in contenders.items()}
    networks = [make_features(spec) for spec in NETWORKS]

    def distances(images: NDArray[np.uint8], others: NDArray[np.uint8]) -> list[str]:
        cells = []
        for network in networks:
            mine, theirs = (network.extract(tensor_of(some)).numpy() for some in (images, others))
            cells.append(f"{frechet_distance(Moments.of(theirs), Moments.of(mine)):.2f}")
            cells.append(f"{kernel_distance(theirs, mine)[0]:.3f}")
        return cells

    base, soft = power(real), blurred(real)
    print("| | power by ring, over real | brightness | FD, KD simple; FD, KD EN | the same, all blurred |")
    print("|---|---|---|---|---|")
    for name, images in sets.items():
        rings = " ".join(f"{value:.2f}" for value in power(images) / base)
        light = images.mean((1, 2, 3)).std() / real.mean((1, 2, 3)).std()
        cells = [", ".join(distances(*pair)) for pair in ((images, real), (blurred(images), soft))]
        print(f"| {name} | {rings} | {light:.2f} | {cells[0]} | {cells[1]} |", flush=True)
    shown = {"real": real[:12], **{name: images[:12] for name, images in sets.items()}}
    save_image(draw_samples(shown, evaluation.prompts[:12]), given.out / "spectra.png")


if __name__ == "__main__":
    main()
