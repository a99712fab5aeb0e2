"""Adapts any expert to one contract, canonical (x, t, text) -> velocity, and caches texts per expert.

A text's keys and values belong to one network. Each distinct text is read alone, without padding, so that a sample
depends neither on the others in its batch nor on when the expert was loaded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.weak import WeakTensorKeyDictionary

from atoll.cards import ExpertCard, ModelIndex, file_digest
from atoll.diffusion.guidance import guided, guided_each
from atoll.diffusion.prediction import Prediction
from atoll.diffusion.transfer import Conversion, Transfer
from atoll.encoders.text import TextEncoder
from atoll.errors import InputError
from atoll.networks.dit import DiT, TextContext
from atoll.networks.expert import Expert
from atoll.networks.stored import WEIGHTS
from atoll.networks.text_prior import TextPrior
from atoll.storage import known_digest
from atoll.tensors import check_bf16, read_tensors, send

Shape = tuple[int, ...]


class VelocityExpert:
    """A network, and the transfer that turns its outputs into velocities.

    Latents are float32; the network may have lower precision. This class is the interface of an ensemble's experts:
    closed-form experts override `velocity`, remote ones `guided_velocity`.
    """

    network: DiT
    transfer: Transfer
    prior: TextPrior | None  # the prior mean that a calibrated x0 is drawn to; None: the calibration's mean
    shape: Shape  # of one sample
    is_flow: bool  # whether it predicts a velocity, for routing by time
    device: torch.device
    resident = True
    elsewhere = False  # True for remote experts, which raise AwayError if they do not answer

    def __init__(self, network: DiT, transfer: Transfer, prior: TextPrior | None = None) -> None:
        self.network, config = network, network.config
        self.shape = config.in_channels, config.input_size, config.input_size
        self.is_flow = transfer.prediction is Prediction.VELOCITY
        self.device = network.patch_embed.weight.device
        self.transfer = transfer.to(self.device)
        self.prior = None if prior is None else prior.to(self.device)

    @classmethod
    def of(cls, expert: Expert, conversion: Conversion | str | None = None) -> Self:
        transfer = expert.transfer(conversion)
        return cls(expert.network, transfer, expert.prior if transfer.conversion is Conversion.CALIBRATED else None)

    @property
    def text_dim(self) -> int | None:
        """Returns the width of the text tokens that it reads; None: it reads no text."""
        return self.network.config.text_dim

    def load(self) -> None:
        """Loads the weights; only a `FolderExpert` has to."""

    def unload(self) -> None:
        """Frees the memory of the weights; only a `FolderExpert` does."""

    def read_text(self, tokens: Tensor, mask: Tensor | None = None) -> TextContext:
        weight = self.network.patch_embed.weight
        context = self.network.read_text(tokens.to(weight.device, weight.dtype), mask)
        return context if self.prior is None else context._replace(prior_mean=self.prior.of(tokens, mask))

    def predict(self, x: Tensor, t: Tensor, text: TextContext | None = None) -> Tensor:
        """Returns what the network predicts at its own (x, t), in the precision of x."""
        return self.network(x.to(self.network.patch_embed.weight.dtype), t, text).to(x.dtype)

    def velocity(self, x: Tensor, t: Tensor, text: TextContext | None = None) -> Tensor:
        """Returns dx/dt at canonical (x, t), in the precision of x."""
        prior_mean = None if text is None else text.prior_mean
        return self.transfer.velocity(lambda x, t: self.predict(x, t, text), x, t, prior_mean)

    def guided_velocity(self, x: Tensor, t: Tensor, texts: "Guidance", cache: "TextCache") -> Tensor:
        """Returns dx/dt of samples at canonical (x, t), each guided with its own scale; `cache` is this expert's."""
        scale, *others = set(texts.scales)
        if others:
            each = guided_each(self.velocity, texts.scales, lambda rows: cache.context(texts.with_null(rows)))
            return each(x, t)
        rows = range(len(texts.positive))
        batch = guided(self.velocity, scale, lambda both: cache.context(texts.with_null(rows if both else ())))
        return batch(x, t)


