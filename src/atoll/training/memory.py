"""Predicts the peak memory of a training process before it starts.

The memory of an update is not estimated but counted: it runs on torch's fake tensors, which have shapes but no data,
and every storage is tracked from allocation to release.
"""

import ctypes
import math
import resource
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from atoll.adam import AdamW
from atoll.networks.dit import DiT, DiTConfig
from atoll.networks.presets import preset
from atoll.networks.router import Router, RouterConfig
from atoll.training.muon import IN_BLOCKS
from atoll.training.settings import Settings

CUDA_BASE = 750 * 2**20  # CUDA context, kernels and cuBLAS workspace; assumed, not measured
HOLES = {"cpu": 0.15, "cuda": 0.1}
"""Memory lost to fragmentation, as a share of an update's: measured on average for glibc, assumed for CUDA."""
HEAP_TOP = 64 * 2**20  # what glibc keeps at the end of its heap
GROWTH = 1.1  # growth of a process from which on its heap is trimmed
MAPPED = 2**20  # with checkpointing or sharding, blocks of this size or more are returned as soon as they are free


@dataclass(frozen=True)
class Memory:
    """Peak memory of a training process in bytes, on the device that it trains on."""

    base: int  # interpreter, torch and loaded libraries
    frozen: int  # frozen networks: text encoder, codec, teacher
    weights: int  # with their EMA and the optimizer's moments; float32, also under bf16 autocast
    update: int  # gradients, activations, temporaries of the backward pass, a micro-batch
    holes: int  # fragmentation of the allocator, and buckets in which processes reduce gradients
    drawing: int  # sampling and decoding a sample grid

    @property
    def total(self) -> int:
        """Returns the peak: of updates and sample grids the larger counts, since activations are freed in between."""
        return self.base + self.frozen + self.weights + max(self.update + self.holes, self.drawing)

    def lines(self) -> list[str]:
        """Returns a line per part, and one for the peak."""
        parts = {**asdict(self), "peak": self.total}
        return [f"  {name:12} {in_words(size):>9}" for name, size in parts.items() if size]


def predict(
    config: DiTConfig | RouterConfig,
    settings: Settings,
    *,
    text_length: int,
    device_type: str = "cpu",
    bf16: bool = False,
    base: int | None = None,
    processes: int = 1,
    frozen: int = 0,
    drawing: int = 0,
) -> Memory:
    """Predicts the peak of each of `processes` that train `config`; texts have `text_length` tokens.

    Unless given, `base` is measured on a CPU, so call this before anything of the run is loaded. `frozen` is the size
    of frozen networks such as a text encoder, `drawing` the temporary memory of a sample grid.
    """
    if base is None:
        base = CUDA_BASE if device_type == "cuda" else measure_base(settings.checkpointing)
    num, cuda_casts = micro_batch_of(settings, processes), bf16 and device_type == "cuda"
    with FakeTensorMode(), Storages() as watch, Kernels(cuda_casts):
        network = network_of(config)
        network.gradient_checkpointing = settings.checkpointing
        learned = [p for p in network.parameters() if p.requires_grad]
        copies = [torch.empty_like(p) for p in learned for _ in ("EMA", "moment")]
        copies += [  # the second moment, which Muon does not have
            torch.empty_like(p)
            for name, p in network.named_parameters()
            if p.requires_grad and not (settings.optimizer == "muon" and IN_BLOCKS.fullmatch(name))
        ]
        weights = watch.peak = watch.now
        for p in learned:
            p.grad = torch.empty_like(p)
        gradients = watch.now - weights
        x, *others = inputs_of(config, num, text_length)
        # x0, noise and the target in addition to x_t; the padded text in addition to the unpadded one
        copies += [torch.empty_like(part) for part in (x, x, x, *others[1:])]
        add_gradients(network, [x, *others], bf16)
        update = watch.peak - weights
    is_sharded = settings.shard and processes > 1
    if is_sharded:  # this process's rows; unsharded are only the current block, the next one, and a block's gradients
        block = sum(4 * p.numel() for p in network.blocks[0].parameters())
        weights //= processes
        update += 3 * block - gradients + gradients // processes
    holes = round(HOLES[device_type] * update)
    if device_type == "cpu":
        holes = 0 if settings.checkpointing or is_sharded else holes + min(update, HEAP_TOP)
    holes += gradients if processes > 1 and not is_sharded else 0  # buckets
    return Memory(base, frozen, weights, update, holes, round((1 + HOLES[device_type]) * drawing))


def largest_micro_batch(
    predicted: Callable[[Settings], Memory], settings: Settings, available: int, processes: int = 1
) -> int:
    """Returns the largest micro-batch whose training takes at most `available` bytes; 0 if one sample is too many."""
    sizes = range(1, micro_batch_of(replace(settings, micro_batch=None), processes) + 1)
    return bisect_right(sizes, available, key=lambda num: predicted(replace(settings, micro_batch=num)).total)


