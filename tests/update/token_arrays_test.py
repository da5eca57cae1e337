"""What diagnostics measure of each token is what a plain NumPy computation says."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.updates import G, P, T, in_rows, make_batch, make_method

from rlvr_jax import corrections, distillation, geometry, losses
from rlvr_jax.geometry import GramContext
from rlvr_jax.ops.logprobs import head_logits
from rlvr_jax.ops.veto import negative_advantage_veto
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.reporting.log import loss_tokens_alone
from rlvr_jax.update.accumulate import batch_forward, first_phase
from rlvr_jax.update.diagnostics import MARKS, measure, of_tokens
from rlvr_jax.update.objective import Constants, Estimate, Scores, estimate_coefficients
from rlvr_jax.update.step import initial_state, train_step
from rlvr_jax.update.teaching import Teaching

pytestmark = pytest.mark.usefixtures("x64")
LOW, HIGH, THRESHOLD = 0.8, 1.25, 0.7  # of the correction's κ; of the veto's ratio
TEMPERATURE = 0.8


@functools.cache
def method_of(mesh=None):
  """GRPO's clip around the proximal policy, a correction that drops, and a veto."""
  model = make_method("float64", mesh=mesh).model
  return make_method(
    "float64",
    mesh=mesh,
    loss=corrections.corrected(losses.ppo_clip(), corrections.icepop(low=LOW, high=HIGH)),
    veto=negative_advantage_veto(scope="suffix", threshold=THRESHOLD),
    temperature=TEMPERATURE,
    gram=geometry.streaming(),
    gram_context=GramContext(model, TEMPERATURE, mesh),
  )


@functools.cache
def params_of():
  # Far enough from uniform that ratios differ.
  return jax.tree.map(lambda x: 2 * x, make_method("float64").model.init(jax.random.key(0)))


def make_proximal_batch():
  batch = make_batch(np.float64)
  noise = np.random.default_rng(1).normal(size=(P, G, T)) * 0.2
  return dataclasses.replace(batch, proximal_logprobs=batch.behavior_logprobs + noise)


@functools.partial(jax.jit, static_argnames="method")
def _measure(state, batch, *, method):
  found = measure(
    state, {}, state.params, batch, method=method, gram=geometry.streaming(), compared=""
  )
  return found[1], train_step(state, {}, batch, method=method)[1]


def measured(batch, mesh=None):
  """(arrays of the loss tokens, metrics of the update that follows)."""
  method = method_of(mesh)
  params = params_of()
  if mesh is not None:
    params = jax.device_put(params, sharding.state_shardings(params, mesh))
  arrays, metrics = _measure(initial_state(method, params, jnp.zeros(())), batch, method=method)
  of_token = {name: x for name, x in arrays.items() if name.startswith("token_")}
  return loss_tokens_alone(jax.device_get(of_token), batch.mask), jax.device_get(metrics)


def in_numpy(batch):
  """The same from full logits, with loops over tokens."""
  model, params = make_method("float64").model, params_of()
  hidden = model.response_hidden(params, batch.prompts, batch.tokens)
  logits = np.asarray(head_logits(hidden, model.head(params)), np.float64) / TEMPERATURE
  logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  entropy = -(np.exp(logprobs) * logprobs).sum(-1).reshape(P, G, T)
  logprobs = logprobs.reshape(P, G, T, -1)
  found = {name: [] for name in ("log_ratio", "log_ratio_proximal", "entropy")}
  found |= {name: [] for name in ("clipped", "dropped", "vetoed")}
  for p, g in np.ndindex(P, G):
    A, triggered = batch.rewards[p, g] - batch.rewards[p].mean(), False
    for t in range(int(batch.mask[p, g].sum())):
      policy = logprobs[p, g, t, batch.tokens[p, g, t]]
      beta, proximal = batch.behavior_logprobs[p, g, t], batch.proximal_logprobs[p, g, t]
      ratio, of_loss, kappa = np.exp([policy - beta, policy - proximal, proximal - beta])
      is_trigger = A < 0 and ratio < THRESHOLD
      found["log_ratio"].append(policy - beta)
      found["log_ratio_proximal"].append(policy - proximal)
      found["entropy"].append(entropy[p, g, t])
      found["clipped"].append((A > 0 and of_loss > 1.2) or (A < 0 and of_loss < 0.8))
      found["dropped"].append(not LOW <= kappa <= HIGH)
      found["vetoed"].append(A < 0 and triggered and not is_trigger)
      triggered |= is_trigger
  return {f"token_{name}": np.array(x) for name, x in found.items()}


