"""Any expert behind one contract: canonical (x, t, text) -> velocity, with its texts read once and guidance per expert.

A text's keys and values belong to one network. Each distinct text is read alone, without padding, so what a sample
sees depends neither on the others in its batch nor on when the expert came into memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from atoll.cards import ExpertCard
from atoll.config import build
from atoll.diffusion.objective import Objective
from atoll.diffusion.prediction import Prediction
from atoll.diffusion.transfer import Conversion, Predict, Transfer
from atoll.encoders.text import TextEncoder
from atoll.errors import InputError
from atoll.networks.dit import DiT, TextContext
from atoll.networks.expert import CALIBRATION, Expert
from atoll.networks.stored import CONFIG, WEIGHTS, folder_of
from atoll.networks.text_prior import TextPrior
from atoll.storage import read_json
from atoll.tensors import read_tensors

Shape = tuple[int, ...]
CPU = torch.device("cpu")


class VelocityField(Protocol):
    """What an ensemble asks of an expert."""

    @property
    def prediction(self) -> Prediction: ...

    @property
    def shape(self) -> Shape | None:
        """Of one sample; None: any."""

    @property
    def text_dim(self) -> int | None:
        """Width of the tokens it reads; None: it reads no text."""

    @property
    def device(self) -> torch.device: ...

    def read_text(self, tokens: Tensor, mask: Tensor | None = None) -> TextContext: ...

    def velocity(self, x: Tensor, t: Tensor, text: TextContext | None = None) -> Tensor:
        """dx/dt at canonical (x, t), in the precision of x."""


# --- experts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class VelocityExpert:
    """A network and the transfer that makes its outputs velocities. Latents are float32, the network may be less."""

    network: DiT
    transfer: Transfer
    prior: TextPrior | None = None

    @classmethod
    def of(cls, expert: Expert, conversion: Conversion | str | None = None) -> Self:
        transfer = expert.transfer(conversion)
        draws = transfer.conversion is Conversion.CALIBRATED and expert.prior is not None
        device = expert.network.patch_embed.weight.device
        return cls(expert.network, transfer, expert.prior.to(device) if draws and expert.prior else None)

    @property
    def prediction(self) -> Prediction:
        return self.transfer.prediction

    @property
    def shape(self) -> Shape:
        config = self.network.config
        return config.in_channels, config.input_size, config.input_size

    @property
    def text_dim(self) -> int | None:
        return self.network.config.text_dim

    @property
    def device(self) -> torch.device:
        return self.network.patch_embed.weight.device

    def read_text(self, tokens: Tensor, mask: Tensor | None = None) -> TextContext:
        weight = self.network.patch_embed.weight
        found = self.network.read_text(tokens.to(weight.device, weight.dtype), mask)
        return found if self.prior is None else found._replace(prior_mean=self.prior.of(tokens, mask))

    def velocity(self, x: Tensor, t: Tensor, text: TextContext | None = None) -> Tensor:
        dtype = self.network.patch_embed.weight.dtype

        def predict(native_x: Tensor, native_t: Tensor) -> Tensor:
            return self.network(native_x.to(dtype), native_t, text).to(x.dtype)

        return self.transfer.velocity(predict, x, t, None if text is None else text.prior_mean)


@dataclass(frozen=True, eq=False)
class FunctionExpert:
    """A function of its own (x, t) as an expert that reads no text: what closed-form experts are."""

    predict: Predict
    transfer: Transfer
    shape: Shape | None = None
    text_dim: None = None
    device: torch.device = CPU

    @property
    def prediction(self) -> Prediction:
        return self.transfer.prediction

    def read_text(self, tokens: Tensor, mask: Tensor | None = None) -> TextContext:
        raise InputError("this expert reads no text: pass none to it")

    def velocity(self, x: Tensor, t: Tensor, text: TextContext | None = None) -> Tensor:
        return self.transfer.velocity(self.predict, x, t)


class FolderExpert:
    """An expert in its folder, whose weights are in memory only from `load` to `unload`.

    The first `load` checks every value; the next ones only read again what has been checked. Weights are read into
    memory of their own, not mapped, so that results do not depend on where in the file they lie.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        conversion: Conversion | str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        revision: str | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`check` is called before the weights are first read, to refuse them."""
        self.path = folder_of(folder, revision, (CONFIG, WEIGHTS, CALIBRATION))
        self.conversion = None if conversion is None else Conversion(conversion)
        self.dtype = dtype
        self.device = torch.device(device)
        about = read_json(self.path / CONFIG, f"an expert is a folder with {CONFIG} and {WEIGHTS}")
        architecture = about.get("architecture")
        if "latent_space" not in about or not isinstance(architecture, dict):
            raise InputError(f"{self.path / CONFIG} does not describe an expert: give the folder of one")
        card = ExpertCard.read(self.path)
        self.shape: Shape = tuple(card.latent_space.shape)
        self.text_dim: int | None = architecture.get("text_dim")
        self.prediction = build(Objective, card.objective, f"the objective in {self.path / CONFIG}").prediction
        self.guidance = float(card.guidance)
        self.resident = False
        self._expert: VelocityExpert | None = None
        self._check = check
        self._stamp: tuple[int, ...] = ()

    def load(self) -> None:
        """Bring the weights into memory."""
        if self.resident:
            return
        if self._expert is None:
            self._stamp = self._file_stamp()
            if self._check is not None:
                self._check()
            expert = Expert.load(self.path, dtype=self.dtype)
            expert.network.to(self.device)
            self._expert = VelocityExpert.of(expert, self.conversion)
        else:
            network = self._expert.network
            dtype = network.patch_embed.weight.dtype
            network.load_state_dict(
                {name: weight.to(self.device, dtype) for name, weight in self._read_again().items()}, assign=True
            )
        self.resident = True

    def unload(self) -> None:
        """Give the memory back; what was checked and the shapes stay."""
        if self._expert is not None:
            self._expert.network.to("meta")
        self.resident = False

    def read_text(self, tokens: Tensor, mask: Tensor | None = None) -> TextContext:
        return self._loaded().read_text(tokens, mask)

    def velocity(self, x: Tensor, t: Tensor, text: TextContext | None = None) -> Tensor:
        return self._loaded().velocity(x, t, text)

    def _loaded(self) -> VelocityExpert:
        self.load()
        assert self._expert is not None
        return self._expert

    def _read_again(self) -> dict[str, Tensor]:
        path = self.path / WEIGHTS
        if self._file_stamp() != self._stamp:
            raise InputError(f"{path} was changed while it was in use: start again")
        return read_tensors(path, "start again when it is back")

    def _file_stamp(self) -> tuple[int, ...]:
        try:
            about = (self.path / WEIGHTS).stat()
        except OSError as error:
            raise InputError(f"{self.path / WEIGHTS} is missing: copy the expert again from its source") from error
        return about.st_ino, about.st_size, about.st_mtime_ns


# --- texts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Prompts:
    """The texts of a batch, each distinct one once, and which of them each sample follows and is guided away from."""

    texts: tuple[Tensor, ...]  # [1, L, text_dim] each, without padding
    positive: tuple[int, ...]
    negative: tuple[int, ...] | None = None  # None: there is no null text, hence no guidance

    def __len__(self) -> int:
        return len(self.positive)

    @classmethod
    def encode(cls, encoder: TextEncoder, prompts: Sequence[str], negative: str | Sequence[str] = "") -> Self:
        """A prompt a sample; `negative` takes the place of the null text, for all samples or for each."""
        negatives = [negative] * len(prompts) if isinstance(negative, str) else list(negative)
        if len(negatives) != len(prompts):
            raise InputError(
                f"there are {len(negatives)} negative prompts for {len(prompts)} prompts: give one, or one for each"
            )
        encoded = [encoder.encode(encoder.tokenize(texts)) for texts in (prompts, negatives)]
        return cls.of(*encoded[0], *encoded[1])

    @classmethod
    def of(
        cls, tokens: Tensor, mask: Tensor | None, null: Tensor | None = None, null_mask: Tensor | None = None
    ) -> Self:
        """From tokens[B, L, text_dim] with mask[B, L], and a null text for all samples or one for each."""
        found: dict[bytes, int] = {}
        texts: list[Tensor] = []

        def number_of(text: Tensor) -> int:
            key = text.cpu().contiguous().view(torch.uint8).numpy().tobytes()
            if key not in found:
                found[key] = len(texts)
                texts.append(text[None])
            return found[key]

        positive = tuple(number_of(text) for text in _without_padding(tokens, mask))
        if null is None:
            return cls(tuple(texts), positive)
        negative = tuple(number_of(text) for text in _without_padding(null, null_mask))
        if len(negative) not in (1, len(positive)):
            raise InputError(f"there are {len(negative)} null texts for {len(positive)} prompts: give one, or one each")
        return cls(tuple(texts), positive, negative * len(positive) if len(negative) == 1 else negative)


def _without_padding(tokens: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Each text's real tokens: [L, text_dim]."""
    if tokens.dim() != 3 or 0 in tokens.shape or (mask is not None and mask.shape != tokens.shape[:2]):
        raise InputError(
            f"texts must be tokens [batch, length, width] and a mask [batch, length], but tokens have "
            f"{list(tokens.shape)}{'' if mask is None else f' and the mask {list(mask.shape)}'}"
        )
    if mask is None:
        return list(tokens)
    if not bool(mask.bool().any(1).all()):
        raise InputError("a text has no token at all: encode the empty string, which has at least one")
    return [text[real] for text, real in zip(tokens, mask.bool(), strict=True)]


