"""What every exported estimator, loss and reweighting must do, found by walking the exports.

A failure says what to do about it.
"""

import collections
import dataclasses
import functools
import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.batches import poison, random_case, with_needs
from remedy import remedy

from rlvr_jax import advantages, corrections, distillation, geometry, losses, reweighting
from rlvr_jax.ops import reductions
from rlvr_jax.ops.aggregate import aggregate
from rlvr_jax.ops.veto import negative_advantage_veto
from rlvr_jax.update.teaching import Teaching


def _with_defaults(package):
  """Every component that a package exports, by name."""
  made = {}
  for name in package.__all__:
    try:
      made[name] = getattr(package, name)()
    except (AttributeError, TypeError) as error:
      error.add_note(
        f"Remedy: import {name} in {package.__name__}/__init__.py, and give every hyper-parameter"
        " of its factory a default."
      )
      raise
  return made


COMPILES = remedy(
  "compute with jnp alone: no if, float() or NumPy on values, and no shapes that depend on values."
)
LOSS_DTYPES = remedy(
  "begin with losses.base.prepare, or raise inputs by ops.masked.upcast: statistics are float32,"
  " the gradient has the dtype of the input."
)
ESTIMATOR_DTYPES = remedy(
  "begin with rewards = as_group(NAME, batch.rewards, batch.valid) of advantages/base.py, which are"
  " float32, or raise inputs by ops.masked.upcast; return one coefficient per rollout, [P, G]."
)
REWEIGHTING_DTYPES = remedy(
  "begin with ops.masked.upcast(coefficients), and of the Gram matrix; return one per rollout."
)
FINITE = remedy(
  "guard each division and logarithm, in the branch that jnp.where does not take as well, since its"
  " gradient counts: ops/masked.py has means and counts that allow for an empty mask."
)
ESTIMATOR_FINITE = remedy(
  "add an epsilon to what divides, or guard it by jnp.maximum: all rewards of a group may be equal,"
  " and all responses empty. Then return zero_if_constant(coefficients, rewards, batch.valid) of"
  " advantages/base.py."
)
MASKED = remedy(
  "read tokens from losses.base.prepare, which clears what is masked, and reduce by ops/masked.py."
)
# Components in addition to their defaults, so that every branch meets the contract.
LOSSES = _with_defaults(losses) | {
  "ppo_clip-dual": losses.ppo_clip(epsilon_high=0.28, dual_clip=3.0),
  "reinforce-truncated": losses.reinforce(truncation=2.0),
  "p3o-sequence": losses.p3o(ess="sequence"),
  "p3o-blocks": losses.p3o(ess_scope=6),
  "p3o-one": losses.p3o(ess="one"),
  "p3o-inverse": losses.p3o(cap="inverse_ess"),
  "p3o-kl_only": losses.p3o(cap="none"),
  "dppo-kl": losses.dppo(divergence="kl", form="ratio", log_ratio_penalty=0.1),
  "dppo-proximal": losses.dppo(anchor="proximal", symmetric=True, truncation=None),
  "vespo-truncated": losses.vespo(token_truncation=1.2),
}
BRANCHES = LOSSES.keys() - {*losses.__all__} - {"p3o-sequence", "p3o-blocks"}
ESTIMATORS = _with_defaults(advantages) | {
  "fade-entropy": advantages.fade(schedule="entropy"),
  "fade-logarithmic": advantages.fade(schedule="logarithmic"),
  "gdpo-leave_one_out": advantages.gdpo(over="tokens", leave_one_out=True, batch_epsilon=0.0),
  "opob-by_deviation": advantages.opob(by_deviation=True),
  "otb-truncated": advantages.otb(truncation=2.0, level="sequence", zero_constant=False),
  "pass_at_k-plug_in": advantages.pass_at_k(form="plug_in"),
  "reinforce_plus_plus-tokens": advantages.reinforce_plus_plus(baseline=True, over="tokens"),
}
REWEIGHTINGS = _with_defaults(reweighting) | {
  "salt-shared": reweighting.salt(channels="shared"),
  "salt-residual": reweighting.salt(channels="residual", positive_part=False),
  "salt-amplified": reweighting.salt(channels="amplified", alpha_min=0.5),
  "salt-random": reweighting.salt(random_subspace=True),
}
# Every correction of a loss is a loss.
CORRECTIONS = {
  **{name: getattr(corrections, name)() for name in corrections.__all__},
  "importance-clip": corrections.importance(level="geometric", bound="clip", low=0.9, high=1.1),
  "importance-normalized": corrections.importance(batch_normalize=True, veto=0.05),
  "importance-rules": corrections.importance(
    level="sequence", reject=(("token_k1", 0.3, 3.0), ("max_k3", 0.5), ("sum_k2", 2.0))
  ),
}
LOSSES |= {
  f"ppo_clip-{name}": corrections.corrected(losses.ppo_clip(), correction)
  for name, correction in CORRECTIONS.items()
}
LOSSES |= {
  "reinforce-tis": corrections.corrected(losses.reinforce(), corrections.tis(level="sequence")),
  "clip_cov-icepop": corrections.corrected(losses.clip_cov(), corrections.icepop()),
  "gspo-normalized": corrections.corrected(losses.gspo(), CORRECTIONS["importance-normalized"]),
}
DISTILLATIONS = _with_defaults(distillation) | {
  "opd-discounted": distillation.opd(discount=0.9, student="behavior"),
  "kl_estimate-k3": distillation.kl_estimate(estimator="k3"),
  "kl_estimate-k3+": distillation.kl_estimate(estimator="k3+"),
}


