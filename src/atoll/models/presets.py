"""Sizes by name. Parameters are of an expert on 32 x 32 x 4 latents with 768-wide text."""

from typing import Any

from atoll.errors import unknown

PRESETS: dict[str, dict[str, Any]] = {
    "xs": {"hidden_size": 64, "depth": 2, "num_heads": 2, "patch_size": 2},  # 0.2M, for tests
    "s/2": {"hidden_size": 384, "depth": 12, "num_heads": 6, "patch_size": 2},  # 30M
    "b/2": {"hidden_size": 768, "depth": 12, "num_heads": 12, "patch_size": 2},  # 119M
    "l/2": {"hidden_size": 1024, "depth": 24, "num_heads": 16, "patch_size": 2},  # 411M
    "xl/2": {"hidden_size": 1152, "depth": 28, "num_heads": 16, "patch_size": 2},  # 606M, the paper's expert
}


def preset(name: str, **changes: Any) -> dict[str, Any]:
    """The arguments of a config by its size's name: DiTConfig(**preset("b/2", text_dim=512))."""
    if name.lower() not in PRESETS:
        raise unknown("model size", name, PRESETS)
    return {**PRESETS[name.lower()], **changes}
