"""Truncated, clipped and masked importance sampling, with rejection: TIS, MIS, IcePop and more."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from rlvr_jax.corrections.base import LOG_BOUND, Correction, Mismatch
from rlvr_jax.ops import kl
from rlvr_jax.ops.checks import check_between, check_choice
from rlvr_jax.ops.masked import masked_count, masked_max, masked_mean, masked_sum
from rlvr_jax.ops.ratios import mean_log_ratios, sequence_log_ratios
from rlvr_jax.types import Array

LEVELS = ("token", "sequence", "geometric", "none")
BOUNDS = ("truncate", "clip", "mask")
Rule = tuple[Any, ...]  # ("mean_k1", low, high), ("mean_k3", high)

_DIVERGENCES: dict[str, Callable[[Array, Array, Array], Array]] = {
  "k1": kl.k1,
  "k2": kl.k2,
  "k3": kl.k3,
}
_OVER: dict[str, Callable[[Array, Array], Array]] = {
  "token": lambda x, mask: x,
  "sum": lambda x, mask: masked_sum(x, mask, axis=-1)[..., None],
  "mean": lambda x, mask: masked_mean(x, mask, axis=-1)[..., None],
  "max": lambda x, mask: masked_max(x, mask, axis=-1, initial=-jnp.inf)[..., None],
}


def importance(
  *,
  level: str = "token",
  bound: str = "truncate",
  low: float = 0.0,
  high: float = 2.0,
  batch_normalize: bool = False,
  reject: Sequence[Rule] = (),
  veto: float = 0.0,
  policies: int = 3,
) -> Correction:
  """Multiplies the loss of a token by its weight w, or by 0 if a rule rejects the token.

  κ is π_prox/β or π/β, see `policies`. u is log κ of a token (level "token"), or the sum
  ("sequence") or mean ("geometric") of log κ over the response. The weight w is min(eᵘ, high) for
  the bound "truncate", clip(eᵘ, low, high) for "clip", and eᵘ·1[low ≤ eᵘ ≤ high] for "mask".

  Args:
    level: one of `LEVELS`; "none" sets all weights to 1.
    bound: one of `BOUNDS`.
    low, high: inclusive bounds of eᵘ, 0 ≤ low < high; "truncate" reads only `high`.
    batch_normalize: whether weights are divided by their mean over the batch: the mean over loss
      tokens at level "token", over responses at the other levels.
    reject: rules (statistic, low, high) or (statistic, high); a token is kept if it passes all
      rules. A statistic's name has two parts, as in "mean_k1". The second part says what is
      computed for each token: k1 = −log κ, k2 = (log κ)²/2, k3 = κ − 1 − log κ. The first part is
      "token" for each token's own value; or "sum", "mean" or "max" for the sum, mean or largest of
      a response's values. A rule for k1 states bounds of κ: exp(−statistic) must lie between low
      and high. A rule for k2 or k3 states an upper bound of the statistic.
    veto: a response that has a token with κ < veto is dropped; 0 drops no response.
    policies: 3: κ = π_prox/β, and the ratio of the loss is π/π_prox. 2: κ = π/β, and the loss keeps
      the ratio π/β; then a loss with a ratio allows rejection but no weights. A loss without a
      ratio always uses two policies.
  Source: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al. 2025)
    for truncation; IcePop in "Every Step Evolves" (arXiv:2510.18855); verl 0.9.1
    `rollout_corr_helper.py`, for rules and presets; in verl, bounds of k1 are bounds of 1/κ.
  """
  check_choice("importance", "level", level, LEVELS)
  check_choice("importance", "bound", bound, BOUNDS)
  check_between("importance", "low", low, low=0.0)
  check_between("importance", "high", high, low=low, open_low=True)
  check_choice("importance", "batch_normalize", batch_normalize, (True, False))
  check_between("importance", "veto", veto, low=0.0)
  check_choice("importance", "policies", policies, (2, 3))
  if not isinstance(reject, (tuple, list)):
    raise ValueError(
      f"importance: reject = {reject!r} is not a tuple of rules; for one rule write"
      " ((statistic, high),)"
    )
  for rule in reject:
    _check_rule(rule)
  if level == "none":
    fields = dict(bound=bound, low=low, high=high, batch_normalize=batch_normalize)
    _refuse_unread("level = 'none'", fields)
  elif bound == "truncate":
    _refuse_unread("bound = 'truncate'", dict(low=low))
  if level == "none" and not reject and not veto:
    raise ValueError(
      "importance: level = 'none' without reject and veto changes nothing; set reject or veto, or"
      " set config.correction = 'none'"
    )

  def weights_of(seen: Mismatch) -> tuple[Array, Array | bool, Array]:
    """The weights, before normalization and rejection, with kept and capped, see `Correction`."""
    if level == "none":
      one = jnp.ones_like(seen.log_weights)
      return one, True, one < 0
    u = {
      "token": lambda: seen.log_weights,
      "sequence": lambda: jnp.clip(
        sequence_log_ratios(seen.log_weights, seen.mask), -LOG_BOUND, LOG_BOUND
      ),
      "geometric": lambda: mean_log_ratios(seen.log_weights, seen.mask),
    }[level]()
    kappa = jnp.exp(u)
    inside = (kappa >= low) & (kappa <= high)
    if bound == "mask":
      return kappa, inside, jnp.zeros_like(inside)
    bounded = jnp.clip(kappa, low if bound == "clip" else 0.0, high)
    return bounded, True, bounded != kappa

  def batch_mean(seen: Mismatch) -> Array:
    weights, kept, _ = weights_of(seen)
    weights = jnp.where(kept, weights, 0.0)
    if level == "token":
      mean = masked_mean(weights, seen.mask)
    else:
      mean = masked_mean(weights, masked_count(seen.mask, axis=-1)[..., None])
    return jnp.where(mean > 0, mean, 1.0)

  def apply(seen: Mismatch, mean: Array | None) -> tuple[Array, Array | bool, Array]:
    weights, kept, capped = weights_of(seen)
    if mean is not None:
      weights = weights / mean
    for rule in reject:
      kept = kept & _passes(rule, seen)
    if veto:
      kappa = jnp.exp(seen.log_weights)
      kept = kept & ~jnp.any((kappa < veto) & (seen.mask > 0), axis=-1, keepdims=True)
    return weights, kept, capped

  return Correction(
    apply,
    statistics=batch_mean if batch_normalize else None,
    weighs=level != "none",
    policies=policies,
  )


def _passes(rule: Rule, seen: Mismatch) -> Array:
  """Whether a rule keeps each token or response, bool[P, G, T] or bool[P, G, 1]."""
  over, divergence = rule[0].split("_")
  # Only the difference log κ of two log-probabilities counts, so one of them may be 0.
  of_tokens = _DIVERGENCES[divergence](
    jnp.zeros_like(seen.log_weights), seen.log_weights, seen.mask
  )
  statistic = _OVER[over](of_tokens, seen.mask)
  if divergence == "k1":
    low, high = (math.log(bound) if bound else -math.inf for bound in rule[1:])
    return (-statistic >= low) & (-statistic <= high)
  return statistic <= rule[1]


def _refuse_unread(reason: str, fields: Mapping[str, object]) -> None:
  """Raises ValueError if an option of `importance` without effect is set.

  Args:
    reason: the setting that leaves `fields` without effect, such as "level = 'none'".
    fields: name → value of the options that have no effect.
  """
  for name, value in fields.items():
    if value != inspect.signature(importance).parameters[name].default:
      raise ValueError(
        f"importance: {name} = {value!r} has no effect with {reason}; leave one of them out"
      )


def _check_rule(rule: Rule) -> None:
  """Raises ValueError unless `rule` is a valid rule of `importance`."""
  names = [f"{over}_{divergence}" for over in _OVER for divergence in _DIVERGENCES]
  name = rule[0] if isinstance(rule, tuple) and rule else None
  if name not in names:
    raise ValueError(
      f"importance: reject contains {rule!r}, which is not a rule; write (statistic, low, high) if"
      " the statistic's name ends in k1, and (statistic, high) if it ends in k2 or k3; the"
      f" statistics are {', '.join(names)}"
    )
  of_kappa = name.endswith("k1")
  if len(rule) != (3 if of_kappa else 2):
    form = "(statistic, low, high), with bounds of κ" if of_kappa else "(statistic, high)"
    raise ValueError(f"importance: the rule {rule!r} of reject has the wrong length; write {form}")
  owner = f"importance: reject {name!r}"
  if of_kappa:
    check_between(owner, "low", rule[1], low=0.0)
  check_between(owner, "high", rule[-1], low=rule[1] if of_kappa else 0.0, open_low=True)


# --- what the papers and peers name ---------------------------------------------------------------

_WEIGHTS = ("none", "token", "sequence")
_TRUNCATION = 2.0


def _rejection(
  owner: str, rule: Rule, *, weight: str, truncation: float, policies: int = 3
) -> Correction:
  """A correction that rejects by one rule, and weights kept tokens by min(κ, truncation) or 1."""
  check_choice(owner, "weight", weight, _WEIGHTS)
  check_between(owner, "truncation", truncation, low=0.0, open_low=True)
  if weight == "none" and truncation != _TRUNCATION:
    raise ValueError(
      f"{owner}: truncation = {truncation} has no effect with weight = 'none'; leave out"
      " truncation, or set weight to 'token' or 'sequence'"
    )
  return importance(level=weight, high=truncation, reject=(rule,), policies=policies)


def tis(*, level: str = "token", high: float = 2.0) -> Correction:
  """Truncated importance sampling: multiplies the loss by min(κ, high).

  Args:
    level: "token", "sequence" or "geometric"; `importance` explains the levels and κ.
    high: above 0.
  Source: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al.
    2025).
  """
  check_choice("tis", "level", level, LEVELS[:3])
  return importance(level=level, high=high)


def mis(*, level: str = "sequence", low: float = 0.0, high: float = 3.0) -> Correction:
  """Masked importance sampling: multiplies the loss by κ where low ≤ κ ≤ high, else by 0.

  Args:
    level: "token", "sequence" or "geometric"; `importance` explains the levels and κ.
    low, high: bounds of κ, 0 ≤ low < high; the defaults are TRL's.
  Source: "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch" (Liu et al. 2025).
  """
  check_choice("mis", "level", level, LEVELS[:3])
  return importance(level=level, bound="mask", low=low, high=high)


def icepop(*, low: float = 0.5, high: float = 5.0) -> Correction:
  """IcePop: multiplies a token's loss by κ where low ≤ κ ≤ high, else by 0.

  Args:
    low, high: bounds of κ, 0 ≤ low < high; for κ see `importance`.
  Source: "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model"
    (arXiv:2510.18855).
  """
  return importance(bound="mask", low=low, high=high)


def sequence_rejection(
  *, low: float = 0.5, high: float = 2.0, weight: str = "sequence", truncation: float = _TRUNCATION
) -> Correction:
  """Drops responses with Π κ outside [low, high]; kept responses get a truncated weight.

  Args:
    low, high: bounds of Π κ, 0 ≤ low < high; for κ see `importance`.
    weight: the level of the weight min(κ, truncation): "token" or "sequence"; "none": no weight.
    truncation: above 0.
  Source: verl 0.9.1, `decoupled_seq_is_rs`.
  """
  rule = ("sum_k1", low, high)
  return _rejection("sequence_rejection", rule, weight=weight, truncation=truncation)


def geometric_rejection(
  *,
  low: float = 1 / 1.001,
  high: float = 1 / 0.999,
  weight: str = "none",
  truncation: float = _TRUNCATION,
  policies: int = 3,
) -> Correction:
  """Drops responses whose geometric mean of κ lies outside [low, high].

  Args:
    low, high: bounds of exp(mean log κ), 0 ≤ low < high; for κ see `importance`. verl's bounds,
      0.999 and 1.001, apply to 1/κ.
    weight: the level of the weight min(κ, truncation): "token" or "sequence"; "none": no weight.
    truncation: above 0.
    policies: 3 or 2, see `importance`.
  Source: presets of verl 0.9.1: `decoupled_geo_rs`, also with the endings `_token_tis` and
    `_seq_tis`, and `bypass_ppo_clip_geo_rs`.
  """
  rule = ("mean_k1", low, high)
  return _rejection(
    "geometric_rejection", rule, weight=weight, truncation=truncation, policies=policies
  )


def k3_rejection(
  *, high: float = 0.01, weight: str = "none", truncation: float = _TRUNCATION, policies: int = 3
) -> Correction:
  """Drops responses in which the mean of k3 = κ − 1 − log κ is above `high` nats per token.

  Args:
    high: above 0; for κ see `importance`.
    weight: the level of the weight min(κ, truncation): "token" or "sequence"; "none": no weight.
    truncation: above 0.
    policies: 3 or 2, see `importance`.
  Source: presets of verl 0.9.1: `decoupled_k3_rs`, also with the endings `_token_tis` and
    `_seq_tis`, and `bypass_ppo_clip_k3_rs`.
  """
  rule = ("mean_k3", high)
  return _rejection("k3_rejection", rule, weight=weight, truncation=truncation, policies=policies)
