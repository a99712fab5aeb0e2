"""The list of verbs that `atoll --help` prints: one sentence for each, without its flags and examples."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

Verb = Callable[..., Any]


def verbs_for(arguments: Sequence[str], verbs: Mapping[str, Verb]) -> dict[str, Verb]:
    """Returns the verbs; for a bare `--help`, stand-ins that carry only the first paragraph of each docstring."""
    if list(arguments) not in ([], ["-h"], ["--help"]):
        return dict(verbs)
    return {name: _headline(verb) for name, verb in verbs.items()}


def _headline(verb: Verb) -> Verb:
    def listed() -> None:
        pass

    function = verb.func if isinstance(verb, partial) else verb
    listed.__doc__ = (function.__doc__ or "").split("\n\n")[0]
    return listed
