"""`atoll VERB ...`. Verbs import what they need when they run, so that --help is quick."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

import tyro

from atoll.cli.assemble import assemble
from atoll.cli.assign import assign
from atoll.cli.convert import convert
from atoll.cli.demo import demo
from atoll.cli.distill import distill
from atoll.cli.evaluate import evaluate
from atoll.cli.fetch import fetch
from atoll.cli.inspect import inspect
from atoll.cli.partition import partition
from atoll.cli.prepare import prepare
from atoll.cli.reproduce import reproduce
from atoll.cli.sample import sample
from atoll.cli.train import train
from atoll.cli.train_all import train_all
from atoll.cli.train_router import train_router
from atoll.errors import InputError, printable
from atoll.training.settings import DistillSettings, ExpertSettings, RouterSettings, Settings, read_recipe

VERBS: dict[str, Callable[..., Any]] = {
    "fetch": fetch,
    "prepare": prepare,
    "partition": partition,
    "assign": assign,
    "inspect": inspect,
    "train": train,
    "train-router": train_router,
    "train-all": train_all,
    "assemble": assemble,
    "distill": distill,
    "sample": sample,
    "convert": convert,
    "evaluate": evaluate,
    "reproduce": reproduce,
    "demo": demo,
}
SETTINGS: dict[str, dict[str, type[Settings]]] = {
    "train": {"settings": ExpertSettings},
    "train-router": {"settings": RouterSettings},
    "train-all": {"settings": ExpertSettings, "router_settings": RouterSettings},
    "distill": {"settings": DistillSettings},
}


def main(arguments: list[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    if given == ["--version"]:
        print(f"atoll {version('atoll')}")
        return
    try:
        with plain_warnings():
            tyro.extras.subcommand_cli_from_dict(
                _verbs(given),
                prog="atoll",
                description="Train one text-to-image diffusion model on computers that never talk to each other.",
                args=given,
                sort_subcommands=False,
            )
    except InputError as error:
        print(printable(f"atoll: {error}"), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("atoll: interrupted: rerun the same command to resume", file=sys.stderr)
        sys.exit(130)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Our warnings as one line each, once, and without the line of code they came from."""
    told: set[str] = set()

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if str(message) not in told:
            told.add(str(message))
            print("\r" * sys.stderr.isatty() + printable(f"atoll: {message}"), file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


def _verbs(given: list[str]) -> dict[str, Callable[..., Any]]:
    """The verbs, those that take settings with the recipe's values as their defaults: so flags win over it."""
    verbs = dict(VERBS)
    for name, wanted in SETTINGS.items():
        recipe = _recipe(given) if given[:1] == [name] else None
        defaults = {key: cls() if recipe is None else read_recipe(recipe, cls) for key, cls in wanted.items()}
        verbs[name] = partial(VERBS[name], **defaults)
    return verbs


def _recipe(given: list[str]) -> str | None:
    for i, argument in enumerate(given):
        flag, equals, value = argument.partition("=")
        if flag == "--recipe":
            if equals:
                return value
            if i + 1 < len(given):
                return given[i + 1]
    return None


if __name__ == "__main__":
    main()
