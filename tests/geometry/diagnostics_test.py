"""Diagnostics of a Gram matrix against NumPy on the features themselves."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.geometry import diagnostics
from rlvr_jax.ops.spectral import spectrum

P, G, DIM = 3, 4, 9
B = P * G
PREFIX = "geometry/group_effective_rollouts/"
SHARES = [f"{PREFIX}{name}" for name in ("below_0.5", "0.5_to_1", "1_to_2", "2_to_4", "from_4")]

diagnose = jax.jit(diagnostics.diagnose, static_argnums=3, static_argnames=("min_rank", "max_rank"))
group_participation_ratios = jax.jit(diagnostics.group_participation_ratios, static_argnums=1)
group_effective_rollouts = jax.jit(diagnostics.group_effective_rollouts, static_argnums=2)
redundancy = jax.jit(diagnostics.redundancy, static_argnums=1)
energies, update_norms = jax.jit(diagnostics.energies), jax.jit(diagnostics.update_norms)
modes_of = jax.jit(spectrum)


@pytest.fixture
def batch(x64):
  """Features of unequal norms with a direction in common, one of them zero; and coefficients."""
  rng = np.random.default_rng(0)
  features = rng.normal(size=(B, DIM)) * rng.uniform(0.3, 3, size=(B, 1)) + rng.normal(size=DIM)
  features[5] = 0
  return features, rng.normal(size=(P, G))


def cosine(x, y):
  return x @ y / np.linalg.norm(x) / np.linalg.norm(y)


def effective_rollouts(coefficients, features):
  weighted = coefficients[:, None] * features
  return np.sum(weighted.sum(0) ** 2) / np.sum(weighted**2)


def test_redundancy_is_the_mean_cosine_of_features(batch):
  features, _ = batch
  groups = features.reshape(P, G, DIM)
  found = redundancy(features @ features.T, P)
  pairs = [p for g in groups for p in itertools.combinations(g, 2) if all(x.any() for x in p)]
  within = [cosine(*pair) for pair in pairs]
  between = [cosine(*pair) for pair in itertools.combinations(groups.mean(1), 2)]
  assert len(within) == 3 * 6 - 3 and min(within) < 0
  expected = [within, np.maximum(within, 0), between, np.maximum(between, 0)]
  np.testing.assert_allclose(found, [np.mean(x) for x in expected], rtol=1e-12)


def test_redundancy_of_identical_orthogonal_and_opposite_gradients():
  direction = np.full((4, 1), 3.0)
  assert_close = functools.partial(np.testing.assert_allclose, atol=1e-6)
  assert_close(redundancy(direction @ direction.T, 2), [1, 1, 1, 1])
  assert_close(redundancy(np.eye(4), 2), [0, 0, 0, 0])
  opposite = np.array([[1.0, -1, 1, -1]])  # within a prompt: the means vanish
  assert_close(redundancy(opposite.T @ opposite, 2), [-1, 0, 0, 0])
  opposed = np.array([[1.0, 1, -1, -1]])  # prompt against prompt
  assert_close(redundancy(opposed.T @ opposed, 2), [1, 1, -1, 0])


def test_a_mean_gradient_that_cancels_to_within_rounding_has_no_direction(x64):
  rng = np.random.default_rng(1)
  first, second = rng.normal(size=(2, 50))
  features = np.stack([first, -first + 1e-4 * second, second, second])
  assert redundancy(features @ features.T, 2).between == 0
  features[1] = -first + 0.1 * second
  np.testing.assert_allclose(redundancy(features @ features.T, 2).between, 1, rtol=1e-3)


def test_redundancy_at_the_end_of_float32():
  for value in (1e36, 1e-37):  # the sum of a block of the larger is no float32
    gram = np.full((64, 64), value, np.float32)
    np.testing.assert_allclose(redundancy(gram, 2), [1, 1, 1, 1], rtol=1e-6)


@pytest.mark.parametrize("rank", [1, 3, DIM, B])
def test_energies_and_update_norms_are_those_of_the_features(batch, rank):
  features, coefficients = batch
  A = coefficients.ravel()
  left, singular, _ = np.linalg.svd(features)
  projector = left[:, :rank] @ left[:, :rank].T
  outside = A - projector @ A
  update = features.T @ A
  modes = modes_of(features @ features.T)

  shared, residual = energies(A, modes, rank)
  np.testing.assert_allclose(
    shared, np.sum((features.T @ projector @ A) ** 2) / np.sum(update**2), rtol=1e-10
  )
  np.testing.assert_allclose(
    residual, np.sum((features.T @ outside) ** 2) / np.sum(update**2), rtol=1e-10, atol=1e-14
  )

  norm, bound = update_norms(A, modes, rank, B)
  np.testing.assert_allclose(norm, np.linalg.norm(update) / B, rtol=1e-10)
  following = np.append(singular**2, np.zeros(B))[rank] / B  # of K divided by B
  expected = np.sqrt(following / B) * np.linalg.norm(outside)
  np.testing.assert_allclose(bound, expected, rtol=1e-10, atol=1e-7)  # √ of a rounding error
  assert np.linalg.norm(features.T @ outside) / B <= bound + 1e-12


def test_the_bound_is_reached_by_the_first_direction_left_out(batch):
  features, _ = batch
  modes = modes_of(features @ features.T)
  norm, bound = update_norms(-3 * modes.vectors[:, 2], modes, 2, B)
  np.testing.assert_allclose(norm, bound, rtol=1e-12)


@pytest.mark.parametrize("size", [2, 256])
def test_energies_of_an_update_that_cancels_are_undefined(size):
  features = np.random.default_rng(size).normal(size=(1, 30)).repeat(size, 0).astype(np.float32)
  modes = modes_of(features @ features.T)
  signs = np.resize([1.0, -1.0], size)
  assert energies(signs, modes, 1) == (0, 0)
  np.testing.assert_allclose(energies(signs + 0.1, modes, 1), [1, 0], atol=1e-3)


def test_values_of_groups_are_those_of_their_features(batch):
  features, coefficients = batch
  coefficients[2] = 0
  gram = features @ features.T
  groups = features.reshape(P, G, DIM)

  n_eff, counted = group_effective_rollouts(coefficients, gram, P)
  assert counted.tolist() == [True, True, False]
  expected = [effective_rollouts(coefficients[p], groups[p]) for p in range(2)]
  np.testing.assert_allclose(n_eff[:2], expected, rtol=1e-10)

  ratios, usable = group_participation_ratios(gram, P)
  singular = np.linalg.svd(groups, compute_uv=False) ** 2
  assert usable.all()
  np.testing.assert_allclose(ratios, singular.sum(1) ** 2 / (singular**2).sum(1), rtol=1e-10)


def test_a_group_whose_weighted_gradients_are_all_zero_is_left_out():
  gram = np.diag([1.0, 0, 0, 0])
  _, counted = group_effective_rollouts(np.array([[0.0, 1], [1, 1]]), gram, 2)
  assert counted.tolist() == [False, False]
  _, counted = group_effective_rollouts(np.array([[1.0, 1], [1, 1]]), gram, 2)
  assert counted.tolist() == [True, False]
  assert group_participation_ratios(gram, 2)[1].tolist() == [True, False]


def test_histogram_counts_the_groups_that_count():
  values = jnp.array([0.0, 0.49, 0.5, 1.0, 1.99, 3.0, 4.0, 64.0, 0.1])
  counted = jnp.array([True] * 8 + [False])
  shares = diagnostics.effective_rollouts_histogram(values, counted)
  assert [f"geometry/{name}" for name in shares] == SHARES
  np.testing.assert_allclose(list(shares.values()), np.array([2, 1, 2, 1, 2]) / 8)
  empty = diagnostics.effective_rollouts_histogram(values, jnp.zeros(9, bool))
  assert list(empty.values()) == [0] * 5


def group_shared_energy(A, features):
  """‖the update's projection onto the group's own top right-singular vectors‖² / ‖the update‖²."""
  _, singular, directions = np.linalg.svd(features, full_matrices=False)
  ratio = np.sum(singular**2) ** 2 / np.sum(singular**4)
  rank = int(np.clip(round(ratio), 1, len(A) - 1))
  update = A @ features
  return np.sum((directions[:rank] @ update) ** 2) / np.sum(update**2)


def test_diagnose_says_what_its_parts_say(batch):
  features, coefficients = batch
  reweighted = np.maximum(coefficients, 0)
  gram = features @ features.T
  found = diagnose(gram, coefficients, reweighted, P)
  singular = np.linalg.svd(features, compute_uv=False) ** 2
  ratio = singular.sum() ** 2 / np.sum(singular**2)
  rank = round(ratio)
  assert 1 < rank < DIM
  modes = modes_of(gram)
  A = coefficients.ravel()
  groups = np.arange(B).reshape(P, G)
  n_eff = [effective_rollouts(A[p], features[p]) for p in groups]
  shares = np.histogram(n_eff, [0, 0.5, 1, 2, 4, np.inf])[0] / P
  expected = {
    "gram_usable": 1,
    "participation_ratio": ratio,
    "group_participation_ratio": np.mean(group_participation_ratios(gram, P)[0]),
    "effective_rollouts": effective_rollouts(A, features),
    "effective_rollouts_reweighted": effective_rollouts(reweighted.ravel(), features),
    "group_effective_rollouts/mean": np.mean(n_eff),
    "rank": rank,
    "group_shared_energy": np.mean([group_shared_energy(A[p], features[p]) for p in groups]),
    "update_norm_reweighted": np.linalg.norm(features.T @ reweighted.ravel()) / B,
  }
  ranks = [round(group_participation_ratios(gram, P)[0][p].item()) for p in range(P)]
  norms_of = lambda p: update_norms(A[p], modes_of(gram[np.ix_(p, p)]), ranks[p[0] // G], G)
  norms, bounds = zip(*map(norms_of, groups), strict=True)
  own = [np.linalg.norm(A[p] @ features[p]) / G for p in groups]
  np.testing.assert_allclose(norms, own, rtol=1e-9)
  expected |= {
    "group_update_norm": np.mean(norms),
    "group_update_norm_bound": np.mean(bounds),
    "group_norm_correlation": np.corrcoef(norms, bounds)[0, 1],
  }
  parts = {
    ("shared_energy", "residual_energy"): energies(A, modes, rank),
    ("update_norm", "update_norm_bound"): update_norms(A, modes, rank, B),
    tuple(f"redundancy_{name}" for name in diagnostics.Redundancy._fields): (redundancy(gram, P)),
  }
  for names, values in parts.items():
    expected |= dict(zip(names, values, strict=True))
  expected = {f"geometry/{name}": value for name, value in expected.items()}
  expected |= dict(zip(SHARES, shares, strict=True))
  assert set(found) == set(expected)
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-9, err_msg=name)
  # Flat coefficients, and a chosen rank, on which only the energies and the bound depend.
  chosen = diagnose(gram, A, reweighted.ravel(), P, min_rank=3, max_rank=3)
  of_rank = (
    "rank",
    "shared_energy",
    "group_shared_energy",
    "residual_energy",
    "update_norm_bound",
    "group_update_norm_bound",
    "group_norm_correlation",
  )
  for name, value in chosen.items():
    same = bool(np.isclose(value, found[name], rtol=1e-9))
    assert same != name.removeprefix("geometry/").startswith(of_rank), name
  assert chosen["geometry/rank"] == 3 != rank


def test_diagnose_is_free_of_scale_in_float32(batch):
  features, coefficients = batch
  gram = (features @ features.T).astype(np.float32)
  plain = diagnose(gram, np.float32(coefficients), np.float32(coefficients), P)
  for of_gram, of_coefficients in ((1e-30, 1.0), (1e30, 1.0), (1.0, 1e-25), (1.0, 1e25)):
    scaled = np.float32(coefficients * of_coefficients)
    found = diagnose(np.float32(gram * of_gram), scaled, scaled, P)
    for name, value in plain.items():
      assert value.dtype == found[name].dtype == np.float32, name
      expected = value * (np.sqrt(of_gram) * of_coefficients if "update_norm" in name else 1)
      np.testing.assert_allclose(found[name], expected, rtol=2e-4, err_msg=name)


def test_diagnose_does_not_see_the_order_of_prompts_and_of_rollouts(batch):
  features, coefficients = batch
  rng = np.random.default_rng(9)
  order = np.concatenate([G * p + rng.permutation(G) for p in rng.permutation(P)])
  plain = diagnose(features @ features.T, coefficients, coefficients, P)
  shuffled, weights = features[order], coefficients.ravel()[order].reshape(P, G)
  found = diagnose(shuffled @ shuffled.T, weights, weights, P)
  for name, value in plain.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-9, err_msg=name)
  mixed = np.roll(np.arange(B), 1)  # across prompts: what is of groups changes
  shuffled, weights = features[mixed], coefficients.ravel()[mixed].reshape(P, G)
  found = diagnose(shuffled @ shuffled.T, weights, weights, P)
  assert abs(found["geometry/redundancy_within"] - plain["geometry/redundancy_within"]) > 1e-3


def _bad(kind):
  gram, A = np.eye(B, dtype=np.float32), np.ones((P, G), np.float32)
  if kind == "zero coefficients":
    return gram, 0 * A, P
  if kind in ("one rollout per prompt", "one prompt", "one rollout"):
    size = 1 if kind == "one rollout" else B
    num_prompts = B if kind == "one rollout per prompt" else 1
    return gram[:size, :size], A.reshape(-1)[:size].reshape(num_prompts, -1), num_prompts
  value = {"zero Gram": 0, "NaN Gram": np.nan, "infinite Gram": np.inf, "overflow": 3e38}[kind]
  return np.where(gram > 0, np.float32(value), 0), A, P


UNUSABLE = ["zero Gram", "NaN Gram", "infinite Gram", "overflow"]


@pytest.mark.parametrize("kind", UNUSABLE)
def test_diagnose_is_0_where_the_gram_is_unusable(kind):
  gram, A, num_prompts = _bad(kind)
  found = diagnose(gram, A, A, num_prompts)
  group_level = (
    "group_effective",
    "group_participation",
    "group_update",
  )  # a group's own block may be usable
  for name, value in found.items():
    assert np.isfinite(value), name
    assert value == 0 or (kind == "overflow" and any(x in name for x in group_level)), name


def test_one_bad_block_leaves_the_other_groups_readable():
  gram, A, _ = _bad("zero coefficients")
  gram[0, 0] = np.nan
  values, counted = group_effective_rollouts(A + 1, gram, P)
  assert counted.tolist() == [False, True, True]
  np.testing.assert_allclose(values, [0, 1, 1], rtol=1e-6)
  found = diagnose(gram, A + 1, A + 1, P)
  np.testing.assert_allclose(found["geometry/group_participation_ratio"], G, rtol=1e-6)
  np.testing.assert_allclose(found[f"{PREFIX}mean"], 1, rtol=1e-6)


@pytest.mark.parametrize(
  "kind", ["zero coefficients", "one rollout per prompt", "one prompt", "one rollout"]
)
def test_diagnose_of_small_and_silent_batches(kind):
  gram, A, num_prompts = _bad(kind)
  found = {k.removeprefix("geometry/"): v for k, v in diagnose(gram, A, A, num_prompts).items()}
  assert all(np.isfinite(value) for value in found.values())
  assert found["gram_usable"] == 1
  assert found["participation_ratio"] == pytest.approx(A.size)
  silent = kind == "zero coefficients"
  assert found["effective_rollouts"] == pytest.approx(0 if silent else 1)
  assert found["shared_energy"] + found["residual_energy"] == pytest.approx(0 if silent else 1)
  assert found["update_norm"] == pytest.approx(0 if silent else A.size**-0.5)
  shares = [found[name.removeprefix("geometry/")] for name in SHARES]
  np.testing.assert_allclose(shares, [0] * 5 if silent else [0, 0, 1, 0, 0])
  for name in ("redundancy_within", "redundancy_between"):
    assert found[name] == 0


def test_groups_must_be_equal():
  with pytest.raises(ValueError, match="the 12 rollouts of a Gram matrix cannot be divided into 5"):
    diagnostics.group_participation_ratios(np.eye(12), 5)
