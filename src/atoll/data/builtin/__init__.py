"""The data sets that need no download: avatars, shapes and handwritten digits.

Row i is a function of (name, size, seed, i) alone, so any worker can make any row, in any order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from atoll.data.builtin import avatars, shapes
from atoll.errors import InputError, unknown

NUM_DIGITS = 1797
DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIZES = {"avatars": avatars.SIZES, "shapes": shapes.SIZES, "digits": (8, 1024)}
NAMES = tuple(SIZES)


class Example(NamedTuple):
    image: Image.Image  # RGB
    caption: str
    attributes: dict[str, str]


@dataclass(frozen=True)
class Examples(Sequence[Example]):
    """Examples that are made when asked for."""

    num: int
    make_row: Callable[[int], Example]

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: Any) -> Any:
        rows = range(self.num)[i]
        return self.make_row(rows) if isinstance(rows, int) else [self.make_row(row) for row in rows]


def make(name: str, num: int | None = None, size: int = 32, seed: int = 0, heldout: str = "include") -> Examples:
    """Returns the first num rows of a data set; None is all there are, for digits.

    heldout is for avatars: "exclude" leaves out a tenth of the combinations of attributes, "only" makes
    nothing else, "include" makes any.
    """
    if name not in NAMES:
        raise unknown("built-in data set", name, NAMES)
    low, high = SIZES[name]
    if not low <= size <= high:
        raise InputError(f"{name} are from {low} to {high} pixels wide, not {size}")
    if seed < 0:
        raise InputError(f"seed must be 0 or more, but is {seed}")
    if name == "digits":
        _digits()  # a missing library is told here, not in a worker
        num = NUM_DIGITS if num is None else num
        if num > NUM_DIGITS:
            raise InputError(f"there are {NUM_DIGITS} handwritten digits, and {num} were asked for: ask for fewer")
    if num is None:
        raise InputError(f"{name} has no end: say how many examples to make (num)")
    if name == "avatars":
        return Examples(num, partial(_avatar, size, seed, heldout=heldout))
    return Examples(num, partial(_scene if name == "shapes" else _digit, size, seed))


def _avatar(size: int, seed: int, i: int, heldout: str) -> Example:
    rng = np.random.default_rng((seed, i))
    attributes = avatars.choose_avatar(rng, heldout)
    image = avatars.draw_avatar(attributes, size, rng)
    return Example(Image.fromarray(image), avatars.caption_of(attributes), attributes)


def _scene(size: int, seed: int, i: int) -> Example:
    attributes, image = shapes.draw_shapes(np.random.default_rng((seed, i)), size)
    return Example(image, shapes.caption_of(attributes), attributes)


def _digit(size: int, seed: int, i: int) -> Example:
    images, labels = _digits()
    row = np.random.default_rng(seed).random(NUM_DIGITS).argsort(kind="stable")[i]
    image = Image.fromarray(images[row]).resize((size, size), Image.Resampling.BICUBIC)
    word = DIGIT_WORDS[labels[row]]
    return Example(image.convert("RGB"), f"a handwritten {word}", {"digit": word})


@lru_cache
def _digits() -> tuple[NDArray[np.uint8], list[int]]:
    """Returns the images [1797, 10, 10], each with a margin, and what they show."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError("the digits come with scikit-learn: pip install scikit-learn") from error
    digits = load_digits()
    images = np.pad(digits.images, ((0, 0), (1, 1), (1, 1)))
    return np.round(images * (255 / 16)).astype(np.uint8), digits.target.tolist()
