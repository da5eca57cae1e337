"""All runs of the experiments on the testbed, in the order of ORDER.md: one sweep, one workdir."""

from experiments.fade import testbed as fade
from experiments.mu_grpo import testbed as mu_grpo
from experiments.p3o_mismatch import testbed as p3o_mismatch
from experiments.salt_geometry import testbed as salt_geometry
from experiments.testbed.arms import committed_runs, merge_arms, runs
from experiments.together import testbed as together

EXPERIMENTS = (salt_geometry, p3o_mismatch, fade, mu_grpo, together)
CLAIMS = merge_arms(experiment.CLAIMS for experiment in EXPERIMENTS)
_ALL = merge_arms([CLAIMS, *(experiment.ABLATIONS for experiment in EXPERIMENTS)])
_DECISIVE = (  # one comparison of each paper, which runs first, with five seeds
  *("GRPO", "SALT, sampled"),
  *("GRPO, temperature 1.5, raw", "P3O, temperature 1.5, raw"),
  *("FADE", "success-heavy", "failure-heavy"),
  *("tight, μ = 96", "suffix, μ = 96"),
  "all four",
)
_ELSEWHERE = (  # what they were for has been decided on other tasks since, docs/deciding.py
  *("SALT, score", "GRPO, G = 32", "SALT, sampled, G = 32", "entropy bonus 0.05"),
  *("GRPO, half from another policy", "P3O, half from another policy"),
  *("GRPO, lag 8", "P3O, lag 8", "GRPO, on-policy", "P3O, on-policy"),
  *("grpo_mean", "pass@4 training", "FADE, H* = 0.5"),
  *("relaxed, μ = 96", "trigger, μ = 96"),
)
_ADDED = ("P3O, temperature 1.2, raw", "P3O, two anchors, temperature 1.2, raw")  # P7's
DECISIVE = {label: CLAIMS[label] for label in _DECISIVE}
FURTHER = {
  label: fields
  for label, fields in _ALL.items()
  if label in _ADDED or (label in CLAIMS and label not in (*_DECISIVE, *_ELSEWHERE))
}
NEEDED = {**DECISIVE, **FURTHER}  # of claims that these runs decide
REST = {label: fields for label, fields in _ALL.items() if label not in NEEDED}
IN_ORDER = runs(DECISIVE) + p3o_mismatch.FIRST + runs(FURTHER) + runs(REST)


def get_sweep():
  """Runs without committed results, so that any machine can continue the sweep."""
  done = committed_runs()
  return [run for run in IN_ORDER if (run["label"], run["seed"]) not in done]
