"""InputError and its subclasses, for wrong input, whose messages say what to do; and helpers for messages."""

import re
import reprlib
from collections.abc import Collection
from difflib import get_close_matches

# Characters that move the cursor, change colours or reverse text: C0 and C1 controls, bidirectional marks.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class InputError(ValueError):
    """Wrong input from the caller. The CLI prints its message, one sentence, instead of a traceback."""


class NotFiniteError(InputError):
    """Weights that are NaN or infinite: a caller with other weights can continue without them."""


class StoreError(InputError):
    """A failure of an object store, as opposed to its content: no image is rejected because of it."""


class AwayError(InputError):
    """A remote expert does not answer: other experts can take its place until it is back."""


def shown(value: object, limit: int = 60) -> str:
    """Returns a short repr of an untrusted value of any length and depth."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = limit
    text = short.repr(value)
    return text if len(text) <= 3 * limit else f"{text[: 3 * limit]}..."


def printable(text: str, limit: int = 2000) -> str:
    """Returns the text as one line that is safe to print: control characters escaped, shortened in the middle."""
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def unknown(kind: str, name: object, known: Collection[str]) -> InputError:
    """Returns the error for a name that is not in a list, suggesting the closest one."""
    near = get_close_matches(str(name)[:100], known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InputError(f"unknown {kind} {shown(str(name))}: {hint}accepted are {', '.join(sorted(known))}")


def plural(num: int, noun: str) -> str:
    """Returns "1 image" or "2,000 images"."""
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {noun}s"
