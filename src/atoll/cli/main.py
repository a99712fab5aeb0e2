"""`atoll VERB ...`. Verbs import their dependencies when they run, so that --help is quick."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any

import tyro

from atoll.cli.federation import run as run_federation
from atoll.cli.help import verbs_for
from atoll.data.settings import PrepareSettings
from atoll.errors import InputError, printable
from atoll.training.settings import DistillSettings, ExpertSettings, RouterSettings, Settings, read_recipe

FILES = (
    *("fetch", "prepare", "partition", "assign", "inspect"),
    *("train", "train_router", "train_all", "assemble", "distill", "sample", "convert"),
    *("federation", "serve", "serve_expert", "evaluate", "reproduce", "demo", "doctor"),
)
VERBS: dict[str, Callable[..., Any]] = {
    name.replace("_", "-"): getattr(import_module(f"atoll.cli.{name}"), name) for name in FILES
}
NOT_RESUMED = {"inspect", "assemble", "sample", "convert", "serve", "serve-expert", "doctor"}  # start from scratch
DESCRIPTION = """Train one text-to-image diffusion model on computers that never talk to each other.

`atoll VERB --help` has all flags of a verb, and examples. `atoll demo` shows everything in five minutes.
"""
SETTINGS: dict[str, dict[str, type[Settings] | type[PrepareSettings]]] = {
    "prepare": {"settings": PrepareSettings},
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
    if not sys.stderr.isatty():  # a log file: tqdm, which reads this when it is imported, writes a line now and then
        os.environ.setdefault("TQDM_MININTERVAL", "30")
    try:
        with plain_warnings():
            if given[:1] == ["federation"]:
                run_federation(given[1:])
            else:
                tyro.extras.subcommand_cli_from_dict(
                    verbs_for(given, _verbs(given)),
                    prog="atoll",
                    description=DESCRIPTION,
                    args=given,
                    sort_subcommands=False,
                )
            _end_process_group()
    except InputError as error:
        print(printable(f"atoll: {error}"), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        resume = "" if NOT_RESUMED.intersection(given[:1]) else ": rerun the same command to resume"
        print(f"atoll: interrupted{resume}", file=sys.stderr)
        sys.exit(130)


def _end_process_group() -> None:
    """Stops torch.distributed's communication threads, which can otherwise abort the interpreter at exit."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Shows each warning once, on one line, without the line of code it came from."""
    shown: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in shown:
            shown.add(str(message))
            print("\r" * sys.stderr.isatty() + printable(f"atoll: {message}"), file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


@dataclass(frozen=True)
class _Flag:
    recipe: str | None = None


def _verbs(given: list[str]) -> dict[str, Callable[..., Any]]:
    """Returns the verbs; those with settings take the recipe's values as defaults, so that flags override it."""
    verbs = dict(VERBS)
    for name, wanted in SETTINGS.items():
        recipe = None
        if given[:1] == [name]:
            flag, _ = tyro.cli(_Flag, args=given[1:], add_help=False, return_unknown_args=True)
            recipe = flag.recipe
        defaults = {key: cls() if recipe is None else read_recipe(recipe, cls) for key, cls in wanted.items()}
        verbs[name] = partial(VERBS[name], **defaults)
    return verbs


if __name__ == "__main__":
    main()