def _taught(loss, made):
  """The loss of an update with a teacher: as `update.objective.surrogate` puts it together."""
  teaching = Teaching(made, weight=0.7, reward_weight=0.5, temperature=1.0, names=("teacher",))

  def per_token(policy, batch, coefficients, statistics):
    sums = teaching.coefficients(policy, batch, coefficients)
    of_reward, metrics = loss.per_token(policy, batch, sums, statistics)
    metrics = {**metrics, **teaching.metrics(policy, batch)}
    return teaching.losses(policy, batch, of_reward), metrics

  return loss._replace(per_token=per_token)


# Every distillation beside a loss is a loss.
LOSSES |= {f"taught-{name}": _taught(losses.ppo_clip(), x) for name, x in DISTILLATIONS.items()}
# Losses with a term that no coefficient multiplies.
WITHOUT_COEFFICIENT = ("p3o", "dro", "kl_cov", "clip_cov", "dppo", "taught")
# Where a rollout stands changes what is drawn or shared.
BY_PLACE = ("p3o-blocks", "clip_cov", "clip_cov-icepop")
TRACES = collections.Counter()  # how often each component was traced, or run without jit
each_loss = pytest.mark.parametrize("name", LOSSES)
each_estimator = pytest.mark.parametrize("name", ESTIMATORS)
each_reweighting = pytest.mark.parametrize("name", REWEIGHTINGS)


def _exported(package, quick):
  """Parametrizes by the components of a package with their defaults; all but some are slow."""
  marks = lambda name: () if name in quick else pytest.mark.slow
  return pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(name)) for name in package.__all__]
  )


def _finite(tree):
  return all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(tree))


def _loss_run(name):
  """An update's loss: (value, gradients by the policy and by the coefficients, metrics)."""
  loss = LOSSES[name]

  def mean(policy, coefficients, batch):
    statistics = loss.statistics and loss.statistics(policy, batch, coefficients)
    losses, metrics = loss.per_token(policy, batch, coefficients, statistics)
    pair = aggregate(losses, batch.mask, how="token_mean", max_response_length=losses.shape[-1])
    return pair.total / jnp.maximum(pair.weight, 1), metrics

  def run(policy, batch, coefficients):
    TRACES[name] += 1
    differentiate = jax.value_and_grad(mean, argnums=(0, 1), has_aux=True)
    (value, metrics), (gradient, to_coefficients) = differentiate(policy, coefficients, batch)
    return value, gradient, to_coefficients, metrics

  return run


@functools.cache
def _loss_jit(name):
  return jax.jit(_loss_run(name))


def _takes_only_keywords(factory):
  kinds = {parameter.kind for parameter in inspect.signature(factory).parameters.values()}
  return kinds <= {inspect.Parameter.KEYWORD_ONLY}


