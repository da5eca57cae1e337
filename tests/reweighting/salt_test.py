"""SALT, against NumPy written from the formula, and the properties the formula has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles.batches import metric_value

from rlvr_jax import reweighting

BLOCKS, SIZE = 3, 8
DEFAULTS = {
  "rank_scale": 1.0,
  "min_rank": 1,
  "max_rank": 64,
  "alpha_min": 0.0,
  "alpha_max": 1.0,
  "positive_part": True,
  "channels": "both",
}
ABLATIONS = {
  "default": {},
  "no positive part": {"positive_part": False},
  "shared": {"channels": "shared"},
  "residual": {"channels": "residual"},
  "amplified": {"channels": "amplified", "alpha_min": 0.3},
  "residual of A": {"channels": "residual", "positive_part": False},
  "fixed alpha": {"alpha_min": 0.3, "alpha_max": 0.3},
  "bounded alpha": {"alpha_min": 0.4, "alpha_max": 0.5},
  "fixed rank": {"min_rank": 3, "max_rank": 3},
  "small subspace": {"rank_scale": 0.4},
  "large subspace": {"rank_scale": 2.5},
}


def _case(seed, blocks=BLOCKS, size=SIZE, width=12):
  """Coefficients [N, b] and features [N, b, width] of different norms that share a direction.

  Standing out from the rest by a factor of its own, each direction is well apart from the others.
  """
  rng = np.random.default_rng(seed)
  scales = rng.uniform(0.2, 2, (blocks, size, 1)) * 1.5 ** -np.arange(width)
  features = rng.normal(size=(blocks, size, width)) * scales
  features[..., 0] += 0.8
  return rng.normal(size=(blocks, size)), features


def _gram(features):
  return np.einsum("nid,njd->nij", features, features)


def _oracle(a, features, **hyper):
  """One block from the formula; what it goes through, by name."""
  hyper = DEFAULTS | hyper
  size = len(a)
  values, vectors = np.linalg.eigh(features @ features.T / size)
  values, vectors = values[::-1], vectors[:, ::-1]
  ratio = values.sum() ** 2 / (values**2).sum()
  ceiling = min(hyper["max_rank"], size - 1, (values > 1e-6 * values[0]).sum())
  rank = int(min(max(np.round(hyper["rank_scale"] * ratio), hyper["min_rank"]), ceiling))
  projection = vectors[:, :rank] @ vectors[:, :rank].T
  norms = np.linalg.norm(features, axis=1)
  n_eff = np.linalg.norm(a @ features) ** 2 / (a**2 * norms**2).sum()
  alpha = np.clip(1 - n_eff, hyper["alpha_min"], hyper["alpha_max"])
  kept = np.maximum(a, 0) if hyper["positive_part"] else a
  shared, residual = projection @ a, alpha * (kept - projection @ kept)
  forms = {"both": shared + residual, "shared": shared, "residual": residual}
  both = (forms | {"amplified": a + residual})[hyper["channels"]]
  explored = residual if hyper["channels"] != "shared" else 0 * residual
  return {
    "coefficients": both,
    "gap": (values[rank - 1] - values[rank]) / values[0],
    "tie": abs((hyper["rank_scale"] * ratio) % 1 - 0.5),
    "participation_ratio": ratio,
    "effective_rollouts": n_eff,
    "alpha": alpha,
    "rank": rank,
    "coefficient_change": np.linalg.norm(both - a) / np.linalg.norm(a),
    "shared_share": np.linalg.norm(shared) ** 2 / np.linalg.norm(a) ** 2,
    "exploration_share": np.sum(explored**2) / (np.sum(both**2) or 1),
    "unusable_gram": 0.0,
  }


@functools.cache
def _jit(**hyper):
  rule = reweighting.salt(**hyper)
  return jax.jit(lambda a, gram, key: rule.apply(a, gram, jnp.ones(a.shape, bool), key))


def _apply(a, gram, key=0, **hyper):
  """A' [N, b]."""
  return np.asarray(_jit(**hyper)(a, gram, jax.random.key(key))[0])


@pytest.mark.parametrize(
  "name, size", [*((name, SIZE) for name in ABLATIONS), ("default", 2), ("large subspace", 2)]
)
def test_salt_equals_numpy_block_by_block(name, size, x64):
  a, features = _case(0, size=size)
  expected = [_oracle(*block, **ABLATIONS[name]) for block in zip(a, features, strict=True)]
  assert min(e["gap"] for e in expected) > 1e-3 and min(e["tie"] for e in expected) > 1e-3
  result, metrics = _jit(**ABLATIONS[name])(a, _gram(features), jax.random.key(0))
  np.testing.assert_allclose(result, [e["coefficients"] for e in expected], atol=1e-12)
  assert {key.removeprefix("reweighting/"): metric_value(m) for key, m in metrics.items()} == {
    key: pytest.approx(np.mean([e[key] for e in expected]), rel=1e-6)
    for key in expected[0]
    if key not in ("coefficients", "gap", "tie")
  }


