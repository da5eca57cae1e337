"""An environment's tokens within responses change nothing, found by walking the exports.

Policy tokens are spread over longer responses, with anything at the other places: whatever an
update computes is what it computes of the policy tokens alone, side by side.
"""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import batches, gram_cases, updates

from rlvr_jax import advantages, geometry, losses
from rlvr_jax.geometry import GramContext
from rlvr_jax.geometry.updates import advantage_logprob_covariance
from rlvr_jax.models.flops import forward_flops, update_flops
from rlvr_jax.ops import reductions
from rlvr_jax.ops.aggregate import AGGREGATIONS, aggregate
from rlvr_jax.ops.masked import for_tokens
from rlvr_jax.ops.update_metrics import batch_metrics
from rlvr_jax.ops.veto import SCOPES, negative_advantage_veto
from rlvr_jax.rollouts.batch import loss_tokens, response_lengths
from rlvr_jax.update.accumulate import batch_forward
from rlvr_jax.update.objective import Constants, Estimate, Scores, surrogate

REMEDY = "mask by batch.mask before any arithmetic: ops.masked.masked_fill, ops.ratios.log_ratios"
ESTIMATORS = {name: getattr(advantages, name)() for name in advantages.__all__}
ESTIMATORS["pass_at_k"] = advantages.pass_at_k(k=2)  # groups here have four
# One number of a rollout, turn and token. `ppo_clip` takes all three; other losses take one by
# token, or by rollout if they are of responses.
ESTIMATORS_OF_EACH_KIND = ("grpo", "mt_grpo", "otb")
LOSSES = {name: getattr(losses, name)() for name in losses.__all__} | {
  "p3o-sequence": losses.p3o(ess="sequence", cap="inverse_ess"),
  "ppo_clip-dual": losses.ppo_clip(dual_clip=3.0),
  "reinforce-truncated": losses.reinforce(truncation=1.5),
}
VETOES = (
  {"": None}
  | {scope: negative_advantage_veto(scope=scope, threshold=0.8) for scope in SCOPES}
  | {"above": negative_advantage_veto(trigger="above", threshold=1.2)}
  | {"often": negative_advantage_veto(threshold=1.1)}
  | {"renormalized": negative_advantage_veto(threshold=0.8, renormalize=True)}
)
FILLS = {"arbitrary": None, "nan": np.nan, "inf": np.inf, "-inf": -np.inf}
P, G, T, LONGEST = 4, 4, 13, 6  # tokens: of a response, and of the policy in it
# Of the policy's tokens: two in a turn, at whose last one is its score.
TURNS = np.arange(LONGEST) // 2 * 2
PER_TOKEN = ("behavior_logprobs", "proximal_logprobs", "reference_logprobs")
PER_TOKEN += ("squared_probabilities",)


@functools.cache
def case():
  """Values of the policy tokens, side by side, and the places that they are spread to."""
  rng = np.random.default_rng(0)
  lengths = rng.integers(1, LONGEST + 1, (P, G))
  lengths[-1, -1] = 0
  order = rng.permuted(np.tile(np.arange(T), (P, G, 1)), axis=-1)[..., :LONGEST]
  order[0, 0], lengths[0, 0] = (0, 1, 4, 5, 9, 12), LONGEST  # three turns of two, two and one
  order[0, 1], lengths[0, 1] = (2, 3, 4, 8, 9, 10), 3  # an environment's tokens first and last
  present = np.arange(LONGEST) < lengths[..., None]
  places = np.sort(np.where(present, order, T), axis=-1)
  behavior = -rng.exponential(1.0, places.shape)
  near = lambda spread: behavior + spread * rng.standard_normal(places.shape)
  values = dict(
    behavior_logprobs=behavior, proximal_logprobs=near(0.3), reference_logprobs=near(0.3)
  )
  values |= dict(policy=near(0.5), entropy=rng.random(places.shape))
  is_scored = (np.arange(LONGEST) % 2 == 1) & (rng.random(places.shape) < 0.8)
  values["turn_scores"] = np.where(is_scored, rng.normal(size=places.shape), np.nan)
  values["squared_probabilities"] = np.exp(2 * values["policy"]) + rng.random(places.shape)
  return values, places, present


