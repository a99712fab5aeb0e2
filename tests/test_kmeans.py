"""Clusters: k-means beside scikit-learn, bounded reading, the cap on sizes, and every mistake a user can make."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.metrics import silhouette_score
from sklearn.preprocessing import normalize

from atoll.errors import InputError
from atoll.partition import kmeans as clustering
from atoll.partition.kmeans import (
    Centroids,
    _finish,
    _Points,
    _stream_pass,
    assign,
    capacity_of,
    find_nearest,
    hierarchical,
    kmeans,
    measure,
    pack,
    read,
    sample_indices,
    silhouette,
)
from atoll.partition.partition import by_label, by_random

DIGITS = load_digits().data.astype(np.float32)


def mixture(num_rows: int, dim: int, components: int, seed: int = 0, apart: float = 2.0) -> np.ndarray:
    """Returns Gaussians of unequal size and width, with 5% noise."""
    rng = np.random.default_rng(seed)
    own = rng.choice(components, num_rows, p=rng.dirichlet(np.full(components, 2.0)))
    x = apart * rng.standard_normal((components, dim))[own]
    x += rng.uniform(0.5, 1.5, components)[own, None] * rng.standard_normal((num_rows, dim))
    noise = rng.random(num_rows) < 0.05
    x[noise] = 2 * apart * rng.standard_normal((noise.sum(), dim))
    return x.astype(np.float32)


class OnDisk:
    """Rows that record how they are read, without holding data."""

    def __init__(self, num_rows: int, dim: int, components: int = 8) -> None:
        self.num_rows, self.dim = num_rows, dim
        self.centres = 3 * np.random.default_rng(0).standard_normal((components, dim))
        self.largest, self.total = 0, 0

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        self.largest, self.total = max(self.largest, len(rows)), self.total + len(rows)
        wave = np.sin(rows[:, None] * (1 + np.arange(self.dim)) * 12.9898)
        return (self.centres[rows % len(self.centres)] + wave).astype(np.float16)


# k-means itself


@pytest.mark.parametrize("k", [8, 32])
@pytest.mark.parametrize("name", ["digits", "mixture", "far from the origin"])
def test_inertia_within_one_percent_of_the_best_of_ten(name, k, report):
    x = DIGITS if name == "digits" else mixture(6000, 16, 24) + (300 if name == "far from the origin" else 0)
    best = KMeans(k, n_init=10, random_state=0).fit(x).inertia_
    ratios = [kmeans(x, k, seed=seed).inertia / best for seed in range(2)]
    report(f"k-means inertia / scikit-learn's best of 10, {name}, k={k}: {min(ratios):.4f} to {max(ratios):.4f}")
    assert max(ratios) < 1.01


def test_cosine_is_spherical_k_means():
    x = mixture(4000, 24, 12) * np.random.default_rng(1).uniform(0.1, 10, (4000, 1)).astype(np.float32)
    found = kmeans(x, 12, metric="cosine")
    unit = normalize(x)
    assert torch.allclose(found.centroids.norm(dim=1), torch.ones(12), atol=1e-5)
    own = found.centroids.numpy()[found.labels.numpy()]
    assert found.inertia == pytest.approx(2 * (1 - (unit * own).sum(1)).sum(), rel=1e-4)
    theirs = KMeans(12, n_init=10, random_state=0).fit(unit)
    best = 2 * (1 - (unit * normalize(theirs.cluster_centers_)[theirs.labels_]).sum(1)).sum()
    assert found.inertia < 1.01 * best
    assert torch.equal(kmeans(x * 8, 12, metric="cosine").labels, found.labels)


def test_what_is_returned_fits_together():
    x = mixture(5000, 8, 10)
    found = kmeans(x, 10)
    own = found.centroids.numpy()[found.labels.numpy()]
    assert found.inertia == pytest.approx(((x - own) ** 2).sum(), rel=1e-4)
    assert torch.equal(found.sizes, torch.bincount(found.labels, minlength=10))
    all_distances = torch.cdist(torch.from_numpy(x).double(), found.centroids.double())
    assert torch.equal(all_distances.argmin(1), found.labels)


@pytest.mark.bits
def test_the_seed_decides_and_the_chunk_does_not(monkeypatch):
    x = mixture(9000, 8, 10)
    found, again, other = kmeans(x, 10, seed=3), kmeans(torch.from_numpy(x), 10, seed=3), kmeans(x, 10, seed=4)
    assert torch.equal(found.centroids, again.centroids)
    assert not torch.equal(found.centroids, other.centroids)
    expected = find_nearest(x, found.centroids, "euclidean")[0]
    monkeypatch.setattr(clustering, "CHUNK", 1000)
    assert torch.equal(find_nearest(x, found.centroids, "euclidean")[0], expected)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_reading_is_bounded(metric):
    rows = OnDisk(60_000, 16)
    found = kmeans(rows, 8, metric=metric)
    assert rows.largest <= 4096
    assert rows.total == 1 + 4 * 4096 + 3 * 60_000, "the width, the sample, two passes, and one for the assignment"
    assert found.sizes.tolist() == [7500] * 8
    rows.largest = 0
    _, labels = hierarchical(rows, 4, fine=16, metric=metric, cap=1.2)
    measure(rows, labels, 4, metric=metric)
    assert rows.largest <= 4096


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_a_streamed_pass_is_lloyds(metric):
    """Compared with Lloyd's definition, from centroids of which one is nearest to no row."""
    x = torch.from_numpy(mixture(9000, 8, 10))
    x = torch.nn.functional.normalize(x) if metric == "cosine" else x
    start = torch.cat([x[:9], torch.full((1, 8), 50.0)])
    moved = _stream_pass(x, start.clone(), metric, False)
    labels = torch.cdist(x.double(), start.double()).argmin(1)
    means = torch.stack([x[labels == k].double().mean(0) for k in range(9)])
    means = torch.nn.functional.normalize(means) if metric == "cosine" else means
    assert torch.allclose(moved[:9].double(), means, atol=1e-5)
    farthest = int((x.double() - start[labels]).square().sum(1).argmax())
    assert torch.allclose(moved[9], x[farthest], atol=1e-5), "it goes to the row that costs most"


