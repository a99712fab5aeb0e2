"""What `atoll prepare` can be told. Apart, so that its --help need not wait for torch."""

from dataclasses import dataclass

from atoll.errors import InputError

BOUNDS = {"size": (8, 4096), "holdout": (0, 0.99), "max_aspect": (1, 1e6), "min_side": (1, 8192)}


@dataclass(frozen=True)
class PrepareSettings:
    """How images are prepared."""

    size: int = 32
    """Images are scaled and cropped to SIZE x SIZE pixels."""
    codec: str = "pca"
    """pixels, pca, pca:8x40 (8x8 patches as 40 numbers), pca:lapped (patches overlap: for photographs),
    pca:plain (decoded without a network against grain and seams), pca:long (with one that is fitted for longer), conv
    or conv:8x24 (8x8 patches as 24 numbers, learned in about 3 minutes: for photographs of 64 to 128 pixels),
    vae:HUB_ID_OR_FOLDER, or saved:DATA for that of another data set."""
    text: str = "words"
    """words (hashed), wordllama (with meaning), or clip:HUB_ID_OR_FOLDER."""
    features: str = "simple"
    """What images are clustered by: simple, efficientnet, efficientnet:SIZE, dino:HUB_ID_OR_FOLDER or
    clip:HUB_ID_OR_FOLDER."""
    holdout: float = 0.05
    """The share of images kept from training, chosen by their content."""
    near_duplicates: str = "auto"
    """drop or keep them; auto drops, but keeps those of a built-in data set."""
    min_side: int | None = None
    """Images with a shorter side are left out; half of SIZE by default."""
    max_aspect: float = 4.0
    """Images that are longer than this times their width are left out."""
    flip: bool = False
    """Trains on mirrored images as well, but for those whose captions say left or right. Leave it off for images of
    text, faces that must be recognised, and all that has a side."""
    license: str = "unknown"
    """Goes into dataset.json and travels with all that is made of the data."""
    crop: str = "centre"
    """Which part of an image that is not square: its centre, or smart, where there is most detail."""

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InputError(f"{name.replace('_', '-')} must be from {low:g} to {high:g}, but is {value}")
        if self.crop not in ("centre", "smart"):
            raise InputError(f"crop must be centre or smart, but is {self.crop!r}")
        if self.near_duplicates not in ("auto", "drop", "keep"):
            raise InputError(f"near-duplicates must be auto, drop or keep, but is {self.near_duplicates!r}")
