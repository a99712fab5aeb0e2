"""Text encoders: captions -> token ids, which shards store, -> tokens [B, L, D] with a mask, which experts read."""

import hashlib
import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from atoll.cards import TextEncoderCard, hash_of
from atoll.encoders.pretrained import Foreign, Frozen, load_model, load_saved, locate, require, save_model, two_numbers
from atoll.errors import InputError, shown, unknown
from atoll.networks.stored import Stored

FOLDER, TOKENIZER = "text_encoder", "tokenizer"  # places in an ensemble, as the published Paris model has them
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
PADDING, BEGIN = 0, 1
MAX_POSITIONS = 2**24  # numbers in the table of positions: 64 MB
NUM_IDS = 2**30  # so many that no two words of a vocabulary meet; there is no table that would grow with it
CHARACTERS = 100  # for each token of an encoder; of a longer text the rest is not looked at
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64's step, as a signed number
# Letters of scripts without spaces between words: Thai to Lao, Burmese, Khmer, kana, Han.
NO_SPACES = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
PROBE = "A photo of 2 red-haired cats, naïve & 猫!"


class TextEncoder(Frozen):
    """Captions to tokens, with fixed weights; the empty string is the null text."""

    dim: int
    max_length: int
    card_class, place = TextEncoderCard, FOLDER

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Returns int32 ids [B, max_length], cut and padded."""
        raise NotImplementedError

    def encode(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns float32 tokens [B, L, dim] of ids[B, L], and a mask [B, L] that is True where one is to be seen."""
        raise NotImplementedError

    def null_ids(self) -> Tensor:
        """Returns the ids of the empty string: [1, max_length]."""
        return self.tokenize([""])

    def sizes(self) -> dict[str, Any]:
        return {"dim": self.dim, "max_length": self.max_length}


def make_text_encoder(spec: str, *, dtype: torch.dtype = torch.float32) -> TextEncoder:
    """Makes `words`, `words:DIMxLENGTH`, or `clip:HUB_ID_OR_FOLDER` computed in `dtype`."""
    kind, _, rest = spec.partition(":")
    if kind == "clip" and rest:
        return CLIPText.open(rest, dtype)
    if kind == "words":
        numbers = two_numbers(spec, "words:64x32 for 64-wide tokens and texts of up to 32")
        return Words(WordsConfig(*numbers) if numbers else WordsConfig()).eval()
    raise unknown("text encoder", spec, ("words", "words:DIMxLENGTH", "clip:HUB_ID_OR_FOLDER"))


def load_text_encoder(folder: str | Path, *, hide_padding: bool | None = None) -> TextEncoder:
    """Returns the text encoder that `save` wrote to `folder`, or the CLIP of a published ensemble.

    `hide_padding=False` lets experts attend to CLIP's padding, as those of Paris do.
    """
    encoder: TextEncoder = load_saved(
        Path(folder) / FOLDER, (Words,), lambda dtype: CLIPText.open(str(folder), dtype, hide_padding)
    )
    return encoder


@dataclass(frozen=True)
class WordsConfig:
    """Sizes of the built-in text encoder."""

    dim: int = 64
    max_length: int = 32

    def __post_init__(self) -> None:
        sizes = 2 <= self.dim <= 65536 and 2 <= self.max_length <= 65536
        if not sizes or self.dim % 2 or self.dim * self.max_length > MAX_POSITIONS:
            raise InputError(
                f"words of width {shown(self.dim)} in texts of {shown(self.max_length)} cannot be: both must be at "
                f"least 2, the width even, and their product at most {MAX_POSITIONS}"
            )