def test_float32_is_near_float64():
  a, features = _case(1)
  expected = [_oracle(*block)["coefficients"] for block in zip(a, features, strict=True)]
  result = _apply(a.astype(np.float32), _gram(features).astype(np.float32))
  assert result.dtype == np.float32
  np.testing.assert_allclose(result, expected, atol=1e-5)


def _well_posed(seed, **hyper):
  """A case whose subspace rounding cannot change: with an eigengap at k, k not on a tie."""
  a, features = _case(seed, blocks=1)
  expected = _oracle(a[0], features[0], **hyper)
  assume(expected["gap"] > 1e-3 and expected["tie"] > 1e-3)
  return a, features


seeds = st.integers(0, 10_000)
properties = settings(max_examples=25, deadline=None, derandomize=True)


@properties
@given(seeds, seeds)
def test_rotating_the_feature_space_changes_nothing(seed, rotation_seed):
  with jax.enable_x64(True):
    a, features = _well_posed(seed)
    normal = np.random.default_rng(rotation_seed).normal(size=(features.shape[-1],) * 2)
    rotated = features @ np.linalg.qr(normal)[0]
    np.testing.assert_allclose(_apply(a, _gram(rotated)), _apply(a, _gram(features)), atol=1e-10)


@properties
@given(seeds, st.permutations(range(SIZE)))
def test_permuting_rollouts_permutes_the_coefficients(seed, order):
  with jax.enable_x64(True):
    a, features = _well_posed(seed)
    permuted = _apply(a[:, order], _gram(features[:, order]))
    np.testing.assert_allclose(permuted, _apply(a, _gram(features))[:, order], atol=1e-10)


@properties
@given(seeds, st.floats(-20, 20))
def test_scaling_all_gradients_changes_nothing(seed, power):
  """In float32, from 1e-20 to 1e20."""
  a, features = _well_posed(seed)
  a, gram = a.astype(np.float32), _gram(features).astype(np.float32)
  scaled = gram * np.float32(10.0**power)
  np.testing.assert_allclose(_apply(a, scaled), _apply(a, gram), atol=1e-3)
  exact = gram * np.float32(2.0 ** round(3.3 * power))
  np.testing.assert_array_equal(_apply(a, exact), _apply(a, gram))


@properties
@given(seeds, st.floats(0.01, 100))
def test_scaling_the_coefficients_scales_the_result(seed, scale):
  with jax.enable_x64(True):
    a, features = _well_posed(seed)
    result = _apply(scale * a, _gram(features))
    np.testing.assert_allclose(result, scale * _apply(a, _gram(features)), rtol=1e-9, atol=1e-12)


def _values(a, gram):
  metrics = _jit()(a, gram, jax.random.key(0))[1]
  return {name.removeprefix("reweighting/"): metric_value(m) for name, m in metrics.items()}


