"""PixArt-alpha, whose architecture ours is: its own .pth files, and diffusers' PixArtTransformer2DModel."""

import torch
from torch import Tensor
from torch.nn import functional as F

from atoll.convert.common import Converted, Options, Sizes, build_network, keep_channels, spacing_of, take_positions
from atoll.convert.mapping import Ledger
from atoll.convert.tables import PIXART, PixArtFormat
from atoll.diffusion.objective import Objective
from atoll.diffusion.prediction import Prediction
from atoll.errors import InputError, shown
from atoll.networks.dit import DiT, DiTConfig, frequencies
from atoll.networks.published import Source

LICENSE = "openrail++ (CreativeML Open RAIL++-M)"
PIXELS = 8  # of the autoencoder, a side of a latent's place
TRAINED_SIDE = 32  # units: 32 x 32 places for 512 pixels, and 64 x 64 that are half a unit apart for 1024
OBJECTIVE = Objective(Prediction.EPS, "ddpm")


def convert_pixart(source: Source, options: Options, format: PixArtFormat) -> Converted:
    """Returns an expert with an MLP for the text, exactly the source."""
    ledger, notes = Ledger(source.weights, str(source.path)), []
    sizes = Sizes.of(source, options, ledger, ledger.apply(format.rules))
    keep_channels(ledger, sizes)
    text_dim = ledger.filled["text_embed.0.weight"].shape[-1]
    if options.text_dim not in (None, text_dim):
        why = f"it reads texts {text_dim} wide, and {options.text_dim} were asked for"
        text_dim = options.text_dim
        (key,) = ledger.used.pop("text_embed.0.weight")["from"]
        ledger.drop(key, why)
        del ledger.filled["text_embed.0.weight"]
        generator = torch.Generator().manual_seed(options.seed)
        weight = 0.02 * torch.randn(sizes.trunk.hidden_size, text_dim, generator=generator)
        ledger.start("text_embed.0.weight", weight, "N(0, 0.02)")
        notes.append(f"the text's first layer is new: {why}")
    if format.null in source.weights:
        ledger.drop(format.null, "the null text is the encoded empty string")
    if f"{format.resolution[0]}.weight" in source.weights:
        pixels = PIXELS * sizes.trunk.input_size
        _fix_size(ledger, format, float(pixels))
        notes.append(f"its sight of sizes is fixed to square images of {pixels} pixels")
    absent = "pos_embed" not in source.weights
    take_positions(ledger, sizes, _spacing(source, sizes) if absent or sizes.resized else None)
    config = sizes.config(DiTConfig, text_dim=text_dim, text_projection="mlp")
    network, objective = build_network(DiT, config, ledger), options.objective_or(OBJECTIVE)
    return Converted(network, source, format.name, LICENSE, ledger, objective, notes)


def _fix_size(ledger: Ledger, format: PixArtFormat, pixels: float) -> None:
    """Adds what a model sees of the image's size, which is a constant, to the last bias of the time MLP."""
    answers: list[Tensor] = []
    sources: list[str] = []
    for names, values in ((format.resolution, [pixels, pixels]), (format.aspect_ratio, [1.0])):
        parts = [f"{name}.{part}" for name in names for part in ("weight", "bias")]
        first, first_bias, second, second_bias = map(ledger.take, parts)
        angle = torch.tensor(values)[:, None] * frequencies()
        waves = torch.cat([torch.cos(angle), torch.sin(angle)], 1)
        answers.append(F.linear(F.silu(F.linear(waves, first, first_bias)), second, second_bias).flatten())
        sources += parts
    bias = ledger.filled["time_embed.mlp.2.bias"].clone().add_(torch.cat(answers))  # of this shape, not broadcast
    ledger.change("time_embed.mlp.2.bias", bias, "with its answer to this size added", *sources)


def _spacing(source: Source, sizes: Sizes) -> float:
    """Returns how far apart places are: those of training, drawn out or pressed together to the size asked for."""
    drawn_out = sizes.source_size / sizes.trunk.input_size
    if source.config:  # as diffusers has it
        scale = source.config.get("interpolation_scale") or max(sizes.source_size // 64, 1)
        if type(scale) not in (int, float) or not 1e-3 <= scale <= 1e3:
            raise InputError(
                f"interpolation_scale in the config of {source.path} is {shown(scale)}, not a number from 0.001 to 1000"
            )
        return drawn_out / scale
    if "pos_embed" not in source.weights:
        # The models for many sizes, which see the size, were trained on 32 units a side; the others on whole units.
        many = f"{PIXART.resolution[0]}.weight" in source.weights
        return TRAINED_SIDE * sizes.trunk.patch_size / sizes.trunk.input_size if many else 1.0
    step = spacing_of(source.weights["pos_embed"].flatten(0, -2))
    if step is None:
        raise InputError(
            f"pos_embed in {source.path} is not the sines and cosines of a grid, so it cannot be computed for another "
            f"size: leave out --size, or give {sizes.source_size}"
        )
    return drawn_out * step
