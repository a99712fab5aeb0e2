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
        out: Output folder: OUT/report.html is for you, OUT/results.json for programs.
        compare: Also train a monolith with as many FLOPs, and an ensemble of flow-matching experts only.
        few_steps: Also distil the ensemble into students that sample in 4, 2 and 1 steps.
        quick: Use tiny settings, whose images are noise, to check in half a minute that everything runs.
    """
    from atoll.experiments.demo import FULL, QUICK, run_demo

    run_demo(out, QUICK if quick else FULL, compare, few_steps)