def side_by_side(width=LONGEST):
  """(log π, entropy, batch) without environments, in responses of so many places."""
  places = np.broadcast_to(np.arange(LONGEST), (P, G, LONGEST))
  return jax.tree.map(lambda x: x[..., :width] if x.ndim == 3 else x, _lay(places, 0.0))


def spread(fill=None):
  """The same with environments' tokens, of which nothing is known but that they are masked."""
  return _lay(case()[1], fill)


def _lay(places, fill):
  values, _, present = case()
  places, rng = np.where(present, places, T), np.random.default_rng(1)

  def lay(x, fill):
    found = rng.normal(size=(P, G, T + 1)) if fill is None else np.full((P, G, T + 1), fill)
    np.put_along_axis(found, places, x, axis=-1)
    return found[..., :T]

  laid = {name: lay(x, fill) for name, x in values.items() if name != "turn_scores"}
  scores = np.where(present, values["turn_scores"], np.nan)
  rewards = np.random.default_rng(2).integers(0, 2, (P, G)).astype(float)
  rewards[0] = 1, 0, 0, 0  # the rollouts of several turns differ in sign
  batch = batches.make_batch(
    lay(present.astype(float), 0.0),
    rewards=rewards,
    lags=lay(np.broadcast_to(np.arange(P * G).reshape(P, G, 1) % 3, places.shape), -1).astype(
      np.int32
    ),
    sources=np.arange(P) % 2,
    turns=lay(np.broadcast_to(TURNS, places.shape), 1.0).astype(np.int32),
    turn_scores=lay(scores, np.nan),
    rewards_by_name=rewards[..., None],
    policy_logprobs=laid["policy"],
    squared_norms=1.0 + rewards,
    **{name: laid[name] for name in PER_TOKEN},
  )
  return jnp.asarray(laid["policy"]), jnp.asarray(laid["entropy"]), batch


def of_policy_tokens(x, batch):
  """The values at policy tokens, in their order; all others must be exactly 0."""
  mask = np.broadcast_to(np.asarray(batch.mask) > 0, x.shape)
  assert not np.any(np.asarray(x)[~mask]), REMEDY
  return np.asarray(x)[mask]


def assert_near(found, expected, tolerance=1e-12):
  """In float64, whose sums are over other numbers of zeros."""
  close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
  jax.tree.map(lambda a, b: close(a, b, err_msg=REMEDY), found, expected)


@functools.cache
def coefficients_of(name, in_loss):
  """A program: the coefficients of a batch by an estimator, as a loss of this kind takes them."""
  estimator = ESTIMATORS[name]

  @jax.jit
  def run(batch):
    state = estimator.init(jnp.asarray(0.7))
    coefficients = estimator.apply(state, batch)
    return estimator.in_loss(state, batch, coefficients) if in_loss else coefficients

  return run


def every_loss():
  """(name of a loss, names of vetoes): none and another one for each, or, slow, all."""
  others = itertools.cycle(name for name in VETOES if name)
  for name in LOSSES:
    is_variant = name not in losses.__all__
    slow = pytest.mark.slow
    yield pytest.param(name, ["", next(others)], marks=slow if is_variant else [], id=name)
    yield pytest.param(name, [*VETOES], marks=slow, id=f"{name}-all")