KINDS = {
  advantages: advantages.Advantage,
  losses: losses.Loss,
  corrections: corrections.Correction,
  distillation: distillation.Distillation,
  reweighting: reweighting.Reweighting,
  geometry: geometry.GramFn,
}
FOR_FACTORIES = ("stateless", "token_loss")  # they make a component of a function


def _factories(package, kind):
  """Names of the functions in a package's files that are factories, with or without annotations."""
  for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
    for name, value in vars(importlib.import_module(found.name)).items():
      if not inspect.isfunction(value) or value.__module__ != found.name or name[0] == "_":
        continue
      returns = value.__annotations__.get("return", kind if _takes_only_keywords(value) else None)
      if returns in (kind, kind.__name__) and name not in FOR_FACTORIES:
        yield name


def test_a_factory_that_is_written_is_exported():
  """A component without an export is found by no configuration and by no test of this file."""
  missing = [
    f"{package.__name__}.{name}"
    for package, kind in KINDS.items()
    for name in _factories(package, kind)
    if name not in package.__all__
  ]
  assert not missing, (
    "written but not exported: import it in the package's __init__.py and name it in __all__;"
    " if it is a helper and no component, begin its name with _"
  )


@remedy(
  "write def NAME(*, hyper_parameter=default), with a docstring of formula, symbols and source."
)
def test_an_export_is_a_documented_factory_with_keyword_only_arguments():
  for package in KINDS:
    for name in package.__all__:
      factory = getattr(package, name)
      is_named = inspect.isfunction(factory) and factory.__name__ == name
      assert is_named and factory.__doc__, (package, name)
      assert _takes_only_keywords(factory), (package, name)


@pytest.mark.parametrize(
  ("factory", "hyper"),
  [
    (advantages.asym, dict(delta=0.0)),
    (advantages.asymmetric_reinforce, dict(baseline_shift=0.1)),
    (advantages.fade, dict(alpha_max=0.5)),
    (advantages.fade, dict(delta_min=1.5)),
    (advantages.fade, dict(smoothing=0.0)),
    (advantages.fade, dict(target_entropy=-1.0)),
    (advantages.fade, dict(schedule="cosine")),
    (advantages.fade, dict(decay_updates=0)),
    (advantages.gdpo, dict(epsilon=-1e-06)),
    (advantages.gdpo, dict(batch_epsilon=-1e-06)),
    (advantages.gdpo, dict(over="groups")),
    (advantages.gdpo, dict(weights=0.5)),
    (advantages.grpo, dict(epsilon=-1e-06)),
    (advantages.log_mean_exp, dict(eta=0.0)),
    (advantages.mt_grpo, dict(turn_weight=-0.5)),
    (advantages.mt_grpo, dict(epsilon=-1e-06)),
    (advantages.opob, dict(by_deviation="yes")),
    (advantages.otb, dict(truncation=0.0)),
    (advantages.otb, dict(level="group")),
    (advantages.otb, dict(zero_tail="yes")),
    (advantages.otb, dict(zero_constant="no")),
    (advantages.pass_at_k, dict(k=0)),
    (advantages.pass_at_k, dict(k=2.5)),
    (advantages.pass_at_k, dict(form="biased")),
    (advantages.power, dict(alpha=0.5)),
    (advantages.reinforce_plus_plus, dict(baseline="mean")),
    (advantages.reinforce_plus_plus, dict(over="groups")),
    (advantages.weighted_reinforce, dict(success_weight=-1.0)),
    (losses.cispo, dict(epsilon_low=1.5)),
    (losses.clip_cov, dict(share=0.0)),
    (losses.clip_cov, dict(high=1.0)),
    (losses.clip_cov, dict(low="a")),
    (losses.clip_cov, dict(seed="x")),
    (losses.dppo, dict(divergence="js")),
    (losses.dppo, dict(delta_low=0.0)),
    (losses.dppo, dict(anchor="behavior")),
    (losses.dro, dict(penalty=0.0)),
    (losses.kl_cov, dict(coefficient=-1.0)),
    (losses.vespo, dict(token_truncation=0.0)),
    (losses.decoupled_ppo, dict(behavior_weight_cap=0.0)),
    (losses.gmpo, dict(epsilon_high=-0.1)),
    (losses.gspo, dict(epsilon_low="0.1")),
    (losses.m2po, dict(budget=0.0)),
    (losses.p3o, dict(ess="token")),
    (losses.p3o, dict(ess_scope=0)),
    (losses.p3o, dict(ess_scope="micro")),
    (losses.p3o, dict(cap=None)),
    (losses.ppo_clip, dict(epsilon_high=float("nan"))),
    (losses.ppo_clip, dict(dual_clip=1.0)),
    (losses.reinforce, dict(truncation=-1.0)),
    (losses.sapo, dict(temperature_positive=0)),
    (distillation.opd, dict(student="sampler")),
    (distillation.opd, dict(discount=1.5)),
    (distillation.opd_score, dict(truncation=0.0)),
    (distillation.opd_ratio, dict(max_drop=0.0)),
    (distillation.iw_opd, dict(gamma=-1.0)),
    (distillation.kl_estimate, dict(bound=0.0)),
    (distillation.kl_estimate, dict(estimator="k4")),
    (negative_advantage_veto, dict(scope="prefix")),
    (negative_advantage_veto, dict(threshold=0.0)),
    (negative_advantage_veto, dict(trigger="over")),
    (negative_advantage_veto, dict(renormalize=2)),
  ],
)
@remedy("check it by ops.checks when the component is made, before anything is compiled.")
def test_a_bad_hyper_parameter_is_named_with_its_value(factory, hyper):
  [(field, value)] = hyper.items()
  with pytest.raises(ValueError, match=field) as error:
    factory(**hyper)
  assert repr(value) in str(error.value)


