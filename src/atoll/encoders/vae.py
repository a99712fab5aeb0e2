"""VAEs from diffusers, and TAESD in its authors' format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from atoll.encoders.codec import FOLDER, Codec, check_images
from atoll.encoders.pretrained import Foreign, dtype_name, fill, load_model, locate, one_by_one, require
from atoll.errors import InputError, shown
from atoll.networks.published import read_weights


class VAE(Codec, Foreign):
    """diffusers' AutoencoderKL or AutoencoderTiny: the posterior's mode, shifted and scaled as its config says."""

    shift: Tensor
    scale: Tensor

    def __init__(self, model: nn.Module, spec: str) -> None:
        super().__init__(model, spec)
        self.kind, config = type(model).__name__, self.model.config
        self.channels = int(config["latent_channels"])
        stages = "encoder_block_out_channels" if self.kind == "AutoencoderTiny" else "block_out_channels"
        self.factor = 2 ** (len(config[stages]) - 1)
        # Most have one shift and one factor; a few have a mean and a standard deviation per channel.
        shift = torch.tensor(config.get("latents_mean") or config.get("shift_factor") or 0.0).float()
        deviation = torch.tensor(config.get("latents_std") or 1.0).float()
        self.register_buffer("shift", shift.reshape(-1, 1, 1), persistent=False)
        self.register_buffer("scale", (config["scaling_factor"] / deviation).reshape(-1, 1, 1), persistent=False)

    @classmethod
    def open(cls, where: str, dtype: torch.dtype) -> Self:
        """Opens a hub id or a folder that holds the VAE (or has it in `vae`), or a folder with TAESD's two files."""
        if not any((Path(where) / part / "config.json").exists() for part in (FOLDER, "")):
            suffixes = (".safetensors", ".pth")  # TAESD is published as two files, encoder and decoder
            encoders = [path for suffix in suffixes for path in sorted(Path(where).glob(f"tae*_encoder{suffix}"))]
            pairs = [(path, path.with_name(path.name.replace("_encoder.", "_decoder."))) for path in encoders]
            pairs = [(encoder, decoder) for encoder, decoder in pairs if decoder.exists()]
            if len(pairs) > 1:
                names = ", ".join(encoder.name for encoder, _ in pairs)
                raise InputError(f"{where} holds several tiny VAEs ({names}): put the two files of one into a folder")
            if pairs:
                return cls(_open_taesd(*pairs[0], dtype), f"vae:{where}")
        place = locate(where, (FOLDER, ""), ("AutoencoderKL", "AutoencoderTiny"))
        _check_vae(place.config, where)
        return cls(load_model("diffusers", place.config["_class_name"], place, dtype), f"vae:{where}")

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        self.latent_shape(check_images(images).shape[2])
        return (self._finite(one_by_one(self._encode, images.to(self.dtype)).float()) - self.shift) * self.scale

    def _encode(self, images: Tensor) -> Tensor:
        encoded = self.model.encode(images)
        latents: Tensor = encoded.latents if self.kind == "AutoencoderTiny" else encoded.latent_dist.mode()
        return latents

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        native = latents.float() / self.scale + self.shift
        images = one_by_one(lambda x: self.model.decode(x).sample, native.to(self.dtype))
        return self._finite(images.float()).clamp(-1, 1)

    def _finite(self, values: Tensor) -> Tensor:
        if not bool(values.isfinite().all()):
            raise InputError(f"{self.spec} overflows in {dtype_name(self.dtype)}: use float32 or bfloat16")
        return values

    def sizes(self) -> dict[str, Any]:
        return {"kind": self.kind, **super().sizes(), **self._transform()}

    def _transform(self) -> dict[str, list[float]]:
        return {"shift": self.shift.flatten().tolist(), "scale": self.scale.flatten().tolist()}

    def settings(self) -> dict[str, Any]:
        # Only settings that do not follow from the weights, named explicitly because diffusers versions add keys.
        names = ("act_fn", "norm_num_groups", "upsample_fn", "upsampling_scaling_factor")
        config = self.model.config
        return {"codec": self.kind, **{name: config[name] for name in names if name in config}, **self._transform()}


def _check_vae(config: Mapping[str, Any], where: str) -> None:
    """Raises InputError for settings that do not follow from the weights and that a VAE of RGB images cannot have."""
    channels = config.get("latent_channels", 4)
    for key, known in (("in_channels", 3), ("out_channels", 3), ("upsampling_scaling_factor", 2)):
        if config.get(key, known) != known:
            raise InputError(f"{key} in the config of {where} is {shown(config[key])}, not {known}: give another VAE")
    for key, least in (("scaling_factor", 1e-6), ("latents_std", 1e-6), ("shift_factor", 0), ("latents_mean", 0)):
        value = config.get(key)
        numbers: Any = value if isinstance(value, list) and len(value) == channels else [value]
        if value is not None and not all(
            type(number) in (int, float) and least <= abs(number) <= 1e6 for number in numbers
        ):
            raise InputError(
                f"{key} in the config of {where} is {shown(value)}, not a number for all or for each of its channels: "
                "copy it again"
            )


def _open_taesd(encoder: Path, decoder: Path, dtype: torch.dtype) -> nn.Module:
    """Returns diffusers' AutoencoderTiny with the weights of the authors' two files.

    Both formats number the layers. The original decoder's first layer clamps its input, which diffusers does without a
    layer. The original takes images in [0, 1]; diffusers' class scales to and from [-1, 1].
    """
    weights = {f"encoder.layers.{name}": value for name, value in read_weights(encoder).items()}
    for name, value in read_weights(decoder).items():
        number, _, rest = name.partition(".")
        place = int(number) - 1 if number.isdecimal() and len(number) < 4 else number
        weights[f"decoder.layers.{place}.{rest}"] = value
    first = weights.get("decoder.layers.0.weight", torch.empty(0))
    channels = first.shape[1] if first.dim() == 4 else 0
    model = require("diffusers", "hf").AutoencoderTiny(latent_channels=min(max(channels, 1), 64))
    return fill(model, weights, f"{encoder} and {decoder.name} are not the two halves of a TAESD").to(dtype)
