"""The expert: a diffusion transformer with AdaLN-Single and cross-attention to text (paper, section 3.4).

Shapes: B samples, C channels, S x S latents, N = (S / p)^2 image tokens, d wide, H heads, L text tokens.
Where the paper's equations and PixArt-alpha differ, this is PixArt-alpha; docs/theory.md says why.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from atoll.cards import ExpertCard
from atoll.config import check_choices, check_counts
from atoll.diffusion.schedules import check_times
from atoll.errors import InputError, shown
from atoll.networks.stored import Stored

NUM_FREQUENCIES = 256
MAX_LATENTS, MAX_TOKENS = 2**24, 2**16  # elements and tokens per sample: images of 8192 pixels per side and more


@dataclass(frozen=True)
class TrunkConfig:
    """The architecture that experts and routers share."""

    input_size: int = 32  # S
    in_channels: int = 4  # C
    patch_size: int = 2  # p
    hidden_size: int = 1152  # d
    depth: int = 28
    num_heads: int = 16
    mlp_ratio: float = 4.0
    text_dim: int | None = 768  # width of the text encoder's tokens; None: no text
    text_projection: str = "linear"  # "linear" as in the paper, "mlp" as in PixArt-alpha
    cross_attention_norm: bool = False  # the LN of Eq. 17, which PixArt-alpha does not have
    time_scale: float = 999.0  # Eq. 20: t in [0, 1] is given to the network as a step in [0, 999]
    adaln: str = "single"  # one linear map of the time for all blocks, or "block", one for each, as in DiT
    frequency_shift: int = 0  # 1: the slowest wave is exactly 10,000 times slower, as in diffusers' DiT
    local: bool = False  # a depthwise 3 x 3 convolution before each MLP: short runs need not learn locality

    def __post_init__(self) -> None:
        check_counts(
            self, input_size=4096, in_channels=4096, patch_size=256, hidden_size=65536, depth=1024, num_heads=1024,
            text_dim=65536,
        )  # fmt: skip
        for name in ("mlp_ratio", "time_scale"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0.01 <= value <= 1e6:
                raise InputError(f"{name} must be a number from 0.01 to 1e6, but is {shown(value)}")
        check_choices(
            self,
            text_projection=("linear", "mlp"),
            adaln=("single", "block"),
            frequency_shift=(0, 1),
            local=(False, True),
        )
        if self.in_channels * self.input_size**2 > MAX_LATENTS or self.num_tokens > MAX_TOKENS:
            raise InputError(
                f"{self.in_channels} x {self.input_size} x {self.input_size} latents in patches of {self.patch_size} "
                f"are too many: a sample has at most {MAX_LATENTS} numbers and {MAX_TOKENS} tokens"
            )
        if self.input_size % self.patch_size:
            raise InputError(f"input_size {self.input_size} is not a multiple of patch_size {self.patch_size}")
        if self.hidden_size % self.num_heads or self.hidden_size % 4:
            raise InputError(
                f"hidden_size {self.hidden_size} must be a multiple of 4 and of num_heads {self.num_heads}"
            )

    @property
    def num_tokens(self) -> int:
        return (self.input_size // self.patch_size) ** 2


@dataclass(frozen=True)
class DiTConfig(TrunkConfig):
    """An expert's architecture."""

    out_channels: int | None = None  # None: in_channels

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, out_channels=4096)


class TextContext(NamedTuple):
    """Each block's keys and values for a text. They do not depend on x or t: compute once, use at every step."""

    keys_values: tuple[tuple[Tensor, Tensor], ...]  # per block: [B, H, L, d/H] each
    mask: Tensor | None  # [B, 1, 1, L], True for real tokens; None: all are real
    prior_mean: Tensor | None = None  # [B, C, S, S], from `TextPrior`: for calibration, not used by the network


class TextTokens(NamedTuple):
    """An embedded text, from which each block computes its keys and values."""

    embedded: Tensor  # [B, L, d], or [all real tokens, d]
    places: Tensor | None  # [B, L], True at the positions of real tokens if only these are embedded
    mask: Tensor | None  # as in TextContext


class SelfAttention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, N, d/H]
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))  # [B, N, d]


