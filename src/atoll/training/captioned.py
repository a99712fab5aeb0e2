"""What an expert's task and the router's have in common: rows with captions, some of which are dropped."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.data.shards import Dataset
from atoll.data.view import Rows
from atoll.encoders.pretrained import check_same
from atoll.encoders.text import load_text_encoder
from atoll.training.loop import Tensors
from atoll.training.settings import Settings


class CaptionedTask:
    """The rows of a run and their text encoder, on its device."""

    def __init__(self, data: Dataset, settings: Settings, device: torch.device) -> None:
        self.text_dropout, self.device = settings.text_dropout, device
        self.at_a_time = settings.micro_batch or settings.batch
        self.rows = Rows(data)
        self.num_rows = len(self.rows.train)
        self.text = load_text_encoder(data.folder)
        if isinstance(self.text, nn.Module):
            self.text.to(device)
        self.null_ids = self.text.null_ids()
        self.about_text: Mapping[str, Any] = data.about["text"]
        check_same(self.about_text, self.text.describe(), "text encoder")

    @property
    def text_length(self) -> int:
        return self.rows.longest_text(self.text)

    @property
    def frozen_bytes(self) -> int:
        return bytes_of(self.text)

    def read(self, rows: NDArray[np.int64]) -> Tensors:
        """Which rows of the data they are, their latents and their token ids."""
        at = self.rows.train[rows]
        return torch.from_numpy(at), self.rows.latents(at), self.rows.tokens(at)

    def draw(self, num: int, generator: torch.Generator) -> Tensors:
        """Times, noise, and whose text is dropped."""
        t = self.sample_times(num, generator)
        eps = torch.randn(num, *self.rows.shape, generator=generator)
        return t, eps, torch.rand(num, generator=generator) < self.text_dropout

    def sample_times(self, num: int, generator: torch.Generator) -> Tensor:
        return torch.rand(num, generator=generator)

    def encode(self, ids: Tensor, dropped: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The texts as a network sees them, the null text in the place of those that are dropped."""
        kept = torch.where(dropped[:, None], self.null_ids.to(ids.device), ids)
        return self.rows.encode(self.text, kept, rows)


def bytes_of(what: object) -> int:
    """Of weights and buffers, if it is a network."""
    tensors = (*what.parameters(), *what.buffers()) if isinstance(what, nn.Module) else ()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
