"""How much memory a training process will take at its peak, predicted before it takes it.

What autograd keeps is not estimated but counted: one update runs on torch's meta device, where tensors have shapes
and no data, and every storage is followed from its making to its end.
"""

import ctypes
import math
import resource
import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from atoll.networks.dit import DiT, DiTConfig, Trunk
from atoll.networks.presets import preset
from atoll.networks.router import Router, RouterConfig
from atoll.training.settings import Settings

FLOAT = 4  # weights, their EMA, gradients and moments are float32, also under bf16 autocast
CUDA_BASE = 750 * 2**20  # the context, kernels and cuBLAS' workspace; not measured here
SAVING_COPIES = tuple(map(int, version("safetensors").split(".")[:2])) < (0, 8)
"""Whether safetensors copies all of a checkpoint before it writes. What comes from a GPU is copied by every version,
but to the host."""
HOLES = {"cpu": 0.15, "cuda": 0.1}
"""What an allocator cannot use again, as a share of what an update asks of it: glibc's on average, CUDA's assumed."""
HEAP_TOP = 64 * 2**20  # what glibc keeps at the end of its heap
GROWTH = 1.1  # of a process, from which on its heap is tidied
MAPPED = 2**20  # with checkpointing, blocks from here on are given back as soon as they are free


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a training process, on the device that it trains on."""

    base: int  # interpreter, torch and what is loaded
    weights: int
    gradients: int
    optimiser: int  # AdamW's two moments
    ema: int
    activations: int  # what autograd keeps for the backward pass, with bf16 copies of weights
    batch: int  # latents, noise, target and text of a micro-batch
    saving: int  # what writing a checkpoint takes beside the tensors themselves
    other: int  # temporaries of the backward pass, holes of the allocator
    frozen: int = 0  # what never learns: text encoder, codec, teacher
    drawing: int = 0  # what a grid of samples takes: sampling and decoding

    @property
    def total(self) -> int:
        """Checkpoints are written and samples drawn between updates, when activations are gone: the largest counts."""
        held = self.base + self.weights + self.optimiser + self.ema + self.frozen
        return held + max(self.gradients + self.activations + self.batch + self.other, self.saving, self.drawing)

    def lines(self) -> list[str]:
        """Returns a part in each line, and the peak."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return [f"{name:12} {in_words(size):>9}" for name, size in {**parts, "peak": self.total}.items() if size]


@dataclass(frozen=True)
class Activations:
    """Bytes of an update that come and go with it."""

    kept: int  # when the forward pass is done, or with checkpointing, when a block has been computed again
    temporary: int  # the most that the backward pass has beyond that


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
    """Predicts the peak of one of `processes` that train `config`; texts have `text_length` tokens.

    `base` is measured on a CPU unless given: call this before anything of the run is loaded. `frozen` is for what else
    will be there, such as a text encoder, `drawing` for what comes and goes with a grid of samples. On a CPU, the
    process has a `Heap`.
    """
    if base is None:
        base = CUDA_BASE if device_type == "cuda" else measure_base()
    num_samples = micro_batch_of(settings, processes)
    checkpointing = settings.checkpointing
    activations = count_activations(
        config, num_samples, text_length=text_length, checkpointing=checkpointing, bf16=bf16, device_type=device_type
    )
    network = on_meta(config)
    weights = FLOAT * sum(p.numel() for p in network.parameters())
    gradients = FLOAT * sum(p.numel() for p in network.parameters() if p.requires_grad)
    latents = config.in_channels * config.input_size**2
    text = text_length * (config.text_dim or 0)
    # x0, noise, their mixture and the target; the text with padding and without
    batch = num_samples * FLOAT * (4 * latents + 2 * text)
    buckets = gradients if processes > 1 else 0  # in which processes add up their gradients
    requested = gradients + activations.kept + activations.temporary + batch
    holes = round(HOLES[device_type] * requested)
    if device_type == "cpu":
        holes = 0 if checkpointing else holes + min(requested, HEAP_TOP)
    return Memory(
        base=base,
        weights=weights,
        gradients=gradients,
        optimiser=2 * gradients,
        ema=gradients,
        activations=activations.kept,
        batch=batch,
        saving=4 * gradients if SAVING_COPIES and device_type == "cpu" else 0,
        other=activations.temporary + buckets + holes,
        frozen=frozen,
        drawing=round((1 + HOLES[device_type]) * drawing),
    )


