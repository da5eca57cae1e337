"""μ-GRPO's loss: a relaxed interval, and a veto on what the policy would no longer have written.

Source: arXiv 2605.17570. For now the schedule is 16 updates per refresh; the paper's stages, four
per run with all rollouts of a stage drawn at its start, come with the staleness schedules.
**open**: the veto's threshold; sweep `--config.veto.threshold` over 1e-4, 1e-3, 1e-2, 1e-1.

  python -m rlvr_jax.main --config=configs/mu_grpo.py --workdir=runs/mu_grpo

What is not set below is the quickstart's. Card: docs/methods/mu_grpo.md.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = dict(
    name="ppo_clip",
    kwargs=dict(epsilon_low=1.0, epsilon_high=4.0),  # the interval [0, 5]
    aggregation="token_mean",
  )
  c.veto.enabled = True
  c.schedule.batches_per_refresh = 16
  return c
