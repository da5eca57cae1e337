"""What the pictures show, against NumPy on the features themselves, and that they show it."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax import advantages, reweighting
from rlvr_jax.evaluate import geometry_plots
from rlvr_jax.evaluate.geometry_plots import Measurement
from rlvr_jax.train.reporting.writer import open_writer

P, G, DIM = 3, 6, 7
B = P * G
SALT, GRPO = reweighting.salt(), advantages.grpo_mean()
REWARDS = np.array([[0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0], [1, 0, 1, 1, 1, 1]], float)


def measurement(update=0, seed=0, common=3.0, **fields):
  """A batch and its features [B, DIM], with a direction in common that centered A cancels."""
  rng = np.random.default_rng(seed)
  features = rng.normal(size=(B, DIM)) + common * np.eye(DIM)[0]
  arrays = {
    "gram": features @ features.T,
    "coefficients": REWARDS - REWARDS.mean(1, keepdims=True),
    "reweighted": rng.normal(size=(P, G)),
    "rewards": REWARDS,
    "lengths": rng.integers(1, 9, (P, G)).astype(float),
    "valid": np.ones((P, G), bool),
  }
  return Measurement(update=update, **arrays | fields), features


def salt_of(A, features):
  """A', k, α and the projection P_k, from the singular vectors of the features."""
  vectors, singular, _ = np.linalg.svd(features)
  eigenvalues = singular**2
  ratio = eigenvalues.sum() ** 2 / (eigenvalues**2).sum()
  rank = max(round(ratio), 1)
  n_eff = np.sum((A @ features) ** 2) / np.sum(A**2 * np.sum(features**2, 1))
  alpha = np.clip(1 - n_eff, 0, 1)
  shared = vectors[:, :rank] @ vectors[:, :rank].T
  positive = np.maximum(A, 0)
  return shared @ A + alpha * (positive - shared @ positive), rank, alpha, shared


# --- records --------------------------------------------------------------------------------------


def test_measurements_come_back_in_the_order_of_the_updates(tmp_path):
  written = [measurement(update, seed=update)[0] for update in (100, 0, 20)]
  written[1] = written[1]._replace(gram_compared=np.eye(B))
  with open_writer(tmp_path) as writer:
    for m in written:
      writer.write_geometry(m.update, {k: v for k, v in m._asdict().items() if np.ndim(v)})
  found = geometry_plots.load_geometry(tmp_path)
  assert [m.update for m in found] == [0, 20, 100]
  for m, expected in zip(found, [written[1], written[2], written[0]], strict=True):
    for name, value in expected._asdict().items():
      np.testing.assert_array_equal(getattr(m, name), value)
  assert found[1].gram_compared is None


def test_a_workdir_without_measurements_says_what_to_set(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"workdir .*nowhere.* does not exist"):
    geometry_plots.load_geometry(tmp_path / "nowhere")
  with pytest.raises(FileNotFoundError, match=r"--config\.diagnostics\.every=10"):
    geometry_plots.load_geometry(tmp_path)


# --- arrays ---------------------------------------------------------------------------------------


def test_salted_is_the_formula(x64):
  m, features = measurement()
  A = m.coefficients.reshape(-1)
  expected, rank, alpha, _ = salt_of(A, features)
  found = geometry_plots.apply_salt(m, SALT)
  assert 0 < alpha < 1 and 1 < rank < DIM
  np.testing.assert_allclose(found.coefficients, expected.reshape(P, G), rtol=1e-9)
  assert (found.rank, found.alpha) == (rank, pytest.approx(alpha, rel=1e-9))
  assert found.effective_rollouts == pytest.approx(1 - alpha, rel=1e-9)
  fixed = geometry_plots.apply_salt(m, reweighting.salt(alpha_min=1.0, min_rank=2, max_rank=2))
  assert (fixed.rank, fixed.alpha) == (2, 1.0)


def test_eigenvalue_shares_are_squared_singular_values(x64):
  m, features = measurement()
  squares = np.linalg.svd(features, compute_uv=False) ** 2
  expected = np.pad(squares / squares.sum(), (0, B - DIM))
  np.testing.assert_allclose(geometry_plots.eigenvalue_shares(m.gram), expected, atol=1e-12)


