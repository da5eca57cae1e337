"""Values and gradients of peers' and authors' own code for the methods of 2026, float64."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.batches import make_batch, metric_value
from oracles.golden import AGGREGATIONS, ATOL, RTOL, Golden

from rlvr_jax import advantages, corrections, distillation, losses
from rlvr_jax.ops.aggregate import aggregate
from rlvr_jax.ops.divergence import Divergence

GOLDEN = Golden("golden_2026")
LEFT_OUT = {  # by the beginning of a case's name: why it has no test
  # The behavior policy's most probable tokens would have to be recorded; the paper finds no gain.
  "divergence_topk_": "not offered",
}


def _cases(methods):
  return GOLDEN.params(
    lambda case: (
      case["params"].get("method") in methods and not case["name"].startswith(tuple(LEFT_OUT))
    )
  )


LARGEST = 12  # rollouts, and tokens of one


def _padded(case):
  """The case's arrays of rollouts with masked ones around them, so that cases share a program."""
  arrays = GOLDEN.arrays(case)
  B, T = arrays["mask"].shape
  arrays["places"] = np.arange(B * T, dtype=np.int32).reshape(B, T)

  def pad(x):
    widths = [(0, LARGEST - B), (0, LARGEST - T) if x.shape[1:2] == (T,) else (0, 0)]
    widths += [(0, 0)] * x.ndim
    return np.pad(x, widths[: x.ndim]) if x.shape[:1] == (B,) else x

  return {name: pad(x) for name, x in arrays.items()}, B * T


def _key(case):
  """Cases of the same parameters share a program."""
  return json.dumps(case["params"], sort_keys=True)


# --- losses ---------------------------------------------------------------------------------------


def _dppo(params):
  symmetric, form = params.get("symmetric", False), params["form"]
  return losses.dppo(
    divergence=params["divergence"],
    delta_low=None if symmetric else params.get("delta_low", params["delta_high"]),
    delta_high=params["delta_high"],
    truncation=params["truncation"] if form == "score" else None,
    form=form,
    anchor={"behavior": "sampler", "proximal": "proximal"}[params["anchor"]],
    symmetric=symmetric,
    log_ratio_penalty=params.get("log_ratio_penalty", 0.0),
  )


def _vespo(params):
  names = ("k_positive", "lambda_positive", "k_negative", "lambda_negative", "token_truncation")
  return losses.vespo(**{name: params[name] for name in names if name in params})


def _clip(params):
  return {"epsilon_low": params["clip_low"], "epsilon_high": params["clip_high"]}


def _clip_cov(params):
  names = ("share", "low", "high")
  return losses.clip_cov(**{name: params[name] for name in names}, **_clip(params))


def _opsm(params):
  return corrections.corrected(
    losses.ppo_clip(**_clip(params)), corrections.opsm(delta=params["delta"])
  )


def _tv_mask(params):
  correction = corrections.tv_mask(delta=params["delta"], cap=params["weight_high"])
  return corrections.corrected(losses.ppo_clip(**_clip(params)), correction)


def _bounds(text):
  """verl's "0.5_2.0" or 0.05 as a tuple of numbers."""
  return tuple(float(part) for part in str(text).split("_"))


def _verl_rules(params):
  """verl's rejections, with its bounds of 1/κ as those of κ."""
  if params["reject"] is None:
    return ()
  names = params["reject"].split(",")
  rules = []
  for name, text in zip(names, str(params["reject_bounds"]).split(","), strict=True):
    over, divergence = name.removeprefix("seq_").split("_")
    bounds = _bounds(text)
    if divergence == "k1":
      bounds = (1 / bounds[1], 1 / bounds[0])
    rules.append((f"{over}_{divergence}", *bounds))
  return tuple(rules)


