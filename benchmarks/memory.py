"""Peak memory of a training process: predicted, measured, and their ratio.

    python benchmarks/memory.py [--steps 10]    # trains small models on the CPU, with and without checkpointing
    python benchmarks/memory.py --table         # the tables of docs/hardware.md: computed, nothing is trained

Prediction and training each have a process of their own, as `atoll train --dry-run` and `atoll train` do. Training is the
loop that trains experts, states and the finished network written by it included; its data is random numbers.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.diffusion.objective import get_objective
from atoll.models.dit import DiT, DiTConfig
from atoll.models.presets import preset
from atoll.training.loop import Tensors, train
from atoll.training.memory import (
    CUDA_BASE,
    Kernels,
    Storages,
    in_words,
    largest_micro_batch,
    peak_resident,
    predict,
)
from atoll.training.settings import ExpertSettings


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


class Noise:
    """An expert's task on random numbers, which take as much memory as any."""

    num_rows = 100_000
    frozen_bytes = 0

    def __init__(self, case: Case) -> None:
        self.case, self.text_length = case, case.text_length
        self.network = DiT(case.config)
        self.objective = get_objective("fm")
        self.shape = (case.config.in_channels, case.size, case.size)

    def describe(self) -> dict[str, Any]:
        return {}

    def read(self, rows: NDArray[np.int64]) -> Tensors:
        lengths = torch.randint(2, self.text_length + 1, (len(rows), 1))
        lengths[::8] = self.text_length
        return torch.randn(len(rows), *self.shape), torch.arange(self.text_length) < lengths

    def draw(self, num: int, generator: torch.Generator) -> Tensors:
        t = self.objective.sample_times(num, generator)
        return t, torch.randn(num, *self.shape, generator=generator)

    def loss(self, network: nn.Module, batch: Tensors, drawn: Tensors) -> Tensor:
        (x0, mask), (t, eps) = batch, drawn
        text = torch.randn(len(x0), self.text_length, self.case.text_dim)
        return self.objective.loss(lambda x, t: network(x, t, text, mask), x0, eps, t)

    def evaluate(self) -> dict[str, Any]:
        return {}

    def picture(self) -> None:
        return None

    def finish(self, folder: Path, training: Mapping[str, Any]) -> list[str]:
        self.network.save_pretrained(folder)
        return []


def ask(do: str, case: str, checkpointing: bool, steps: int, micro_batch: int | None = None) -> int:
    """The bytes that a process of its own predicts, or comes to."""
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
            train(lambda device: Noise(case), settings, Path(folder), progress=False)
        print(peak_resident())


def print_tables() -> None:
    pass


if __name__ == "__main__":
    main()