@pytest.mark.parametrize(("name", "vetoes"), [*every_loss()])
def test_losses_are_those_of_the_policy_tokens(x64, name, vetoes):
  """With every aggregation; their gradients and metrics too."""
  loss = LOSSES[name]

  @jax.jit
  def run(policy, batch, coefficients):
    statistics = loss.statistics and loss.statistics(policy, batch, coefficients)

    def values(policy):
      per_token, metrics = loss.per_token(policy, batch, coefficients, statistics)
      found = []
      for label in vetoes:
        veto, kept, mask = VETOES[label], per_token, batch.mask
        if veto is not None:
          kept, mask, more = veto(kept, policy, batch, coefficients)
          metrics |= {f"{name} {label}": value for name, value in more.items()}
        for how in AGGREGATIONS:
          pair = aggregate(kept, mask, how=how, max_response_length=T)
          found.append(reductions.value(pair))
      return jnp.stack(found), metrics

    found, pullback, metrics = jax.vjp(values, policy, has_aux=True)
    (gradients,) = jax.vmap(pullback)(jnp.eye(found.size))
    return found, reductions.values(metrics), gradients

  # Of the same width, one program is compiled for both.
  is_long = len(vetoes) == len(VETOES)
  plain = side_by_side(LONGEST if is_long else T)
  if is_long or name == "ppo_clip":
    estimators = ESTIMATORS if is_long else ESTIMATORS_OF_EACH_KIND
  else:
    estimators = ["grpo" if loss.of_responses else "otb"]
  for number, estimator in enumerate(estimators):
    coefficients = coefficients_of(estimator, not loss.of_responses)
    expected = run(plain[0], plain[-1], coefficients(plain[-1]))
    fills = FILLS if number == 0 else {"nan": np.nan}
    for fill in fills.values():
      dialogues = spread(fill)
      found = run(dialogues[0], dialogues[-1], coefficients(dialogues[-1]))
      assert_near(found[:2], expected[:2])
      pairs = (found, dialogues), (expected, plain)
      assert_near(*(of_policy_tokens(result[2], x[-1]) for result, x in pairs))
  assert np.abs(found[2]).max() > 0


@pytest.mark.parametrize("name", [n for n in losses.__all__ if not LOSSES[n].of_responses])
def test_coefficients_of_tokens_are_those_of_their_turns(x64, name):
  """A token has the loss and the gradient that the coefficient of its turn gives it."""
  loss, (policy, _, batch) = LOSSES[name], side_by_side()
  mixed = np.where(np.arange(LONGEST) < 3, 0.7, -0.4) * np.ones(batch.mask.shape)
  statistics = loss.statistics and jax.jit(loss.statistics)(policy, batch, mixed)

  @jax.jit
  def run(coefficients):
    total = lambda policy: loss.per_token(policy, batch, coefficients, statistics)[0]
    losses, pullback = jax.vjp(total, policy)
    return losses, *pullback(batch.mask)

  first, second = run(np.full((P, G), 0.7)), run(np.full((P, G), -0.4))
  expected = [np.where(np.arange(LONGEST) < 3, *pair) for pair in zip(first, second, strict=True)]
  mask = np.asarray(batch.mask)
  assert_near([x * mask for x in jax.device_get(run(mixed))], [x * mask for x in expected])
  assert np.any(np.asarray(first[1]) != np.asarray(second[1]))