@each_loss
@COMPILES
def test_loss_under_jit(name):
  """A second batch does not compile again."""
  first, second = (random_case(seed, dtype=np.float32) for seed in range(2))
  value, gradient, *_ = _loss_jit(name)(*first)
  assert value.dtype == gradient.dtype == jnp.float32
  traces = TRACES[name]
  _loss_jit(name)(*second)
  assert TRACES[name] == traces


@_exported(losses, quick=("ppo_clip", "p3o"))
@COMPILES
def test_loss_is_the_same_without_jit(name):
  case = random_case(0, dtype=np.float32)
  with jax.disable_jit():
    plain = _loss_run(name)(*case)
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
  jax.tree.map(near, _loss_jit(name)(*case), plain)


def _bfloat16_case():
  case = random_case(3, dtype=np.float32)
  return jax.tree.map(lambda x: x.astype(jnp.bfloat16), case)


@each_loss
@LOSS_DTYPES
def test_losses_and_metrics_are_float32(name):
  """Of what is in bfloat16; traced alone."""
  loss = LOSSES[name]

  def trace(policy, batch, coefficients):
    statistics = loss.statistics and loss.statistics(policy, batch, coefficients)
    return loss.per_token(policy, batch, coefficients, statistics)

  found = jax.tree.leaves(jax.eval_shape(trace, *_bfloat16_case()))
  assert {x.dtype for x in found if jnp.issubdtype(x.dtype, jnp.floating)} == {jnp.dtype("f4")}


@_exported(losses, quick=("ppo_clip", "p3o"))
@LOSS_DTYPES
def test_a_loss_of_bfloat16_is_finite(name):
  value, gradient, *rest = _loss_jit(name)(*_bfloat16_case())
  assert value.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16
  assert _finite((value, gradient, rest))


@each_loss
@FINITE
def test_loss_of_degenerate_batches_is_finite(name):
  policy, batch, coefficients = random_case(4, dtype=np.float32)
  run = _loss_jit(name)
  empty = dataclasses.replace(batch, mask=jnp.zeros_like(batch.mask))
  on_policy = dataclasses.replace(batch, behavior_logprobs=policy, proximal_logprobs=policy)
  one_token = dataclasses.replace(batch, mask=jnp.zeros_like(batch.mask).at[0, 1, 0].set(1.0))
  for degenerate in (batch, empty, on_policy, one_token):
    for a in (coefficients, jnp.zeros_like(coefficients), jnp.abs(coefficients)):
      value, gradient, _, metrics = run(policy, degenerate, a)
      assert _finite((value, gradient, metrics))
      if degenerate is empty:
        assert value == 0 and np.all(gradient == 0)


