"""A simulated GPU: tensors that claim to be on `cuda:0` and compute on the CPU, with real values.

It fails where a GPU would, when tensors of two devices meet, and counts by call site what would stall one: reading a
value, copying to the host, copying from unpinned memory, and operations whose output size depends on values. (Fake
tensors cannot do this here: their autograd needs a build with CUDA, and without values no code can branch on them.)
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda:0")
aten = torch.ops.aten
STALLS = {
    *(aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.nonzero.default),
    *(aten.masked_select.default, aten._unique2.default, aten.unique_dim.default, aten.repeat_interleave.Tensor),
}
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._unsafe_index.Tensor)


class GpuTensor(Tensor):
    """Claims to be on the GPU; `held` is the tensor on the CPU. Autograd sees a CPU tensor."""

    held: Tensor
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    data = property(lambda self: self.detach(), lambda self, other: setattr(self, "held", other.held))

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool = False) -> "GpuTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device="cpu", requires_grad=requires_grad,
        )  # fmt: skip
        tensor.held = held
        return tensor

    def record_stream(self, stream: "Stream") -> None:
        _gpu().log.append(("record_stream", stream.name, tuple(self.shape)))

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        first = args[0] if args else None
        if name in ("to", "type_as") and len(args) > 1 and isinstance(args[1], Tensor):  # to another tensor's device
            return first.to(args[1].device, args[1].dtype, *args[2:], **kwargs)
        if name == "pad_sequence":  # creates its result in C++, which sees CPU tensors
            return GpuTensor(func(*tree_map(_held, args), **kwargs))
        if name == "to" and sys._getframe(1).f_globals["__name__"] in ("torch.nn.utils.clip_grad", "torch.optim.adam"):
            return first  # they group tensors by the device that C++ sees, and move nothing
        if name in ("cpu", "numpy", "tolist") or (name == "to" and _target(args, kwargs) == "cpu"):
            _gpu().stall(name)
            with torch._C.DisableTorchFunctionSubclass():
                host = _leave(first)
            return host if name == "cpu" else getattr(host, name)(*args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _gpu().run(func, args, kwargs or {})


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: GpuTensor) -> Tensor:
        return tensor.held.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return GpuTensor(gradient)


def _leave(tensor: GpuTensor) -> Tensor:
    return _Leave.apply(tensor)


def _target(args: Any, kwargs: Any) -> str | None:
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, str | torch.device):
            return torch.device(value).type
        if isinstance(value, Tensor):
            return value.device.type
    return None


class Stream:
    """A stream of the device; here all run immediately, and their calls are logged."""

    def __init__(self, name: Any = "side") -> None:
        self.name = name if isinstance(name, str) else "side"

    def wait_event(self, event: "Event") -> None:
        _gpu().log.append(("wait", self.name, event.number))


class Event:
    number = 0

    def record(self, stream: Stream) -> None:
        Event.number += 1
        self.number = Event.number
        _gpu().log.append(("record", stream.name, self.number))


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    gpu = _gpu()
    gpu.stream, before = stream, gpu.stream
    yield
    gpu.stream = before


class Gpu(TorchDispatchMode):
    """The device while it is simulated; `stalls` are counted by call site in atoll."""

    def __init__(self) -> None:
        super().__init__()
        self.stalls: Counter[str] = Counter()
        self.log: list[tuple[Any, ...]] = []  # copies to the device, and calls of streams and events
        self.stream = Stream("default")
        self.pinned: dict[int, torch.UntypedStorage] = {}

    def pin(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, GpuTensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor': only dense CPU tensors can be pinned")
        copy = tensor.clone()
        self.pinned[copy.untyped_storage().data_ptr()] = copy.untyped_storage()
        return copy

    def is_pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, GpuTensor) and tensor.untyped_storage().data_ptr() in self.pinned

    def stall(self, what: str) -> None:
        frame: Any = sys._getframe()
        while frame is not None and "/atoll/" not in frame.f_code.co_filename:
            frame = frame.f_back
        where = "elsewhere"
        if frame is not None:
            where = f"{frame.f_code.co_filename.rpartition('/atoll/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
        self.stalls[f"{where}: {what}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        flat, _ = tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        on_gpu = [tensor for tensor in tensors if isinstance(tensor, GpuTensor)]
        device = kwargs.get("device")
        to_gpu = device is not None and torch.device(device).type == "cuda"
        if not on_gpu and not to_gpu:
            return func(*args, **kwargs)
        copies = func in (aten._to_copy.default, aten.copy_.default)
        if not copies and not to_gpu and func not in INDEXING:
            for tensor in tensors:
                if not isinstance(tensor, GpuTensor) and tensor.dim():
                    raise RuntimeError(
                        f"Expected all tensors to be on the same device, but found cuda:0 and cpu! ({func})"
                    )
        indices = [i for i in args[1] if isinstance(i, Tensor)] if func in INDEXING else []
        if func in STALLS or any(i.dtype is torch.bool for i in indices):
            self.stall(str(func))
        if any(i.dim() and not isinstance(i, GpuTensor) for i in indices):
            self.stall(f"{func} by an index on the host")
        if func is aten.copy_.default and not isinstance(args[0], GpuTensor):
            self.stall("copy to the host")
        source = tensors[-1] if tensors else None
        if copies and source is not None and not isinstance(source, GpuTensor) and (to_gpu or source.dim()):
            if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
                self.stall("blocking copy to the device")
            elif not self.is_pinned(source):  # the driver copies it to pinned memory first, and waits for that
                self.stall("copy to the device from memory that is not pinned")
            self.log.append(("copy", self.stream.name, tuple(source.shape)))
        held = {id(tensor.held): tensor for tensor in on_gpu}
        kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
        kwargs.pop("pin_memory", None)
        result = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        if func is aten.copy_.default:
            return args[0]

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, GpuTensor):
                return value
            return held.get(id(value)) if id(value) in held else GpuTensor(value)

        return tree_map(wrap, result)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, GpuTensor) else value


def _save_held(tensors: dict[str, Tensor], *args: Any, **kwargs: Any) -> None:
    save_file({name: _held(tensor) for name, tensor in tensors.items()}, *args, **kwargs)


def _on_the_host(make: Any) -> Any:
    """Creates tensors from Python numbers on the CPU and copies them to the GPU, as torch does."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        tensor = make(*args, **kwargs)
        return tensor if device is None else tensor.to(device)

    return made


