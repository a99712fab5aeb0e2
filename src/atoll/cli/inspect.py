"""`atoll inspect`."""

from pathlib import Path
from typing import Annotated

import tyro


def inspect(
    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")], sheet: Path | None = None, seed: int = 0
) -> None:
    """Describe a data set and write a contact sheet of it.

    For example:
      atoll inspect data
      atoll inspect data --sheet sheet.png

    Args:
        data: A folder from `atoll prepare`, or its URL, which is first copied to this machine.
        sheet: Where to write the contact sheet; DATA/sheet.png by default.
        seed: Random seed for choosing the images on the sheet.
    """
    from atoll.data.local_copy import local_copy
    from atoll.data.overview import describe, draw_sheet
    from atoll.data.shards import Dataset
    from atoll.errors import printable
    from atoll.plots.canvas import save_image

    dataset = Dataset.open(local_copy(data), partial=True)
    print(*map(printable, describe(dataset)), sep="\n")
    path = sheet or dataset.folder / "sheet.png"
    save_image(draw_sheet(dataset, seed), path)
    print(f"contact sheet: {path}")
