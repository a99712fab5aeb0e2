"""Peak memory of a training process: predicted, measured, and their ratio.

    python benchmarks/memory.py [--steps 10]    # trains small models on the CPU, with and without checkpointing
    python benchmarks/memory.py --table         # the tables of docs/hardware.md: computed, nothing is trained

Prediction and training each have a process of their own, as `atoll train --dry-run` and `atoll train` do. An update is
forward, loss, backward, gradient clipping, AdamW and the moving average; a state is written after the last.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import nn

from atoll.diffusion.objective import get_objective
from atoll.models.dit import DiT, DiTConfig
from atoll.models.presets import preset
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


def train(case: Case, checkpointing: bool, steps: int, micro_batch: int) -> int:
    """Train a network on noise, save its state, and give the most memory that this process had."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config, objective = case.config, get_objective("fm")
    network = DiT(config)
    network.gradient_checkpointing = checkpointing
    average = [p.detach().clone() for p in network.parameters()]
    learned = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-4, fused=True)
    for _ in range(steps):
        for _ in range(case.batch // micro_batch):
            x0 = torch.randn(micro_batch, config.in_channels, case.size, case.size)
            text = torch.randn(micro_batch, case.text_length, case.text_dim)
            lengths = torch.randint(2, case.text_length + 1, (micro_batch, 1))
            lengths[0] = case.text_length
            mask = torch.arange(case.text_length) < lengths
            losses = objective.loss(
                lambda x, t, text=text, mask=mask: network(x, t, text, mask),  # type: ignore[misc]
                x0,
                torch.randn_like(x0),
                torch.rand(micro_batch),
            )
            (losses.sum() / case.batch).backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(average, [p.detach() for p in network.parameters()], 0.01)
    with TemporaryDirectory() as folder:
        state = {f"weights.{name}": tensor for name, tensor in network.state_dict().items()}
        state |= {f"ema.{i}": tensor for i, tensor in enumerate(average)}
        for i, p in enumerate(learned):
            state |= {f"{name}.{i}": optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq")}
        save_file(state, Path(folder) / "state.safetensors")
    return peak_resident()


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
        if args.do == "train":
            print(train(case, args.checkpointing, args.steps, args.micro_batch or case.batch))
        else:
            settings = ExpertSettings(
                batch=case.batch, micro_batch=args.micro_batch, checkpointing=args.checkpointing
            )
            print(predict(case.config, settings, text_length=case.text_length).total)


def print_tables() -> None:
    pass


if __name__ == "__main__":
    main()