@each_loss
@MASKED
def test_what_is_masked_changes_neither_value_nor_gradient(name):
  """tests/dialogue_masks_test.py asks the same behind every veto."""
  policy, batch, coefficients = random_case(5, dtype=np.float32)
  run = _loss_jit(name)
  clean = run(policy, batch, coefficients)
  for fill in (np.nan, np.inf, -np.inf, 1e30):
    spoilt = run(*poison(policy, batch, fill), coefficients)
    jax.tree.map(np.testing.assert_array_equal, clean, spoilt)
  assert np.all(np.asarray(clean[1])[np.asarray(batch.mask) == 0] == 0)


def _splits_trivially(name):
  """Whether a further loss has no statistics, so that a token's loss cannot know its batch."""
  return name not in losses.__all__ and LOSSES[name].statistics is None


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(x, marks=[pytest.mark.slow] if x in BRANCHES or _splits_trivially(x) else [])
    for x in LOSSES
  ],
)
@remedy(
  "what depends on other prompts belongs in Loss.statistics, computed once per global batch and"
  " given to per_token (see losses/p3o.py); metrics carry a reduction (Mean, Max, … of types.py)"
)
def test_micro_batches_with_the_batch_s_statistics_equal_one_batch(name):
  with jax.enable_x64(True):
    policy, batch, coefficients = random_case(6, (4, 3, 5), spread=0.8)
    loss = LOSSES[name]
    statistics = loss.statistics and jax.jit(loss.statistics)(policy, batch, coefficients)

    @jax.jit
    def run(policy, batch, coefficients):
      def total(policy):
        per_token, metrics = loss.per_token(policy, batch, coefficients, statistics)
        pair = aggregate(per_token, batch.mask, how="sequence_mean", max_response_length=5)
        return pair.total, (pair.weight, metrics)

      (total, (weight, metrics)), gradient = jax.value_and_grad(total, has_aux=True)(policy)
      return gradient, total, weight, metrics

    gradient, total, weight, metrics = run(policy, batch, coefficients)
    # As an update does it: arrays of the whole batch, in which the others' tokens do not count.
    of_part, mask = np.arange(4)[:, None, None] < 2, np.asarray(batch.mask)
    masks = [np.where(chosen, mask, 0) for chosen in (of_part, ~of_part)]
    parts = [run(policy, dataclasses.replace(batch, mask=m), coefficients) for m in masks]
    gradients, totals, weights, part_metrics = zip(*jax.device_get(parts), strict=True)
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    near(sum(gradients), gradient)
    near(sum(totals), total)
    near(sum(weights), weight)
    merged = reductions.values(reductions.merge_metrics(*part_metrics))
    jax.tree.map(near, merged, reductions.values(metrics))


@each_loss
@remedy("losses.base.prepare wraps the coefficients in jax.lax.stop_gradient.")
def test_coefficients_are_constants_for_differentiation(name):
  _, _, to_coefficients, _ = _loss_jit(name)(*random_case(7, dtype=np.float32))
  assert np.all(to_coefficients == 0)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[pytest.mark.slow] if name in BRANCHES else [])
    for name, loss in LOSSES.items()
    if loss.statistics is not None
  ],
)
@remedy("wrap what Loss.statistics returns in jax.lax.stop_gradient.")
def test_statistics_are_constants_for_differentiation(name):
  policy, batch, coefficients = random_case(7, dtype=np.float32)
  loss = LOSSES[name]
  measure = lambda policy: loss.statistics(policy, batch, coefficients)

  @jax.jit
  def gradients(policy):
    def total(policy, statistics=None):
      given = measure(policy) if statistics is None else statistics
      return jnp.sum(loss.per_token(policy, batch, coefficients, given)[0])

    return jax.grad(total)(policy), jax.grad(total)(policy, measure(policy))

  np.testing.assert_array_equal(*gradients(policy))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.sampled_from([n for n in LOSSES if n not in BY_PLACE]), st.permutations(range(12)))
