"""The four methods on their four axes, one at a time and all at once; see README.md."""

from experiments.fade.testbed import FADE
from experiments.mu_grpo.testbed import MU, stages, veto
from experiments.p3o_mismatch.testbed import P3O
from experiments.salt_geometry.testbed import SALT
from experiments.testbed.arms import BASE, runs

STAGES = {**stages(MU), **veto("suffix")}
SINGLE = {  # labels of the papers' own experiments, so that runs are shared
  "FADE": FADE,
  "SALT, sampled": SALT,
  "P3O": P3O,
  f"suffix, μ = {MU}": STAGES,
}


def combine(parts):
  """Combines fields of several methods; under the veto, P3O's loss replaces the relaxed clip."""
  fields = {}
  for label in (f"suffix, μ = {MU}", "FADE", "SALT, sampled", "P3O"):
    fields |= SINGLE[label] if label in parts else {}
  return fields


CLAIMS = {**BASE, **SINGLE, "all four": combine(SINGLE)}
ABLATIONS = {
  f"all but {label.partition(',')[0] if fields != STAGES else 'stages'}": combine(
    [other for other in SINGLE if other != label]
  )
  for label, fields in SINGLE.items()
}


def get_sweep():
  return runs(CLAIMS) + runs(ABLATIONS)