def assert_same(found, expected):
  assert found.keys() == expected.keys()
  for name, array in expected.items():
    np.testing.assert_allclose(found[name], array, rtol=1e-9, atol=1e-12, err_msg=name)


@jax.jit
def _of_tokens(params, batch):
  method = method_of()
  estimate = functools.partial(estimate_coefficients, (), method=method)
  constants = first_phase(params, {}, batch, estimate, jax.random.key(0), method=method)
  scores, _ = batch_forward(params, {}, batch, method=method._replace(gram=None))
  return of_tokens(scores, batch, constants, method=method)


def test_arrays_of_tokens_are_what_numpy_says():
  batch = make_proximal_batch()
  expected = in_numpy(batch)
  for name in MARKS:  # every case occurs
    assert 0 < expected[name].sum() < expected[name].size
  found = loss_tokens_alone(jax.device_get(_of_tokens(params_of(), batch)), batch.mask)
  assert_same(found, expected)
  assert all(found[name].dtype == bool for name in MARKS)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["padded", "rows", "mesh"])
def test_a_measurement_is_of_the_update_that_follows(form):
  """Whatever rows, micro-batches and devices: the same arrays, whose means are its metrics."""
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2) if form == "mesh" else None
  batch, expected = make_proximal_batch(), in_numpy(make_proximal_batch())
  given = batch if form == "padded" else in_rows(batch, rows=1, mesh=mesh)
  found, metrics = measured(given, mesh)
  assert_same(found, expected)
  for name, metric in [*MARKS.items(), ("token_entropy", "policy/entropy")]:
    assert metrics[metric] == pytest.approx(expected[name].mean())


def marks_of(loss, veto=None):
  """Names of the arrays of marks that a method has; traced alone."""
  method = make_method(loss=loss, veto=veto)

  def trace(batch):
    A, logprobs = batch.rewards - 0.5, batch.behavior_logprobs
    statistics = loss.statistics and loss.statistics(logprobs, batch, A)
    constants = Constants(A, statistics, {}, Estimate(A, A, {}))
    return of_tokens(Scores(logprobs, logprobs), batch, constants, method=method)

  found = jax.eval_shape(trace, make_proximal_batch())
  assert all(x.shape == (P, G, T) for x in found.values())
  return {name for name in found if name in MARKS}


def _bounds():
  made = {name: getattr(losses, name)() for name in losses.__all__}
  return made | {"truncated": losses.reinforce(truncation=2.0), "uncapped": losses.p3o(cap="none")}


@pytest.mark.parametrize("name", _bounds())
def test_a_loss_has_marks_unless_it_bounds_nothing(name):
  bounds_nothing = name in ("reinforce", "dro", "kl_cov", "uncapped")
  assert marks_of(_bounds()[name]) == (set() if bounds_nothing else {"token_clipped"})


@pytest.mark.parametrize(
  ("correction", "drops"),
  [
    (corrections.tis(), False),
    (corrections.importance(level="none", reject=(("mean_k1", 0.9, 1.1),)), True),
    (corrections.importance(veto=1e-4), True),
    (corrections.mis(), True),
    (corrections.opsm(), True),
    (corrections.tv_mask(), True),
  ],
)
def test_a_correction_has_marks_if_it_may_drop(correction, drops):
  found = marks_of(corrections.corrected(losses.ppo_clip(), correction))
  assert found == {"token_clipped"} | ({"token_dropped"} if drops else set())


def test_the_veto_has_marks():
  assert marks_of(losses.reinforce(), negative_advantage_veto()) == {"token_vetoed"}


def test_a_teacher_s_advantages_are_part_of_the_coefficients():
  """Traced alone: a teacher that the update compares with gives its numbers to the measurement."""
  model = make_method("float64").model
  teaching = Teaching(distillation.top_k_opd(), 0.5, 1.0, 1.0, ("teacher",), model)
  method = method_of()._replace(teaching=teaching)
  state = initial_state(method, params_of(), jnp.zeros(()))
  batch = in_rows(make_proximal_batch(), rows=1)
  run = functools.partial(measure, method=method, gram=geometry.streaming(), compared="")
  _, arrays = jax.eval_shape(run, state, {}, state.params, batch, (params_of(), {}))
  assert {*MARKS} <= arrays.keys()
