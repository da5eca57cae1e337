"""The four methods on their four axes, one at a time and all at once; see README.md."""

from experiments.fade.testbed import FADE
from experiments.mu_grpo.testbed import MU, stages, veto
from experiments.p3o_mismatch.testbed import P3O
from experiments.salt_geometry.testbed import SALT
from experiments.testbed.arms import BASE, runs

STAGES = {**stages(MU), **veto("suffix")}
SINGLE = {  # label as in the papers' own experiments, so that the runs are shared
  "FADE": FADE,
  "SALT, sampled": SALT,
  "P3O": P3O,
  f"suffix, μ = {MU}": STAGES,
}


def together(parts):
  """Fields of several methods together; P3O's loss replaces the relaxed clip, under the veto."""
  fields = {}
  for label in (f"suffix, μ = {MU}", "FADE", "SALT, sampled", "P3O"):
    fields |= SINGLE[label] if label in parts else {}
  return fields


CLAIMS = {**BASE, **SINGLE, "all four": together(SINGLE)}
ABLATIONS = {
  f"all but {label.partition(',')[0] if left_out != STAGES else 'stages'}": together(
    [other for other in SINGLE if other != label]
  )
  for label, left_out in SINGLE.items()
}


def get_sweep():
  return runs(CLAIMS) + runs(ABLATIONS)