class CrossAttention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def read(self, text: TextTokens) -> tuple[Tensor, Tensor]:
        """Returns keys and values, [B, H, L, d/H] each."""
        kv = self.kv(text.embedded)  # [..., 2d]
        if text.places is not None:
            rows = text.places.flatten().nonzero().squeeze(1)  # masked_scatter is six times slower
            padded = kv.new_zeros(text.places.numel(), kv.shape[-1]).index_copy(0, rows, kv)
            kv = padded.unflatten(0, text.places.shape)  # [B, L, 2d]
        keys, values = kv.unflatten(2, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return keys, values

    def forward(self, h: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        q = self.q(h).unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # [B, H, N, d/H]
        keys, values = (kv.expand(len(h), -1, -1, -1) for kv in (keys, values))
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))  # [B, N, d]


class Block(nn.Module):
    """Self-attention, cross-attention and an MLP, of which the first and last are modulated by time (Eq. 15-18)."""

    def __init__(self, config: TrunkConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.own_time = config.adaln == "block"
        if self.own_time:
            self.time_block = nn.Linear(width, 6 * width)
        else:
            self.modulation = nn.Parameter(torch.empty(6, width))  # E_b
        self.attention = SelfAttention(width, config.num_heads)
        self.cross = None if config.text_dim is None else CrossAttention(width, config.num_heads)
        self.cross_norm = config.cross_attention_norm
        self.side = config.input_size // config.patch_size
        self.local = nn.Conv2d(width, width, 3, padding=1, groups=width) if config.local else None
        inner = int(width * config.mlp_ratio)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, width))

    def read_text(self, text: TextTokens) -> tuple[Tensor, Tensor]:
        assert self.cross is not None
        return self.cross.read(text)

    def forward(
        self, h: Tensor, time: Tensor, text: tuple[Tensor, Tensor, Tensor | None] | TextTokens | None
    ) -> Tensor:
        """Returns h[B, tokens, d]; `time` is c of Eq. 14, [B, 6, d], or for a block with its own map, [B, d]."""
        six = self.time_block(time).unflatten(1, (6, -1)) if self.own_time else time + self.modulation  # [B, 6, d]
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = six.unsqueeze(2).unbind(1)  # [B, 1, d]
        h = torch.addcmul(h, gate, self.attention(modulated_norm(h, shift, scale)))
        if self.cross is not None:
            assert text is not None
            if isinstance(text, TextTokens):
                text = (*self.cross.read(text), text.mask)
            h = h + self.cross(plain_norm(h) if self.cross_norm else h, *text)
        inputs = modulated_norm(h, mlp_shift, mlp_scale)
        if self.local is not None:
            grid = inputs.transpose(1, 2).unflatten(2, (self.side, self.side))  # [B, d, S/p, S/p]
            inputs = inputs + self.local(grid).flatten(2).transpose(1, 2)
        return torch.addcmul(h, mlp_gate, self.mlp(inputs))


def plain_norm(h: Tensor) -> Tensor:
    return F.layer_norm(h, h.shape[-1:], eps=1e-6)


