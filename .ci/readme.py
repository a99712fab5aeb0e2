"""Runs the commands of the README exactly as they are written, in their order, in one shell."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECTIONS = ("Start", "Your own images")
RUN_BEFORE = ("make test", "make check")  # by .ci/run itself


def commands() -> list[str]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = []
    for section in SECTIONS:
        (text,) = re.findall(rf"^## {section}\n(.*?)^## ", readme, re.DOTALL | re.MULTILINE)
        found += re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE)
    return [line for line in found if not line.startswith(RUN_BEFORE)]


if __name__ == "__main__":
    script = "\n".join(f"echo {shlex.quote('+ ' + line)}\n{line}" for line in commands())
    sys.exit(subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, check=False).returncode)
