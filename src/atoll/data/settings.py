"""Settings of `atoll prepare`, in their own module so that --help need not import torch."""

from dataclasses import dataclass

from atoll.errors import InputError

BOUNDS = {"size": (8, 4096), "holdout": (0, 0.99), "max_aspect": (1, 1e6), "min_side": (1, 8192)}


@dataclass(frozen=True)
class PrepareSettings:
    """How images are prepared."""

    size: int = 32
    """Images are scaled and cropped to SIZE x SIZE pixels."""
    codec: str = "pca"
    """pixels, pca, pca:8x40 (8x8 patches as 40 channels), pca:lapped (overlapping patches, for photographs),
    pca:plain (without a refiner against grain and seams), pca:long (refiner trained for longer), conv or conv:8x24
    (8x8 patches as 24 channels, trained in about 3 minutes, for photographs of 64 to 128 pixels),
    vae:HUB_ID_OR_FOLDER, or saved:DATA for the codec of another data set."""
    text: str = "words"
    """words (hashed), wordllama (pretrained word embeddings), or clip:HUB_ID_OR_FOLDER."""
    features: str = "simple"
    """Features for clustering: simple, efficientnet, efficientnet:SIZE, dino:HUB_ID_OR_FOLDER or
    clip:HUB_ID_OR_FOLDER."""
    holdout: float = 0.05
    """Fraction of images held out from training, chosen by a hash of their content."""
    near_duplicates: str = "auto"
    """drop, keep, or auto, which drops them except in built-in data sets."""
    min_side: int | None = None
    """Reject images whose shorter side is below this; half of SIZE by default."""
    max_aspect: float = 4.0
    """Reject images with a larger ratio of longer to shorter side."""
    flip: bool = False
    """Also encode mirrored images for training, except where a caption says left or right. Leave it off for images of
    text, faces that must be recognised, and anything else that is not symmetric."""
    license: str = "unknown"
    """Licence of the data, recorded in dataset.json and in everything trained on it."""
    crop: str = "centre"
    """How images are cropped to a square: centre, or smart for the part with the most detail."""

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InputError(f"{name.replace('_', '-')} must be from {low:g} to {high:g}, but is {value}")
        if self.crop not in ("centre", "smart"):
            raise InputError(f"crop must be centre or smart, but is {self.crop!r}")
        if self.near_duplicates not in ("auto", "drop", "keep"):
            raise InputError(f"near-duplicates must be auto, drop or keep, but is {self.near_duplicates!r}")
