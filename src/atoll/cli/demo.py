"""`atoll demo`."""

from pathlib import Path


def demo(out: Path = Path("demo"), compare: bool = False, few_steps: bool = False, quick: bool = False) -> None:
    """Show everything on this machine: data, experts trained in isolation, one model, samples, figures, a report.

    Rerun the command to resume.

    For example:
      atoll demo
      atoll demo --compare
      atoll demo --few-steps
      atoll demo --quick --out /tmp/demo

    Args:
        out: The folder to make: OUT/report.html is for you, OUT/results.json for programs.
        compare: Also train a monolith with as many FLOPs, and an ensemble of flow matching alone.
        few_steps: Also distil the ensemble into students that make an image in 4 steps, 2 and 1.
        quick: Tiny settings, whose images are noise: to see in half a minute whether all of it runs.
    """
    from atoll.experiments.demo import FULL, QUICK, run_demo

    run_demo(out, QUICK if quick else FULL, compare, few_steps)
