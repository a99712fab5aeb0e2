"""Model sizes by name. Parameter counts are for an expert on 32 x 32 x 4 latents with 768-wide text."""

import re
from typing import Any

from atoll.errors import InputError, unknown

OPTIONS: dict[str, dict[str, Any]] = {  # suffixes of a size after a colon
    "local": {"local": True},  # convolutions between neighbouring tokens
    "zero": {"adaln": "block"},  # AdaLN-Zero: a map of the time for each block, as DiT has it
    "norm": {"cross_attention_norm": True},  # the LN of Eq. 17
    "blind": {"text_dim": None},  # no text, and no cross-attention
    "mlp": {"head": "mlp"},  # of a router
}

SIZES: dict[str, dict[str, Any]] = {
    "xs": {"hidden_size": 64, "depth": 2, "num_heads": 2},  # 0.2M, for tests
    "mini": {"hidden_size": 128, "depth": 6, "num_heads": 4},  # 1.9M, for a laptop
    "s": {"hidden_size": 384, "depth": 12, "num_heads": 6},  # 30M
    "b": {"hidden_size": 768, "depth": 12, "num_heads": 12},  # 119M
    "l": {"hidden_size": 1024, "depth": 24, "num_heads": 16},  # 411M
    "xl": {"hidden_size": 1152, "depth": 28, "num_heads": 16},  # 606M, the paper's expert
    "3b": {"hidden_size": 2304, "depth": 36, "num_heads": 32},  # 3.1B, the size of DDM's largest experts
}


def preset(name: str, **changes: Any) -> dict[str, Any]:
    """Returns the arguments of a config for a size and patch: DiTConfig(**preset("b/2", text_dim=512)).

    "128x6/2" is 128 wide and 6 blocks deep. The patch defaults to 2, or to 1 if `changes` has an input_size of at most
    16. OPTIONS may follow, as in "b/2:zero".
    """
    plain, *options = name.lower().split(":")
    for option in options:
        if option not in OPTIONS or (option == "mlp" and "num_experts" not in changes):
            raise unknown("option of a model", option, [known for known in OPTIONS if known != "mlp"])
    size, _, patch = plain.partition("/")
    if size in SIZES:
        config = dict(SIZES[size])
    elif sizes := re.fullmatch(r"(\d{1,5})x(\d{1,4})", size):
        width, depth = map(int, sizes.groups())
        heads = next((n for n in (width // 64, width // 32, 1) if n and width % n == 0), 1)
        config = {"hidden_size": width, "depth": depth, "num_heads": heads}
    else:
        raise unknown("model size", name, [*(f"{known}/2" for known in SIZES), "WIDTHxDEPTH/PATCH[:OPTION]"])
    if patch and not re.fullmatch(r"[1-9]\d{0,2}", patch):
        raise InputError(f"the patch of model size {name!r} must be a whole number: write it like b/2")
    config["patch_size"] = int(patch) if patch else (1 if changes.get("input_size", 32) <= 16 else 2)
    return {**config, **changes, **{key: value for option in options for key, value in OPTIONS[option].items()}}


def size_of(config: Any) -> str:
    """Returns the name of a network's size, in the format that `preset` accepts."""
    options = (option for option, values in OPTIONS.items() if all(getattr(config, key, None) == value
               and hasattr(config, key) for key, value in values.items()))  # fmt: skip
    return ":".join((f"{config.hidden_size}x{config.depth}/{config.patch_size}", *options))