def test_cosines_are_ordered_by_group_and_then_by_reward(x64):
  m, features = measurement()
  found = geometry_plots.ordered_cosines(m)
  order = sorted(range(B), key=lambda i: (i // G, -REWARDS.flat[i], i))
  assert found.order.tolist() == order
  assert found.rewards.tolist() == [1, 1, 1, 0, 0, 0] + 6 * [0] + [1, 1, 1, 1, 1, 0]
  unit = features / np.linalg.norm(features, axis=1, keepdims=True)
  np.testing.assert_allclose(found.cosines, unit[order] @ unit[order].T, atol=1e-12)


def of_subsample(features, indices):
  """(PR, n_eff or None) of some rollouts of every prompt, indices [P, g]."""
  rewards = REWARDS.reshape(-1)[indices]
  A = (rewards - rewards.mean(1, keepdims=True)).reshape(-1)
  g = features[indices.reshape(-1)]
  K = g @ g.T
  ratio = np.trace(K) ** 2 / np.sum(K**2)
  return ratio, (A @ K @ A) / np.sum(A**2 * np.diagonal(K)) if A.any() else None


def test_group_sizes_estimate_the_mean_over_all_subsamples(x64):
  """At full size every sample is the batch itself."""
  m, features = measurement()
  found = geometry_plots.group_sizes(m, GRPO, num_samples=2000)
  assert found.sizes.tolist() == [2, 4, 6]
  whole = of_subsample(features, np.arange(B).reshape(P, G))
  for band, expected in zip(found[1:], whole, strict=True):
    np.testing.assert_allclose([x[-1] for x in band], 3 * [expected], rtol=1e-9)
  pairs = itertools.combinations(range(G), 2)
  choices = itertools.product(list(pairs), repeat=P)
  offsets = G * np.arange(P)[:, None]
  rows = [of_subsample(features, np.array(choice) + offsets) for choice in choices]
  for band, values in zip(found[1:], zip(*rows, strict=True), strict=True):
    values = np.array([x for x in values if x is not None])
    assert len(values) > 1000 and np.std(values) > 0.05
    error = np.std(values) / np.sqrt(1000)
    assert abs(band.mean[0] - values.mean()) < 4 * error
    np.testing.assert_allclose(
      [band.low[0], band.high[0]], np.quantile(values, [0.025, 0.975]), atol=15 * error
    )


def test_group_sizes_without_a_signal_have_no_effective_rollouts(x64):
  m, _ = measurement(rewards=np.ones((P, G)))
  found = geometry_plots.group_sizes(m, advantages.grpo(), num_samples=5)
  assert np.isnan(found.effective_rollouts).all()
  assert np.isfinite(found.participation_ratio).all()


def test_group_sizes_give_the_estimator_lengths(x64):
  m, features = measurement()
  found = geometry_plots.group_sizes(m, advantages.opo(), num_samples=2)
  baseline = np.sum(m.lengths * REWARDS, 1) / np.sum(m.lengths, 1)
  A = (REWARDS - baseline[:, None]).reshape(-1)
  A[G : 2 * G] = 0
  n_eff = np.sum((A @ features) ** 2) / np.sum(A**2 * np.sum(features**2, 1))
  assert found.effective_rollouts.mean[-1] == pytest.approx(n_eff, rel=1e-9)


def test_energies_are_those_of_the_projected_update(x64):
  m, features = measurement()
  found = geometry_plots.energies(m, SALT)
  vectors, singular, _ = np.linalg.svd(features)
  A = m.coefficients.reshape(-1)
  reweighted, rank, _, _ = salt_of(A, features)
  assert found.rank == rank

  def shares(a):
    inside = [vectors[:, :k] @ vectors[:, :k].T @ a @ features for k in range(B + 1)]
    return np.sum(np.square(inside), 1) / np.sum((a @ features) ** 2)

  np.testing.assert_allclose(found.coefficients, shares(A), atol=1e-9)
  np.testing.assert_allclose(found.reweighted, shares(reweighted), atol=1e-9)
  even = np.cumsum(np.pad(singular**2, (1, B - DIM))) / np.sum(singular**2)
  np.testing.assert_allclose(found.even, even, atol=1e-12)
  assert found.coefficients[rank] < found.reweighted[rank]  # SALT keeps the shared part


def test_update_norms_over_a_run(x64):
  run = [measurement(update, seed=update) for update in (0, 5, 10)]
  found = geometry_plots.update_norms([m for m, _ in run], SALT)
  np.testing.assert_array_equal(found.updates, [0, 5, 10])
  for n, (m, features) in enumerate(run):
    A = m.coefficients.reshape(-1)
    reweighted, rank, _, shared = salt_of(A, features)
    outside = A - shared @ A
    bound = np.linalg.svd(features, compute_uv=False)[rank] / B * np.linalg.norm(outside)
    norms = [np.linalg.norm(a @ features) / B for a in (A, reweighted, outside)]
    np.testing.assert_allclose([x[n] for x in found[1:]], [*norms, bound], rtol=1e-9)
    assert 0 < found.residual[n] < found.bound[n]


@pytest.mark.parametrize("gram", [np.zeros((B, B)), np.full((B, B), np.nan)])
def test_an_unusable_gram_changes_nothing_and_is_named(axes, gram):
  m, _ = measurement(gram=gram)
  found = geometry_plots.apply_salt(m, SALT)
  np.testing.assert_array_equal(found.coefficients, np.float32(m.coefficients))
  assert found.rank == 0
  np.testing.assert_allclose(geometry_plots.eigenvalue_shares(gram), 1 / B)
  assert not np.any(geometry_plots.update_norms([m], SALT)[1:])
  geometry_plots.plot_eigenspectrum(axes, m, SALT)
  assert "not usable" in axes.get_title()


# --- drawing --------------------------------------------------------------------------------------


@pytest.fixture
def axes():
  from matplotlib.figure import Figure  # a second, which few tests need

  return Figure().subplots()


def drawn(axes, label):
  """y values of the line whose label begins so."""
  (line,) = (line for line in axes.lines if line.get_label().startswith(label))
  return np.asarray(line.get_ydata())


def test_the_eigenspectrum_of_each_gram_is_drawn(axes):
  m, _ = measurement(gram_compared=np.eye(B))
  geometry_plots.plot_eigenspectrum(axes, m, SALT)
  shares = geometry_plots.eigenvalue_shares(m.gram)
  np.testing.assert_array_equal(drawn(axes, "per-rollout"), shares)
  np.testing.assert_allclose(drawn(axes, "compared"), 1 / B, rtol=1e-5)
  assert axes.get_title() == "before update 1"


def test_the_cosine_gram_is_drawn_with_its_rewards(axes):
  m, _ = measurement(4)
  image = geometry_plots.plot_cosine_gram(axes, m)
  expected = geometry_plots.ordered_cosines(m)
  np.testing.assert_allclose(image.get_array(), expected.cosines)
  (beside,) = axes.child_axes
  np.testing.assert_array_equal(beside.images[0].get_array()[:, 0], expected.rewards)
  labels = [label.get_text() for label in beside.get_yticklabels()]
  assert labels == ["prompt 1", "prompt 2", "prompt 3"]
  assert axes.get_title() == "before update 5"


def test_the_curves_are_drawn(axes):
  m, _ = measurement()
  geometry_plots.plot_group_sizes(axes, m, GRPO)
  sizes = geometry_plots.group_sizes(m, GRPO)
  np.testing.assert_array_equal(drawn(axes, "PR"), sizes.participation_ratio.mean)
  np.testing.assert_array_equal(drawn(axes, "n_eff"), sizes.effective_rollouts.mean)
  np.testing.assert_array_equal(drawn(axes, "rollouts"), P * sizes.sizes)
  axes.clear()
  geometry_plots.plot_energies(axes, m, SALT)
  energies = geometry_plots.energies(m, SALT)
  np.testing.assert_array_equal(drawn(axes, "A:"), energies.coefficients)
  np.testing.assert_array_equal(drawn(axes, "A'"), energies.reweighted)
  axes.clear()
  geometry_plots.plot_update_norms(axes, [m], SALT)
  norms = geometry_plots.update_norms([m], SALT)
  for label, values in (("update norm, A'", norms.reweighted), ("bound", norms.bound)):
    np.testing.assert_array_equal(drawn(axes, label), values)


def test_the_coefficients_are_drawn_by_reward(axes):
  m, _ = measurement()
  geometry_plots.plot_coefficients(axes, m, SALT)
  points = axes.collections[0]
  result = geometry_plots.apply_salt(m, SALT)
  expected = np.stack([m.coefficients.ravel(), jnp.ravel(result.coefficients)], axis=1)
  np.testing.assert_allclose(points.get_offsets(), expected, rtol=1e-6)
  np.testing.assert_array_equal(points.get_array(), REWARDS.ravel())
  assert f"k = {result.rank}" in axes.get_title()


def test_the_load_of_experts_is_drawn_by_layer(axes):
  choices = np.array([[2, 2, 2, 2], [0, 8, 0, 0], [0, 0, 0, 0]], float)
  m, _ = measurement(expert_load=choices)
  image = geometry_plots.plot_expert_load(axes, m)
  expected = [[1, 1, 1, 1], [4, 0, 0, 0], [0, 0, 0, 0]]  # no tokens: no load
  np.testing.assert_array_equal(image.get_array(), expected)
  message = "update 0 has no load of experts: the policy has no experts"
  with pytest.raises(ValueError, match=message):
    geometry_plots.plot_expert_load(axes, measurement()[0])
