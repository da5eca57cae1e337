"""A run's folder made by hand: few numbers that a test knows, and texts that attack a page."""

import json

import numpy as np

from rlvr_jax.configs import base
from rlvr_jax.rollouts.group import Group
from rlvr_jax.rollouts.store import RolloutStore

ATTACK = "</script><script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'>"
TURNED = "right \u202eto left"
EURO = "€"  # three tokens of bytes
COMPLETIONS = [[f"7{ATTACK}", EURO], [TURNED, "12"]]
STOP = 257
P = G = 2


def config(**fields):
  """A configuration of 4 updates on 2 prompts of 2 rollouts, one refresh for two batches."""
  c = base.get_config()
  c.num_updates, c.schedule = 4, "updates_per_refresh(batches=2)"
  c.batch.prompts, c.batch.group_size = P, G
  c.update_from_flattened_dict(fields)
  return c


def sample(prompt, completion, *, correct, version=0, **more):
  """The record of a rollout; its stop token is its last one."""
  return {
    "version": version,
    "prompt": prompt,
    "completion": completion,
    "answer": "12",
    "outcome": "correct" if correct else "wrong",
    "extracted": "12",
    "reward": float(correct),
    "shaped_reward": float(correct),
    "tokens": len(completion.encode()) + 1,
    "stopped": True,
  } | more


def group(index, completions, corrects, *, version=0, prompt="3 * 4 =", **arrays):
  """A group with log-probabilities −0.25, −0.5, …, of bytes as tokens."""
  ids = [[*text.encode(), STOP] for text in completions]
  T = max(map(len, ids))
  tokens = np.array([row + [256] * (T - len(row)) for row in ids], np.int32)
  mask = np.array([[1.0] * len(row) + [0.0] * (T - len(row)) for row in ids], np.float32)
  rewards = np.array(corrects, np.float32)
  found = {
    "prompts.tokens": np.frombuffer(prompt.encode(), np.uint8).astype(np.int32),
    "prompts.lengths": np.array(len(prompt), np.int32),
    "tokens": tokens,
    "mask": mask,
    "behavior_logprobs": (-0.25 * (1 + np.arange(T)) * mask).astype(np.float32),
    "rewards": rewards,
    "correct": rewards,
    "valid": np.ones(len(ids), bool),
  }
  samples = [
    sample(prompt, text, correct=bool(correct), version=version)
    for text, correct in zip(completions, corrects, strict=True)
  ]
  return Group(0, index, 0, {version: "f"}, found | arrays, samples, {})


def batch(version=0):
  """Two groups: one with both outcomes, and one without a correct answer."""
  return [
    group(0, COMPLETIONS[0], [1, 0], version=version),
    group(1, COMPLETIONS[1], [0, 0], version=version),
  ]


def write_run(folder, *, batches=None, measured=(), records=None, **fields):
  """Writes a run's folder; returns it.

  Args:
    batches: groups of each batch; None: four of `batch`.
    measured: (updates before it, Gram matrix, coefficients, rewards, and if any the lengths and
      arrays of tokens by name) of each measurement.
    records: of metrics.jsonl; None: of two updates and an evaluation.
    fields: of `config`, dotted names.
  """
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(config(**fields).to_json_best_effort())
  if batches is None:
    batches = [batch(version) for version in (0, 0, 2, 2)]
  with RolloutStore(folder / "rollouts", writable=True) as store:
    for number, groups in enumerate(batches):
      store.write(number, groups, {"sources": ["policy"]})
  if records is None:
    evaluation = {"eval/pass@1": 0.5, "eval/pass@1_low": 0.4, "eval/pass@1_high": 0.6}
    records = [
      {"step": 0, "phase": "eval", **evaluation, "time/evaluate_seconds": 2.0},
      {"step": 1, "phase": "train", "reward/mean": 0.25, "policy/entropy": 1.5},
      {"step": 2, "phase": "train", "reward/mean": 0.5, "time/generate_seconds": 1.0},
    ]
  lines = "".join(json.dumps(record) + "\n" for record in records)
  (folder / "metrics.jsonl").write_text(lines)
  for step, gram, coefficients, rewards, *more in measured:
    lengths, of_tokens = more or (np.ones(np.shape(rewards)), {})
    (folder / "geometry").mkdir(exist_ok=True)
    np.savez(
      folder / "geometry" / f"{step:06d}.npz",
      gram=np.asarray(gram, np.float32),
      coefficients=np.asarray(coefficients, np.float32),
      reweighted=np.asarray(coefficients, np.float32),
      rewards=np.asarray(rewards, np.float32),
      valid=np.ones(np.shape(rewards), bool),
      lengths=np.asarray(lengths, np.float32),
      **of_tokens,
    )
  return folder