class Words(TextEncoder, Stored):
    """Words hashed to ids, an id to a fixed random vector of signs, plus its place. Nothing is learned or downloaded.

    Signs are bits of an integer hash, so they are exactly the same on every machine; two words' vectors are nearly
    orthogonal. A begin token opens each text and is all that the null text has.
    """

    config: WordsConfig
    config_class = WordsConfig
    positions: Tensor

    def __init__(self, config: WordsConfig) -> None:
        super().__init__()
        self.config = config
        self.dim, self.max_length = config.dim, config.max_length
        self.spec = f"words:{config.dim}x{config.max_length}"
        # Waves from 2 pi to 2 pi max_length words long: no text is longer, so slower ones would stand still.
        # On the CPU even where a network without memory is built: there torch's arange imports all of its compiler.
        powers = torch.arange(0, config.dim, 2, dtype=torch.float64, device="cpu") / config.dim
        angle = torch.arange(config.max_length, dtype=torch.float64, device="cpu")[:, None] / config.max_length**powers
        positions = torch.cat([angle.sin(), angle.cos()], 1).float()  # [max_length, dim]
        self.register_buffer("positions", positions.to(torch.get_default_device()))

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        ids = torch.full((len(captions), self.max_length), PADDING, dtype=torch.int32)
        for row, caption in zip(ids, captions, strict=True):
            words = islice(split_words(_cut(caption, self.max_length)), self.max_length - 1)
            tokens = [BEGIN, *map(word_id, words)]
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        return ids

    @torch.no_grad()
    def encode(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids = _check_ids(ids, self.max_length, NUM_IDS).to(self.positions.device)
        mask = ids != PADDING
        tokens = _signs(ids, self.dim) + self.positions[: ids.shape[1]]
        return tokens * mask[..., None], mask

    def settings(self) -> dict[str, Any]:
        probe = self.tokenize([PROBE]).tolist()
        return {"text": "words", **asdict(self.config), "num_ids": NUM_IDS, "probe": probe}


def split_words(text: str) -> Iterator[str]:
    """Yields the words of a text in any script, in compatibility form and without case; punctuation is left out.

    Scripts that write no spaces, and emoji, give a word for each character.
    """
    word, alone = list[str](), False
    folded = unicodedata.normalize("NFKC", text).casefold()
    for char in unicodedata.normalize("NFKC", folded):
        kind = unicodedata.category(char)
        if kind == "Cf" or "\ufe00" <= char <= "\ufe0f":  # joiners, soft hyphens, the styles of an emoji
            continue
        if kind[0] == "M":
            if word:
                word.append(char)
            continue
        single = kind == "So" or (kind[0] in "LN" and NO_SPACES.match(char) is not None)
        if word and (alone or single or kind[0] not in "LN"):
            yield "".join(word)
            word.clear()
        if single or kind[0] in "LN":
            word.append(char)
            alone = single
    if word:
        yield "".join(word)


@lru_cache(maxsize=1 << 16)
def word_id(word: str) -> int:
    """Returns a word's id, the same in every process: not one of PADDING and BEGIN."""
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return BEGIN + 1 + int.from_bytes(digest, "little") % (NUM_IDS - BEGIN - 1)


def split_mix(state: Tensor) -> Tensor:
    """Returns SplitMix64's output for each 64-bit state."""
    # int64 wraps around, as the unsigned original; a right shift copies the sign, so the copies are masked out.
    state = (state ^ (state >> 30 & 2**34 - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
    state = (state ^ (state >> 27 & 2**37 - 1)) * (0x94D049BB133111EB - 2**64)
    return state ^ (state >> 31 & 2**33 - 1)


def _signs(ids: Tensor, dim: int) -> Tensor:
    """Returns a +-1 vector for each id, from 64 bits of SplitMix64 at a time: [..., dim]."""
    blocks = math.ceil(dim / 64)
    counters = ids.long()[..., None] * blocks + torch.arange(blocks, device=ids.device)  # [..., blocks]
    state = split_mix((counters + 1) * GOLDEN)
    bits = state[..., None] >> torch.arange(64, device=ids.device) & 1  # [..., blocks, 64]
    return (bits * 2 - 1).flatten(-2)[..., :dim].float()


class CLIPText(TextEncoder, Foreign):
    """transformers' CLIPTextModel: the last hidden state of each token."""

    def __init__(self, model: Any, tokenizer: Any, spec: str, hide_padding: bool) -> None:
        super().__init__(model, spec)
        self.tokenizer, self.hide_padding = tokenizer, hide_padding
        self.dim = int(model.config.hidden_size)
        self.max_length = int(min(model.config.max_position_embeddings, tokenizer.model_max_length))
        model.config.atoll_hide_padding = hide_padding  # saved with the model, so that loading needs no argument

    @classmethod
    def open(cls, where: str, dtype: torch.dtype, hide_padding: bool | None = None) -> Self:
        """Opens a hub id or folder with `text_encoder` and `tokenizer` in it, or with the files of both."""
        place = locate(where, (FOLDER, ""), ("clip", "clip_text_model"), (f"{TOKENIZER}/*", *TOKENIZER_FILES))
        # A whole CLIP also has the image side; old files also have the positions' numbers.
        spare = r"vision_model|visual_projection|text_projection|logit_scale|.*position_ids$"
        model: Any = load_model("transformers", "CLIPTextModel", place, dtype, spare)
        if hide_padding is None:
            hide_padding = bool(place.config.get("atoll_hide_padding", True))
        tokenizer = _load_tokenizer(place.root if place.folder == place.root else place.root / TOKENIZER)
        if len(tokenizer) > model.config.vocab_size:
            raise InputError(
                f"the tokenizer of {where} has {len(tokenizer)} tokens and its text encoder {model.config.vocab_size}: "
                "give a folder in which the two belong together"
            )
        return cls(model, tokenizer, f"clip:{where}", hide_padding)

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        plain = [self._plain(caption) for caption in captions]
        if not plain:
            return torch.zeros(0, self.max_length, dtype=torch.int32)
        tokens = self.tokenizer(plain, padding="max_length", truncation=True, max_length=self.max_length)
        return torch.tensor(tokens["input_ids"], dtype=torch.int32)

    def _plain(self, text: str) -> str:
        """Returns the text without half characters, which the tokenizer refuses, and words that would end it early."""
        text = _cut(text, self.max_length)
        for special in (self.tokenizer.bos_token, self.tokenizer.eos_token):
            text = text.replace(special, " ")
        return text.encode("utf-8", "replace").decode()

    @torch.no_grad()
    def encode(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids = _check_ids(ids, self.max_length, self.model.config.vocab_size).to(self.model.device)
        # Attention is causal, so padding, which comes last, never alters the tokens before it.
        tokens = self.model(input_ids=ids.long()).last_hidden_state.float()
        if not self.hide_padding:
            return tokens, torch.ones_like(ids, dtype=torch.bool)
        ends = (ids == self.tokenizer.eos_token_id).int()
        return tokens, ends.cumsum(1) - ends == 0  # up to and with the first end; often padding is more of them

    def sizes(self) -> dict[str, Any]:
        return {**super().sizes(), "hide_padding": self.hide_padding}

    def save(self, folder: str | Path) -> None:
        super().save(folder)
        save_model(self.tokenizer, Path(folder) / TOKENIZER)

    def settings(self) -> dict[str, Any]:
        config = self.model.config
        return {
            "text": "clip",
            "hide_padding": self.hide_padding,
            "max_length": self.max_length,
            "vocabulary": hash_of(self.tokenizer.get_vocab()),
            "probe": self.tokenize([PROBE]).tolist(),
            **{name: getattr(config, name) for name in ("hidden_act", "layer_norm_eps", "num_attention_heads")},
        }


def _load_tokenizer(path: Path) -> Any:
    try:
        tokenizer = require("transformers", "hf").CLIPTokenizer.from_pretrained(str(path))
    except Exception as error:  # the tokenizers library raises nothing more precise for a damaged file
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"{path} has no tokenizer that can be read ({reason}): copy it again") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # which is what one gets where there are no files at all
        raise InputError(f"{path} has no tokenizer: give a folder with vocab.json and merges.txt or a tokenizer.json")
    return tokenizer


def _cut(text: str, max_length: int) -> str:
    """Returns the part of a text that fills an encoder many times over: time and memory must not grow with the rest."""
    return text[: CHARACTERS * min(max(max_length, 10), 65536)]


def _check_ids(ids: Tensor, max_length: int, num_ids: int) -> Tensor:
    fits = ids.dim() == 2 and not ids.is_floating_point() and 1 <= ids.shape[1] <= max_length
    if not fits or (ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_ids):
        raise InputError(
            f"token ids must be integers [batch, up to {max_length}] from 0 to {num_ids - 1}: "
            "these come from another text encoder or a damaged file"
        )
    return ids
