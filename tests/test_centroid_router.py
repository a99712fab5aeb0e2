"""The router from centroids is Bayes' rule for clusters that satisfy its assumptions."""

import pytest
import torch
from torch.distributions import MultivariateNormal

from atoll.diffusion.oracle import ClusteredGaussians
from atoll.diffusion.schedules import LINEAR
from atoll.errors import InputError
from atoll.networks.centroid_router import CentroidRouter, CentroidRouterConfig

K, C, S, D = 5, 3, 4, 6
TIMES = torch.tensor([0.0, 0.01, 0.3, 0.7, 0.99, 1.0], dtype=torch.float64)


@pytest.fixture
def data(rng) -> ClusteredGaussians:
    """Returns one isotropic Gaussian per cluster."""
    means = torch.randn(K, 1, C * S * S, generator=rng, dtype=torch.float64)
    variances = (0.1 + torch.rand(K, 1, 1, generator=rng, dtype=torch.float64)).expand_as(means)
    counts = torch.tensor([[100.0], [20.0], [300.0], [7.0], [73.0]], dtype=torch.float64)
    return ClusteredGaussians(means, variances, counts / counts.sum())


@pytest.fixture
def router(data) -> CentroidRouter:
    return CentroidRouter.fit(data.means.view(K, C, S, S), data.variances[:, 0, 0], 500 * data.weights[:, 0])


@pytest.fixture
def x(data, rng):
    x0, _ = data.sample(40, rng)
    return 0.6 * x0 + 0.4 * torch.randn(x0.shape, generator=rng, dtype=x0.dtype)


def test_it_is_the_posterior(data, router, x):
    for t in TIMES:
        p = torch.softmax(router(x.view(-1, C, S, S), t), 1)
        torch.testing.assert_close(p, data.posterior(x, LINEAR(t)), rtol=1e-9, atol=1e-12)
    times = torch.rand(40, dtype=torch.float64)
    p = torch.softmax(router(x.view(-1, C, S, S), times), 1)
    torch.testing.assert_close(p, data.posterior(x, LINEAR(times)), rtol=1e-9, atol=1e-12)


def test_pure_noise_gives_the_shares(data, router, x):
    p = torch.softmax(router(x.view(-1, C, S, S), TIMES[-1]), 1)
    torch.testing.assert_close(p, data.weights[:, 0].expand(40, -1))


def test_image_scale(data, x):
    """A smaller factor gives less confident probabilities and the same shares."""
    statistics = (data.means.view(K, C, S, S), data.variances[:, 0, 0], 500 * data.weights[:, 0])
    whole, part = (CentroidRouter.fit(*statistics, image_scale=scale) for scale in (1.0, 0.2))
    x = x.view(-1, C, S, S)
    sure, unsure = (torch.softmax(router(x, TIMES[2]), 1).amax(1).mean() for router in (whole, part))
    assert unsure < sure
    torch.testing.assert_close(torch.softmax(part(x, TIMES[-1]), 1), data.weights[:, 0].expand(40, -1))


def test_the_text_part_is_a_gaussian(data, x, rng):
    means = torch.randn(K, D, generator=rng, dtype=torch.float64)
    root = torch.randn(D, D, generator=rng, dtype=torch.float64)
    covariance = root @ root.T + torch.eye(D)
    statistics = (data.means.view(K, C, S, S), data.variances[:, 0, 0], 500 * data.weights[:, 0])
    router = CentroidRouter.fit(*statistics, means, covariance, shrinkage=0.0)
    tokens = torch.randn(40, 7, D, generator=rng, dtype=torch.float64)
    mask = torch.arange(7) < torch.randint(1, 8, (40, 1), generator=rng)
    pooled = torch.stack([text[real].mean(0) for text, real in zip(tokens, mask, strict=True)])
    density = MultivariateNormal(means, covariance)
    x = x.view(-1, C, S, S)
    blind = router(x, TIMES[2])
    expected = torch.softmax(blind + density.log_prob(pooled[:, None]), 1)
    torch.testing.assert_close(torch.softmax(router(x, TIMES[2], tokens, mask), 1), expected)
    read = router.read_text(tokens, mask)
    assert read.shape == (40, K)
    torch.testing.assert_close(router(x, TIMES[2], read), router(x, TIMES[2], tokens, mask))


def test_a_covariance_that_has_no_inverse(data, rng):
    statistics = (data.means.view(K, C, S, S), data.variances[:, 0, 0], 500 * data.weights[:, 0])
    router = CentroidRouter.fit(*statistics, torch.randn(K, D, generator=rng), torch.zeros(D, D))
    assert bool(torch.isfinite(router.text_weight).all())


def test_round_trip(data, router, x, tmp_path):
    router.card = {"temperature": 3.0}
    router.save_pretrained(tmp_path)
    again = CentroidRouter.from_pretrained(tmp_path)
    assert again.config == router.config == CentroidRouterConfig(K, C, S)
    assert again.card == {"temperature": 3.0}
    x = x.view(-1, C, S, S)
    assert torch.equal(again(x, TIMES[2]), router(x, TIMES[2]))


def test_empty_and_flat_clusters():
    """An empty cluster is never chosen, and one without variance stays finite at t = 0."""
    means = torch.stack([torch.full((1, 2, 2), float(k)) for k in range(3)])
    router = CentroidRouter.fit(means, torch.tensor([0.0, 0.1, 0.1]), torch.tensor([5, 0, 5]))
    p = torch.softmax(router(means, torch.tensor(0.0)), 1)
    assert p.argmax(1).tolist()[0] == 0
    assert p[:, 1].tolist() == [0, 0, 0]


def test_wrong_inputs(router, x):
    with pytest.raises(AssertionError, match="x must have shape"):
        router(x, TIMES[2])
    with pytest.raises(AssertionError, match="built without text"):
        router(x.view(-1, C, S, S), TIMES[2], torch.zeros(40, 3, D))
    with pytest.raises(InputError, match="num_experts"):
        CentroidRouterConfig(0)
