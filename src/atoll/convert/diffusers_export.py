"""An expert as diffusers' PixArtTransformer2DModel: a folder that its from_pretrained loads, with the same outputs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from atoll.convert.common import check_free, spacing_of
from atoll.convert.tables import DIFFUSERS_PIXART
from atoll.errors import InputError, printable
from atoll.networks.dit import DiT
from atoll.networks.stored import CONFIG
from atoll.storage import read_json, write_json, write_whole

WEIGHTS = "diffusion_pytorch_model.safetensors"
ABOUT = "atoll.json"


def export(expert: str | Path, out: str | Path) -> list[str]:
    """Writes the folder; returns what to print."""
    if not Path(expert).is_dir():
        raise InputError(f"{expert} is not a folder: give that of an expert")
    check_free(Path(out), {WEIGHTS, ABOUT, CONFIG}, ABOUT)
    if read_json(Path(expert) / CONFIG, "give the folder of an expert").get("model") != DiT.__name__:
        raise InputError(f"{expert} is no expert of Atoll's: only these are exported")
    network = DiT.from_pretrained(expert, dtype=torch.float32)
    spacing = check_expressible(network, str(expert))
    folder, card = Path(out), network.card
    weights = {name: value.clone() for name, value in translate(network).items()}
    write_whole(folder / WEIGHTS, lambda staged: save_file(weights, staged, metadata={"format": "pt"}))
    about = {
        "made_by": "atoll convert --to diffusers",
        "objective": card.get("objective"),
        "time": f"timestep = {network.config.time_scale:g} t, t from 0 (data) to 1 (noise)",
        **{key: card[key] for key in ("license", "latent_space", "text_encoder", "init", "data") if key in card},
    }
    write_json(folder / ABOUT, about)
    write_json(folder / CONFIG, _config(network, spacing))
    objective = card["objective"] if isinstance(card.get("objective"), Mapping) else {}
    what = f"{objective.get('prediction', 'unknown')} on the schedule {objective.get('schedule', 'unknown')}"
    time = f"timestep {network.config.time_scale:g} t"
    return [
        f"{out}: PixArtTransformer2DModel, predicts {printable(what, 100)}, for {time} (see {ABOUT})",
        f"licence: {printable(str(card.get('license', 'unknown')), 300)}",
        f'next: PixArtTransformer2DModel.from_pretrained("{out}") in Python',
    ]


def check_expressible(network: DiT, name: str) -> float:
    """Returns one over how far apart its places are; refuses what PixArtTransformer2DModel cannot express."""
    config = network.config
    faults = {
        "per-block modulation": config.adaln == "block",
        "no text": config.text_dim is None,
        "a norm before cross-attention": config.cross_attention_norm and config.text_dim is not None,
        "waves of the time in another spacing": config.frequency_shift != 0,
        "MLPs that are not 4 times as wide as it": config.mlp_ratio != 4,
    }
    for fault, has in faults.items():
        if has:
            raise InputError(
                f"{name} has {fault}, which diffusers' PixArtTransformer2DModel does not: it stays as it is"
            )
    step = spacing_of(network.positions.detach().float(), within=2e-5)
    if step is not None:
        return 1 / step
    raise InputError(f"{name} has learned its positions, and PixArtTransformer2DModel's are fixed: use it in Atoll")


def _config(network: DiT, spacing: float) -> dict[str, Any]:
    config = network.config
    mlp_text = config.text_projection == "mlp"
    return {
        "_class_name": "PixArtTransformer2DModel",
        "num_attention_heads": config.num_heads,
        "attention_head_dim": config.hidden_size // config.num_heads,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels or config.in_channels,
        "num_layers": config.depth,
        "cross_attention_dim": config.hidden_size if mlp_text else config.text_dim,
        "caption_channels": config.text_dim if mlp_text else None,
        "sample_size": config.input_size,
        "patch_size": config.patch_size,
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "interpolation_scale": spacing,
        "use_additional_conditions": False,
    }


def translate(network: DiT) -> dict[str, Tensor]:
    """Returns their state dict. A linear text projection has no place there and goes into keys and values."""
    ours, config = network.state_dict(), network.config
    theirs: dict[str, Tensor] = {}
    del ours["positions"]
    ours["patch_embed.weight"] = ours["patch_embed.weight"].unflatten(1, (config.in_channels, *[config.patch_size] * 2))
    if config.text_projection == "linear":
        weight, bias = ours.pop("text_embed.weight").double(), ours.pop("text_embed.bias").double()
        for i in range(config.depth):
            name = f"blocks.{i}.cross.kv"
            after = ours[f"{name}.weight"].double()
            ours[f"{name}.bias"] = (ours[f"{name}.bias"].double() + after @ bias).float()
            ours[f"{name}.weight"] = (after @ weight).float()
    for rule in DIFFUSERS_PIXART.rules:
        for target, keys in rule.at(config.depth):
            if target.startswith("text_embed") and config.text_projection == "linear":
                continue
            theirs |= zip(keys, ours.pop(target).chunk(len(keys)), strict=True)
    assert not ours, sorted(ours)
    return theirs