def test_a_sparse_sample_is_read_row_by_row():
    rows = OnDisk(200_000, 4)
    indices = sample_indices(200_000, 300, seed=1)
    x = read(rows, indices, "euclidean")
    assert rows.total == 300 == len(np.unique(indices))
    assert torch.equal(x, torch.from_numpy(rows[indices]).float())


def test_no_cluster_is_empty():
    rng = np.random.default_rng(0)
    x = np.repeat(rng.standard_normal((7, 3)), [500, 1, 1, 1, 300, 2, 1], axis=0).astype(np.float32)
    found = kmeans(x, 7)
    assert sorted(found.sizes.tolist()) == [1, 1, 1, 1, 2, 300, 500]
    assert found.inertia == pytest.approx(0, abs=1e-4)


def test_centroids_without_rows_are_moved_or_dropped():
    x = torch.from_numpy(mixture(300, 4, 6))
    lost = torch.cat([x[:1].expand(3, -1), torch.full((2, 4), 1e3)])
    centroids, _ = _Points(x, spherical=False).lloyd(lost.clone(), 20, 0)
    assert find_nearest(x, centroids, "euclidean")[0].unique().tolist() == [0, 1, 2, 3, 4]
    found = _finish(x, lost.clone(), "euclidean", False)
    assert len(found.centroids) == 5
    assert int(found.sizes.min()) > 0
    found = _finish(x[:2].repeat(9, 1), lost.clone(), "euclidean", False)
    assert found.sizes.tolist() == [9, 9]


