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
_FIRST = (  # one comparison of each paper, another clip, and all four methods at once
  *("GRPO", "SALT, sampled"),
  *("P3O", "GRPO, temperature 1.5, raw", "P3O, temperature 1.5, raw", "GRPO, ε = 0.6"),
  *("FADE", "success-heavy", "failure-heavy"),
  *("tight, μ = 96", "suffix, μ = 96"),
  "all four",
)
FIRST = {label: CLAIMS[label] for label in _FIRST}
REST = {label: fields for label, fields in _ALL.items() if label not in FIRST}
IN_ORDER = runs(FIRST) + p3o_mismatch.FIRST + runs(REST)


def get_sweep():
  """Runs without committed results, so that any machine can continue the sweep."""
  done = committed_runs()
  return [run for run in IN_ORDER if (run["label"], run["seed"]) not in done]
