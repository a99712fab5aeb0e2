"""Exports an expert to diffusers' PixArtTransformer2DModel: from_pretrained loads the folder, with the same outputs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from atoll.cards import CONFIG
from atoll.convert import check_out
from atoll.convert.ledger import spacing_of
from atoll.convert.tables import DIFFUSERS_PIXART, expand
from atoll.errors import InputError, printable
from atoll.networks.dit import DiT
from atoll.storage import write_json, write_whole

WEIGHTS = "diffusion_pytorch_model.safetensors"
ABOUT = "atoll.json"


def export(expert: str | Path, out: str | Path) -> list[str]:
    """Writes the folder; returns lines to print."""
    if not Path(expert).is_dir():
        raise InputError(f"{expert} is not a folder: give that of an expert")
    check_out(out, (WEIGHTS, CONFIG, ABOUT))
    network = DiT.from_pretrained(expert, dtype=torch.float32)
    config = diffusers_config(network, str(expert))
    folder, card = Path(out), network.card
    weights = {name: value.clone() for name, value in translate(network).items()}
    write_whole(folder / WEIGHTS, lambda staged: save_file(weights, staged, metadata={"format": "pt"}))
    time = f"{network.config.time_scale:g} t"
    about = {
        "made_by": "atoll convert --to diffusers",
        "objective": card.get("objective"),
        "time": f"timestep = {time}, t from 0 (data) to 1 (noise)",
        **{key: card[key] for key in ("license", "latent_space", "text_encoder", "init", "data") if key in card},
    }
    write_json(folder / ABOUT, about)
    write_json(folder / CONFIG, config)
    objective = card["objective"] if isinstance(card.get("objective"), Mapping) else {}
    what = f"{objective.get('prediction', 'unknown')} on the schedule {objective.get('schedule', 'unknown')}"
    return [
        f"{out}: PixArtTransformer2DModel, predicts {printable(what, 100)}, for timestep {time} (see {ABOUT})",
        f"licence: {printable(str(card.get('license', 'unknown')), 300)}",
        f'next: PixArtTransformer2DModel.from_pretrained("{out}") in Python',
    ]


def diffusers_config(network: DiT, name: str) -> dict[str, Any]:
    """Returns the arguments of PixArtTransformer2DModel; raises InputError for networks it cannot represent."""
    config = network.config
    step = spacing_of(network.positions.detach().float(), within=2e-5)
    faults = {
        "per-block modulation": config.adaln == "block",
        "no text": config.text_dim is None,
        "a norm before cross-attention": config.cross_attention_norm,
        "convolutions before its MLPs": config.local,
        "waves of the time in another spacing": config.frequency_shift != 0,
        "MLPs that are not 4 times as wide as it": config.mlp_ratio != 4,
        "positions that it has learned": step is None,
    }
    for fault in (fault for fault, has in faults.items() if has):
        raise InputError(f"{name} has {fault}, which diffusers' PixArtTransformer2DModel does not: it stays as it is")
    assert step is not None
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
        "interpolation_scale": 1 / step,
        "use_additional_conditions": False,
    }


def translate(network: DiT) -> dict[str, Tensor]:
    """Returns diffusers' state dict. It has no linear text projection, so ours is folded into keys and values."""
    ours, config = network.state_dict(), network.config
    theirs: dict[str, Tensor] = {}
    del ours["positions"]
    ours["patch_embed.weight"] = ours["patch_embed.weight"].unflatten(1, (config.in_channels, *[config.patch_size] * 2))
    table = dict(DIFFUSERS_PIXART.table)
    if config.text_projection == "linear":
        del table["text_embed.0"], table["text_embed.2"]
        weight, bias = ours.pop("text_embed.weight").double(), ours.pop("text_embed.bias").double()
        for name in (f"blocks.{i}.cross.kv" for i in range(config.depth)):
            after = ours[f"{name}.weight"].double()
            ours[f"{name}.bias"] = (ours[f"{name}.bias"].double() + after @ bias).float()
            ours[f"{name}.weight"] = (after @ weight).float()
    for target, keys in expand(table, config.depth):
        theirs |= zip(keys, ours.pop(target).chunk(len(keys)), strict=True)
    assert not ours, sorted(ours)
    return theirs