@pytest.mark.parametrize(
  "estimator", ["k3", *(pytest.param(x, marks=pytest.mark.slow) for x in ("k1", "k2"))]
)
def test_reference_and_entropy_are_those_of_the_policy_tokens(x64, estimator):
  """In the objective of a micro-batch, with a veto, both gradients, and every shared metric."""
  method = updates.make_method(
    "float64",
    reference_kl=0.1,
    reference_kl_estimator=estimator,
    entropy_bonus=0.01,
    veto=VETOES["suffix"],
    max_response_length=T,
    sources=("policy", "other"),
  )

  @jax.jit
  def run(policy, entropy, batch):
    A = advantages.grpo().apply((), batch)
    constants = Constants(A, None, {}, Estimate(A, A, {}))
    objective = lambda *scores: surrogate(Scores(*scores), batch, constants, method=method)
    (total, (weight, metrics)), gradients = jax.value_and_grad(
      objective, argnums=(0, 1), has_aux=True
    )(policy, entropy)
    return (total, weight, reductions.values(metrics)), gradients

  expected, plain_gradients = run(*side_by_side())
  plain_gradients = [of_policy_tokens(x, side_by_side()[-1]) for x in plain_gradients]
  of_rollouts, lengths = np.arange(P * G).reshape(P, G) % 3, case()[-1].sum(-1)
  mean = np.average(of_rollouts, weights=lengths)
  assert_near(expected[-1]["staleness/mean"], mean, tolerance=1e-6)  # in float32
  for fill in FILLS.values():
    dialogues = spread(fill)
    found, gradients = run(*dialogues)
    assert_near(found, expected)
    assert_near([of_policy_tokens(x, dialogues[-1]) for x in gradients], plain_gradients)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_are_those_of_the_policy_tokens(x64, name):
  estimator = ESTIMATORS[name]

  @jax.jit
  def run(batch):
    state = estimator.init(jnp.asarray(0.7))
    metrics = batch_metrics(batch) | estimator.metrics(state, batch)
    after = estimator.update(state, batch, jnp.asarray(0.5))
    coefficients = estimator.apply(state, batch)
    in_loss = estimator.in_loss(state, batch, coefficients)
    by_token = jnp.broadcast_to(for_tokens(in_loss), batch.mask.shape)
    return (coefficients, reductions.values(metrics), after), by_token

  pairs = [(batch, *run(batch)) for batch in (spread()[-1], side_by_side(T)[-1])]
  assert_near(*(rest for _, rest, _ in pairs))
  assert_near(*(np.asarray(by_token)[batch.mask > 0] for batch, _, by_token in pairs))


def test_an_indicator_of_entropy_is_that_of_the_policy_tokens(x64):
  coefficients = np.random.default_rng(4).normal(size=(P, G))
  covariance = lambda policy, entropy, batch: advantage_logprob_covariance(
    coefficients, policy, batch.mask
  )
  for fill in FILLS.values():
    assert_near(covariance(*spread(fill)), covariance(*side_by_side()))


# --- with a network -------------------------------------------------------------------------------

PROMPTS, GROUP, LENGTH = 3, 3, 12
SIZES = dict(
  width=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=16, vocab_size=23, tied_head=False
)
LAYOUTS = {  # alignment: (places of a row, rows of a micro-batch, whether some are short)
  8: (24, 2, False),
  16: (64, 1, True),
  32: (64, 10**6, False),
}


@functools.cache
def network():
  """(method, parameters, batch): turns of random lengths, the last often an environment's."""
  config = dataclasses.replace(updates.CONFIG, **SIZES)
  model = updates.small_model(
    dataclasses.replace(config, compute_dtype="float64", param_dtype="float64")
  )
  method = updates.make_method("float64", model=model, loss=losses.reinforce())
  method = method._replace(max_response_length=LENGTH, gram_context=GramContext(model))
  rng = np.random.default_rng(3)
  shape = (PROMPTS, GROUP, LENGTH)
  turns = np.cumsum(rng.random(shape) < 0.3, axis=-1)
  lengths = rng.integers(4, LENGTH + 1, shape[:2])
  mask = (turns % 2 == 0) & (np.arange(LENGTH) < lengths[..., None])
  mask[0, 0, :2] = False  # of a turn that is not in the loss
  mask[1, 1] = False
  tokens = np.where(np.arange(LENGTH) < lengths[..., None], rng.integers(0, 23, shape), 0)
  batch = batches.make_host_batch(
    mask.astype(float),
    rewards=rng.integers(0, 2, shape[:2]).astype(float),
    prompts=batches.random_prompts(rng, PROMPTS, updates.S, 23),
    tokens=tokens.astype(np.int32),
    behavior_logprobs=np.where(mask, -3.0 + 0.3 * rng.normal(size=shape), np.nan),
  )
  ends = response_lengths(batch)
  within = np.arange(LENGTH) < ends[..., None]
  assert (within & ~mask).any(-1).sum() > 5 and (ends < lengths).sum() > 3
  return method, model.init(jax.random.key(0)), batch