def test_identical_rollouts_keep_their_mean():
  """PR = 1, n_eff = B for equal coefficients, 0 for balanced ones."""
  gram = 7 * np.ones((1, SIZE, SIZE), np.float32)
  equal = np.full((1, SIZE), 0.5, np.float32)
  balanced = equal * np.tile([1, -1], SIZE // 2).astype(np.float32)
  np.testing.assert_allclose(_apply(equal, gram), equal, atol=1e-6)
  values = _values(equal, gram)
  assert values["participation_ratio"] == pytest.approx(1)
  assert values["effective_rollouts"] == pytest.approx(SIZE)
  assert values["alpha"] == 0 and values["rank"] == 1
  # Balanced: the mean is 0, and what is left is A⁺ without its own mean.
  positive = np.maximum(balanced, 0)
  np.testing.assert_allclose(_apply(balanced, gram), positive - positive.mean(), atol=1e-6)
  assert _values(balanced, gram)["effective_rollouts"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("fill", [0.0, np.nan, np.inf, -np.inf])
def test_a_block_with_an_unusable_gram_stays_as_it_is_and_is_reported(fill):
  a, features = (x.astype(np.float32) for x in _case(2))
  gram = _gram(features)
  spoilt = gram.copy()
  spoilt[1] = fill
  result, expected = _apply(a, spoilt), _apply(a, gram)
  np.testing.assert_array_equal(result[1], a[1])
  np.testing.assert_array_equal(result[[0, 2]], expected[[0, 2]])
  assert np.abs(expected[1] - a[1]).max() > 0.1
  values, others = _values(a, spoilt), _values(a[[0, 2]], gram[[0, 2]])
  assert values.pop("unusable_gram") == pytest.approx(1 / 3)
  assert others.pop("unusable_gram") == 0
  assert values == pytest.approx(others)  # the means are over the others


def test_blocks_without_a_usable_gram_report_nothing_else():
  a, features = (x.astype(np.float32) for x in _case(2))
  values = _values(a, 0 * _gram(features))
  assert values.pop("unusable_gram") == 1
  assert np.all(np.isnan([*values.values()]))


def test_coefficients_without_a_gradient_stay_exactly_as_they_are():
  a, features = (x.astype(np.float32) for x in _case(3))
  a[0] = 0
  features[1, 2] = 0
  a[1] = np.where(np.arange(SIZE) == 2, 0.7, 0)
  result = _apply(a, _gram(features))
  np.testing.assert_array_equal(result[:2], a[:2])
  values, third = _values(a, _gram(features)), _values(a[2:], _gram(features[2:]))
  for name in ("effective_rollouts", "alpha", "coefficient_change", "shared_share"):
    assert values[name] == pytest.approx(third[name])


def test_coefficients_that_are_not_finite_are_not_hidden():
  a, features = (x.astype(np.float32) for x in _case(4))
  a[1, 3] = np.nan
  assert np.isnan(_apply(a, _gram(features))[1]).any()


def _random_projection(gram, key, block, rank):
  """P_k of one block, column by column, from coefficients that are unit vectors."""
  hyper = {"channels": "shared", "random_subspace": True, "min_rank": rank, "max_rank": rank}
  unit = np.eye(SIZE)
  columns = [_apply(np.tile(unit[n], (BLOCKS, 1)), gram, key, **hyper)[block] for n in range(SIZE)]
  return np.stack(columns, axis=1)


def test_a_random_subspace_has_the_same_rank_and_is_its_key_s_and_block_s(x64):
  gram = _gram(_case(5)[1])
  one, again, other_key, other_block = (
    _random_projection(gram, key, block, 3) for key, block in ((0, 0), (0, 0), (1, 0), (0, 1))
  )
  np.testing.assert_allclose(one @ one, one, atol=1e-12)
  np.testing.assert_allclose(one, one.T, atol=1e-12)
  np.testing.assert_allclose(np.trace(one), 3, rtol=1e-12)
  np.testing.assert_array_equal(one, again)
  top = np.linalg.eigh(gram[0])[1][:, -3:]
  for other in (other_key, other_block, top @ top.T):
    assert np.abs(one - other).max() > 0.1


def test_nothing_else_depends_on_the_key():
  a, features = _case(6)
  np.testing.assert_array_equal(_apply(a, _gram(features), 0), _apply(a, _gram(features), 1))


def test_the_result_is_a_constant_for_differentiation_where_eigenvalues_coincide():
  rule = reweighting.salt()
  valid, key = jnp.ones((1, 4), bool), jax.random.key(0)
  total = lambda a, gram: jnp.sum(rule.apply(a, gram, valid, key)[0] ** 2)
  gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(jnp.ones((1, 4)), jnp.eye(4)[None])
  assert all(np.all(np.asarray(g) == 0) for g in gradients)


def test_one_rollout_is_an_error_with_a_remedy():
  rule = reweighting.salt(scope="group")
  with pytest.raises(ValueError, match=r"scope = 'group' gives blocks of 1 .*set scope to 'batch'"):
    blocks = jnp.ones((4, 1)), jnp.ones((4, 1, 1)), jnp.ones((4, 1), bool)
    jax.jit(rule.apply)(*blocks, jax.random.key(0))


@pytest.mark.parametrize(
  "hyper, match",
  [
    ({"rank_scale": 0.0}, r"rank_scale = 0.0 is not a number in \(0"),
    ({"min_rank": 0}, "min_rank = 0 is not an integer ≥ 1; set min_rank to 1"),
    ({"min_rank": 1.5}, "min_rank = 1.5 is not an integer"),
    ({"max_rank": 2.5}, "max_rank = 2.5 is not an integer"),
    ({"min_rank": 5, "max_rank": 4}, "min_rank = 5 is above max_rank = 4"),
    ({"alpha_min": -0.1}, r"alpha_min = -0.1 .*\[0"),
    ({"alpha_min": 0.5, "alpha_max": 0.4}, "alpha_min = 0.5 is above alpha_max = 0.4"),
    ({"positive_part": "yes"}, r"positive_part = 'yes' is unknown"),
    ({"channels": "main"}, r"channels = 'main' is unknown.*'both', 'residual', 'shared'"),
    ({"random_subspace": None}, r"random_subspace = None is unknown"),
    ({"channels": "shared", "alpha_max": 0.5}, "alpha_max = 0.5 has no effect with channels"),
    ({"channels": "shared", "positive_part": False}, "positive_part = False has no effect with"),
    ({"scope": "prompt"}, "scope = 'prompt' is not 'batch', 'group' or a number of rollouts ≥ 2"),
    ({"scope": "micro_batch"}, "scope = 'micro_batch' .* such as scope=8"),
    ({"scope": 1}, "scope = 1 is not 'batch', 'group' or a number of rollouts ≥ 2"),
  ],
)
def test_what_is_out_of_range_is_refused_with_the_range(hyper, match):
  with pytest.raises(ValueError, match=rf"salt: {match}"):
    reweighting.salt(**hyper)


def test_the_scope_is_handed_on():
  assert reweighting.salt().scope == "batch"
  assert reweighting.salt(scope=8).scope == 8
  assert reweighting.salt().needs_gram
