"""Peak memory of a training process: predicted, measured, and their ratio.

    python benchmarks/memory.py [--steps 10]    # trains small models on the CPU, with and without checkpointing
    python benchmarks/memory.py --table         # computes the tables of docs/hardware.md; nothing is trained

Prediction and training run in separate processes, as `atoll train --dry-run` and `atoll train` do. Training is the
loop that trains experts, including checkpoints and the final network, on random data.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from atoll.diffusion.objective import get_objective
from atoll.networks.dit import DiT, DiTConfig, Trunk
from atoll.networks.presets import preset
from atoll.networks.router import RouterConfig
from atoll.training.loop import train
from atoll.training.memory import (
    CUDA_BASE,
    Storages,
    in_words,
    largest_micro_batch,
    network_of,
    peak_resident,
    predict,
)
from atoll.training.settings import ExpertSettings
from atoll.training.task import Batch, Task, Tensors


@dataclass(frozen=True)
class Case:
    model: str
    size: int
    text_dim: int
    text_length: int
    batch: int

    @property
    def config(self) -> DiTConfig:
        return DiTConfig(**preset(self.model, input_size=self.size, text_dim=self.text_dim))


CASES = {
    "tiny": Case("xs", size=8, text_dim=64, text_length=16, batch=32),
    "xs": Case("xs", size=16, text_dim=64, text_length=32, batch=64),
    "256x6": Case("256x6/2", size=16, text_dim=768, text_length=77, batch=64),
    "s/2": Case("s/2", size=32, text_dim=768, text_length=77, batch=8),
}


class Noise(Task):
    """An expert's task on random data, which takes the same memory as real data."""

    num_rows = 100_000

    def __init__(self, case: Case) -> None:
        self.case, self.text_length = case, case.text_length
        self.network: Trunk = DiT(case.config)
        self.objective = get_objective("fm")
        self.shape = (case.config.in_channels, case.size, case.size)

    def describe(self) -> dict[str, Any]:
        return {}

    def draw(self, num: int, generator: torch.Generator) -> Tensors:
        t = self.objective.sample_times(num, generator)
        return t, torch.randn(num, *self.shape, generator=generator)

    def read(self, rows: NDArray[np.int64], drawn: Tensors) -> Batch:
        lengths = torch.randint(2, self.text_length + 1, (len(rows), 1))
        lengths[::8] = self.text_length
        mask = torch.arange(self.text_length) < lengths
        t, eps = drawn
        return Batch(torch.randn(len(rows), *self.shape), mask, t, eps, torch.zeros(len(rows)))

    def loss(self, network: nn.Module, batch: Batch, host: Batch) -> Tensor:
        text = torch.randn(len(batch.t), self.text_length, self.case.text_dim)
        return self.objective.loss(lambda x, t: network(x, t, text, batch.ids), batch.latents, batch.eps, batch.t)

    def evaluate(self, sample: bool) -> tuple[dict[str, Any], None]:
        return {}, None

    def finish(self, folder: Path, training: Mapping[str, Any]) -> list[str]:
        self.network.save_pretrained(folder)
        return []


