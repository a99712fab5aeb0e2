"""The classifier that reads labels from features, against scikit-learn's."""

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from atoll.errors import InputError
from atoll.metrics.labels import MOST, Reader, why_unreadable


@pytest.fixture(scope="module")
def digits():
    pictures, labels = load_digits(return_X_y=True)
    return pictures, [f"digit {label}" for label in labels]


def test_is_linear_discriminant_analysis(digits, report):
    vectors, labels = digits
    ours = Reader.fit(vectors[:1000], labels[:1000], shrinkage=0.3)
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.3).fit(vectors[:1000], labels[:1000])
    np.testing.assert_allclose(ours.weights, theirs.coef_, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(ours.bias, theirs.intercept_, rtol=1e-6)
    assert ours.read(vectors[1000:]) == theirs.predict(vectors[1000:]).tolist()
    right = np.mean(np.array(ours.read(vectors[1000:])) == labels[1000:])
    report(f"labels of handwritten digits read from pixels: {right:.3f}")
    assert right > 0.88


def test_fewer_pictures_than_dimensions():
    g = np.random.default_rng(0)
    labels = ["a", "b"] * 10
    vectors = g.normal(size=(20, 300)) + 3 * np.array([[label == "a"] for label in labels])
    assert Reader.fit(vectors, labels).read(vectors) == labels


def test_identical_pictures():
    """With no spread all images are equal, and nothing fails."""
    assert len(Reader.fit(np.ones((6, 4)), ["a", "b"] * 3).read(np.ones((2, 4)))) == 2


def test_a_label_that_one_picture_has_is_left_out(digits):
    vectors, labels = digits
    assert Reader.fit(vectors, ["once", *labels[1:]]).labels == [f"digit {k}" for k in range(10)]


def test_what_cannot_be_read():
    assert why_unreadable(["a", "b"] * 2) == ""
    assert "no two labels that several of them share" in why_unreadable([""] * 9)
    assert "no two labels" in why_unreadable(["", "", "a", "a"])  # images without a label are not a class
    assert "no two labels" in why_unreadable(["a", "b", "c"])
    assert "more than the 100 that are told apart" in why_unreadable([str(k) for k in range(MOST + 1)] * 2)
    with pytest.raises(InputError, match="finite|NaN"):
        Reader.fit(np.full((4, 2), np.nan), ["a", "b"] * 2)