_running: list[Gpu] = []


def _gpu() -> Gpu:
    return _running[-1]


def _pinned(tensor: Tensor) -> Tensor:
    return _gpu().pin(tensor)


def _is_pinned(tensor: Tensor) -> bool:
    return _gpu().is_pinned(tensor)


@contextmanager
def simulated_gpu() -> Iterator[Gpu]:
    """Simulates a machine with one GPU, as far as Python can tell."""
    gpu = Gpu()
    _running.append(gpu)
    patches = {"is_available": lambda: True, "_lazy_init": lambda: None, "device_count": lambda: 1,
               "is_bf16_supported": lambda including_emulation=True: True, "current_device": lambda: 0,
               "Stream": Stream, "Event": Event, "stream": on_stream,
               "current_stream": lambda device: gpu.stream}  # fmt: skip
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("atoll.")]
    savers = [module for module in ours if getattr(module, "save_file", None) is save_file]
    makers = {name: _on_the_host(getattr(torch, name)) for name in ("tensor", "as_tensor")}
    try:
        with ExitStack() as patched:
            for module in savers:  # which read memory by its address
                patched.enter_context(mock.patch.object(module, "save_file", _save_held))
            patched.enter_context(mock.patch.multiple(torch.cuda, **patches))
            patched.enter_context(mock.patch.multiple(torch, **makers))
            patched.enter_context(mock.patch.multiple(Tensor, pin_memory=_pinned, is_pinned=_is_pinned))
            patched.enter_context(gpu)
            yield gpu
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
        _running.pop()
