"""`atoll VERB ...`. Verbs import what they need when they run, so that --help is quick."""

import sys

import tyro

from atoll.cli.assign import assign
from atoll.cli.inspect import inspect
from atoll.cli.partition import partition
from atoll.cli.prepare import prepare
from atoll.errors import InputError

VERBS = {"prepare": prepare, "partition": partition, "assign": assign, "inspect": inspect}


def main(arguments: list[str] | None = None) -> None:
    try:
        tyro.extras.subcommand_cli_from_dict(
            VERBS,  # type: ignore[arg-type]
            prog="atoll",
            description="Train one text-to-image diffusion model on computers that never talk to each other.",
            args=arguments,
            sort_subcommands=False,
        )
    except InputError as error:
        print(f"atoll: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("atoll: interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
