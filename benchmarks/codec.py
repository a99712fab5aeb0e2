"""Reconstruction error of the codecs `pca`, with and without a refiner and overlapping patches, and `conv`.

    atoll fetch cifar-10 --num 5000 --out images
    python benchmarks/codec.py images/cifar-10.tar --size 32
    python benchmarks/codec.py photos --size 64 --numbers 24
    python benchmarks/codec.py photos --size 128 --plain

Fits the codecs to four fifths of the images, and measures on the rest: PSNR, and the seam ratio, which is the mean
absolute difference of pixels across patch borders over that elsewhere, for latents without noise and with noise of 0.25
and 0.5. All codecs have the same patches and equally many numbers per patch.
"""

import argparse
import time

import torch
from torch import Tensor

from atoll.data.images import Transform
from atoll.data.prepare import count
from atoll.data.sources import Source, readers
from atoll.encoders.codec import Codec
from atoll.encoders.codecs import make_codec
from atoll.encoders.pca import PatchPCA
from atoll.encoders.refiner import seam_ratio

LEVELS = (0.0, 0.25, 0.5)
OPTIONS = (":plain", "", ":lapped:plain", ":lapped")


def load(path: str, size: int, num: int) -> Tensor:
    _, items = count(Source(path, "{label}"), num, progress=False)  # captions do not matter here
    with readers(0, Transform(size, 1, 4.0), 64) as read:
        pixels = [torch.tensor(image.pixels) for _, image in read(items) if image is not None]
    return torch.stack(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


def measure(codec: Codec, images: Tensor) -> str:
    latents, results = codec.encode(images), []
    for level in LEVELS:
        noise = level * torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
        decoded = codec.decode(latents + noise)
        psnr = (10 * (4 / (decoded - images).square().mean((1, 2, 3))).log10()).mean()
        results.append(f"{psnr:5.2f} dB {seam_ratio(decoded, codec.factor):5.3f}")
    return " | ".join(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", help="a folder or a tar, as for atoll prepare")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--num", type=int, default=2560)
    parser.add_argument("--numbers", type=int, help="per patch; as many as pca chooses by default")
    parser.add_argument("--plain", action="store_true", help="only those without a network, which take seconds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    images = load(args.images, args.size, args.num)
    sample, others = images[: len(images) * 4 // 5], images[len(images) * 4 // 5 :]
    pca = PatchPCA.fit(sample, None, args.numbers)
    numbers = f"{pca.factor}x{pca.channels}"
    print(f"{'noise':28}" + " | ".join(f"{level:<14}" for level in LEVELS))
    specs = [f"pca:{numbers}{options}" for options in OPTIONS if "plain" in options or not args.plain]
    for spec in specs if args.plain else (*specs, f"conv:{numbers}"):
        start = time.process_time()
        codec = make_codec(spec, sample=sample)
        seconds = time.process_time() - start
        print(f"{spec:22}{seconds:4.0f} s {measure(codec, others)}", flush=True)
    print(f"the images themselves: seam ratio {seam_ratio(others, pca.factor):.3f}")


if __name__ == "__main__":
    main()
