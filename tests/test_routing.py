"""Routing policies: rows sum to 1, and each does what its name says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.errors import InputError
from atoll.sampling.routing import (
    POLICIES,
    Routing,
    by_time,
    get_routing,
    mask_missing,
    probabilities,
    sample,
    threshold,
    top1,
    topk,
)

P = torch.tensor([[0.1, 0.6, 0.25, 0.05], [0.4, 0.1, 0.1, 0.4]], dtype=torch.float64)
HALF = torch.tensor(0.5)


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def some_p(seed: int, num_experts: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.softmax(4 * torch.randn(8, num_experts, generator=g, dtype=torch.float64), 1)


@given(seed=st.integers(0, 10_000), num_experts=st.integers(1, 9), name=st.sampled_from(POLICIES))
def test_rows_sum_to_one(seed, num_experts, name):
    p = some_p(seed, num_experts)
    g = torch.Generator().manual_seed(seed)
    number = {"topk": 1 + seed % num_experts, "threshold": seed / 10_000, "by_time": 0.5}.get(name)
    weights = Routing(name, number).weights(
        p,
        torch.rand((), generator=g),
        labels=torch.randint(num_experts, (8,), generator=g),
        generators=generators(*range(8)),
        is_flow=torch.arange(num_experts) % 2 == 0,
    )
    assert weights.shape == p.shape
    assert bool((weights >= 0).all())
    torch.testing.assert_close(weights.sum(1), torch.ones(8, dtype=torch.float64))


@given(seed=st.integers(0, 10_000), num_experts=st.integers(1, 9))
def test_limits_are_full_and_top1(seed, num_experts):
    p = some_p(seed, num_experts)
    torch.testing.assert_close(topk(p, num_experts), p)
    torch.testing.assert_close(threshold(p, 0.0), p)
    torch.testing.assert_close(Routing("full").weights(p, HALF), p)
    torch.testing.assert_close(topk(p, 1), top1(p))
    torch.testing.assert_close(threshold(p, 1.0), top1(p))


def test_by_hand():
    assert top1(P).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    torch.testing.assert_close(topk(P, 2)[0], torch.tensor([0, 0.6, 0.25, 0], dtype=torch.float64) / 0.85)
    torch.testing.assert_close(threshold(P, 0.1)[0], torch.tensor([0.1, 0.6, 0.25, 0], dtype=torch.float64) / 0.95)
    assert threshold(P, 0.5)[1].tolist() == [1, 0, 0, 0]  # none is as probable as that: the first of the largest stays
    assert Routing("oracle").weights(P, HALF, labels=torch.tensor([3, 1])).tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]


def test_the_switch():
    """High noise goes to flow matching, low noise to the others, each time to the most probable one."""
    is_flow = torch.tensor([True, False, True, False])
    assert by_time(P, torch.tensor(0.7), is_flow, 0.5).argmax(1).tolist() == [2, 0]
    assert by_time(P, torch.tensor(0.5), is_flow, 0.5).argmax(1).tolist() == [1, 3]
    assert by_time(P, torch.tensor([0.7, 0.3]), is_flow, 0.5).argmax(1).tolist() == [2, 3]
    assert by_time(P, torch.tensor(0.4), is_flow, switch=0.2).argmax(1).tolist() == [2, 0]
    torch.testing.assert_close(by_time(P, torch.tensor(0.3), torch.tensor([True] * 4), 0.5), top1(P))


def test_drawing():
    num = 20_000
    weights = sample(P[:1].expand(num, -1), generators(*range(num)))
    assert bool((weights.sum(1) == 1).all())
    torch.testing.assert_close(weights.mean(0), P[0], atol=0.02, rtol=0)
    impossible = torch.tensor([[0.0, 1.0, 0.0]]).expand(100, -1)
    assert bool((sample(impossible, generators(*range(100)))[:, 1] == 1).all())


def test_a_draw_does_not_depend_on_the_batch():
    p = some_p(0, 5)
    together = sample(p, generators(*range(8)))
    alone = [sample(p[i : i + 1], generators(i)) for i in range(8)]
    torch.testing.assert_close(together, torch.cat(alone))


def test_missing_experts():
    present = torch.tensor([True, False, True, True])
    torch.testing.assert_close(mask_missing(P, present)[0], torch.tensor([0.1, 0, 0.25, 0.05]).double() / 0.4)
    sure = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    torch.testing.assert_close(mask_missing(sure, present), torch.tensor([[1.0, 0.0, 1.0, 1.0]]) / 3)


def test_probabilities():
    logits = torch.tensor([[0.0, 500.0, 1.0]])
    torch.testing.assert_close(
        probabilities(logits, 2.0, torch.tensor([True, False, True])),
        torch.softmax(torch.tensor([[0.0, -torch.inf, 0.5]]), 1),
    )  # softmax first would leave nothing
    everyone = torch.ones(3, dtype=torch.bool)
    assert probabilities(logits.bfloat16(), 1.0, everyone).dtype == torch.float32


@pytest.mark.parametrize("spec", ["top1", "full", "sample", "oracle", "topk", "threshold", "by_time"])
def test_names(spec):
    assert get_routing(spec) == Routing(spec) == get_routing(str(get_routing(spec)))


def test_numbers_in_names():
    assert get_routing("topk:3", every=2) == Routing("topk", 3, every=2)
    assert get_routing("threshold:0.2") == Routing("threshold", 0.2)
    assert get_routing("by_time:0.4", confident=0.9) == Routing("by_time", 0.4, confident=0.9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: topk(P, 5), "topk:5 asks for more than the 4 experts"),
        (lambda: Routing("top2"), "unknown routing 'top2': did you mean 'topk'"),
        (lambda: Routing("topk", 0), "the K of topk:K must be"),
        (lambda: Routing("topk", 1.5), "the K of topk:K must be"),
        (lambda: Routing("threshold", 2.0), "threshold:2.0 must lie in"),
        (lambda: Routing("threshold", torch.nan), "threshold:nan must lie in"),
        (lambda: Routing("by_time", -1.0), "by_time:-1.0 must lie in"),
        (lambda: Routing(every=0), "route_every must be"),
        (lambda: Routing(confident=0.0), "confident must lie"),
        (lambda: get_routing("full:2"), "takes no number"),
        (lambda: get_routing("topk:two"), "a number after the colon"),
        (lambda: get_routing("topk:"), "a number after the colon"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(InputError, match=message):
        call()
