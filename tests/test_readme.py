"""The README keeps its word: its code runs, its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_code_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links(path):
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_make_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in DOCS:
        for target in re.findall(r"(?:`|^ {4})make ([a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert target in targets, f"{path.name} says make {target}"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_functions_named_in_the_docs_exist(path):
    for module, names in re.findall(r"`([a-z/]+\.py): ([A-Za-z_.\[\]\"]+)`", path.read_text(encoding="utf-8")):
        file = next(
            f
            for root in ("src/atoll", ".")
            for f in [ROOT / root / module, *(ROOT / root).glob(f"*/{module}")]
            if f.exists()
        )
        for name in re.findall(r"[A-Za-z_]{3,}", names):
            assert re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")), f"{path.name}: {module} has no {name}"
