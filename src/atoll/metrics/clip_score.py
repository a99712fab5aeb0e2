"""The CLIP score: how well images match their captions, by a CLIP from a folder or the hub."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from atoll.encoders.features import clip_pixels
from atoll.encoders.pretrained import Frozen, load_model, locate, one_by_one, public_spec
from atoll.encoders.text import CLIPText


class CLIPScore(Frozen):
    """Scores by transformers' CLIPModel: 100 times the cosine similarity of an image's and its caption's embeddings."""

    def __init__(self, model: Any, tokenizer: Any, where: str) -> None:
        super().__init__()
        self.model = model
        self.spec = public_spec(f"clip:{where}")
        self.text = CLIPText(model.text_model, tokenizer, self.spec, hide_padding=True)
        self.size = int(model.config.vision_config.image_size)

    @classmethod
    def open(cls, where: str) -> Self:
        """Loads one from a hub id or a folder with both encoders and the tokenizer."""
        place = locate(where, ("",), ("clip",))
        model: Any = load_model("transformers", "CLIPModel", place, torch.float32, spare=r".*position_ids$")
        return cls(model, CLIPText.open(where, torch.float32).tokenizer, where)

    @torch.no_grad()
    def scores(self, images: Tensor, captions: Sequence[str]) -> Tensor:
        """Returns scores[B] of images [B, 3, S, S] in [-1, 1] and their captions: at most 100, mostly 15 to 35."""
        ids = self.text.tokenize(captions).long().to(images.device)
        pixels = clip_pixels(images, self.size)
        places = torch.arange(len(images), device=images.device)
        return one_by_one(lambda rows: self._cosines(pixels[rows], ids[rows]), places).float() * 100

    def _cosines(self, pixels: Tensor, ids: Tensor) -> Tensor:
        output = self.model(input_ids=ids, pixel_values=pixels)  # the embeddings are normalised
        return torch.as_tensor((output.image_embeds * output.text_embeds).sum(1))

    def sizes(self) -> dict[str, Any]:
        return {"transform": f"resize to {self.size}, bicubic, CLIP's mean and deviation"}

    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def settings(self) -> dict[str, Any]:
        sides = (self.model.config.text_config, self.model.config.vision_config)
        heads = [[side.hidden_act, side.layer_norm_eps, side.num_attention_heads] for side in sides]
        return {"score": "clip", "size": self.size, "heads": heads, "text": self.text.fingerprint}
