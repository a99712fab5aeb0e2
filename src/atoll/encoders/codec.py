"""The codec interface: images [B, 3, S, S] in [-1, 1] <-> float32 latents [B, C, h, w] of about unit variance."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.cards import CodecCard
from atoll.encoders.pretrained import Frozen
from atoll.errors import InputError

FOLDER = "vae"  # the codec's folder in a model, as in the published Paris model


class Codec(Frozen):
    """Images <-> latents, with fixed weights: `channels` numbers for each `factor` x `factor` patch of pixels."""

    channels: int
    factor: int
    card_class, place = CodecCard, FOLDER

    def latent_shape(self, size: int) -> tuple[int, int, int]:
        """Returns (C, h, w) for images of `size` x `size`; raises InputError for sizes that cannot be encoded."""
        if size < self.factor or size % self.factor:
            near = max(1, round(size / self.factor)) * self.factor
            raise InputError(
                f"images of {size} x {size} cannot be cut into patches of {self.factor}: use {near} x {near}"
            )
        return (self.channels, size // self.factor, size // self.factor)

    def encode(self, images: Tensor) -> Tensor:
        raise NotImplementedError

    def decode(self, latents: Tensor) -> Tensor:
        raise NotImplementedError

    def sizes(self) -> dict[str, Any]:
        return {"channels": self.channels, "factor": self.factor}


def check_images(images: Tensor) -> Tensor:
    """Returns the images after asserting that they are [B, 3, S, S] in [-1, 1]."""
    _, channels, height, width = images.shape
    assert (channels, height) == (3, width), images.shape
    if images.device.type == "cpu":  # reading the value would stall a GPU
        assert float(images.abs().max()) <= 1.001, "images must be in [-1, 1]"  # NaN fails too
    return images


def device_of(codec: Codec) -> torch.device:
    tensors = (*codec.parameters(), *codec.buffers())
    return tensors[0].device if tensors else torch.device("cpu")


def to_uint8(images: Tensor) -> NDArray[np.uint8]:
    """Returns images [n, 3, S, S] in [-1, 1] as bytes [n, S, S, 3]."""
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