def _correction(params):
  if "preset" in params:
    bounds = _bounds(params["weight_bounds"])
    how = dict(
      level=params["weight_level"] or "none",
      bound="truncate" if len(bounds) == 1 else "mask",
      low=0.0 if len(bounds) == 1 else bounds[0],
      high=bounds[-1],
      batch_normalize=params["batch_normalize"],
      reject=_verl_rules(params),
    )
  else:
    level = params.get("reject_level")
    name = {None: None, "geometric": "mean_k1", "sequence": "sum_k1", "token": "token_k1"}[level]
    how = dict(
      level=params["weight_level"],
      bound=params["weight_mode"],
      low=params["weight_low"] or 0.0,
      high=params["weight_high"],
      reject=() if name is None else ((name, params["reject_low"], params["reject_high"]),),
      veto=params.get("veto") or 0.0,
    )
  unread = {"bound", "low", "high"} if how["level"] == "none" else set()
  unread |= {"low"} if how["bound"] == "truncate" else set()
  how = {name: value for name, value in how.items() if name not in unread}
  if params["anchor"] == "behavior":
    how["policies"] = 2
  if params["loss"] == "reinforce":
    loss = losses.reinforce()
  else:
    loss = losses.ppo_clip(**_clip(params), dual_clip=params.get("dual_clip"))
  if how["level"] == "none" and not how["reject"] and not how.get("veto"):
    return loss  # verl's presets include the one that corrects nothing
  return corrections.corrected(loss, corrections.importance(**how))


MAKE = {
  "dppo": _dppo,
  "vespo": _vespo,
  "dro": lambda params: losses.dro(penalty=params["beta"]),
  "luspo": lambda params: losses.gspo(**_clip(params)),
  "clip_cov": _clip_cov,
  "kl_cov": lambda p: losses.kl_cov(share=p["share"], coefficient=p["coefficient"]),
  "opsm": _opsm,
  "tv_mask": _tv_mask,
  "correction": _correction,
}


def _batch(arrays):
  group = lambda name: arrays[name][:, None] if name in arrays else None  # every rollout a prompt
  return make_batch(
    group("mask"),
    group("behavior_logprobs"),
    proximal_logprobs=group("proximal_logprobs"),
    teacher_logprobs=group("teacher_logprobs"),
    tokens=group("places"),
  )


def _mean(per_token, mask, size, how):
  """The aggregated loss of a case with so many places before it was padded."""
  pair = aggregate(per_token, mask, how=how, max_response_length=mask.shape[-1])
  return pair.total / pair.weight * (mask.size / size if how == "constant" else 1)


def _aggregations(params):
  return params.get("aggregations") or [AGGREGATIONS[params["aggregation"]]]


@functools.cache
def _loss_program(key):
  """The losses [A] of all aggregations, gradients [A, B, T], losses of tokens [B, T], metrics."""
  params = json.loads(key)
  loss, names = MAKE[params["method"]](params), _aggregations(params)

  @jax.jit
  def run(policy_logprobs, batch, coefficients, size):
    statistics = loss.statistics and loss.statistics(policy_logprobs, batch, coefficients)

    def values(policy_logprobs):
      per_token, metrics = loss.per_token(policy_logprobs, batch, coefficients, statistics)
      means = [_mean(per_token, batch.mask, size, how) for how in names]
      return jnp.stack(means), (per_token * batch.mask, metrics)

    totals, pullback, (per_token, metrics) = jax.vjp(values, policy_logprobs, has_aux=True)
    (gradients,) = jax.vmap(pullback)(jnp.eye(len(names)))
    return totals, gradients[:, :, 0], per_token[:, 0], metrics

  return run


_mean_and_gradient = functools.partial(jax.jit, static_argnames="how")(jax.value_and_grad(_mean))


def _expected(case, arrays, size, how):
  """(loss, gradient) of a case.

  Peers take dropped tokens out of the denominators; here they have the loss 0 and stay. The arrays
  *_full_mask do not help: they keep the dropped tokens' losses. So the numbers follow from the
  peer's losses and gradients of each kept token.
  """
  suffix = f"_{how}" if f"loss_{how}" in arrays else ""
  if "kept_mask" not in arrays or case["params"].get("denominator") == "all loss tokens":
    return arrays[f"loss{suffix}"], arrays[f"grad{suffix}" if suffix else "grad_logprobs"]
  kept, mask = arrays["kept_mask"], arrays["mask"][:, None]
  losses_of_tokens = (arrays["token_losses"] * kept)[:, None]
  mean, gradient = _mean_and_gradient(losses_of_tokens, mask, size, how=how)
  of_token = arrays["grad_sequence_sum"] * np.sum(np.any(kept > 0, axis=-1))
  return mean, of_token * np.asarray(gradient)[:, 0]