def largest_micro_batch(
    config: DiTConfig | RouterConfig,
    settings: Settings,
    available: int,
    **circumstances: Any,
) -> int:
    """Returns the most samples at a time whose training takes at most `available` bytes; 0 if one is too many."""
    if circumstances.get("base") is None and circumstances.get("device_type", "cpu") == "cpu":
        circumstances["base"] = measure_base()

    def needed(num: int) -> int:
        return predict(config, replace(settings, micro_batch=num), **circumstances).total

    fits, too_many = 1, micro_batch_of(replace(settings, micro_batch=None), circumstances.get("processes", 1))
    least, most = needed(fits), needed(too_many)
    if least > available:
        return 0
    if most <= available:
        return too_many
    while too_many - fits > 1:
        # Memory is nearly a straight line over samples: where it meets `available` is nearly the answer.
        guess = fits + (too_many - fits) * (available - least) // (most - least)
        num = min(max(guess, fits + 1), too_many - 1)
        if (size := needed(num)) <= available:
            fits, least = num, size
        else:
            too_many, most = num, size
    return fits


def micro_batch_of(settings: Settings, processes: int = 1) -> int:
    """Returns how many samples a process has at a time."""
    share = -(-settings.batch // processes)
    return share if settings.micro_batch is None else min(settings.micro_batch, share)


def count_activations(
    config: DiTConfig | RouterConfig,
    num_samples: int,
    *,
    text_length: int,
    checkpointing: bool = False,
    bf16: bool = False,
    device_type: str = "cpu",
) -> Activations:
    """Counts what a forward pass keeps and a backward pass adds, without data."""
    network, arguments = on_meta(config), inputs_of(config, num_samples, text_length)
    learned = [p for p in network.parameters() if p.requires_grad]
    for parameter in learned:
        parameter.grad = torch.empty_like(parameter)
    gradients = [p.grad for p in learned if p.grad is not None]
    watch = Storages([*network.parameters(), *gradients, *arguments])
    kernels = Kernels(bf16, device_type)
    blocks = _Blocks(network, watch, kernels)
    with watch:
        with kernels:
            loss = network(*arguments).float().square().mean()
        kernels.copies.clear()
        kept = watch.now - _size(loss)
        torch.autograd.backward(loss)
    temporary = watch.peak - kept
    if checkpointing:
        # Of each block only its arguments stay, and all of it for as long as its gradients are computed. Autocast
        # itself keeps its copies of weights until the forward pass is done.
        kept += max(*blocks.own, blocks.copies) - sum(blocks.own)
    return Activations(kept, temporary)


class Storages(TorchDispatchMode):
    """Follows the memory of all tensors made while it is entered: bytes `now`, and at their `peak`.

    What was there before is known by its name, or by being an argument before it was a result.
    """

    def __init__(self, left_out: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in left_out}

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
    """Has functions keep what they keep on a real device.

    Attention keeps its arguments, its result and a number a row, as fused kernels do; on the meta device it would keep
    the matrix. With bf16 there are the casts of torch.autocast, which does not know that device either.
    """

    def __init__(self, bf16: bool, device_type: str) -> None:
        super().__init__()
        self.bf16 = bf16
        self.on_cuda = device_type == "cuda"
        self.copies: dict[int, Tensor] = {}  # weights in bf16, made once per forward pass

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _Attention.apply(*(self._cast(arg) for arg in args[:3]))
        if func is F.linear:
            args = tuple(self._cast(arg) for arg in args)
        elif self.bf16 and self.on_cuda and func is F.layer_norm:
            args = (args[0].float(), *args[1:])
        elif self.bf16 and self.on_cuda and func is torch.addcmul:
            args = tuple(arg.float() for arg in args)  # one of them is, and autocast takes the widest
        return func(*args, **(kwargs or {}))

    def _cast(self, value: Any) -> Any:
        if not self.bf16 or not isinstance(value, Tensor):
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.bfloat16()
        if id(value) not in self.copies:
            self.copies[id(value)] = value.bfloat16()
        return self.copies[id(value)]


class _Attention(torch.autograd.Function):
    """softmax(q k) v as far as memory goes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, length, width = q.shape
        result = q.new_empty(batch, length, heads, width).transpose(1, 2)
        sums = q.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class _Blocks:
    """What each block keeps beside its arguments, and how much of all that is copies of weights."""

    def __init__(self, network: Trunk, watch: Storages, kernels: Kernels) -> None:
        self.own: list[int] = []
        self.copies = 0
        self.watch, self.kernels = watch, kernels
        for block in network.blocks:
            block.register_forward_pre_hook(self._enter)
            block.register_forward_hook(self._leave)

    def _enter(self, block: Any, arguments: Any) -> None:
        self.own.append(-self.watch.now)
        self.copies -= self._size_of_copies()

    def _leave(self, block: Any, arguments: Any, result: Tensor) -> None:
        self.own[-1] += self.watch.now - _size(result)  # the result is the next one's argument
        self.copies += self._size_of_copies()

    def _size_of_copies(self) -> int:
        return sum(_size(copy) for copy in self.kernels.copies.values())


class Heap:
    """Keeps glibc, where there is one, from holding on to memory that is free.

    What is left of an aligned block does not hold another of its size, so its heap fills with holes: over a hundred
    updates it grew to four times what was in use. When it has grown by a tenth, the holes are given back.

    With checkpointing, activations come and go between those that stay, and the holes of one update are as large as
    what is saved. Then large blocks are given back as soon as they are free, which takes a third to half more time.
    """

    def __init__(self, checkpointing: bool = False, enabled: bool = True) -> None:
        libc = ctypes.CDLL(None) if enabled else None
        self._trim = getattr(libc, "malloc_trim", None)
        self._updates, self._limit = 0, math.inf
        if libc is not None and checkpointing and hasattr(libc, "mallopt"):
            libc.mallopt(-3, MAPPED)  # M_MMAP_THRESHOLD, which would otherwise rise to 32 MB

    def tidy(self) -> None:
        """To be called after each update."""
        if self._trim is None:
            return
        self._updates += 1
        if self._updates == 2:  # by then an update has all that it needs
            self._limit = GROWTH * peak_resident()
        elif resident() > self._limit:
            self.give_back()
            self._limit = max(self._limit, GROWTH * resident())  # more is in use than there was

    def give_back(self) -> None:
        """Return what is free to the system."""
        if self._trim is not None:
            self._trim(0)


def measure_base() -> int:
    """Returns this process's memory once it has trained something tiny: torch loads some of itself only then."""
    config = DiTConfig(**preset("xs", input_size=4, in_channels=1, text_dim=4))
    with torch.random.fork_rng(devices=[]):
        network = DiT(config)
        optimizer = torch.optim.AdamW(network.parameters(), fused=True)
        loss = network(torch.zeros(2, 1, 4, 4), torch.zeros(2), torch.zeros(2, 1, 4)).square().mean()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    return resident()


def resident() -> int:
    """Returns the bytes of this process in memory, or on systems that do not tell, the most there have been."""
    return _from_status("VmRSS")


def peak_resident() -> int:
    """Returns the most bytes of this process that have been in memory."""
    return _from_status("VmHWM")


def _from_status(key: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on Linux, that of who started it if that is more
        return peak if sys.platform == "darwin" else 1024 * peak
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def in_words(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def on_meta(config: DiTConfig | RouterConfig) -> DiT | Router:
    with torch.device("meta"):
        return Router(config) if isinstance(config, RouterConfig) else DiT(config)


def inputs_of(config: DiTConfig | RouterConfig, num_samples: int, text_length: int) -> list[Tensor]:
    """Returns x, t and a text without padding, since how much of it is padding is a question to the data."""
    assert num_samples >= 1
    assert text_length >= 1
    size = config.input_size
    shapes = [(num_samples, config.in_channels, size, size), (num_samples,)]
    if config.text_dim is not None:
        shapes.append((num_samples, text_length, config.text_dim))
    return [torch.empty(shape, device="meta") for shape in shapes]


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
