"""Converts PixArt-alpha, which has Atoll's architecture: its .pth files, and diffusers' PixArtTransformer2DModel."""

from dataclasses import asdict

import torch
from torch import Tensor
from torch.nn import functional as F

from atoll.convert.ledger import Converted, Ledger, Options, spacing_of, start, take_positions
from atoll.convert.tables import Format
from atoll.diffusion.objective import Objective
from atoll.diffusion.prediction import Prediction
from atoll.errors import InputError, shown
from atoll.networks.dit import DiT, DiTConfig, TrunkConfig, frequencies
from atoll.networks.published import Source

LICENSE = "openrail++ (CreativeML Open RAIL++-M)"
PIXELS = 8  # of the autoencoder, per side of a latent position
TRAINED_SIDE = 32  # units: 32 x 32 positions for 512 pixels, and 64 x 64 positions half a unit apart for 1024
OBJECTIVE = Objective(Prediction.EPS, "ddpm")
NULL = "y_embedder.y_embedding"


def convert_pixart(source: Source, options: Options, format: Format) -> Converted:
    """Returns an expert with an MLP for the text, exactly equivalent to the source."""
    ledger, trunk = start(source, options, format)
    notes = []
    text_dim = ledger.weights["text_embed.0.weight"].shape[-1]
    if options.text_dim not in (None, text_dim):
        why = f"it reads texts {text_dim} wide, and {options.text_dim} were asked for"
        text_dim = options.text_dim
        ledger.dropped[f"{format.table['text_embed.0']}.weight"] = why
        del ledger.weights["text_embed.0.weight"]
        notes.append(f"the text's first layer is new: {why}")
    if NULL in source.weights:
        ledger.dropped[NULL] = "the null text is the encoded empty string"
    sees_size = f"{format.sizes['resolution.0']}.weight" in source.weights
    if sees_size:
        pixels = PIXELS * trunk.input_size
        ledger.apply(format.sizes)
        _fix_size(ledger, float(pixels))
        notes.append(f"its sight of sizes is fixed to square images of {pixels} pixels")
    take_positions(ledger, trunk, _spacing(ledger, trunk, sees_size))
    config = DiTConfig(**{**asdict(trunk), "text_dim": text_dim, "text_projection": "mlp"})
    network = ledger.build(DiT, config, options.seed)
    return Converted(network, ledger, format.name, LICENSE, options.objective_or(OBJECTIVE), notes)


def _fix_size(ledger: Ledger, pixels: float) -> None:
    """Adds the embedding of the image size, a constant, to the last bias of the time MLP."""
    answers: list[Tensor] = []
    for name, values in (("resolution", [pixels, pixels]), ("aspect_ratio", [1.0])):
        first, second = ledger.pop_layer(f"{name}.0"), ledger.pop_layer(f"{name}.2")
        angle = torch.tensor(values)[:, None] * frequencies()
        answers.append(second(F.silu(first(torch.cat([torch.cos(angle), torch.sin(angle)], 1)))).flatten())
    time = ledger.pop_layer("time_embed.mlp.2")
    ledger.put_layer("time_embed.mlp.2", time._replace(bias=time.bias.clone().add_(torch.cat(answers))))


def _spacing(ledger: Ledger, trunk: TrunkConfig, sees_size: bool) -> float:
    """Returns the spacing of positions: that of training, stretched or compressed to the requested size."""
    source, drawn_out = ledger.source, ledger.source_size / trunk.input_size
    if source.config:  # as in diffusers
        scale = source.config.get("interpolation_scale") or max(ledger.source_size // 64, 1)
        if type(scale) not in (int, float) or not 1e-3 <= scale <= 1e3:
            raise InputError(
                f"interpolation_scale in the config of {source.path} is {shown(scale)}, not a number from 0.001 to 1000"
            )
        return drawn_out / scale
    if "pos_embed" not in source.weights:
        # Multi-size models, which embed the size, were trained on 32 units per side; the others on whole units.
        return TRAINED_SIDE * trunk.patch_size / trunk.input_size if sees_size else 1.0
    step = spacing_of(source.weights["pos_embed"].flatten(0, -2)) if drawn_out != 1 else 1.0  # else it is copied
    if step is None:
        raise InputError(
            f"pos_embed in {source.path} is not the sines and cosines of a grid, so it cannot be computed for another "
            f"size: leave out --size, or give {ledger.source_size}"
        )
    return drawn_out * step