class FolderExpert(VelocityExpert):
    """An expert in a folder, whose weights are in memory only from `load` to `unload`.

    The first `load` checks every value and, for a part of a model, the hashes in its `index`; later ones only check
    that the file is the same. Weights are copied into memory, not mapped, so that results do not depend on their
    alignment in the file.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        conversion: Conversion | str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        index: ModelIndex | None = None,
    ) -> None:
        self.path, self.index = Path(folder), index
        self.card = ExpertCard.read(self.path)
        self.shape = tuple(self.card.latent_space.shape)
        self.is_flow = self.card.objective.get("prediction") == Prediction.VELOCITY
        self.conversion, self.dtype, self.device = conversion, dtype, torch.device(device)
        self.resident = False
        self._digest: str | None = None  # of the weights that were checked

    def load(self) -> None:
        if self.resident:
            return
        path = self.path / WEIGHTS
        if self._digest is None:
            if self.index is not None:
                self.index.verify_part(self.path.parent, self.path.name)
            expert = Expert.load(self.path, dtype=self.dtype)
            if expert.network.patch_embed.weight.dtype is torch.bfloat16:
                check_bf16(self.device)
            expert.network.to(self.device)
            loaded = VelocityExpert.of(expert, self.conversion)
            self.network, self.transfer, self.prior = loaded.network, loaded.transfer, loaded.prior
            self._digest = file_digest(path, self.path, known_digest)
        elif file_digest(path, self.path, known_digest) != self._digest:
            raise InputError(f"{path} was changed while it was in use: start again")
        else:
            weights = read_tensors(path, "start again when it is back")
            dtype = self.network.patch_embed.weight.dtype
            self.network.load_state_dict(
                {name: weight.to(self.device, dtype) for name, weight in weights.items()}, assign=True
            )
        self.resident = True

    def unload(self) -> None:
        if self.resident:
            self.network.to("meta")
        self.resident = False


# --- texts --------------------------------------------------------------------------------------------------------


class Guidance(NamedTuple):
    """The texts that the samples of a batch follow and are guided away from, and their guidance scales."""

    positive: Sequence[Tensor]  # [1, L, text_dim] each, without padding
    negative: Sequence[Tensor | None]  # None: there is no null text, hence no guidance
    scales: Sequence[float]

    def with_null(self, rows: Sequence[int]) -> list[Tensor]:
        """Returns the positive texts of all samples, followed by the null texts of these."""
        texts = list(self.positive)
        for row in rows:
            null = self.negative[row]
            assert null is not None, "there is no null text: give one, or no guidance"
            texts.append(null)
        return texts


class EncodedTexts(NamedTuple):
    """Encoded texts, with their ids and lengths on the host, so that no copy from the device is needed."""

    tokens: Tensor  # [B, L, text_dim]
    ids: Tensor  # [B, L], on the host
    lengths: Sequence[int]  # the number of tokens of each that are not padding

    @classmethod
    def of(cls, encoder: TextEncoder, ids: Tensor) -> Self:
        tokens, _ = encoder.encode(ids)
        return cls(tokens, ids, encoder.lengths(ids))

    def split(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yields the ids of each text and a copy of its tokens[1, L, text_dim], both without padding."""
        for text, ids, length in zip(self.tokens, self.ids.tolist(), self.lengths, strict=True):
            yield tuple(ids[:length]), text[None, :length].clone()