def laid(alignment):
  """The batch in rows of this alignment; None: padded."""
  if alignment is None:
    return network()[-1]
  length, rows, short = LAYOUTS[alignment]
  found = updates.in_rows(
    network()[-1],
    rows=rows,
    length=length,
    alignment=alignment,
    several=rows < 10**6,
    has_short_rows=short,
  )
  assert bool(found.packed.num_short) == short
  return found


each_layout = pytest.mark.parametrize(
  "alignment", [8, *(pytest.param(x, marks=pytest.mark.slow) for x in (None, 16, 32))]
)


@functools.cache
def by_rollout():
  """(−Σ_t m log π [B], its gradients, by differentiating one rollout after the other)."""
  method, params, batch = network()
  batch = jax.tree.map(jnp.asarray, batch)
  one = lambda params, i: gram_cases.rollout_loss(params, batch, method.gram_context, i)
  differentiate = jax.vmap(jax.value_and_grad(one), in_axes=(None, 0))
  return jax.jit(differentiate)(params, jnp.arange(PROMPTS * GROUP))


@each_layout
def test_an_update_is_that_of_each_rollout(x64, alignment):
  """Padded, and at every alignment of rows; of a sum over rollouts."""
  method, params, batch = network()
  scores, gradients = by_rollout()
  coefficients = np.random.default_rng(6).normal(size=(PROMPTS, GROUP))
  weights = coefficients.reshape(-1) / batch.mask.sum()
  (loss, _), found = updates.gradient_of(method, laid(alignment), params, coefficients)
  np.testing.assert_allclose(loss, weights @ scores, rtol=1e-11)
  expected = jax.tree.map(lambda g: np.tensordot(weights, g, 1), gradients)
  assert updates.relative_distance(found, expected) < 1e-11


ROUTES = {
  "streaming": geometry.streaming(block_elements=1),
  "streaming-sampled": geometry.streaming(feature="sampled"),
  "per_rollout": geometry.per_rollout(),
  "per_rollout-sampled": geometry.per_rollout(feature="sampled"),
  "per_rollout-all": geometry.per_rollout(parameters="all"),
  "sketch": geometry.sketch(copies=4, hidden_size=64, vocabulary_size=64),
}


@functools.cache
def features():
  """What the routes' Gram matrices are made of, f64[B, N], from each rollout alone."""
  method, params, batch = network()
  _, gradients = by_rollout()
  flat = lambda x: np.reshape(x, (PROMPTS * GROUP, -1))
  hidden = jax.jit(method.model.response_hidden)(params, batch.prompts, batch.tokens)
  one_hot = np.eye(SIZES["vocab_size"])[batch.tokens] * batch.mask[..., None]
  return {
    "": flat(gradients["head_kernel"]),
    "all": np.concatenate([flat(x) for x in jax.tree.leaves(gradients)], axis=1),
    "sampled": flat(-np.einsum("pgtd,pgtv->pgdv", hidden, one_hot)),
  }


@each_layout
def test_a_gram_matrix_is_that_of_each_rollout(x64, alignment):
  """Of all parameters or the head's, padded and in rows; the sketch within its own error.

  Routes that run the model again take the padded batch, however the rollouts lie in rows.
  """
  assert {name.partition("-")[0] for name in ROUTES} == {*geometry.__all__}
  method, params, _ = network()
  method = method._replace(gram=ROUTES["sketch"])  # its forward pass has what the others need

  @jax.jit
  def run(params, batch):
    _, forward = batch_forward(params, {}, batch, method=method)
    args = params, {}, batch, forward, method.gram_context
    wanted = {k: x for k, x in ROUTES.items() if x.needs_forward or alignment is None}
    return {name: x.gram(*args) for name, x in wanted.items()}, method.gram.error(*args)

  grams, error = jax.device_get(run(params, laid(alignment)))
  for name, found in grams.items():
    rows = features()[name.partition("-")[2]]
    expected = rows @ rows.T
    tolerance = 3 * error if name == "sketch" else 1e-10
    assert np.linalg.norm(found - expected) < tolerance * np.linalg.norm(expected), name