def modulated_norm(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Returns LN(h) * (1 + scale) + shift."""
    if len(scale) == 1:  # one time for the whole batch: the modulation becomes the norm's affine part
        return F.layer_norm(h, h.shape[-1:], weight=1 + scale.flatten(), bias=shift.flatten(), eps=1e-6)
    return torch.addcmul(shift, plain_norm(h), 1 + scale)


class TimeEmbedding(nn.Module):
    """Maps t in [0, 1] to tau(t): cosines and sines of the scaled time, then an MLP."""

    def __init__(self, width: int, scale: float, shift: int = 0) -> None:
        super().__init__()
        self.scale, self.shift = scale, shift
        self.mlp = nn.Sequential(nn.Linear(NUM_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        angle = (self.scale * t.float())[:, None] * frequencies(self.shift, t.device)  # [B, 128]
        waves = torch.cat([torch.cos(angle), torch.sin(angle)], 1)
        weight: Tensor = self.mlp[0].weight  # type: ignore[assignment]
        return self.mlp(waves.to(weight.dtype))  # [B, d]


def frequencies(shift: int = 0, device: torch.device | None = None) -> Tensor:
    """Returns the frequencies of the time embedding, falling from 1: [128]."""
    half = NUM_FREQUENCIES // 2
    powers = -math.log(10_000) * torch.arange(half, device=device, dtype=torch.float32)
    return torch.exp(powers / (half - shift))


class Trunk(Stored):
    """All of an expert or a router except its last layer: patch embedding, time and text conditioning, blocks."""

    def __init__(self, config: TrunkConfig) -> None:
        super().__init__()
        self.config = config
        width, patch = config.hidden_size, config.patch_size
        self.patch_embed = nn.Linear(config.in_channels * patch**2, width)
        self.positions = nn.Parameter(torch.empty(config.num_tokens, width), requires_grad=False)
        self.time_embed = TimeEmbedding(width, config.time_scale, config.frequency_shift)
        # MLP_global of Eq. 14, after a SiLU
        self.time_block = nn.Linear(width, 6 * width) if config.adaln == "single" else None
        self.text_embed: nn.Module | None = None
        if config.text_dim is not None:
            self.text_embed = nn.Linear(config.text_dim, width)
            if config.text_projection == "mlp":
                act = nn.GELU(approximate="tanh")
                self.text_embed = nn.Sequential(self.text_embed, act, nn.Linear(width, width))
        self.blocks: Sequence[Block] = nn.ModuleList(Block(config) for _ in range(config.depth))  # type: ignore[assignment]
        self.gradient_checkpointing = False
        self.is_sharded = False  # if so, a block's weights are complete only while it runs, so it reads the text itself

    def reset_parameters(self) -> None:
        """Initialises the weights as PixArt-alpha does: near the identity, and without effect of the text."""
        width = self.config.hidden_size
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for part in (self.time_embed, self.time_block, self.text_embed):
            for module in () if part is None else part.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=0.02)
        for block in self.blocks:
            if block.own_time:
                nn.init.zeros_(block.time_block.weight)
            else:
                nn.init.normal_(block.modulation, std=width**-0.5)
            if block.cross is not None:
                nn.init.zeros_(block.cross.out.weight)
            if block.local is not None:
                nn.init.zeros_(block.local.weight)
                nn.init.zeros_(block.local.bias)  # type: ignore[arg-type]
        with torch.no_grad():
            self.positions.copy_(sincos_positions(width, self.config.input_size // self.config.patch_size))

    def read_text(self, tokens: Tensor, mask: Tensor | None = None) -> TextContext:
        """Returns each block's keys and values for tokens[B, L, text_dim] with mask[B, L], True for real tokens."""
        text = self.embed_text(tokens, mask)
        return TextContext(tuple(block.read_text(text) for block in self.blocks), text.mask)

    def embed_text(self, tokens: Tensor, mask: Tensor | None = None) -> TextTokens:
        """Returns the embedded text from which blocks compute keys and values.

        On the CPU, where reading the mask costs nothing, padding is skipped: the projections run on real tokens only,
        attention on the length of the longest text. On a GPU reading it would stall: truncate texts before sending.
        """
        dim = self.config.text_dim
        assert self.text_embed is not None, "this network was built without text (text_dim is None): pass no text to it"
        assert tokens.dim() == 3, f"text must have shape [batch, length, {dim}], but has {list(tokens.shape)}"
        assert tokens.shape[2] == dim, f"text must be {dim} wide, but is {tokens.shape[2]}"
        if mask is not None:
            assert mask.shape == tokens.shape[:2], f"the text mask has shape {list(mask.shape)}, not that of the text"
            mask = mask.bool()
        packed = mask is not None and tokens.device.type == "cpu" and not torch.compiler.is_compiling()
        if mask is not None and packed:
            assert bool(mask.any(1).all()), "a text has no token at all: encode the empty string, which has one"
            length = int(mask.any(0).nonzero()[-1]) + 1
            tokens, mask = tokens[:, :length], mask[:, :length]  # truncate to the longest text
            if bool(mask.all()):
                mask, packed = None, False  # there is no padding
        real = tokens[mask] if packed else tokens  # [all real tokens, text_dim] or [B, L, text_dim]
        mask_of_keys = None if mask is None else mask[:, None, None]  # [B, 1, 1, L]
        return TextTokens(self.text_embed(real), mask if packed else None, mask_of_keys)

    def run_blocks(self, h: Tensor, t: Tensor, text: TextContext | TextTokens | None) -> tuple[Tensor, Tensor]:
        """Returns h[B, tokens, d] after all blocks, and tau(t)[B or 1, d]."""
        tau = self.time_embed(t.reshape(-1))
        time = F.silu(tau)  # [B or 1, d]
        if self.time_block is not None:
            time = self.time_block(time).unflatten(1, (6, -1))  # c of Eq. 14: [B or 1, 6, d]
        for i, block in enumerate(self.blocks):
            own_text = (*text.keys_values[i], text.mask) if isinstance(text, TextContext) else text
            if self.gradient_checkpointing and torch.is_grad_enabled():
                h = checkpoint(block, h, time, own_text, use_reentrant=False)
            else:
                h = block(h, time, own_text)
        return h, tau

    def embed(self, x: Tensor) -> Tensor:
        """Returns x[B, C, S, S] as tokens with position embeddings: [B, N, d]."""
        patch = self.config.patch_size
        x = x.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # [B, C, S/p, p, S/p, p]
        patches = x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [B, N, C p p]
        return self.patch_embed(patches) + self.positions  # [B, N, d]

    def take(
        self, x: Tensor, t: Tensor, text: Tensor | TextContext | None, mask: Tensor | None
    ) -> TextContext | TextTokens | None:
        """Checks the arguments of a forward pass, and reads the text unless it is a TextContext already."""
        size, channels = self.config.input_size, self.config.in_channels
        right = x.dim() == 4 and x.shape[1:] == (channels, size, size)
        assert right, f"x must have shape [batch, {channels}, {size}, {size}], but has {list(x.shape)}"
        assert t.shape in ((), (1,), (len(x),)), f"t must be one time or {len(x)}, but has shape {list(t.shape)}"
        check_times(t)
        if isinstance(text, Tensor) and self.is_sharded:
            return self.embed_text(text, mask)
        if isinstance(text, Tensor):
            text = self.read_text(text, mask)
        if text is None:
            assert self.text_embed is None, "this network needs a text: for none, encode the empty string"
            return None
        assert len(text.keys_values) == self.config.depth, "the text was not read by this network: use its read_text"
        num_texts = len(text.keys_values[0][0])
        assert num_texts in (1, len(x)), f"there are {num_texts} texts for {len(x)} samples: give one for all or each"
        return text


class DiT(Trunk):
    """The expert network: (x, t, text) -> its objective's prediction, of the shape of x."""

    config: DiTConfig
    config_class = DiTConfig
    card_keys = frozenset(ExpertCard.model_fields)

    def __init__(self, config: DiTConfig) -> None:
        super().__init__(config)
        out_channels = config.out_channels or config.in_channels
        self.own_time = config.adaln == "block"
        if self.own_time:
            self.out_time_block = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        else:
            self.out_modulation = nn.Parameter(torch.empty(2, config.hidden_size))
        self.out = nn.Linear(config.hidden_size, out_channels * config.patch_size**2)
        if not self.out.weight.is_meta:  # weights on the meta device will be loaded
            self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.own_time:
            nn.init.zeros_(self.out_time_block.weight)
        else:
            nn.init.normal_(self.out_modulation, std=self.config.hidden_size**-0.5)
        nn.init.zeros_(self.out.weight)

    def forward(
        self, x: Tensor, t: Tensor, text: Tensor | TextContext | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Returns the prediction for x[B, C, S, S], t[B] or 0-d, and text[B, L, text_dim] with mask[B, L], or a
        TextContext."""
        context = self.take(x, t, text, mask)
        h, tau = self.run_blocks(self.embed(x), t, context)  # [B, N, d]
        if self.own_time:
            two = self.out_time_block(F.silu(tau)).unflatten(1, (2, -1))  # [B or 1, 2, d]
        else:
            two = tau[:, None] + self.out_modulation
        shift, scale = two.unsqueeze(2).unbind(1)  # [B or 1, 1, d]
        patches = self.out(modulated_norm(h, shift, scale))  # [B, N, p p C]
        patch, side = self.config.patch_size, self.config.input_size // self.config.patch_size
        grid = patches.unflatten(2, (patch, patch, -1)).unflatten(1, (side, side))  # [B, S/p, S/p, p, p, C]
        return grid.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)  # [B, C, S, S]


def sincos_positions(width: int, side: int, step: float = 1.0) -> Tensor:
    """Returns fixed sines and cosines of each token's column, then of its row, `step` apart: [side * side, width]."""
    # On the CPU even if the default device is "meta": see encoders/text.py.
    powers = torch.arange(width // 4, dtype=torch.float64, device="cpu") / (width / 4)
    angle = step * torch.arange(side, dtype=torch.float64, device="cpu")[:, None] / 10_000**powers
    waves = torch.cat([torch.sin(angle), torch.cos(angle)], 1)  # [side, d/2]
    columns, rows = waves.repeat(side, 1), waves.repeat_interleave(side, 0)
    return torch.cat([columns, rows], 1).float()
