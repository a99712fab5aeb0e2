"""The one exception that means: the input was wrong, and this sentence says what to do."""

import re
import reprlib
from collections.abc import Collection
from difflib import get_close_matches

# What moves the cursor, colours the screen or turns the text around: C0 and C1 controls, bidirectional marks.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class InputError(ValueError):
    """A mistake in what the caller gave. Its message is one sentence for a person, not a traceback."""


class NotFiniteError(InputError):
    """Weights that are NaN or infinite: whoever has others can go on without."""


class StoreError(InputError):
    """An object store that failed, which says nothing of what is in it: no image is left out because of it."""


class AwayError(InputError):
    """An expert that is elsewhere does not answer: others can answer in its place, until it is back."""


def shown(value: object, limit: int = 60) -> str:
    """Returns a short repr of a value that anyone may have written, whatever its length and depth."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = limit
    text = short.repr(value)
    return text if len(text) <= 3 * limit else f"{text[: 3 * limit]}..."


def printable(text: str, limit: int = 2000) -> str:
    """Returns the text as one line for a terminal: controls escaped, and shortened in the middle."""
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def unknown(kind: str, name: object, known: Collection[str]) -> InputError:
    """The sentence for a name that is not in a list, with the nearest one that is."""
    near = get_close_matches(str(name)[:100], known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InputError(f"unknown {kind} {shown(str(name))}: {hint}accepted are {', '.join(sorted(known))}")


def plural(num: int, noun: str) -> str:
    """Returns "1 image" or "2,000 images"."""
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {noun}s"
