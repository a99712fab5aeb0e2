"""`atoll doctor`."""

from pathlib import Path


def doctor(quick: bool = False, device: str = "auto", folder: Path = Path(), json: Path | None = None) -> None:
    """Check in two minutes whether Atoll works on this machine, and how fast.

    Each line begins with ok, note (good to know), warn (works, but not as well as it could) or fail. The exit code is
    1 if a check has failed, otherwise 0.

    For example:
      atoll doctor
      atoll doctor --quick
      atoll doctor --device cuda:1 --folder /data --json doctor.json

    Args:
        quick: Measure for a shorter time, without torch.compile: about 20 seconds.
        device: What to check: auto, cpu, cuda or cuda:N.
        folder: Where data and checkpoints will be stored: measures its disk and leaves nothing behind.
        json: Also write a report to this file, to attach to an issue. It contains no user, host or folder names.
    """
    import sys

    from atoll.experiments.doctor import diagnose, find_machine

    if not diagnose(find_machine(device, folder, quick), json):
        sys.exit(1)
