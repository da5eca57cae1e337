"""Stages on the testbed: clip interval, the veto's scope and κ, μ; see TESTBED.md."""

from experiments.testbed.arms import BASE, runs
from experiments.testbed.config import UPDATES

MU = 96
THRESHOLD = 0.1  # κ; experiments/mu_grpo found the recipe's 0.01 nearly idle on another task
TIGHT = {"loss": "ppo_clip(epsilon_low=0.2, epsilon_high=0.2)"}
RELAXED = {"loss": "ppo_clip(epsilon_low=1.0, epsilon_high=4.0)"}  # the interval [0, 5]
HIGHER = {"learning_rate": "constant(peak=1e-3)"}


def stages(mu):
  return {"schedule": f"stages(count={UPDATES // mu})"}


def veto(scope, threshold=THRESHOLD, trigger="below"):
  settings = {"enabled": True, "scope": scope, "threshold": threshold, "trigger": trigger}
  return {**RELAXED, **{f"veto.{name}": value for name, value in settings.items()}}


ARMS = {"tight": TIGHT, "relaxed": RELAXED, "suffix": veto("suffix"), "trigger": veto("trigger")}
CLAIMS = {
  **BASE,
  **{f"{label}, μ = {MU}": {**stages(MU), **fields} for label, fields in ARMS.items()},
}
ABLATIONS = {
  **{
    f"{label}, μ = {MU}, learning rate 1e-3": {**stages(MU), **fields, **HIGHER}
    for label, fields in ARMS.items()
  },
  "GRPO, learning rate 1e-3": HIGHER,
  **{f"{label}, μ = 32": {**stages(32), **ARMS[label]} for label in ("tight", "relaxed", "suffix")},
  **{
    f"{scope.replace('_', ' ')}, μ = {MU}": {**stages(MU), **veto(scope)}
    for scope in ("trigger_and_suffix", "response")
  },
  **{f"suffix, κ = {x:g}, μ = {MU}": {**stages(MU), **veto("suffix", x)} for x in (0.01, 0.001)},
  f"suffix, trigger above 5, μ = {MU}": {**stages(MU), **veto("suffix", 5.0, "above")},
}


def get_sweep():
  return runs(CLAIMS) + runs(ABLATIONS)
