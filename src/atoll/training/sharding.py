"""FSDP2: weights, gradients, EMA and moments shared out to processes, for an expert larger than a GPU.

Each process keeps its rows of every tensor and updates them by itself. Weights are whole only in the block that runs.
"""

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atoll.networks.dit import Trunk

if TYPE_CHECKING:  # half a second that runs of one process need not wait
    from torch.distributed.tensor import DTensor


def shard(network: Trunk, device: torch.device, processes: int) -> None:
    """Leaves this process its rows of the weights, on its device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # which nothing changes in place
    mesh = init_device_mesh(device.type, (processes,))
    # Also the last weights are sharded again after a forward pass: nothing else tells them that EMA took their place.
    for module in (*network.blocks, network):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        register_fsdp_forward_method(module, "read_text")  # which sampling calls by itself
    network.is_sharded = True


@dataclass(frozen=True)
class Shard:
    """This process's rows of a tensor that is laid out as `like`; to a checkpoint, that tensor."""

    rows: Tensor
    like: "DTensor"

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    @property
    def shape(self) -> torch.Size:
        return self.like.shape

    def whole(self) -> Tensor:
        """Returns the tensor; all processes call this at once."""
        from torch.distributed.tensor import DTensor

        like = self.like
        full = DTensor.from_local(
            self.rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return full.full_tensor()

    def copy_(self, whole: Tensor) -> None:
        """Takes its rows, which are distributed as torch.chunk does."""
        parts, rank = whole.chunk(self.like.device_mesh.size()), self.like.device_mesh.get_local_rank()
        if rank < len(parts):  # of a few rows, the last processes have none
            self.rows.copy_(parts[rank])


def whole(tensor: Tensor | Shard) -> Tensor:
    return tensor.whole() if isinstance(tensor, Shard) else tensor
