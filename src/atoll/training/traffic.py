"""Counts FLOPs, and bytes read and written, of each operation that torch runs."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

ATEN = torch.ops.aten
FORMULAS = {  # the CPU's fused attention stands in for a GPU's: neither stores a matrix of scores
    **flop_registry,
    ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[ATEN._scaled_dot_product_flash_attention],
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        flop_registry[ATEN._scaled_dot_product_flash_attention_backward]
    ),
}


class Kernel(NamedTuple):
    name: str
    flops: float
    reads: dict[int, int]  # bytes by storage
    writes: dict[int, int]


class Traffic(TorchDispatchMode):
    """Records the kernels that run inside this context; views and allocations do not count as kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.kept: list[torch.UntypedStorage] = []  # so that no two have the same address

    def operations(self, compiled: bool = False) -> tuple[tuple[str, float, float], ...]:
        kernels = fuse(self.kernels) if compiled else self.kernels
        return tuple((k.name, k.flops, float(sum(k.reads.values()) + sum(k.writes.values()))) for k in kernels)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), func.overloadpacket.__name__
        if func.namespace != "aten" or "empty" in name:
            return result
        # AdamW only reads gradients, though its signature says that it may scale them.
        named = zip(func._schema.arguments, args, strict=False)
        changed = [value for argument, value in named if argument.is_write and argument.name != "grads"]
        reads, writes = self._sizes((args, kwargs)), self._sizes((result, changed))
        if changed or not writes.keys() <= reads.keys():  # otherwise the result is a view
            formula = FORMULAS.get(func.overloadpacket)
            flops = float(formula(*args, **kwargs, out_val=result)) if formula else 0.0
            self.kernels.append(Kernel(name, flops, reads, writes))
        return result

    def _sizes(self, values: Any) -> dict[int, int]:
        """Returns the bytes of tensors by storage: of a view only its part, of expanded dimensions one entry."""
        sizes: dict[int, int] = {}
        views = set()
        for tensor in tree_iter(values):
            if not isinstance(tensor, Tensor):
                continue
            storage, strides = tensor.untyped_storage(), tensor.stride()
            key, view = storage._cdata, (storage._cdata, tensor.storage_offset(), tensor.shape, strides)
            if view not in views:
                views.add(view)
                self.kept.append(storage)
                shown = torch.Size(num for num, step in zip(tensor.shape, strides, strict=True) if step)
                sizes[key] = min(sizes.get(key, 0) + tensor.itemsize * shown.numel(), storage.nbytes())
        return sizes


def fuse(kernels: list[Kernel]) -> list[Kernel]:
    """Fuses all kernels from one matrix product to the next; results are written only if another kernel reads them."""
    groups: list[list[Kernel]] = []
    for kernel in kernels:
        if kernel.flops or not groups or groups[-1][0].flops:
            groups.append([])
        groups[-1].append(kernel)
    readers: dict[int, set[int]] = {}
    for i, group in enumerate(groups):
        for key in set().union(*(kernel.reads for kernel in group)):
            readers.setdefault(key, set()).add(i)
    fused = []
    for i, group in enumerate(groups):
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        for kernel in group:
            for key in kernel.reads.keys() - writes.keys():
                reads[key] = max(reads.get(key, 0), kernel.reads[key])
            writes |= kernel.writes
        left = {key: size for key, size in writes.items() if key in reads or readers.get(key) != {i}}
        fused.append(Kernel("+".join(kernel.name for kernel in group), group[0].flops, reads, left))
    return fused
