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
  *("FADE", "success-heavy", "failure-heavy", "grpo_mean"),
  *("tight, μ = 96", "suffix, μ = 96"),
  "all four",
)
DECISIVE = {label: CLAIMS[label] for label in _DECISIVE}
FURTHER = {label: fields for label, fields in CLAIMS.items() if label not in DECISIVE}
ABLATIONS = {label: fields for label, fields in _ALL.items() if label not in CLAIMS}
IN_ORDER = runs(DECISIVE) + p3o_mismatch.FIRST + runs(FURTHER) + runs(ABLATIONS)


def get_sweep():
  """Runs without committed results, so that any machine can continue the sweep."""
  done = committed_runs()
  return [run for run in IN_ORDER if (run["label"], run["seed"]) not in done]