class TextCache:
    """A batch's texts as one network sees them: each read when first needed, put together for the samples asked for."""

    def __init__(self, read_text: Callable[[Tensor], TextContext], prompts: Prompts) -> None:
        self.prompts = prompts
        self._read_text = read_text
        self._texts: dict[int, tuple[Tensor, Tensor | None]] = {}  # [depth, 2, H, L, d/H], and prior_mean[1, C, S, S]
        self._last: tuple[object, TextContext] | None = None

    def context(self, rows: Sequence[int], guided: bool = False) -> TextContext:
        """Of the samples `rows`; `guided`, their own texts come first, then those to be guided away from."""
        key = (tuple(rows), guided)
        if self._last is None or self._last[0] != key:
            wanted = [self.prompts.positive[row] for row in rows]
            if guided:
                assert self.prompts.negative is not None
                wanted += [self.prompts.negative[row] for row in rows]
            if len(set(wanted)) == 1:
                wanted = wanted[:1]  # one text serves any number of samples
            self._last = key, _put_together([self._text(number) for number in wanted])
        return self._last[1]

    def _text(self, number: int) -> tuple[Tensor, Tensor | None]:
        if number not in self._texts:
            found = self._read_text(self.prompts.texts[number])
            self._texts[number] = torch.stack([torch.cat(block) for block in found.keys_values]), found.prior_mean
        return self._texts[number]


def _put_together(read: Sequence[tuple[Tensor, Tensor | None]]) -> TextContext:
    """Texts[depth, 2, H, L, d/H] read one by one as a batch of them, padded to the longest."""
    texts = [text for text, _ in read]
    means = [mean for _, mean in read if mean is not None]
    prior_mean = torch.cat(means) if means else None
    lengths = torch.tensor([text.shape[3] for text in texts])
    depth, _, heads, _, width = texts[0].shape
    longest = int(lengths.max())
    whole = texts[0].new_zeros(depth, 2, len(texts), heads, longest, width)
    for i, text in enumerate(texts):
        whole[:, :, i, :, : text.shape[3]] = text
    blocks = tuple((keys, values) for keys, values in whole)
    if bool((lengths == longest).all()):
        return TextContext(blocks, None, prior_mean)
    mask = torch.arange(longest) < lengths[:, None]
    return TextContext(blocks, mask[:, None, None].to(whole.device), prior_mean)