@dataclass(frozen=True, eq=False)
class Prompts:
    """The distinct texts of a batch, and the numbers of those that each sample follows and is guided away from."""

    texts: tuple[Tensor, ...]  # [1, L, text_dim] each, without padding
    positive: tuple[int, ...]
    negative: tuple[int, ...] | None = None  # None: there is no null text, hence no guidance

    def guidance(self, scale: float) -> Guidance:
        """Returns the texts of each sample, all guided with the same scale."""
        positive = [self.texts[number] for number in self.positive]
        negative = [None] * len(positive) if self.negative is None else [self.texts[number] for number in self.negative]
        return Guidance(positive, negative, [scale] * len(positive))

    @classmethod
    def encode(cls, encoder: TextEncoder, prompts: Sequence[str], negative: str | Sequence[str] = "") -> Self:
        """Encodes each distinct text once; `negative` replaces the null text, for all samples or one for each."""
        negatives = [negative] * len(prompts) if isinstance(negative, str) else negative
        assert len(negatives) == len(prompts)
        distinct = list(dict.fromkeys((*prompts, *negatives)))
        encoded = cls.of(EncodedTexts.of(encoder, encoder.tokenize(distinct)))
        number = dict(zip(distinct, encoded.positive, strict=True))
        return cls(encoded.texts, tuple(number[text] for text in prompts), tuple(number[text] for text in negatives))

    @classmethod
    def of(cls, texts: EncodedTexts, null: EncodedTexts | None = None) -> Self:
        """Returns prompts from a text per sample, and a null text for all or one for each; equal ids are one text."""
        positive, negative = list(texts.split()), [] if null is None else list(null.split())
        distinct = dict(chain(positive, negative))
        numbers = {ids: number for number, ids in enumerate(distinct)}
        follow, avoid = (tuple(numbers[ids] for ids, _ in part) for part in (positive, negative))
        if len(avoid) == 1:
            avoid *= len(follow)
        return cls(tuple(distinct.values()), follow, None if null is None else avoid)


class TextCache:
    """Caches a network's keys and values of texts, and batches them.

    Each text is read when first needed, and kept as long as its tensor is referenced. Texts are compared by identity
    of their tensors, not by value.
    """

    def __init__(self, read_text: Callable[[Tensor], TextContext]) -> None:
        self._read_text = read_text
        self._read = WeakTensorKeyDictionary()
        self._last: tuple[Sequence[Tensor], TextContext] | None = None

    def context(self, texts: Sequence[Tensor]) -> TextContext:
        """Returns the context of a batch of texts."""
        if all(text is texts[0] for text in texts):
            texts = texts[:1]  # one text serves any number of samples
        if self._last is None or not _same(self._last[0], texts):
            self._last = texts, _put_together([self._stacked(text) for text in texts])
        return self._last[1]

    def _stacked(self, text: Tensor) -> tuple[Tensor, Tensor | None]:
        if text not in self._read:
            self._read[text] = _stacked(self._read_text(text))
        stacked: tuple[Tensor, Tensor | None] = self._read[text]
        return stacked


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _stacked(context: TextContext) -> tuple[Tensor, Tensor | None]:
    """Returns one text as [L, depth, 2, H, d/H], and prior_mean[1, C, S, S]."""
    return torch.stack([torch.cat(block) for block in context.keys_values]).movedim(3, 0), context.prior_mean


def _put_together(texts: Sequence[tuple[Tensor, Tensor | None]]) -> TextContext:
    """Returns texts that were read one by one as one batch, padded to the longest."""
    batch = pad_sequence([text for text, _ in texts], batch_first=True)  # [B, L, depth, 2, H, d/H]
    lengths = torch.tensor([len(text) for text, _ in texts])
    mask = None
    if len({len(text) for text, _ in texts}) > 1:
        mask = send((torch.arange(batch.shape[1]) < lengths[:, None])[:, None, None], batch.device)
    means = [mean for _, mean in texts if mean is not None]
    blocks = batch.permute(2, 3, 0, 4, 1, 5).contiguous()  # [depth, 2, B, H, L, d/H]
    return TextContext(tuple((keys, values) for keys, values in blocks), mask, torch.cat(means) if means else None)