def test_trailing_tokens_of_an_environment_take_no_places():
  """Nor do they change any array of the rows; those between turns do, as inputs."""
  _, _, batch = network()
  ends = response_lengths(batch)
  last = np.max((batch.mask > 0) * np.arange(1, LENGTH + 1), axis=-1)
  np.testing.assert_array_equal(ends, last)
  for alignment in LAYOUTS:
    rows = laid(alignment).packed.rows
    index = np.arange(rows.starts.shape[-1])
    assert np.sum((rows.prompts >= 0) & (index >= rows.starts)) == ends.sum()
  change = lambda where: dataclasses.replace(batch, tokens=np.where(where, 22, batch.tokens))
  pack = lambda batch: updates.in_rows(batch, length=48, alignment=8, several=None).packed
  trailing = np.arange(LENGTH) >= ends[..., None]
  chex.assert_trees_all_equal(pack(change(trailing)), pack(batch))
  between = pack(change(~trailing & (batch.mask == 0)))
  assert np.any(between.tokens != pack(batch).tokens)
  np.testing.assert_array_equal(between.targets, pack(batch).targets)


def test_flops_count_all_tokens_in_the_layers_and_the_policys_in_the_head(x64):
  """As many as of responses of one turn of the same length, less the head at a reply's places."""
  method, _, batch = network()
  counted = np.arange(LENGTH) < response_lengths(batch)[..., None]
  one_turn = dataclasses.replace(batch, mask=counted.astype(np.float32))
  for flops in (forward_flops, update_flops):
    of = lambda lengths, flops=flops: flops(method.model.config, batch.prompts.lengths, lengths)
    assert of(response_lengths(batch)) == of(response_lengths(one_turn))
    assert of(response_lengths(batch)) > 1.1 * of((batch.mask > 0).sum(-1))
    lengths, predicted = response_lengths(batch), loss_tokens(batch)
    replies = int((lengths - predicted).sum())
    head = 2 * replies * method.model.config.width * method.model.config.vocab_size
    passes = 1 if flops is forward_flops else 3
    found = flops(method.model.config, batch.prompts.lengths, lengths, predicted=predicted)
    assert found == of(lengths) - passes * head < of(lengths)


@pytest.mark.slow
def test_the_head_leaves_out_places_that_predict_nothing(x64):
  """Where dialogues have turns, and rows more places than a chunk: loss and gradient stay."""
  method, params, _ = network()
  rng = np.random.default_rng(5)
  shape = (4, 2, 800)
  turns = np.cumsum(rng.random(shape) < 0.01, axis=-1).astype(np.int32)
  batch = batches.make_host_batch(
    (turns % 2 == 0).astype(float),
    prompts=batches.random_prompts(rng, 4, updates.S, 23),
    tokens=rng.integers(0, 23, shape).astype(np.int32),
  )
  batch = updates.in_rows(batch, length=810, several=False)
  assert batch.packed.tokens.size > 2 * 2048 and batch.mask.mean() < 0.6
  coefficients = rng.normal(size=(4, 2))
  run = lambda batch: updates.gradient_of(method, batch, params, coefficients)
  (expected, metrics), gradient = run(batch)
  (loss, found_metrics), found = run(dataclasses.replace(batch, turns=turns))
  np.testing.assert_allclose(loss, expected, rtol=1e-11)
  assert updates.relative_distance(found, gradient) < 1e-11
  pair = map(reductions.values, (found_metrics, metrics))
  chex.assert_trees_all_close(*pair, rtol=1e-9, atol=1e-12)
