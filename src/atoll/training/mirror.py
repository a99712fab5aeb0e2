"""A copy of a run's folder in an object store, from which another machine can resume it.

The order of uploads keeps the copy consistent: first metrics and samples, then the checkpoint they belong to, and last
run.json, which at the end says that the run is complete.
"""

import sys
import time
from pathlib import Path

from atoll.errors import InputError, printable
from atoll.object_store import AccessError, open_store
from atoll.training.checkpoint import saved

RUN, STATE = "run.json", "state"
LONGEST = 3600.0  # seconds of retries when uploading the result
AGAIN = 10.0  # seconds between retries


class Mirror:
    """Synchronises the folder of a run with its copy below a URL."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder, self.store = folder, open_store(url)
        self._uploaded: dict[str, tuple[int, int]] = {}  # size and time of change

    def restore(self, state: bool = True) -> None:
        """Downloads the run if the store is ahead of the folder; without `state`, all but its checkpoints."""
        keys = [key for key, _ in self.store.list()]
        checkpoints = [key for key in keys if key.startswith(f"{STATE}/")]
        last, here = max(checkpoints, default=""), saved(self.folder / STATE)
        is_ahead = last > (f"{STATE}/{here[-1].name}" if here else "")
        if RUN not in keys or (state and (self.folder / RUN).exists() and not is_ahead):
            return
        wanted = [key for key in keys if key not in checkpoints] + [last] * bool(state and last)
        for key in sorted(wanted, key=_order):
            self.store.get_to_file(key, self.folder / key)

    def push(self, last: bool = False) -> None:
        """Uploads new and changed files. If the store fails, training continues, and the next push catches up.

        Only the result must arrive: with `last`, this retries for an hour, or until the store refuses access.
        """
        deadline = time.monotonic() + LONGEST
        while True:
            try:
                return self._push()
            except InputError as error:
                if last and (isinstance(error, AccessError) or time.monotonic() > deadline):
                    raise
                what = "the result is kept" if last else "training continues"
                print(printable(f"atoll: {error}; {what}, and this is tried again later"), file=sys.stderr)
                if not last:
                    return None
            time.sleep(AGAIN)

    def _push(self) -> None:
        files = {
            path.relative_to(self.folder).as_posix(): path
            for path in self.folder.rglob("*")
            if path.is_file() and not path.is_symlink() and not path.name.startswith(".")
        }
        for key in sorted(files, key=_order):
            about = files[key].stat()
            version = about.st_size, about.st_mtime_ns
            if self._uploaded.get(key) != version:
                self.store.put_file(key, files[key])
                self._uploaded[key] = version
        for key, _ in self.store.list(STATE):
            if key not in files:
                self.store.delete(key)


def _order(key: str) -> tuple[int, str]:
    return (2 if key == RUN else key.startswith(f"{STATE}/"), key)
