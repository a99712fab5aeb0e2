"""The router: which expert's cluster a noisy sample belongs to, p(k | x_t, t [, text]) (Eq. 2)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.cards import RouterCard
from atoll.config import check_choices, check_counts
from atoll.networks.dit import TextContext, Trunk, TrunkConfig, plain_norm


@dataclass(frozen=True)
class RouterConfig(TrunkConfig):
    """A router's architecture; with text_dim None it ignores the text, as in the paper."""

    num_experts: int = 8
    head: str = "linear"  # on the normalised class token, or "mlp" on the token as it is, as in Paris

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, num_experts=65536)
        check_choices(self, head=("linear", "mlp"), local=(False,))  # its class token lies beside the grid


class Router(Trunk):
    """An expert's trunk with a class token, whose final state gives K logits. It takes canonical (x_t, t)."""

    config: RouterConfig
    config_class = RouterConfig
    card_keys = frozenset(RouterCard.model_fields)

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.class_token = nn.Parameter(torch.empty(width))
        self.head: nn.Module = nn.Linear(width, config.num_experts)
        if config.head == "mlp":
            act = nn.GELU(approximate="tanh")
            self.head = nn.Sequential(nn.Linear(width, width), act, nn.LayerNorm(width), act, self.head)
        if not self.class_token.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.class_token, std=0.02)
        last = self.head[-1] if isinstance(self.head, nn.Sequential) else self.head
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)

    def forward(
        self, x: Tensor, t: Tensor, text: Tensor | TextContext | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Returns logits[B, K]; takes the same arguments as an expert."""
        context = self.take(x, t, text, mask)
        h = torch.cat([self.class_token.expand(len(x), 1, -1), self.embed(x)], 1)  # [B, 1 + N, d]
        h, _ = self.run_blocks(h, t, context)
        token = h[:, 0]  # [B, d]
        return self.head(plain_norm(token) if self.config.head == "linear" else token)  # [B, K]