@remedy("what compares the rollouts of a group belongs in an advantage, not into a loss.")
def test_permuting_rollouts_permutes_the_gradient(name, order):
  """Any rollout may stand anywhere: no loss looks at the group."""
  policy, batch, coefficients = random_case(8, dtype=np.float32)
  value, gradient, *_ = _loss_jit(name)(policy, batch, coefficients)

  def move(x):
    return x.reshape(-1, *x.shape[2:])[np.asarray(order)].reshape(x.shape)

  fields = ("mask", "behavior_logprobs", "proximal_logprobs")
  fields += ("teacher_logprobs", "teacher_divergence")
  moved = dataclasses.replace(batch, **{f: move(getattr(batch, f)) for f in fields})
  moved_value, moved_gradient, *_ = _loss_jit(name)(move(policy), moved, move(coefficients))
  np.testing.assert_allclose(moved_value, value, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(moved_gradient, move(gradient), rtol=1e-4, atol=1e-6)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
  st.sampled_from([n for n in LOSSES if n.split("-")[0] not in WITHOUT_COEFFICIENT]),
  st.floats(0.1, 10),
)
@remedy("multiply every term by the coefficients, or name the loss in WITHOUT_COEFFICIENT here.")
def test_losses_scale_with_the_coefficients(name, scale):
  policy, batch, coefficients = random_case(9, dtype=np.float32)
  value, gradient, *_ = _loss_jit(name)(policy, batch, coefficients)
  scaled, scaled_gradient, *_ = _loss_jit(name)(policy, batch, scale * coefficients)
  np.testing.assert_allclose(scaled, scale * value, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(scaled_gradient, scale * gradient, rtol=1e-4, atol=1e-6)


@functools.cache
def _estimator_jit(name):
  return jax.jit(_estimator_run(name))


def _estimator_run(name):
  estimator = ESTIMATORS[name]

  def run(state, batch, entropy):
    TRACES[name] += 1
    coefficients = estimator.apply(state, batch)
    metrics = advantages.gradient_masses(coefficients, batch.rewards, batch.correct, batch.valid)
    metrics |= estimator.metrics(state, batch)
    return coefficients, metrics, estimator.update(state, batch, entropy)

  return run


@each_estimator
@COMPILES
def test_estimator_under_jit(name):
  """An update and a batch later nothing compiles again."""
  first, second = _estimator_batches()
  state, entropy = ESTIMATORS[name].init(jnp.float32(0.7)), jnp.float32(0.4)
  compiled = _estimator_jit(name)(state, first, entropy)
  traces = TRACES[name]
  _estimator_jit(name)(compiled[-1], second, entropy)
  assert TRACES[name] == traces


def _estimator_batches():
  cases = (random_case(seed, (4, 5, 3), dtype=np.float32)[1] for seed in range(2))
  return tuple(map(with_needs, cases))


@_exported(advantages, quick=("grpo", "fade"))
@COMPILES
def test_estimator_is_the_same_without_jit(name):
  (batch, _), entropy = _estimator_batches(), jnp.float32(0.4)
  state = ESTIMATORS[name].init(jnp.float32(0.7))
  compiled = _estimator_jit(name)(state, batch, entropy)
  # The difference of two masses has their rounding, where A is 0 in the mean over the batch.
  atol = 1e-6 * max(1.0, float(np.max(np.abs(compiled[1]["advantage/mass_success"].total))))
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol)
  jax.tree.map(near, compiled, _estimator_run(name)(state, batch, entropy))


def _degenerate_groups(dtype):
  """All wrong, all right, one right, one wrong; every response empty."""
  rewards = np.array([[0] * 5, [1] * 5, [0, 1, 0, 0, 0], [1, 1, 0, 1, 1]])
  _, batch, _ = random_case(0, (4, 5, 3), dtype=np.float32)
  batch = dataclasses.replace(
    batch,
    rewards=jnp.asarray(rewards, dtype),
    correct=jnp.asarray(rewards, dtype),
    mask=jnp.zeros_like(batch.mask, dtype),
  )
  return with_needs(batch)


