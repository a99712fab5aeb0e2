"""Text encoders: captions -> token ids (stored in shards) -> tokens [B, L, D] with a mask (the experts' input)."""

import hashlib
import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from atoll.cards import TextEncoderCard, hash_of
from atoll.encoders.pretrained import (
    Foreign,
    Frozen,
    installed_files,
    load_model,
    load_saved,
    locate,
    require,
    save_model,
    two_numbers,
)
from atoll.errors import InputError, shown, unknown
from atoll.networks.stored import Stored
from atoll.storage import read_json
from atoll.tensors import read_tensors, send

FOLDER, TOKENIZER = "text_encoder", "tokenizer"  # folders in a model, as in the published Paris model
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
PADDING, BEGIN = 0, 1
MAX_POSITIONS = 2**24  # elements of the position table: 64 MB
NUM_IDS = 2**30  # large enough to avoid hash collisions; no table grows with it
CHARACTERS = 100  # per token of an encoder's maximum length; the rest of a longer text is ignored
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64's increment, as a signed number
# Letters of scripts without spaces between words: Thai to Lao, Burmese, Khmer, kana, Han.
NO_SPACES = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
LLAMA_FILES = ("l2_supercat_256.safetensors", "l2_supercat_tokenizer_config.json")
LLAMA_DIMS = (64, 128, 256)  # of Matryoshka embeddings, whose leading dimensions work alone
LLAMA_SCALE = 1024  # embeddings are at most 8, and words have a standard deviation of 0.1 to 1
LLAMA_ADVICE = "install it again, pip install --force-reinstall wordllama"
SPACE, BYTES = "\u2581", [f"<0x{byte:02X}>" for byte in range(256)]  # as in Llama 2's vocabulary
MAX_WORD = 64  # characters used: the time to split a word grows with the square of its length
MAX_KNOWN = 1 << 16  # words whose pieces are cached
PROBE = "A photo of 2 red-haired cats, naïve & 猫!"


class TextEncoder(Frozen):
    """Maps captions to tokens, with fixed weights; the empty string is the null text."""

    dim: int
    max_length: int
    num_ids: int
    card_class, place = TextEncoderCard, FOLDER

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Returns int32 ids [B, max_length], truncated and padded."""
        raise NotImplementedError

    def encode(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns float32 tokens [B, L, dim] for ids[B, L], and a mask [B, L] that is True for real tokens."""
        raise NotImplementedError

    def mask(self, ids: Tensor) -> Tensor:
        """Returns the mask of real tokens, those before the padding: bool [B, L], on the device of the ids."""
        raise NotImplementedError

    def lengths(self, ids: Tensor) -> Sequence[int]:
        """Returns each text's number of real tokens. Call it on CPU ids: on a GPU it would wait for the device."""
        lengths: list[int] = self.mask(ids).sum(1).tolist()
        return lengths

    def checked(self, ids: Tensor) -> Tensor:
        """Returns the ids; raises InputError if they are from another text encoder.

        Values are checked only on the CPU, since reading them would stall a GPU.
        """
        fits = ids.dim() == 2 and not ids.is_floating_point() and 1 <= ids.shape[1] <= self.max_length
        on_cpu = ids.device.type == "cpu" and ids.numel() > 0
        if not fits or (on_cpu and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_ids):
            raise InputError(
                f"token ids must be integers [batch, up to {self.max_length}] from 0 to {self.num_ids - 1}: "
                "these come from another text encoder or a damaged file"
            )
        return ids

    def null_ids(self) -> Tensor:
        """Returns the ids of the empty string: [1, max_length]."""
        return self.tokenize([""])

    def sizes(self) -> dict[str, Any]:
        return {"dim": self.dim, "max_length": self.max_length}


def make_text_encoder(spec: str, *, dtype: torch.dtype = torch.float32) -> TextEncoder:
    """Creates `words` or `wordllama`, each also as `NAME:DIMxLENGTH`, or `clip:HUB_ID_OR_FOLDER` in `dtype`."""
    kind, _, rest = spec.partition(":")
    if kind == "clip" and rest:
        return CLIPText.open(rest, dtype)
    if kind in ("words", "wordllama"):
        numbers = two_numbers(spec, f"{kind}:64x32 for 64-wide tokens and texts of up to 32") or ()
        return (Words(WordsConfig(*numbers)) if kind == "words" else WordLlama.installed(*numbers)).eval()
    kinds = ("words", "words:DIMxLENGTH", "wordllama", "wordllama:DIMxLENGTH", "clip:HUB_ID_OR_FOLDER")
    raise unknown("text encoder", spec, kinds)