def micro_batch_of(settings: Settings, processes: int = 1) -> int:
    """Returns the number of samples per forward pass of one process."""
    share = -(-settings.batch // processes)
    return min(settings.micro_batch or share, share)


class Storages(TorchDispatchMode):
    """Tracks the memory of all tensors created inside this context: bytes `now`, and at their `peak`.

    A storage that first appears as an argument existed before the context and is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for value in tree_iter((args, kwargs)):
            if isinstance(value, Tensor):
                self._follow(value.untyped_storage(), 0)
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._follow(value.untyped_storage(), value.untyped_storage().nbytes())
        return result

    def _follow(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata  # views of a tensor share its storage
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._end, key, size)

    def _end(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


class Kernels(TorchFunctionMode):
    """Replaces data-dependent functions, which fake tensors cannot run, and casts as autocast does on a GPU."""

    def __init__(self, cuda_casts: bool) -> None:
        super().__init__()
        self.in_float32 = (F.layer_norm, torch.addcmul) if cuda_casts else ()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.aminmax:  # the check that times lie in [0, 1]
            return 0.0, 1.0
        if func in self.in_float32:
            args = tuple(arg.float() if isinstance(arg, Tensor) else arg for arg in args)
        return func(*args, **(kwargs or {}))


class Heap:
    """Keeps glibc, on systems that have it, from holding on to free memory.

    The remainder of an aligned block is too small for another of its size, so the heap fragments: over a hundred
    updates it grew to four times the memory in use. Whenever it has grown by a tenth, free memory is trimmed.

    With checkpointing (temporary activations between stored ones) and sharding (unsharded blocks between their rows),
    fragmentation within one update would cost as much as they save. Then large blocks are `mapped`, that is, returned
    as soon as they are free, which takes a third to half more time.
    """

    def __init__(self, mapped: bool = False, enabled: bool = True) -> None:
        libc = ctypes.CDLL(None) if enabled else None
        self._trim = getattr(libc, "malloc_trim", None)
        self._updates, self._limit = 0, math.inf
        if self._trim is not None and mapped:
            libc.mallopt(-3, MAPPED)  # type: ignore[union-attr]  # M_MMAP_THRESHOLD, which would rise to 32 MB

    def tidy(self) -> None:
        """Trims the heap if it has grown; call this after each update."""
        if self._trim is None:
            return
        self._updates += 1
        if self._updates == 2:  # by then everything has been allocated once
            self._limit = GROWTH * peak_resident()
        elif resident() > self._limit:
            self.give_back()
            self._limit = max(self._limit, GROWTH * resident())  # more may be in use than before

    def give_back(self) -> None:
        """Returns free memory to the system."""
        if self._trim is not None:
            self._trim(0)


def measure_base(checkpointing: bool = False) -> int:
    """Returns this process's memory after training a tiny network, because torch loads parts of itself only then.

    With checkpointing it is larger: torch's implementation loads its compiler.
    """
    config = DiTConfig(**preset("xs", input_size=4, in_channels=1, text_dim=4))
    Heap().give_back()
    with torch.random.fork_rng(devices=[]):
        network = DiT(config)
        network.gradient_checkpointing = checkpointing
        optimizer = AdamW(network.parameters(), (0.9, 0.999), fused=True)
        network(torch.zeros(2, 1, 4, 4), torch.zeros(2), torch.zeros(2, 1, 4)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step(1e-3)
    return resident()


def resident() -> int:
    """Returns the resident memory of this process in bytes; its peak on systems without /proc."""
    return _from_proc("self/status", "VmRSS", _max_resident())


def peak_resident() -> int:
    """Returns the peak resident memory of this process in bytes."""
    return _from_proc("self/status", "VmHWM", _max_resident())


def available(device: torch.device) -> int:
    """Returns the free memory in bytes; on systems without /proc, 2**63."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _from_proc("meminfo", "MemAvailable", 2**63)


def _from_proc(name: str, key: str, otherwise: int) -> int:
    """Returns a number of bytes from /proc, or `otherwise` on systems without it."""
    try:
        lines = Path("/proc", name).read_text().splitlines()
    except OSError:
        return otherwise
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def _max_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def in_words(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def network_of(config: DiTConfig | RouterConfig) -> DiT | Router:
    return Router(config) if isinstance(config, RouterConfig) else DiT(config)


def add_gradients(network: DiT | Router, inputs: list[Tensor], bf16: bool) -> None:
    """Computes a loss and adds its gradients to those of the weights; call this inside `Kernels`."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = network(*inputs).float().square().mean()
    # Not loss.backward(), in which recomputed blocks would run outside of Kernels.
    torch.autograd.graph._engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def inputs_of(config: DiTConfig | RouterConfig, num_samples: int, text_length: int) -> list[Tensor]:
    """Returns x, t and, if the network reads text, a text without padding (how much is padding depends on the data)."""
    size = config.input_size
    shapes = [(num_samples, config.in_channels, size, size), (num_samples,)]
    if config.text_dim is not None:
        shapes.append((num_samples, text_length, config.text_dim))
    return [torch.empty(shape) for shape in shapes]
