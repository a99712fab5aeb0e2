"""What a text alone predicts of an image: against scikit-learn's ridge, and where it must predict nothing."""

import pytest
import torch

from atoll.errors import InputError
from atoll.networks.text_prior import RIDGES, TextPrior


def data(num=400, dim=6, seed=0):
    """Returns latents that are linear in the text, plus noise."""
    g = torch.Generator().manual_seed(seed)
    texts = torch.randn(num, dim, generator=g) + 1
    weight = torch.randn(dim, 3 * 2 * 2, generator=g)
    latents = (texts @ weight).view(-1, 3, 2, 2) + 0.5 * torch.randn(num, 3, 2, 2, generator=g)
    return texts, latents


def fit(texts, latents, null=None):
    parts = zip(texts.split(50), latents.split(50), strict=True)
    return TextPrior.fit(parts, latents.double().mean(0), torch.zeros(texts.shape[1]) if null is None else null)


def test_against_scikit_learn():
    linear_model = pytest.importorskip("sklearn.linear_model")
    texts, latents = data()
    prior = fit(texts, latents)
    found = prior.of(texts[:7, None])  # one token each: it is its own mean
    level = float(torch.cov(texts.double().T, correction=0).diagonal().mean())
    distances = []
    for ridge in RIDGES:
        model = linear_model.Ridge(alpha=ridge * level * len(texts)).fit(texts.double(), latents.double().flatten(1))
        distances.append(float((found.flatten(1) - torch.from_numpy(model.predict(texts[:7].double()))).abs().max()))
    assert min(distances) < 1e-4


def test_it_predicts_pictures_it_has_not_seen():
    texts, latents = data(800)
    prior = fit(texts[:400], latents[:400])
    left = (prior.of(texts[400:, None]) - latents[400:]).pow(2).mean()
    assert left < 0.3 < (prior.mean - latents[400:]).pow(2).mean()


def test_texts_that_say_nothing_lead_to_the_mean():
    texts, latents = data()
    unrelated = fit(texts, latents[torch.randperm(400, generator=torch.Generator().manual_seed(1))])
    off = unrelated.of(texts[:50, None]) - unrelated.mean
    assert off.pow(2).mean() < 0.05 * latents.var(0).mean()


def test_the_null_text_says_nothing():
    texts, latents = data()
    null = torch.full((6,), 3.0)
    prior = fit(texts, latents, null)
    assert torch.equal(prior.of(null[None, None])[0], prior.mean)
    assert float((prior.of(null[None, None] + 1e-5) - prior.mean).abs().max()) < 1e-2  # nor a rounding of it
    assert float((prior.of(null[None, None] + 1) - prior.mean).abs().max()) > 0.1


def test_it_goes_no_further_than_the_captions_do():
    texts, latents = data()
    prior = fit(texts, latents)
    far = prior.of(1000 * texts[:20, None])
    assert float((far - prior.mean).flatten(1).norm(dim=1).max()) < 0.05 * prior.limit  # it resembles none of them
    near = prior.of(texts[:20, None])
    assert float((near - prior.mean).flatten(1).norm(dim=1).max()) <= prior.limit * 1.0001


def test_padding_is_not_read():
    texts, latents = data()
    prior = fit(texts, latents)
    tokens = torch.stack([texts[0], torch.full((6,), 99.0)])[None]
    mask = torch.tensor([[True, False]])
    torch.testing.assert_close(prior.of(tokens, mask), prior.of(texts[:1, None]))


@pytest.mark.parametrize("num", [1, 2, 3, 7])
def test_few_pictures(num):
    texts, latents = data(num)
    assert torch.isfinite(fit(texts, latents).of(texts[:, None])).all()


def test_parts_that_do_not_fit():
    texts, latents = data()
    prior = fit(texts, latents)
    with pytest.raises(InputError, match="does not fit"):
        TextPrior(prior.mean, prior.weight[:3], prior.centre, prior.null, prior.limit)
    with pytest.raises(InputError, match="not finite"):
        TextPrior(prior.mean * torch.nan, prior.weight, prior.centre, prior.null, prior.limit)