@pytest.mark.parametrize("case", _cases(MAKE))
def test_loss(case):
  """Value and gradient by every aggregation that the case has."""
  (arrays, size), params = _padded(case), case["params"]
  with jax.enable_x64(True):
    given = arrays["logprobs"][:, None], _batch(arrays), arrays["advantages"][:, None], size
    totals, gradients, per_token, metrics = jax.device_get(_loss_program(_key(case))(*given))
    for name, total, gradient in zip(_aggregations(params), totals, gradients, strict=True):
      expected, expected_gradient = _expected(case, arrays, size, name)
      np.testing.assert_allclose(gradient, expected_gradient, rtol=RTOL, atol=ATOL, err_msg=name)
      if "loss" in params.get("compare", ["loss"]):
        np.testing.assert_allclose(total, expected, rtol=RTOL, atol=ATOL, err_msg=name)
    if "kept_mask" in arrays:
      share = 1 - np.sum(arrays["kept_mask"]) / np.sum(arrays["mask"])
      np.testing.assert_allclose(metric_value(metrics["correction/dropped"]), share, atol=1e-12)
      dropped = (arrays["mask"] > 0) & (arrays["kept_mask"] == 0)
      assert np.all(per_token[dropped] == 0)


# --- distillation ---------------------------------------------------------------------------------


def _opd(params):
  if params["form"] == "advantage":
    discount = params.get("discount", 0.0)
    return distillation.opd(student=params["student"], discount=discount)
  if params["form"] == "score":
    return distillation.opd_score(truncation=params["truncation"])
  if params["form"] == "ratio":
    return distillation.opd_ratio(
      max_drop=params["mask_drop"], log_ratio_penalty=params["log_ratio_penalty"]
    )
  return distillation.kl_estimate(estimator=params["estimator"], bound=20.0)


TEACHERS = {
  "opd": _opd,
  "iw_opd": lambda params: distillation.iw_opd(gamma=params["gamma"]),
  "mopd": lambda params: distillation.opd(student=params["student"]),
}


def _loss_beside(params):
  """The loss that takes a case's sums of advantages."""
  if params["method"] == "mopd":
    icepop = corrections.icepop(low=params["low"], high=params["high"])
    return corrections.corrected(losses.reinforce(), icepop)
  return losses.ppo_clip(**_clip(params), dual_clip=params["dual_clip"])


@functools.cache
def _distillation_program(key):
  """The losses [A] of all aggregations, and their gradients [A, B, T]."""
  params = json.loads(key)
  teacher = TEACHERS[params["method"]](params)

  @jax.jit
  def run(policy_logprobs, batch, coefficients, size):
    def values(policy_logprobs):
      if teacher.advantage is not None:
        sums = coefficients + teacher.advantage(policy_logprobs, batch)
        per_token, _ = _loss_beside(params).per_token(policy_logprobs, batch, sums, None)
      else:
        per_token = teacher.per_token(policy_logprobs, batch)
      return jnp.stack([_mean(per_token, batch.mask, size, how) for how in _aggregations(params)])

    totals, pullback = jax.vjp(values, policy_logprobs)
    (gradients,) = jax.vmap(pullback)(jnp.eye(len(totals)))
    return totals, gradients[:, :, 0]

  return run


@pytest.mark.parametrize("case", _cases(TEACHERS))
def test_distillation(case):
  """Advantages, or value and gradient by every aggregation that the case has."""
  (arrays, size), params = _padded(case), case["params"]
  near = functools.partial(np.testing.assert_allclose, rtol=RTOL, atol=ATOL)
  with jax.enable_x64(True):
    batch = _batch(arrays)
    if "base_advantages" in arrays:
      teacher = TEACHERS[params["method"]](params)
      added = teacher.advantage(batch.behavior_logprobs, batch)[:, 0]
      found = arrays["base_advantages"][:, None] + params["coefficient"] * added
      return near(found * arrays["mask"], arrays["advantages"] * arrays["mask"])
    if params.get("anchor") == "proximal":  # the ratio is to it, without a weight
      batch = dataclasses.replace(batch, behavior_logprobs=batch.proximal_logprobs)
    if "kept_mask" in arrays:  # rollouts without a teacher are out of the denominators
      batch = dataclasses.replace(batch, mask=jnp.asarray(arrays["kept_mask"][:, None]))
    coefficients = params.get("outcome_weight", 0.0) * arrays["advantages"][:, None, None]
    given = arrays["logprobs"][:, None], batch, coefficients, size
    totals, gradients = _distillation_program(_key(case))(*given)
    for how, total, gradient in zip(params["aggregations"], totals, gradients, strict=True):
      near(total, arrays[f"loss_{how}"], err_msg=how)
      near(gradient, arrays[f"grad_{how}"], err_msg=how)


