"""The manifest for Kubernetes: its fields, and that its command is one of atoll's."""

import shlex
from pathlib import Path

import pytest

from test_readme import help_of

yaml = pytest.importorskip("yaml")
MANIFEST = Path(__file__).parent.parent / "deploy" / "rayjob.yaml"


def test_the_manifest():
    job = yaml.safe_load(MANIFEST.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    program, verb, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert program == "atoll"
    for flag in (argument for argument in arguments if argument.startswith("--")):
        assert f"{flag} " in help_of(verb) or f"{flag}," in help_of(verb), flag
    cluster = job["spec"]["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert workers["minReplicas"] >= 1  # a request that no node can meet is refused
    for group in (head, workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "object-store"}}]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
