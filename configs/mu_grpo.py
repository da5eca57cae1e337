"""μ-GRPO: four stages of stale rollouts, a relaxed clip interval, and a veto on stale tokens.

Source: "How Off-Policy Can GRPO Be? Mu-GRPO for Efficient LLM Reinforcement Learning"
(arXiv:2605.17570). At the start of each stage the policy is frozen and samples all rollouts of the
stage. So the lag grows from 0 to μ − 1 within the stage of μ updates. The paper has 4096 updates
and μ = 1024. **open**: the veto's threshold κ; experiments/mu_grpo sweeps it.

  python -m rlvr_jax.main --config=configs/mu_grpo.py --workdir=runs/mu_grpo

Other fields are as in configs/quickstart.py: 300 updates, so that μ = 75. A stage's rollouts are in
WORKDIR/rollouts as soon as they are graded. Card: docs/methods/mu_grpo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "ppo_clip(epsilon_low=1.0, epsilon_high=4.0)"  # the interval [0, 5]
  c.veto.enabled = True
  c.schedule = "stages"
  return c
