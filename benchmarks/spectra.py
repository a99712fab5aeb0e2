"""Which conversion of DDPM experts is best, and why do metrics disagree? Spectra of images of `atoll reproduce table3`.

    atoll reproduce table3 --data fashion-mnist --pretrain mnist --out fashion
    python benchmarks/spectra.py fashion --out spectra

The power in rings of the Fourier transform of grey images minus their mean, relative to held-out originals: above 1 is
too much power (grain), below 1 too little (smooth). Also Frechet and kernel distance, without and with a blur of one
pixel of samples and reference, which removes hard edges and little else. Mean and deviation over training seeds.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.experiments.evaluate import REAL, Contender, Evaluation
from atoll.experiments.images import tensor_of
from atoll.experiments.studies import Lab, Recipe, get_studies
from atoll.metrics.frechet import Moments, frechet_distance
from atoll.metrics.kernel import kernel_distance
from atoll.plots.canvas import save_image
from atoll.plots.contact_sheet import draw_samples

SHOWN = ("FM", "DDPM to FM")  # prefixes of the rows' names
HEADS = ("FD", "KD", "FD, blurred", "KD, blurred")
PIXELS, FEATURES = "simple", "efficientnet:96"  # of FD, and of KD


def power(images: NDArray[np.uint8], rings: int = 8) -> NDArray[np.float64]:
    """Returns the mean power of each ring of frequencies, the lowest first."""
    grey = images.mean(3) / 255
    spectrum = np.abs(np.fft.fft2(grey - grey.mean((1, 2), keepdims=True))) ** 2
    f = np.fft.fftfreq(grey.shape[1])
    ring = np.minimum((np.hypot(f[:, None], f[None]) / 0.5 * rings).astype(int), rings)
    return np.array([spectrum[:, ring == k].mean() for k in range(rings)])


def blurred(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    kernel = torch.tensor([1.0, 2, 1])
    weight = (kernel[:, None] * kernel / 16).expand(3, 1, 3, 3)
    soft = torch.nn.functional.conv2d(torch.nn.functional.pad(x, (1, 1, 1, 1), mode="replicate"), weight, groups=3)
    return soft.round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="the --out of `atoll reproduce`")
    parser.add_argument("--study", default="table3")
    parser.add_argument("--recipe", default="reproduce")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    recipe = Recipe.read(given.recipe)
    studies = [get_studies([given.study], Lab(given.folder, recipe, seed))[given.study] for seed in range(given.seeds)]
    originals = next((str(path) for path in (given.folder / "pictures").glob("*.tar")), None)
    settings = recipe.plan.metric_settings("cpu", originals=originals)
    # Reads the images and features that `reproduce` has cached.
    evaluation = Evaluation(studies[0].data, given.folder / "evaluation", settings, studies[0].cluster, progress=False)
    networks, real = evaluation.suite.networks, evaluation.reference.load()
    references = [{spec: network.extract(tensor_of(images)).numpy() for spec, network in networks.items()}
                  for images in (real, blurred(real))]  # fmt: skip

    def measure(images: NDArray[np.uint8]) -> list[float]:
        figures = []
        for some, reference in zip((images, blurred(images)), references, strict=True):
            mine = {spec: network.extract(tensor_of(some)).numpy() for spec, network in networks.items()}
            figures.append(frechet_distance(Moments.of(reference[PIXELS]), Moments.of(mine[PIXELS])))
            figures.append(kernel_distance(reference[FEATURES], mine[FEATURES])[0])
        return [*figures, *(power(images) / power(real))]

    sets = {REAL: [evaluation.real_images(evaluation._others[: settings.num]).load()]}
    for study in studies:
        for row in study.rows:
            if row.label.startswith(SHOWN):
                one = Contender(row.label, row.model.folder, row.sampling)
                pixels = evaluation._usual_images(one, evaluation.open(one), 0).load()
                sets.setdefault(row.label, []).append(pixels)
    print(f"| | {' | '.join(HEADS)} | power over real, 8 rings from low to high frequency |")
    print("|---" * (len(HEADS) + 2) + "|")
    for name, images in sets.items():
        all_figures = np.array([measure(some) for some in images])
        mean, spread = all_figures.mean(0), all_figures.std(0, ddof=1) if len(images) > 1 else None
        cells = [f"{mean[i]:.2f}" + ("" if spread is None else f" ± {spread[i]:.2f}") for i in range(len(HEADS))]
        print(f"| {name} | {' | '.join(cells)} | {' '.join(f'{x:.2f}' for x in mean[len(HEADS) :])} |", flush=True)
    shown = {name: images[0][:12] for name, images in sets.items()} | {REAL: evaluation.first_real_images()}
    given.out.mkdir(parents=True, exist_ok=True)
    save_image(draw_samples(shown, evaluation.prompts[:12]), given.out / "spectra.png")


if __name__ == "__main__":
    main()
