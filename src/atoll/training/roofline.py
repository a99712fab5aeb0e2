"""Predicts the maximum speed of training and sampling on a device from each kernel's FLOPs and bytes (a roofline).

As in memory.py, a step runs on torch's fake tensors. A kernel takes the longer of two times: its FLOPs at the device's
peak, and the bytes that it reads and writes at its memory bandwidth.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from atoll.adam import AdamW
from atoll.networks.dit import DiTConfig
from atoll.networks.router import RouterConfig
from atoll.training.memory import Kernels, add_gradients, inputs_of, network_of
from atoll.training.traffic import Traffic

LAUNCH = 5e-6  # seconds in which the host launches a kernel on a GPU: assumed, not measured


@dataclass(frozen=True)
class Device:
    """Peak figures of a device, as stated by its vendor."""

    name: str
    flops: float  # per second: dense bf16 products, summed in float32
    bandwidth: float  # bytes per second
    memory: float  # bytes
    launch: float = LAUNCH  # 0 for a CPU


DEVICES = {
    "RTX 4090": Device("RTX 4090", 165e12, 1008e9, 24e9),
    "A100": Device("A100 80 GB", 312e12, 2039e9, 80e9),
    "H100": Device("H100 SXM", 989e12, 3350e9, 80e9),
}


@dataclass(frozen=True)
class Work:
    """The kernels of a step."""

    operations: tuple[tuple[str, float, float], ...]  # per kernel: name, FLOPs, bytes read and written

    @property
    def flops(self) -> float:
        return sum(flops for _, flops, _ in self.operations)

    @property
    def bytes(self) -> float:
        return sum(size for _, _, size in self.operations)

    def seconds(self, device: Device) -> float:
        """Returns a lower bound on the time of a step: kernels run one by one, while the host launches the next ones.

        Only a cache that keeps one kernel's output for the next, or another order of kernels, can be faster.
        """
        kernels = sum(max(flops / device.flops, size / device.bandwidth) for _, flops, size in self.operations)
        return max(kernels, device.launch * len(self.operations))


def training_work(
    config: DiTConfig | RouterConfig,
    micro_batch: int,
    *,
    text_length: int,
    bf16: bool = True,
    checkpointing: bool = False,
    micro_batches: int = 1,
    compiled: bool = False,
) -> Work:
    """Counts a training step: gradients of `micro_batches`, clipping, AdamW and EMA, as in the training loop.

    `compiled` fuses elementwise kernels as torch.compile may, see `traffic.fuse`. Computing x_t and its target is left
    out: latents are a hundredth of the activations between two blocks.
    """
    with FakeTensorMode(), Kernels(bf16):
        network = network_of(config)
        network.gradient_checkpointing = checkpointing
        weights: list[Tensor] = [p for p in network.parameters() if p.requires_grad]
        ema, inputs = [torch.empty_like(p) for p in weights], inputs_of(config, micro_batch, text_length)
        optimizer = AdamW(weights, (0.9, 0.999), weight_decay=0.01, fused=True)
        with Traffic() as first:
            add_gradients(network, inputs, bf16)
        with Traffic() as later:  # accumulates into existing gradients
            if micro_batches > 1:
                add_gradients(network, inputs, bf16)
        with Traffic() as update:
            torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
            optimizer.step(1e-3)
            torch._foreach_lerp_(ema, weights, 0.1)
    again = later.operations(compiled) * (micro_batches - 1)
    return Work((*first.operations(compiled), *again, *update.operations()))


@torch.no_grad()
def sampling_work(
    config: DiTConfig | RouterConfig, samples: int, *, text_length: int, bf16: bool = True, compiled: bool = False
) -> Work:
    """Counts one evaluation of `samples` at one t, with the text already read; with bf16 the weights are bf16."""
    with FakeTensorMode(), Kernels(False):
        network, dtype = network_of(config), torch.bfloat16 if bf16 else torch.float32
        for p in network.parameters():
            p.data = p.to(dtype)  # Module.to cannot swap fake tensors
        x, _, *text = (part.to(dtype) for part in inputs_of(config, samples, text_length))
        context, time = network.read_text(text[0]) if text else None, torch.empty(())
        with Traffic() as traffic:
            network(x, time, context)
    return Work(traffic.operations(compiled))