def test_far_from_the_origin_the_nearest_is_still_found():
    x = mixture(2000, 16, 12) + 10_000
    centroids = torch.from_numpy(x[:12])
    expected = torch.cdist(torch.from_numpy(x).double(), centroids.double()).argmin(1)
    assert torch.equal(find_nearest(x, centroids, "euclidean")[0], expected)


def test_equal_rows_are_at_distance_zero():
    x = mixture(200, 64, 12)
    labels, distances = find_nearest(x, torch.from_numpy(x), "euclidean")
    assert labels.tolist() == list(range(200))
    assert not distances.any()


def test_many_clusters_beat_the_best_of_ten(report):
    x = mixture(3000, 2, 40, apart=10)
    best = KMeans(100, n_init=10, random_state=0).fit(x).inertia_
    ratios = [kmeans(x, 100, seed=seed).inertia / best for seed in range(3)]
    report(f"k-means inertia / scikit-learn's best of 10, mixture in a plane, k=100: {max(ratios):.4f} at most")
    assert max(ratios) < 0.99


def test_fewer_distinct_rows_than_clusters():
    x = np.repeat(mixture(3, 64, 3), 50, axis=0)
    found = kmeans(x, 5)
    assert len(found.centroids) == 3
    assert found.sizes.tolist() == [50, 50, 50]
    with pytest.raises(InputError, match="only 3 distinct values"):
        hierarchical(x, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_dtypes_and_read_only_maps(dtype, tmp_path, recwarn):
    x = torch.from_numpy(mixture(500, 6, 4)).to(dtype)
    np.save(tmp_path / "x.npy", x.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert torch.equal(kmeans(mapped, 4).labels, kmeans(x, 4).labels)
    assert not recwarn.list
    assert np.array_equal(mapped, x.numpy()), "the input is left as it was"


def test_one_cluster_and_as_many_as_rows():
    x = mixture(20, 3, 4)
    assert torch.allclose(kmeans(x, 1).centroids[0], torch.from_numpy(x).mean(0), atol=1e-5)
    assert kmeans(x, 20).sizes.tolist() == [1] * 20


# Two levels, and the cap


def test_a_row_belongs_to_the_cluster_of_its_nearest_cell():
    x = mixture(4000, 8, 10)
    centroids, labels = hierarchical(x, 4, fine=64)
    fine = torch.cdist(torch.from_numpy(x).double(), centroids.fine.double()).argmin(1)
    assert torch.equal(labels, centroids.coarse_of_fine[fine])
    assert torch.equal(labels, assign(x, centroids))
    sizes = torch.bincount(labels, minlength=4).tolist()
    assert sizes == sorted(sizes, reverse=True)
    flat = KMeans(4, n_init=10, random_state=0).fit(x).inertia_
    assert measure(x, labels, 4)["inertia"] < 1.03 * flat


def test_small_data_get_fewer_cells_and_it_shows():
    assert len(hierarchical(mixture(300, 4, 4), 4)[0].fine) == 37
    assert len(hierarchical(mixture(12, 4, 4), 5)[0].fine) == 5


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("cap", [1.0, 1.05, 1.5, 3.0])
def test_the_cap_holds(cap, metric):
    rng = np.random.default_rng(0)
    lump = rng.standard_normal((1500, 8)) * 0.1 + 5  # more than a third of all rows in one place
    x = np.concatenate([lump, mixture(2500, 8, 12)]).astype(np.float32)
    centroids, labels = hierarchical(x, 5, fine=100, cap=cap, metric=metric)
    sizes = torch.bincount(labels, minlength=5)
    assert int(sizes.max()) <= capacity_of(cap, 4000, 5) <= cap * 800
    assert int(sizes.min()) > 0
    assert torch.equal(labels, assign(x, centroids))


def test_a_cell_too_large_is_split():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal((900, 4)) * 0.01, rng.standard_normal((100, 4)) * 20]).astype(np.float32)
    free, capped = hierarchical(x, 4, fine=8)[1], hierarchical(x, 4, fine=8, cap=1.2)
    assert int(free.bincount().max()) > 300 >= int(capped[1].bincount().max())
    assert len(capped[0].fine) > 8
    assert torch.equal(capped[1], assign(x, capped[0]))


