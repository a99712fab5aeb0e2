"""FSDP2: shards weights, gradients, EMA and moments over processes, for experts larger than one GPU.

Each process keeps its rows of every tensor and updates only these. Weights are gathered only for the running block.
"""

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atoll.networks.dit import Trunk

if TYPE_CHECKING:  # takes half a second, which runs of one process need not wait for
    from torch.distributed.tensor import DTensor


def shard(network: Trunk, device: torch.device, processes: int) -> None:
    """Shards the network in place: this process keeps its rows of the weights, on its device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing modifies it in place
    mesh = init_device_mesh(device.type, (processes,))
    # Reshard also the root after a forward pass: otherwise its gathered weights would survive a swap with the EMA.
    for module in (*network.blocks, network):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        register_fsdp_forward_method(module, "read_text")  # sampling calls it directly
    network.is_sharded = True


@dataclass(frozen=True)
class Shard:
    """This process's rows of a tensor laid out as `like`; checkpoints treat it as the whole tensor."""

    rows: Tensor
    like: "DTensor"

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    @property
    def shape(self) -> torch.Size:
        return self.like.shape

    def whole(self) -> Tensor:
        """Returns the whole tensor; all processes must call this together."""
        from torch.distributed.tensor import DTensor

        like = self.like
        full = DTensor.from_local(
            self.rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return full.full_tensor()

    def copy_(self, whole: Tensor) -> None:
        """Copies this process's rows of a whole tensor, which are split as by torch.chunk."""
        parts, rank = whole.chunk(self.like.device_mesh.size()), self.like.device_mesh.get_local_rank()
        if rank < len(parts):  # with few rows, the last processes have none
            self.rows.copy_(parts[rank])


def whole(tensor: Tensor | Shard) -> Tensor:
    return tensor.whole() if isinstance(tensor, Shard) else tensor