def load_text_encoder(folder: str | Path, *, hide_padding: bool | None = None) -> TextEncoder:
    """Returns the text encoder that `save` wrote to `folder`, or the CLIP of a published model.

    `hide_padding=False` lets experts attend to CLIP's padding, as those of Paris do.
    """
    encoder: TextEncoder = load_saved(
        Path(folder) / FOLDER, (Words, WordLlama), lambda dtype: CLIPText.open(str(folder), dtype, hide_padding)
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


class WordEncoder(TextEncoder, Stored):
    """A text encoder with one or more tokens per word, after a begin token, which is the null text's only token."""

    kind: ClassVar[str]
    positions: Tensor

    def __init__(self, config: Any, num_ids: int) -> None:
        super().__init__()
        self.config = config
        self.dim, self.max_length, self.num_ids = config.dim, config.max_length, num_ids
        self.spec = f"{self.kind}:{config.dim}x{config.max_length}"
        self.register_buffer("positions", _waves(config.max_length, config.dim))

    def word_ids(self, word: str) -> Sequence[int]:
        """Returns the ids of a word's tokens."""
        raise NotImplementedError

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        ids = torch.full((len(captions), self.max_length), PADDING, dtype=torch.int32)
        for row, caption in zip(ids, captions, strict=True):
            words = split_words(_cut(caption, self.max_length))
            tokens = [BEGIN, *islice((token for word in words for token in self.word_ids(word)), self.max_length - 1)]
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        return ids

    def mask(self, ids: Tensor) -> Tensor:
        return ids != PADDING

    def settings(self) -> dict[str, Any]:
        probe = self.tokenize([PROBE]).tolist()
        return {"text": self.kind, **asdict(self.config), "num_ids": self.num_ids, "probe": probe}


class Words(WordEncoder):
    """Hashes words to ids, and ids to fixed random sign vectors, plus a position embedding. Nothing is learned or
    downloaded.

    Signs are bits of an integer hash, so they are exactly the same on every machine; the vectors of two words are
    nearly orthogonal.
    """

    config: WordsConfig
    config_class, kind = WordsConfig, "words"

    def __init__(self, config: WordsConfig) -> None:
        super().__init__(config, NUM_IDS)

    def word_ids(self, word: str) -> Sequence[int]:
        return (word_id(word),)

    @torch.no_grad()
    def encode(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids = send(self.checked(ids), self.positions.device)
        mask = self.mask(ids)
        tokens = _signs(ids, self.dim) + self.positions[: ids.shape[1]]
        return tokens * mask[..., None], mask


def _waves(max_length: int, dim: int) -> Tensor:
    """Returns sinusoidal position embeddings: [max_length, dim]."""
    # Wavelengths from 2 pi to 2 pi max_length words: longer ones would be nearly constant over any text.
    # On the CPU even if the default device is "meta", where torch's arange imports all of torch's compiler.
    powers = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
    angle = torch.arange(max_length, dtype=torch.float64, device="cpu")[:, None] / max_length**powers
    return torch.cat([angle.sin(), angle.cos()], 1).float().to(torch.get_default_device())


def split_words(text: str) -> Iterator[str]:
    """Yields the words of a text in any script, normalised (NFKC) and case-folded, without punctuation.

    In scripts without spaces, each character is a word; so is each emoji.
    """
    word, alone = list[str](), False
    folded = unicodedata.normalize("NFKC", text).casefold()
    for char in unicodedata.normalize("NFKC", folded):
        kind = unicodedata.category(char)
        if kind == "Cf" or "\ufe00" <= char <= "\ufe0f":  # joiners, soft hyphens, emoji variation selectors
            continue
        if kind[0] == "M":
            if word:
                word.append(char)
            continue
        single = _stands_alone(char)
        if word and (alone or single or kind[0] not in "LN"):
            yield "".join(word)
            word.clear()
        if single or kind[0] in "LN":
            word.append(char)
            alone = single
    if word:
        yield "".join(word)


def _stands_alone(char: str) -> bool:
    """Returns whether a character is a word by itself: an emoji, or from a script without spaces between words."""
    kind = unicodedata.category(char)
    return kind == "So" or (kind[0] in "LN" and NO_SPACES.match(char) is not None)


@lru_cache(maxsize=1 << 16)
def word_id(word: str) -> int:
    """Returns a word's id, which is the same in every process and never PADDING or BEGIN."""
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return BEGIN + 1 + int.from_bytes(digest, "little") % (NUM_IDS - BEGIN - 1)


def split_mix(state: Tensor) -> Tensor:
    """Returns SplitMix64's output for each 64-bit state."""
    # int64 wraps around like the unsigned original; a right shift copies the sign bit, so the copies are masked out.
    state = (state ^ (state >> 30 & 2**34 - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
    state = (state ^ (state >> 27 & 2**37 - 1)) * (0x94D049BB133111EB - 2**64)
    return state ^ (state >> 31 & 2**33 - 1)


def _signs(ids: Tensor, dim: int) -> Tensor:
    """Returns a +-1 vector for each id, from blocks of 64 bits of SplitMix64: [..., dim]."""
    blocks = math.ceil(dim / 64)
    counters = ids.long()[..., None] * blocks + torch.arange(blocks, device=ids.device)  # [..., blocks]
    state = split_mix((counters + 1) * GOLDEN)
    bits = state[..., None] >> torch.arange(64, device=ids.device) & 1  # [..., blocks, 64]
    return (bits * 2 - 1).flatten(-2)[..., :dim].float()


@dataclass(frozen=True)
class WordLlamaConfig:
    """Sizes of WordLlama's embedding table and vocabulary."""

    dim: int
    max_length: int
    num_ids: int
    num_bytes: int  # of the vocabulary

    def __post_init__(self) -> None:
        WordsConfig(self.dim, self.max_length)
        if min(self.num_ids, self.num_bytes) < 2 or max(self.num_ids * self.dim, self.num_bytes) > MAX_POSITIONS:
            raise InputError(
                f"a vocabulary of {shown(self.num_ids)} pieces {self.dim} wide in {shown(self.num_bytes)} bytes cannot "
                f"be: numbers and bytes must each be at most {MAX_POSITIONS}"
            )


class WordLlama(WordEncoder):
    """Pretrained word embeddings, those of WordLlama (Miller 2024, MIT), in which similar words are close.

    Words are split into pieces of Llama 2's vocabulary. WordLlama was trained on sums of pieces, so that "kitten" is
    near "cat" while "k" and "itten" are not: each piece's token is the sum over all pieces of its word, at unit
    variance, plus a position embedding. Embeddings are integers, so that sums are exact on every machine and in any
    batch. Everything needed is saved with it; only creating a new one reads files of the PyPI package.
    """

    config: WordLlamaConfig
    config_class, kind = WordLlamaConfig, "wordllama"
    embeddings: Tensor  # int16 [num_ids, dim]
    pieces: Tensor  # the vocabulary in the order of ids: UTF-8, one piece per line
    starts: Tensor  # bool [num_ids], whether a piece begins a word

    def __init__(self, config: WordLlamaConfig) -> None:
        super().__init__(config, config.num_ids)
        self.register_buffer("embeddings", torch.empty(config.num_ids, config.dim, dtype=torch.int16))
        self.register_buffer("pieces", torch.empty(config.num_bytes, dtype=torch.uint8))
        self.register_buffer("starts", torch.empty(config.num_ids, dtype=torch.bool), persistent=False)
        self._ids: dict[str, int] = {}
        self._known: dict[str, list[int]] = {}

    @classmethod
    def installed(cls, dim: int = 256, max_length: int = 48) -> Self:
        """Reads the files of the PyPI package, without importing its code, which could download others."""
        if dim not in LLAMA_DIMS:
            raise InputError(f"wordllama has no tokens {dim} wide: choose {', '.join(map(str, LLAMA_DIMS))}")
        weights, tokenizer = installed_files("wordllama", "text", LLAMA_FILES)
        table = read_tensors(weights, LLAMA_ADVICE).get("embedding.weight", torch.empty(0))
        model = read_json(tokenizer, LLAMA_ADVICE).get("model")
        ids = model.get("vocab") if isinstance(model, dict) else None
        if not isinstance(ids, dict) or table.shape != (len(ids), max(LLAMA_DIMS)):
            raise InputError(f"{weights} and {tokenizer} do not belong together: {LLAMA_ADVICE}")
        pieces = "\n".join(sorted(ids, key=ids.__getitem__)).encode()
        encoder = cls(WordLlamaConfig(dim, max_length, len(ids), len(pieces)))
        encoder.embeddings.copy_((table[:, :dim].float() * LLAMA_SCALE).round())
        encoder.pieces.copy_(torch.frombuffer(bytearray(pieces), dtype=torch.uint8))
        encoder._read_pieces(tokenizer)
        return encoder

    def _load_weights(self, path: Path) -> None:
        super()._load_weights(path)
        self._read_pieces(path)

    def _read_pieces(self, path: Path) -> None:
        """Reads the vocabulary, while the buffers are on the CPU."""
        pieces = bytes(self.pieces.numpy()).decode("utf-8", "replace").split("\n")
        self._ids = {piece: i for i, piece in enumerate(pieces)}
        if len(self._ids) != self.num_ids or len(pieces) != self.num_ids or not self._ids.keys() >= set(BYTES):
            raise InputError(f"the vocabulary in {path} is not {self.num_ids} pieces with all bytes: copy it again")
        alone = {PADDING, BEGIN, *(self._ids[name] for name in BYTES)}
        starts = [i in alone or piece[:1] == SPACE or _stands_alone(piece[:1]) for piece, i in self._ids.items()]
        self.starts = torch.tensor(starts, device="cpu")

    def word_ids(self, word: str) -> Sequence[int]:
        """Returns the ids of a word's pieces, ignoring case: of `paris` and `Paris`, the one with fewer pieces."""
        word = word[:MAX_WORD]
        if word not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            space = "" if _stands_alone(word[0]) else SPACE
            self._known[word] = min((self._merge(space + form) for form in (word, word.capitalize())), key=len)
        return self._known[word]

    def _merge(self, word: str) -> list[int]:
        """Returns ids by byte-pair encoding: repeatedly joins the pair whose union has the lowest id."""
        parts, ids = list(word), list[int]()
        while True:
            wholes = (self._ids.get(a + b, self.num_ids) for a, b in pairwise(parts))
            lowest, i = min(((whole, i) for i, whole in enumerate(wholes)), default=(self.num_ids, 0))
            if lowest == self.num_ids:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        for part in parts:  # unknown characters fall back to bytes
            ids += [self._ids[part]] if part in self._ids else [self._ids[BYTES[byte]] for byte in part.encode()]
        return ids

    @torch.no_grad()
    def encode(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids = send(self.checked(ids), self.positions.device)
        mask, rows = self.mask(ids), ids.long()
        num, length = ids.shape
        starts = self.starts[rows].long()
        words = starts.cumsum(1) - starts[:, :1] + length * torch.arange(num, device=ids.device)[:, None]  # [B, L]
        # Integers below 2^24 are exact in float32, and sums of their squares in float64, in any order of summation.
        sums = torch.zeros(num * length, self.dim, device=ids.device)
        sums.index_add_(0, words.flatten(), self.embeddings[rows].flatten(0, 1).float())
        squares = sums.double().square().sum(1, keepdim=True)  # [B L, 1]
        vectors = sums / (squares / self.dim).sqrt().clamp(min=1).float()
        tokens = vectors[words] + self.positions[:length]
        return tokens * mask[..., None], mask


class CLIPText(TextEncoder, Foreign):
    """transformers' CLIPTextModel: the last hidden state of each token."""

    def __init__(self, model: Any, tokenizer: Any, spec: str, hide_padding: bool) -> None:
        super().__init__(model, spec)
        self.tokenizer, self.hide_padding = tokenizer, hide_padding
        self.dim, self.num_ids = int(model.config.hidden_size), int(model.config.vocab_size)
        self.max_length = int(min(model.config.max_position_embeddings, tokenizer.model_max_length))
        model.config.atoll_hide_padding = hide_padding  # saved with the model, so that loading restores it

    @classmethod
    def open(cls, where: str, dtype: torch.dtype, hide_padding: bool | None = None) -> Self:
        """Opens a hub id or folder that has subfolders `text_encoder` and `tokenizer`, or the files of both."""
        place = locate(where, (FOLDER, ""), ("clip", "clip_text_model"), (f"{TOKENIZER}/*", *TOKENIZER_FILES))
        # A complete CLIP also has the vision weights; old files also have position ids.
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
        """Returns the text without lone surrogates, which the tokenizer rejects, and without special tokens."""
        text = _cut(text, self.max_length)
        for special in (self.tokenizer.bos_token, self.tokenizer.eos_token):
            text = text.replace(special, " ")
        return text.encode("utf-8", "replace").decode()

    @torch.no_grad()
    def encode(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids = send(self.checked(ids), self.model.device)
        # Attention is causal, so padding never affects the tokens before it.
        return self.model(input_ids=ids.long()).last_hidden_state.float(), self.mask(ids)

    def mask(self, ids: Tensor) -> Tensor:
        if not self.hide_padding:
            return torch.ones_like(ids, dtype=torch.bool)
        ends = (ids == self.tokenizer.eos_token_id).int()
        return ends.cumsum(1) - ends == 0  # up to and including the first end token; padding often repeats it

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
    except Exception as error:  # tokenizers raises a bare Exception for a damaged file
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"{path} has no tokenizer that can be read ({reason}): copy it again") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # the result if there are no files at all
        raise InputError(f"{path} has no tokenizer: give a folder with vocab.json and merges.txt or a tokenizer.json")
    return tokenizer


def _cut(text: str, max_length: int) -> str:
    """Truncates a text, far beyond what an encoder can use, to bound time and memory."""
    return text[: CHARACTERS * min(max(max_length, 10), 65536)]