def test_the_cap_costs_little_and_a_wide_one_nothing():
    x = mixture(5000, 8, 9)
    free, wide, tight = (hierarchical(x, 4, fine=128, cap=cap)[1] for cap in (None, 4.0, 1.1))
    assert torch.equal(wide, free)
    random = measure(x, by_random(5000, 4), 4)["inertia"]
    inertia = [measure(x, labels, 4)["inertia"] for labels in (free, tight)]
    assert inertia[0] <= inertia[1] < (inertia[0] + random) / 2


def test_equal_rows_cannot_be_split():
    x = np.concatenate([np.ones((500, 3)), mixture(500, 3, 4)]).astype(np.float32)
    with pytest.raises(InputError, match="500 images are equal .* remove duplicates"):
        hierarchical(x, 4, cap=1.2)
    assert int(hierarchical(x, 4, cap=2)[1].bincount().max()) == 500


@settings(max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=7),
    bins=st.integers(1, 3),
    slack=st.integers(0, 4),
    seed=st.integers(0, 9),
)
def test_a_packing_keeps_the_capacity_and_small_items_always_fit(sizes, bins, slack, seed):
    bins = min(bins, len(sizes))
    capacity = -(-sum(sizes) // bins) + slack
    costs = np.random.default_rng(seed).random((len(sizes), bins)) * np.array(sizes)[:, None]
    places = pack(np.array(sizes), costs, capacity)
    if places is not None:
        assert len(set(places)) == bins
        assert np.bincount(places, weights=sizes, minlength=bins).max() <= capacity
    else:
        assert max(sizes) > (capacity - sum(sizes) / bins) / max(1 - 1 / bins, 1e-9)


def test_packing_moves_what_costs_least():
    costs = np.array([[0.0, 3], [5, 6], [0, 5], [9, 0]])
    assert pack(np.array([2, 2, 2, 2]), costs, 4).tolist() == [0, 1, 0, 1]


def test_packing_leaves_no_bin_empty():
    costs = np.array([[0.0, 7, 9], [0, 3, 9], [0, 9, 4]])
    assert pack(np.array([1, 1, 1]), costs, 3).tolist() == [0, 1, 2]


def test_packing_many_items_tightly():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 60, 1000)
    costs = rng.random((1000, 8)) * sizes[:, None]
    costs[:, 0] = 0  # nearest to every row
    capacity = -(-sizes.sum() // 8) + 4
    found = pack(sizes, costs, capacity)
    assert np.bincount(found, weights=sizes).max() <= capacity


# Without features


@given(n=st.integers(1, 400), k=st.integers(1, 9), seed=st.integers(-5, 2**70))
def test_random_is_balanced_and_keeps_its_choices(n, k, seed):
    k = min(n, k)
    labels = by_random(n, k, seed=seed)
    sizes = torch.bincount(labels, minlength=k)
    assert len(labels) == n
    assert len(sizes) == k
    assert int(sizes.max() - sizes.min()) <= 1
    assert torch.equal(by_random(n + 3 * k, k, seed=seed)[:n], labels)


def test_random_is_random():
    labels = by_random(80_000, 4, seed=1)
    assert not torch.equal(labels, by_random(80_000, 4, seed=2))
    pairs = torch.bincount(4 * labels[:-4] + labels[4:], minlength=16)
    assert pairs.min() > 4700
    assert pairs.max() < 5300
    for place in range(4):
        assert torch.bincount(labels[place::4]).min() > 4700


def test_labels():
    assert by_label(["cat", "dog", "cat", "bird"], 3).tolist() == [1, 2, 1, 0]
    with pytest.raises(InputError, match="only 2 labels for 3 clusters"):
        by_label("aabb", 3)
    with pytest.raises(InputError, match="set --balance to 1.5,"):
        by_label("aaaaaabb", 2, cap=1.25)
    assert by_label("aaaaaabb", 2, cap=1.5).tolist() == [0] * 6 + [1] * 2


@given(st.lists(st.integers(0, 30), min_size=8, max_size=300), st.integers(1, 5))
def test_whole_labels_in_balanced_groups(labels, k):
    k = min(k, len(set(labels)))
    clusters = by_label(labels, k)
    assert all(len({int(c) for c, x in zip(clusters, labels, strict=True) if x == label}) == 1 for label in set(labels))
    sizes = torch.bincount(clusters, minlength=k)
    assert int(sizes.min()) > 0
    largest = max(labels.count(label) for label in labels)
    assert int(sizes.max()) <= max(largest, len(labels) / k + largest)


# Quality


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_quality_beside_scikit_learn(metric):
    labels = kmeans(DIGITS, 6, metric=metric).labels
    x = normalize(DIGITS) if metric == "cosine" else DIGITS
    found = measure(DIGITS, labels, 6, metric=metric)
    assert found["silhouette"] == pytest.approx(silhouette_score(x, labels, metric=metric), abs=1e-4)
    means = np.stack([x[labels == i].mean(0) for i in range(6)])
    if metric == "cosine":
        means = normalize(means)
        distances = 1 - (x * means[labels]).sum(1)
    else:
        distances = np.linalg.norm(x - means[labels], axis=1)
    assert found["mean_distance"] == pytest.approx([distances[labels == i].mean() for i in range(6)], rel=1e-4)
    assert found["inertia"] == pytest.approx(((x - means[labels]) ** 2).sum(), rel=1e-5)
    assert sum(found["sizes"]) == len(DIGITS)
    assert found["share_of_largest"] == max(found["sizes"]) / len(DIGITS)
    assert found["balance"] == pytest.approx(6 * found["share_of_largest"])


def test_silhouette_of_a_sample(monkeypatch):
    monkeypatch.setattr("atoll.partition.kmeans.SILHOUETTE_ROWS", 400)
    labels = kmeans(DIGITS, 6).labels
    indices = sample_indices(len(DIGITS), 400, seed=0)
    expected = silhouette_score(DIGITS[indices], labels[indices])
    assert silhouette(DIGITS, labels) == pytest.approx(expected, abs=1e-5)
    alone = torch.tensor([0, 0, 1])
    x = np.array([[0.0], [1], [5]], dtype=np.float32)
    assert silhouette(x, alone) == pytest.approx(silhouette_score(x, alone))
    assert silhouette(x, torch.zeros(3, dtype=torch.int64)) is None


# The published file


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    hierarchical(mixture(400, 5, 4), 3, metric="cosine")[0].save(tmp_path / "centroids.safetensors")
    return tmp_path / "centroids.safetensors"


def test_round_trip(stored):
    again = Centroids.load(stored)
    expected = hierarchical(mixture(400, 5, 4), 3, metric="cosine")[0]
    assert torch.equal(again.fine, expected.fine)
    assert torch.equal(again.coarse_of_fine, expected.coarse_of_fine)
    assert (again.metric, again.num_clusters) == ("cosine", 3)
    assert [path.name for path in stored.parent.iterdir()] == [stored.name]
    new = mixture(100, 5, 4, seed=9)
    assert torch.equal(assign(new, again), assign(new, expected))


def edit(path: Path, **changes: torch.Tensor) -> None:
    about = {"atoll": '{"format": 1, "metric": "cosine"}'}
    save_file({**load_file(path), **changes}, path, metadata=about)


def test_a_damaged_file(stored):
    whole = stored.read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        stored.write_bytes(whole[:length])
        with pytest.raises(InputError, match="truncated or not a safetensors file"):
            Centroids.load(stored)
    with pytest.raises(InputError, match="is missing"):
        Centroids.load(stored.parent / "other")
    stored.write_bytes(whole)
    tensors = load_file(stored)
    save_file(tensors, stored)
    with pytest.raises(InputError, match="does not hold the centroids"):
        Centroids.load(stored)
    for changes in (
        {"fine_centroids": tensors["fine_centroids"] * torch.nan},
        {"fine_centroids": tensors["fine_centroids"][:-1].clone()},
        {"coarse_of_fine": tensors["coarse_of_fine"] - 1},
        {"coarse_of_fine": tensors["coarse_of_fine"] + 2**60},  # would need a huge table of means
        {"another": torch.zeros(1)},
    ):
        stored.write_bytes(whole)
        edit(stored, **changes)
        with pytest.raises(InputError, match="does not hold the centroids") as caught:
            Centroids.load(stored)
        assert str(stored) in str(caught.value)
    for about in ("[" * 100_000, "[1]", "7", '{"format": 1, "metric": ["cosine"]}', '{"format": NaN}'):
        save_file(tensors, stored, metadata={"atoll": about})
        with pytest.raises(InputError, match=re.escape(str(stored))):
            Centroids.load(stored)


@pytest.mark.timeout(60)
def test_a_file_that_is_none(stored):
    stored.rename(stored.parent / "elsewhere")
    os.mkfifo(stored)
    with pytest.raises(InputError, match="it is a FIFO"):
        Centroids.load(stored)
    stored.unlink()
    stored.symlink_to("/dev/zero")
    with pytest.raises(InputError, match="it is a link that leaves its folder"):
        Centroids.load(stored)


def test_a_label_as_long_as_a_book():
    """It stands beside 100,000 short ones, each of which would take as much memory in a fixed-width array."""
    labels = ["a", "b"] * 50_000 + ["c" * 10_000_000]
    assert torch.bincount(by_label(labels, 3)).tolist() == [50_000, 50_000, 1]


# Mistakes


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("row", [0, 4500])
def test_a_row_that_is_not_finite_is_named(value, row):
    x = mixture(5000, 4, 4)
    x[row, 2] = value
    message = f"the features of row {row} are not finite"
    for run in (
        lambda: kmeans(x, 4),
        lambda: hierarchical(x, 4, metric="cosine"),
        lambda: assign(x, Centroids(torch.eye(4), torch.arange(4))),
        lambda: measure(x, torch.zeros(5000, dtype=torch.int64), 1),
    ):
        with pytest.raises(InputError, match=message):
            run()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x: kmeans(x, 0), "50 images cannot make 0 clusters"),
        (lambda x: kmeans(x, 51), "50 images cannot make 51 clusters"),
        (lambda x: kmeans(x[:0], 1), "0 images cannot make 1 clusters"),
        (lambda x: hierarchical(x, -1), "50 images cannot make -1 clusters"),
        (lambda x: hierarchical(x, 99), "50 images cannot make 99 clusters"),
        (lambda x: hierarchical(x, 8, fine=4), "fine must be at least the 8 clusters"),
        (lambda x: hierarchical(x, 4, cap=0.9), "balance must be at least 1 .* but is 0.9"),
        (lambda x: hierarchical(x, 4, cap=float("nan")), "balance must be at least 1 .* but is nan"),
        (lambda x: by_random(3, 4), "3 images cannot make 4 clusters"),
    ],
)
def test_a_mistake_gets_one_sentence(run, message):
    with pytest.raises(InputError, match=message) as caught:
        run(mixture(50, 4, 4))
    assert not re.search(r"\.\s|\n", str(caught.value))


def test_rows_of_zeros_have_a_place_under_cosine():
    x = mixture(200, 4, 4)
    x[17] = 0
    centroids, labels = hierarchical(x, 3, metric="cosine")
    assert torch.equal(assign(x, centroids), labels)