def _divergence(params):
  if params["support"] == "all":
    return Divergence(alpha=params["alpha"])
  how = dict(support=params["support"], top_k=params["k"])
  if params.get("form") == "ratio":
    return Divergence(**how, rest="score")
  rest = "tail" if params["tail"] else "renormalize" if params["renormalize"] else "drop"
  return Divergence(**how, alpha=params["alpha"], rest=rest, floor=params.get("floor"))


@functools.cache
def _divergence_program(key):
  """Of student's and teacher's logits: losses of tokens [B, T], their mean and its gradient."""
  params = json.loads(key)

  def per_token(logits, teacher_logits, mask, tokens):
    log_pi, log_tau = (
      jax.nn.log_softmax(x / params.get("temperature", 1.0)) for x in (logits, teacher_logits)
    )
    of_tokens = lambda x: jnp.take_along_axis(x, tokens[..., None], -1)[:, None, :, 0]
    own = jax.lax.stop_gradient(of_tokens(log_pi))
    batch = make_batch(mask[:, None], own, teacher_logprobs=of_tokens(log_tau))
    if params["method"] == "vopd":
      made = distillation.vopd(top_k=params["k"] or 0)
      between = made.divergence(log_pi, log_tau)[:, None]
      with_it = dataclasses.replace(batch, teacher_divergence=between)
      return made.advantage(of_tokens(log_pi), with_it)[:, 0]
    if params["support"] == "sampled":
      return distillation.opd_score().per_token(of_tokens(log_pi), batch)[:, 0]
    return _divergence(params)(log_pi, log_tau)

  def mean(logits, teacher_logits, mask, tokens):
    found = per_token(logits, teacher_logits, mask, tokens)
    return jnp.sum(jnp.where(mask > 0, found, 0)) / mask.sum(), found

  return jax.jit(jax.value_and_grad(mean, has_aux=True))


@pytest.mark.parametrize("case", _cases(("distill", "vopd")))
def test_divergence(case):
  """Value and gradient, or vOPD's advantages."""
  arrays, _ = _padded(case)
  near = functools.partial(np.testing.assert_allclose, rtol=RTOL, atol=ATOL)
  given = (arrays[name] for name in ("student_logits", "teacher_logits", "mask"))
  with jax.enable_x64(True):
    run = _divergence_program(_key(case))
    (value, found), gradient = run(*given, arrays["tokens"].astype(int))
    if case["params"]["method"] == "vopd":
      return near(found * arrays["mask"], arrays["advantages"] * arrays["mask"])
    near(value, arrays["loss"])
    near(gradient, arrays["grad_student_logits"])


@pytest.mark.parametrize("case", _cases(("maxrl",)))
def test_maxrl(case):
  arrays = GOLDEN.arrays(case)
  with jax.enable_x64(True):
    batch = make_batch(np.ones((*arrays["rewards"].shape, 1)), rewards=arrays["rewards"])
    estimator = advantages.maxrl()
    found = jax.jit(estimator.apply)(estimator.init(0.0), batch)
    np.testing.assert_allclose(found, arrays["advantages"], rtol=RTOL, atol=ATOL)


def _advantages(estimator, batch):
  """As a loss takes them; in one program, since op by op each small operation would be another."""
  run = lambda batch: estimator.in_loss((), batch, estimator.apply((), batch))
  return np.asarray(jax.jit(run)(batch))


def _advantage_batch(arrays):
  """The batch of a case: rewards [P, G], or [P, G, K], whose first are then the batch's rewards."""
  rewards = arrays["rewards"]
  P, G = rewards.shape[:2]
  grouped = lambda name: arrays[name].reshape(P, G, -1)
  mask = grouped("mask") if "mask" in arrays else np.ones((P, G, 1))
  if rewards.ndim == 2:
    return make_batch(mask, rewards=rewards)
  return make_batch(mask, rewards=rewards[..., 0], rewards_by_name=rewards)


