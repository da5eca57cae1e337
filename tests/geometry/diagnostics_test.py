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

diagnose = jax.jit(
  diagnostics.diagnose, static_argnums=3, static_argnames=("min_rank", "max_rank")
)
rank_one_fraction = jax.jit(diagnostics.rank_one_fraction)
group_participation_ratios = jax.jit(diagnostics.group_participation_ratios, static_argnums=1)
group_effective_rollouts = jax.jit(diagnostics.group_effective_rollouts, static_argnums=2)
redundancy = jax.jit(diagnostics.redundancy, static_argnums=1)
energies, update_norms = jax.jit(diagnostics.energies), jax.jit(diagnostics.update_norms)
modes_of = jax.jit(spectrum)
gram_agreement = jax.jit(
  diagnostics.gram_agreement, static_argnames=("feature_dim", "num_permutations")
)


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

  norm, bound = update_norms(A, modes, rank)
  np.testing.assert_allclose(norm, np.linalg.norm(update) / B, rtol=1e-10)
  following = np.append(singular**2, np.zeros(B))[rank] / B  # of K divided by B
  expected = np.sqrt(following / B) * np.linalg.norm(outside)
  np.testing.assert_allclose(bound, expected, rtol=1e-10, atol=1e-7)  # √ of a rounding error
  assert np.linalg.norm(features.T @ outside) / B <= bound + 1e-12


def test_the_bound_is_reached_by_the_first_direction_left_out(batch):
  features, _ = batch
  modes = modes_of(features @ features.T)
  norm, bound = update_norms(-3 * modes.vectors[:, 2], modes, 2)
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


def agreement(a, b, feature_dim=40):
  return gram_agreement(a @ a.T, b @ b.T, jax.random.key(0), feature_dim=feature_dim)


def test_agreement_is_the_correlation_of_cosines_and_1_with_itself(batch):
  features, _ = batch
  other = features[:, :4] + 0.5 * np.random.default_rng(2).normal(size=(B, 4))
  other[7] = 0
  found = agreement(features, other)
  pairs = [(i, j) for i, j in itertools.combinations(range(B), 2) if not {i, j} & {5, 7}]
  of = lambda x: [cosine(x[i], x[j]) for i, j in pairs]
  expected = np.corrcoef(of(features), of(other))[0, 1]
  np.testing.assert_allclose(found.correlation, expected, rtol=1e-10)
  np.testing.assert_allclose(agreement(features, -7 * features).correlation, 1, rtol=1e-12)


def test_nulls_of_agreement_hold_what_independent_features_give():
  rng = np.random.default_rng(3)
  features = lambda: rng.normal(size=(B, 40)).astype(np.float32)
  mine = features()
  results = [agreement(mine, features()) for _ in range(20)]
  pairs = B * (B - 1) / 2
  for found in results:
    assert abs(found.correlation) < 4 / np.sqrt(pairs)
    np.testing.assert_allclose([found.permutation_mean, found.noise_mean], 0, atol=0.04)
    for quantile in (found.permutation_quantile, found.noise_quantile):
      np.testing.assert_allclose(quantile, 1.645 / np.sqrt(pairs), rtol=0.3)
  above = sum(f.correlation > min(f.permutation_quantile, f.noise_quantile) for f in results)
  assert above <= 4  # 1 expected of 20
  related = agreement(mine, mine + 0.3 * features())
  assert related.correlation > 3 * max(related.permutation_quantile, related.noise_quantile)


def test_the_permutation_null_permutes_rows_and_columns_alike():
  # Two blocks of six against themselves: 5 % of the matchings leave at least five of six together.
  blocks = np.float32(np.kron(np.eye(2), np.ones((6, 1))))
  found = agreement(blocks, blocks)
  np.testing.assert_allclose(found.correlation, 1, rtol=1e-5)
  np.testing.assert_allclose(found.permutation_mean, 0, atol=0.04)
  swapped = blocks[[6, 1, 2, 3, 4, 5, 0, 7, 8, 9, 10, 11]]
  of = lambda x: (x @ x.T)[np.triu_indices(B, 1)]
  expected = np.corrcoef(of(blocks), of(swapped))[0, 1]
  np.testing.assert_allclose(found.permutation_quantile, expected, rtol=1e-4)


@pytest.mark.parametrize("dim", [4, 20])
def test_cosines_without_features_follow_the_law_of_gaussian_features(dim):
  size, draws = 8, 4000
  sample = jax.vmap(lambda k: diagnostics._gaussian_cosines(k, size, dim, jnp.float32))
  found = np.asarray(sample(jax.random.split(jax.random.key(0), draws)))
  drawn = np.random.default_rng(0).normal(size=(draws, size, dim))
  drawn /= np.linalg.norm(drawn, axis=-1, keepdims=True)
  drawn = drawn @ drawn.swapaxes(1, 2)
  for i, j, k in [(0, 1, 2), (0, 6, 7), (5, 6, 7)]:
    for of in (found, drawn):
      np.testing.assert_allclose(np.mean(of[:, i, j] ** 2), 1 / dim, rtol=0.1)
      triangle = of[:, i, j] * of[:, j, k] * of[:, i, k]
      np.testing.assert_allclose(np.mean(triangle), 1 / dim**2, rtol=0.4)
    quantiles = [np.quantile(of[:, i, j], [0.05, 0.25, 0.75, 0.95]) for of in (found, drawn)]
    np.testing.assert_allclose(*quantiles, atol=0.15 / np.sqrt(dim))
  np.testing.assert_allclose(found[:, range(size), range(size)], 1, rtol=1e-5)
  eigenvalues = np.linalg.eigvalsh(found)[:, ::-1]
  assert np.all(np.sum(eigenvalues > 1e-5, axis=1) == min(size, dim))


