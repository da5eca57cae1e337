"""FADE and static estimators on the testbed; see README.md."""

from experiments.testbed.arms import BASE, GRPO, TOUR, runs

FADE = {"advantage": "fade"}
PASS_AT_K = {"advantage": "pass_at_k"}
GRPO_MEAN = {"advantage": "grpo_mean"}  # r − r̄: `asym` with δ = 1
SUCCESS_HEAVY = {"advantage": "asym(delta=4.0)"}  # m_S / m_F = 4
FAILURE_HEAVY = {"advantage": "asym(delta=0.25)"}  # m_S / m_F = 1/4


def with_target(nats, more=""):
  """FADE with an absolute H*; the relative one, half of the initial 0.06 nats, leaves δ at 1."""
  return {"advantage": f"fade(target_is_relative=False, target_entropy={nats}{more})"}


CLAIMS = {
  **BASE,
  "FADE": FADE,
  "pass@4 training": PASS_AT_K,
  "success-heavy": SUCCESS_HEAVY,
  "failure-heavy": FAILURE_HEAVY,
  "FADE, H* = 0.5": with_target(0.5),
  "grpo_mean": GRPO_MEAN,
}
ON_TOUR = {
  f"tour: {label}": {**TOUR, **fields}
  for label, fields in {
    GRPO: {},
    "FADE": FADE,
    "FADE, H* = 1.0": with_target(1.0),
    "pass@4 training": PASS_AT_K,
    "success-heavy": SUCCESS_HEAVY,
    "failure-heavy": FAILURE_HEAVY,
  }.items()
}
ABLATIONS = {
  "clip-higher": {"loss": "ppo_clip(epsilon_low=0.2, epsilon_high=0.28)"},
  "FADE, α alone": {"advantage": "fade(delta_min=1.0)"},
  "FADE, δ alone, H* = 0.5": with_target(0.5, ", alpha_max=1.0"),
  "FADE, H* = 0.25": with_target(0.25),
  "FADE, H* = 1.0": with_target(1.0),
  "FADE, by entropy": {"advantage": "fade(schedule='entropy')"},
  "FADE, logarithmic": {"advantage": "fade(schedule='logarithmic', decay_updates=192)"},
  "successes alone": {"advantage": "reinforce"},
  "failures mostly, λ = 0.1": {"advantage": "weighted_reinforce"},
  "entropy bonus 0.05": {"entropy_bonus": 0.05},
  **ON_TOUR,
}


def get_sweep():
  return runs(CLAIMS) + runs(ABLATIONS)
