"""Accuracies such as pass@k, learning curves, comparisons of runs, and plots of geometry."""

from rlvr_jax.evaluate.pass_at_k import (
  bootstrap_interval,
  interval_over_problems,
  majority_at_n,
  mean_at_n,
  pass_at_k,
  summarize,
  wilson_interval,
)

__all__ = [
  "bootstrap_interval",
  "interval_over_problems",
  "majority_at_n",
  "mean_at_n",
  "pass_at_k",
  "summarize",
  "wilson_interval",
]