@each_estimator
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@ESTIMATOR_DTYPES
@ESTIMATOR_FINITE
def test_estimator_is_finite_and_float32_on_any_group(name, dtype):
  batch, entropy = _degenerate_groups(dtype), jnp.asarray(0.0, dtype)
  state = ESTIMATORS[name].init(entropy)
  for _ in range(3):
    coefficients, metrics, state = _estimator_jit(name)(state, batch, entropy)
    assert _finite((coefficients, metrics, state))
    assert coefficients.shape == (4, 5) and coefficients.dtype == jnp.float32


@each_estimator
@remedy("A of a success must be ≥ A of a failure in each mixed group; is the sign right?")
def test_solving_is_never_worse_than_failing(name):
  for seed in range(5):  # of the shape that is compiled already
    batch = with_needs(random_case(seed, (4, 5, 3), dtype=np.float32)[1])
    state = ESTIMATORS[name].init(jnp.float32(1.0))
    coefficients = np.asarray(_estimator_jit(name)(state, batch, jnp.float32(0.4))[0])
    for group, rewards in zip(coefficients, np.asarray(batch.rewards), strict=True):
      if 0 < rewards.mean() < 1:
        assert group[rewards == 1].min() >= group[rewards == 0].max()


def _reweighting_case(seed, dtype=np.float32):
  """Coefficients [N, b] and Gram matrices [N, b, b] of rollouts that share a direction."""
  rng = np.random.default_rng(seed)
  features = rng.normal(size=(3, 6, 8)) * rng.uniform(0.3, 2, (3, 6, 1)) + 0.7
  coefficients = rng.normal(size=(3, 6))
  gram = np.einsum("nid,njd->nij", features, features)
  return jnp.asarray(coefficients, dtype), jnp.asarray(gram, dtype)


def _reweighting_run(name):
  def run(coefficients, gram, key):
    TRACES[name] += 1
    valid = jnp.ones(coefficients.shape, bool)
    result, metrics = REWEIGHTINGS[name].apply(coefficients, gram, valid, key)
    return result, metrics

  return run


@functools.cache
def _reweighting_jit(name):
  return jax.jit(_reweighting_run(name))


@each_reweighting
@COMPILES
def test_reweighting_under_jit(name):
  """Another batch and key do not compile again."""
  first, second = (_reweighting_case(seed) for seed in range(2))
  _reweighting_jit(name)(*first, jax.random.key(0))
  traces = TRACES[name]
  _reweighting_jit(name)(*second, jax.random.key(1))
  assert TRACES[name] == traces


@_exported(reweighting, quick=())
@COMPILES
def test_reweighting_is_the_same_without_jit(name):
  case = (*_reweighting_case(0), jax.random.key(0))
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  jax.tree.map(near, _reweighting_jit(name)(*case), _reweighting_run(name)(*case))


@each_reweighting
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@FINITE
@REWEIGHTING_DTYPES
def test_reweighting_of_degenerate_batches_is_finite_and_float32(name, dtype):
  """Gram: none, not finite, identical and orthogonal rollouts. Coefficients: none, of one sign."""
  coefficients, gram = _reweighting_case(2, dtype)
  identical, orthogonal = jnp.ones_like(gram), jnp.broadcast_to(jnp.eye(6, dtype=dtype), gram.shape)
  for k in (gram, 0 * gram, jnp.full_like(gram, jnp.nan), identical, orthogonal):
    for a in (coefficients, jnp.zeros_like(coefficients), jnp.abs(coefficients)):
      result, metrics = _reweighting_jit(name)(a, k, jax.random.key(0))
      assert _finite((result, metrics))
      assert result.shape == a.shape and (name == "none" or result.dtype == jnp.float32)
      if not jnp.any(a):
        assert not jnp.any(result)


@each_reweighting
@remedy(
  "reduce over the last axes of coefficients [N, b] and Gram matrices [N, b, b], never over N."
)
def test_reweighting_acts_on_each_block_alone(name):
  """Blocks elsewhere change nothing here."""
  coefficients, gram = _reweighting_case(3)
  result, _ = _reweighting_jit(name)(coefficients, gram, jax.random.key(0))
  others = coefficients.at[1:].multiply(-2.0), gram.at[1:].multiply(3.0)
  changed, _ = _reweighting_jit(name)(*others, jax.random.key(0))
  np.testing.assert_allclose(changed[0], result[0], rtol=1e-6)
