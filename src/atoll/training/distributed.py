"""The processes that train one network together: this one alone, or those that `accelerate launch` started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.encoders.pretrained import require
from atoll.errors import InputError
from atoll.storage import alone, make_folder
from atoll.training.settings import Settings


class Distributed:
    """One of the processes that train a network. Each trains on its slice of every batch; the first writes files."""

    def __init__(self, settings: Settings) -> None:
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.is_main = self.rank == 0
        self._accelerator: Any = None
        self.device = settings.torch_device
        if self.size > 1:
            # The settings decide on precision and compilation, whatever accelerate's configuration says.
            self._accelerator = require("accelerate", "hf").Accelerator(
                cpu=self.device.type == "cpu", mixed_precision="no", dynamo_backend="no"
            )
            self.device = self._accelerator.device
        if settings.batch % self.size:
            raise InputError(f"a batch of {settings.batch} cannot be shared by {self.size} processes: change --batch")
        num = settings.batch // self.size
        self.is_sharded = settings.shard and self.size > 1
        self.share = slice(self.rank * num, (self.rank + 1) * num)
        if self.device.type == "cpu":
            torch.set_num_threads(settings.threads)

    def wrap(self, network: nn.Module) -> nn.Module:
        """Returns the network wrapped so that backward passes average gradients over processes."""
        return network if self._accelerator is None or self.is_sharded else self._accelerator.prepare_model(network)

    def no_sync(self, network: nn.Module, unless: bool) -> Any:
        """Returns a context for backward passes that leave averaging of gradients to the last micro-batch."""
        if unless or self._accelerator is None or self.is_sharded:  # sharded: unreduced gradients would not fit
            return nullcontext()
        return self._accelerator.no_sync(network)

    def mean(self, values: Tensor) -> Tensor:
        return values if self._accelerator is None else self._accelerator.reduce(values, "mean")

    def norm(self, norm: Tensor) -> Tensor:
        """Returns the global gradient norm from this process's, whose gradients are only a part if sharded."""
        return (self.mean(norm.square()) * self.size).sqrt() if self.is_sharded else norm

    def any(self, flag: bool, asks: bool = True) -> bool:
        """Returns whether the flag is set in any process; with several processes, always False unless this `asks`."""
        if self.size == 1:
            return flag
        return asks and float(self.mean(torch.tensor(float(flag), device=self.device))) > 0

    def barrier(self) -> None:
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()

    @contextmanager
    def locked(self, folder: Path) -> Iterator[None]:
        """Creates the run's folder if needed and locks it; raises an InputError if another run holds it."""
        make_folder(folder)
        with alone(folder) if self.is_main else nullcontext():
            self.barrier()
            yield