def ask(do: str, case: str, checkpointing: bool, steps: int, micro_batch: int | None = None) -> int:
    """Returns the bytes that a separate process predicts, or uses at its peak."""
    options = ["--checkpointing"] if checkpointing else []
    options += [] if micro_batch is None else ["--micro-batch", str(micro_batch)]
    command = [sys.executable, __file__, "--do", do, "--case", case, "--steps", str(steps), *options]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare(steps: int) -> None:
    print("| model | batch | micro-batch | checkpointing | predicted | measured | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, case in CASES.items():
        for micro_batch, checkpointing in ((case.batch, False), (case.batch, True), (case.batch // 4, False)):
            predicted = ask("predict", name, checkpointing, steps, micro_batch)
            measured = ask("train", name, checkpointing, steps, micro_batch)
            row = (case.model, case.batch, micro_batch, "yes" if checkpointing else "no")
            row += (in_words(predicted), in_words(measured), f"{predicted / measured:.2f}")  # type: ignore[assignment]
            print("|", " | ".join(map(str, row)), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--do", choices=("predict", "train"))
    parser.add_argument("--case", choices=list(CASES))
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--micro-batch", type=int)
    args = parser.parse_args()
    if args.table:
        print_tables()
    elif args.do is None:
        compare(args.steps)
    else:
        case = CASES[args.case]
        settings = ExpertSettings(
            steps=args.steps,
            batch=case.batch,
            micro_batch=args.micro_batch,
            checkpointing=args.checkpointing,
            save_every=max(1, args.steps // 2),
            device="cpu",
        )
        if args.do == "predict":
            print(predict(case.config, settings, text_length=case.text_length).total)
            return
        with TemporaryDirectory() as folder:
            train(lambda device: Noise(case), settings, Path(folder), progress_bar=False)
        print(peak_resident())


def print_tables() -> None:
    settings = ExpertSettings(batch=4096, device="cpu")
    cuda: dict[str, Any] = {"text_length": 77, "device_type": "cuda", "bf16": True}
    config = DiTConfig(**preset("xl/2"))
    print("Fixed parts\n")
    print("| model | parameters | weights, EMA, moments | gradients | CUDA itself | together |")
    print("|---|---|---|---|---|---|")
    for name in ("b/2", "l/2", "xl/2", "3b/2"):
        found = predict(DiTConfig(**preset(name)), replace(settings, micro_batch=1), **cuda)
        gradients = found.weights // 4
        parts = (found.weights, gradients, found.base)
        row(name, f"{gradients / 4e6:.0f}M", *map(in_words, (*parts, sum(parts))))

    print("\nxl/2 by micro-batch\n")
    print("| micro-batch | update | total | update, checkpointed | total |")
    print("|---|---|---|---|---|")
    for num in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        cells: list[str] = []
        for checkpointing in (False, True):
            trial = replace(settings, micro_batch=num, checkpointing=checkpointing)
            found = predict(config, trial, **cuda)
            cells += [in_words(found.update), in_words(found.total)]
        row(num, *cells)

    print("\n3b/2 on several GPUs, --shard --checkpointing, by micro-batch\n")
    print("| micro-batch | 1 GPU | 2 | 4 | 8 | 16 |")
    print("|---|---|---|---|---|---|")
    for num in (1, 8, 32):
        trial = replace(settings, micro_batch=num, checkpointing=True, shard=True)
        sizes_of = (predict(DiTConfig(**preset("3b/2")), trial, processes=many, **cuda) for many in (1, 2, 4, 8, 16))
        row(num, *(in_words(found.total) for found in sizes_of))

    print("\nThe largest micro-batch\n")
    sizes = (16, 24, 48, 80)
    print("| model | checkpointing |", " | ".join(f"{size} GB" for size in sizes), "|")
    print("|---|---|" + "---|" * len(sizes))
    for name in ("b/2", "l/2", "xl/2"):
        for checkpointing in (False, True):
            trial = replace(settings, checkpointing=checkpointing)
            predicted = partial(predict, DiTConfig(**preset(name)), **cuda)
            fits = [largest_micro_batch(predicted, trial, size * 10**9) for size in sizes]
            row(name, "yes" if checkpointing else "no", *(num or "none" for num in fits))

    print("\nOn disk\n")
    print("| model | an expert, fp32 | bf16 | a state | states while training |")
    print("|---|---|---|---|---|")
    for name in ("b/2", "l/2", "xl/2", "3b/2"):
        weights = 4 * num_parameters(DiTConfig(**preset(name)))
        row(name, *map(in_words, (weights, weights // 2, 4 * weights, 3 * 4 * weights)))

    print("\nSampling with 8 x xl/2 in bf16, one picture\n")
    expert = 2 * num_parameters(config)
    others = {
        "CUDA itself": CUDA_BASE,
        "router, b/2 in fp32": 4 * num_parameters(RouterConfig(**preset("b/2"))),
        "text encoder, CLIP-L in fp32": 4 * 123_060_480,
        "activations of an expert, with guidance": sampling_activations(config),
        "VAE in fp32, with activations of a decoded picture": sum(decoder()),
    }
    for name, size in others.items():
        row(name, in_words(size))
    print()
    for num in (8, 2, 1):
        row(f"{num} in memory", in_words(num * expert), in_words(num * expert + sum(others.values())))


def row(*cells: object) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def num_parameters(config: DiTConfig | RouterConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in network_of(config).parameters())


@torch.no_grad()
def sampling_activations(config: DiTConfig) -> int:
    """Returns the peak bytes of a forward pass of two samples, one of them for guidance, including the text."""
    with FakeTensorMode():
        network = DiT(config)
        for p in network.parameters():
            p.data = p.bfloat16()  # Module.to cannot swap fake tensors
        x = torch.empty(2, config.in_channels, config.input_size, config.input_size, dtype=torch.bfloat16)
        text = torch.empty(2, 77, config.text_dim or 1, dtype=torch.bfloat16)
        t = torch.empty(())
        with Storages() as watch, patch.object(torch, "aminmax", lambda t: (0, 1)):
            network(x, t, text)
    return watch.peak


@torch.no_grad()
def decoder() -> tuple[int, int]:
    """Returns the bytes of Stable Diffusion's VAE, and the peak that decoding a 256-pixel image adds."""
    from diffusers import AutoencoderKL

    with torch.device("meta"):
        vae: Any = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            latent_channels=4,
        )
        latents = torch.empty(1, 4, 32, 32)
    with Storages() as watch:
        vae.decode(latents)
    return 4 * sum(p.numel() for p in vae.parameters()), watch.peak


if __name__ == "__main__":
    main()