def test_the_noise_null_at_the_dimension_of_a_7b_head():
  features = np.random.default_rng(4).normal(size=(B, 5)).astype(np.float32)
  found = agreement(features, features, feature_dim=152_064 * 3584 * 8)
  assert 0.1 < found.noise_quantile < 0.4 and abs(found.noise_mean) < 0.05


def test_the_noise_null_has_the_zero_gradients_of_the_second_subset():
  few = np.random.default_rng(10).normal(size=(B, 40)).astype(np.float32)
  few[4:] = 0  # 6 pairs, whose correlations with noise are large by chance
  found = agreement(np.random.default_rng(11).normal(size=(B, 40)).astype(np.float32), few)
  assert 0.4 < found.noise_quantile < 0.95


def test_agreement_of_cosines_that_do_not_differ_is_0():
  rng = np.random.default_rng(5)  # of unequal norms: equal cosines but for rounding
  same = (rng.normal(size=40) * rng.uniform(0.3, 3, size=(B, 1))).astype(np.float32)
  other = np.random.default_rng(6).normal(size=(B, 40)).astype(np.float32)
  assert agreement(same, other) == (0, 0, 0, 0, 0)
  assert agreement(same * 0, other) == (0, 0, 0, 0, 0)
  assert agreement(other * np.nan, other)[:3] == (0, 0, 0)


@pytest.mark.parametrize("shape", [(5, 30), (30, 5)])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_rank_one_fraction_is_that_of_the_singular_values(shape, scale):
  update = np.random.default_rng(7).normal(size=shape) + 1.0
  squares = np.linalg.svd(update, compute_uv=False) ** 2
  found = rank_one_fraction((update * scale).astype(np.float32))
  np.testing.assert_allclose(found, squares[0] / squares.sum(), rtol=1e-5)


def test_rank_one_fraction_of_an_outer_product_an_identity_and_nothing():
  fraction = rank_one_fraction
  outer = np.outer(np.arange(5.0), np.ones(30)).astype(np.float32)
  np.testing.assert_allclose(fraction(outer), 1, rtol=1e-6)
  np.testing.assert_allclose(fraction(jnp.eye(8, dtype=jnp.bfloat16)), 1 / 8, rtol=1e-6)
  assert fraction(np.zeros((2, 2))) == 0
  assert fraction(jnp.array([[1.0, jnp.nan], [0, 1]])) == 0
  assert fraction(jnp.array([[1.0, jnp.inf], [0, 1]])) == 0


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_head_share(scale):
  tree = {"head_kernel": np.full((2, 3), 2.0), "blocks": {"head_kernel": np.full((4, 10), 0.5)}}
  tree = jax.tree.map(lambda x: jnp.float32(x * scale), tree)
  np.testing.assert_allclose(diagnostics.head_share(tree, "head_kernel"), 24 / 34, rtol=1e-6)
  np.testing.assert_allclose(
    diagnostics.head_share(tree, "blocks/head_kernel"), 10 / 34, rtol=1e-6
  )


def test_head_share_of_no_update_and_of_no_such_head():
  tree = {"embedding": jnp.zeros((2, 3)), "blocks": {"query": jnp.zeros(2)}}
  assert diagnostics.head_share(tree, "embedding") == 0
  tree["blocks"]["query"] = jnp.array([1.0, jnp.nan])
  assert diagnostics.head_share(tree, "embedding") == 0
  with pytest.raises(ValueError, match=r"'head_kernel'; choose one of \['blocks/query', 'embed"):
    diagnostics.head_share(tree, "head_kernel")


def test_covariance_is_over_loss_tokens(x64):
  rng = np.random.default_rng(8)
  coefficients, logprobs = rng.normal(size=(P, G)), rng.normal(size=(P, G, 5)) - 2
  mask = (rng.uniform(size=(P, G, 5)) < 0.6) * 1.0
  kept = mask > 0
  each = np.repeat(coefficients[..., None], 5, -1)
  spoilt = np.where(kept, logprobs, np.nan)
  found = diagnostics.advantage_logprob_covariance(coefficients, spoilt, mask)
  np.testing.assert_allclose(found, -np.cov(each[kept], logprobs[kept], bias=True)[0, 1])
  assert diagnostics.advantage_logprob_covariance(coefficients, spoilt, 0 * mask) == 0
  # Pushing up what is likely already: entropy falls.
  likely = diagnostics.advantage_logprob_covariance(coefficients, each, np.ones_like(mask))
  np.testing.assert_allclose(likely, -coefficients.var())


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
  parts = {
    ("shared_energy", "residual_energy"): energies(A, modes, rank),
    ("update_norm", "update_norm_bound"): update_norms(A, modes, rank),
    tuple(f"redundancy_{name}" for name in diagnostics.Redundancy._fields): (
      redundancy(gram, P)
    ),
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
  of_rank = ("rank", "shared_energy", "group_shared_energy", "residual_energy", "update_norm_bound")
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
  group_level = ("group_effective", "group_participation")  # a group's own block may be usable
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
  with pytest.raises(ValueError, match="a Gram of 12 rollouts is not of 5 equal groups"):
    diagnostics.group_participation_ratios(np.eye(12), 5)
