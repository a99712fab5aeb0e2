"""The benchmarks' own arithmetic."""

from pathlib import Path


def test_the_ratio_of_any_number_of_rounds(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    from side_by_side import ratio

    assert ratio([3.0], [2.0]) == "1.50 (one round)"
    assert ratio([3.0, 4.0, 5.0], [2.0, 2.0, 2.0]) == "2.00 (middle half of rounds 1.50 to 2.50)"
