"""The one exception that means: the input was wrong, and this sentence says what to do."""

from collections.abc import Collection
from difflib import get_close_matches


class InputError(ValueError):
    """A mistake in what the caller gave. Its message is one sentence for a person, not a traceback."""


class NotFiniteError(InputError):
    """Weights that are NaN or infinite: whoever has others can go on without."""


def unknown(kind: str, name: object, known: Collection[str]) -> InputError:
    """The sentence for a name that is not in a list, with the nearest one that is."""
    near = get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InputError(f"unknown {kind} {str(name)!r}: {hint}accepted are {', '.join(sorted(known))}")
