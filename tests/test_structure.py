"""The structure of the code: allowed imports between parts, no pickles, and imports without optional packages."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "atoll"
MODULES = sorted(SOURCE.rglob("*.py"))

FOUNDATION = {"errors", "config", "storage", "object_store", "tensors", "adam", "cards", "processes"}  # for any part
LAYERS = [  # each may import those above it
    {"diffusion", "plots"},
    {"networks"},
    {"encoders"},
    {"convert", "data"},
    {"partition"},
    {"sampling"},
    {"training"},
    {"metrics", "engines"},
    {"experiments", "serving"},
    {"federation"},
    {"cli"},
]
LAYERS.append({"__init__", "__main__"})  # the public interface
MAY_IMPORT = {part: set().union(*LAYERS[:i]) for i, layer in enumerate(LAYERS) for part in layer}
CORE = {
    "torch",
    "numpy",
    "safetensors",
    "huggingface-hub",
    "pillow",
    "pydantic",
    "tqdm",
    "tyro",
}  # the dependencies in pyproject.toml
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def imports_of(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.append(node.module or "")
    return names


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    part = part_of(path)
    for name in imports_of(tree_of(path)):
        if name.split(".")[0] != "atoll":
            continue
        other = [*name.split("."), ""][1]
        allowed = FOUNDATION | MAY_IMPORT.get(part, set()) | ({part} - FOUNDATION)
        assert other in allowed, f"{path.name} imports {name}, but {part} may import only {sorted(allowed)}"


@pytest.mark.parametrize("path", sorted((SOURCE / "diffusion").glob("*.py")), ids=lambda path: path.name)
def test_diffusion_needs_torch_alone(path):
    outside = {name.split(".")[0] for name in imports_of(tree_of(path))} - set(sys.stdlib_module_names)
    assert outside <= {"torch", "atoll"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_pickle(path):
    tree = tree_of(path)
    assert not {name.split(".")[0] for name in imports_of(tree)} & PICKLES
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "numpy"):
            assert not {"load", "save"} & {alias.name for alias in node.names}, "call them by their full names"
        if not isinstance(node, ast.Call):
            continue
        call = ast.unparse(node.func)
        assert call != "torch.save", "weights are safetensors"
        assert not (call in ("np.load", "numpy.load") and "allow_pickle" in ast.unparse(node))
        if call == "torch.load":
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert path.name == "published.py", "only published checkpoints are read by torch.load"
            assert options.get("weights_only") == "True"


def test_every_module_imports_with_the_core_alone():
    """In a fresh interpreter without any package except the core's dependencies, and theirs."""
    program = """
import importlib, sys
from importlib.metadata import packages_distributions, requires
from packaging.requirements import Requirement

core, modules = set(sys.argv[1].split(",")), sys.argv[2].split(",")
names = packages_distributions()
allowed, todo = set(), list(core)
while todo:
    name = todo.pop()
    if name not in allowed:
        allowed.add(name)
        for line in requires(name) or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                todo.append(need.name.lower().replace("_", "-"))
blocked = {
    m for m, owners in names.items()
    if m != "atoll" and not {o.lower().replace("_", "-") for o in owners} & allowed
}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Blocker())
assert {"diffusers", "transformers", "scipy", "matplotlib"} <= blocked, sorted(blocked)
for module in modules:
    importlib.import_module(module)
"""
    modules = [
        ".".join(("atoll", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for path in MODULES
    ]
    run = subprocess.run(
        [sys.executable, "-c", program, ",".join(CORE), ",".join(modules)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_the_core_is_what_pyproject_says():
    project = tomllib.loads((SOURCE.parent.parent / "pyproject.toml").read_text())["project"]
    declared = {line.split(">")[0].split("=")[0].strip() for line in project["dependencies"]}
    assert declared == CORE


def test_the_public_face():
    import atoll

    for name in atoll.__all__:
        assert getattr(atoll, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = atoll.Nothing


def test_importing_it_is_quick():
    """`import atoll` loads neither torch nor anything else that takes seconds."""
    program = "import sys, atoll, atoll.cli.main; print(*{'torch', 'diffusers', 'transformers'} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_it_runs_as_a_module():
    run = subprocess.run([sys.executable, "-m", "atoll", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("atoll ")