@pytest.mark.parametrize("case", _cases(("reinforce_plus_plus",)))
def test_reinforce_plus_plus(case):
  arrays = GOLDEN.arrays(case)
  with jax.enable_x64(True):
    batch = _advantage_batch(arrays)
    estimator = advantages.reinforce_plus_plus(baseline=case["params"]["baseline"], over="tokens")
    found = _advantages(estimator, batch)[..., None] * batch.mask
    expected = arrays["advantages"].reshape(batch.mask.shape)
    np.testing.assert_allclose(found, expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("case", _cases(("gdpo",)))
def test_gdpo(case):
  arrays, params = GOLDEN.arrays(case), case["params"]
  over = params["batch"]
  # verl's 1e-8 is in the variance.
  batch_epsilon = params.get("batch_epsilon", params["epsilon"] if over == "rollouts" else 0.0)
  with jax.enable_x64(True):
    batch = _advantage_batch(arrays)
    estimator = advantages.gdpo(
      weights=tuple(params["weights"]),
      epsilon=params["epsilon"],
      batch_epsilon=batch_epsilon,
      over=over,
      leave_one_out=params.get("leave_one_out", False),
    )
    found = _advantages(estimator, batch)
    expected = arrays["advantages"]
    if over == "tokens":
      found, expected = found[..., None] * batch.mask, expected.reshape(batch.mask.shape)
    if params.get("leave_one_out"):  # a constant group is not 0 there
      constant = np.all(arrays["rewards"] == arrays["rewards"][:, :1], axis=(1, 2))
      assert constant.any() and np.all(found[constant] == 0) and np.all(expected[constant] != 0)
      found, expected = found[~constant], expected[~constant]
    np.testing.assert_allclose(found, expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("case", _cases(("otb",)))
def test_otb(case):
  """verl leaves the tail of a constant group, and so does `zero_constant=False`."""
  arrays = GOLDEN.arrays(case)
  with jax.enable_x64(True):
    batch = _advantage_batch(arrays)
    grouped = lambda name: jnp.asarray(arrays[name].reshape(batch.mask.shape))
    logprobs, how = grouped("logprobs"), {}
    if "importance_weights" in arrays:  # those of an update are π/β, truncated
      weights = jnp.where(batch.mask > 0, grouped("importance_weights"), 1.0)
      how["truncation"] = float(jnp.max(weights))
      batch = dataclasses.replace(batch, behavior_logprobs=logprobs - jnp.log(weights))
    batch = dataclasses.replace(
      batch,
      policy_logprobs=logprobs,
      squared_probabilities=grouped("sum_squared_probabilities"),
    )
    zero_tail = case["params"]["zero_tail"]
    estimator = advantages.otb(zero_tail=zero_tail, zero_constant=False, **how)
    found = _advantages(estimator, batch)
    np.testing.assert_allclose(found, grouped("advantages"), rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("case", _cases(("opob",)))
def test_opob(case):
  """A constant group has A = 0 here, where rounding and the authors' 1e-8 leave a rest."""
  arrays = GOLDEN.arrays(case)
  with jax.enable_x64(True):
    batch = _advantage_batch(arrays)
    log_weights = jnp.asarray(arrays["log_weights"])[..., None]  # of responses of one token
    batch = dataclasses.replace(
      batch,
      policy_logprobs=log_weights,
      squared_norms=jnp.asarray(np.square(arrays["norms"])),
    )
    found = _advantages(advantages.opob(), batch)
    np.testing.assert_allclose(found, arrays["advantages"], rtol=RTOL, atol=ATOL)


def test_every_case_has_a_test():
  methods = {*MAKE, *TEACHERS, "distill", "vopd"}
  methods |= {"gdpo", "maxrl", "opob", "otb", "reinforce_plus_plus"}
  tested = {case["name"] for case in GOLDEN.cases if case["params"].get("method") in methods}
  rest = [
    case["name"]
    for case in GOLDEN.cases
    if case["name"] not in tested and not case["name"].startswith(tuple(LEFT_OUT))
  ]
  assert rest == []
