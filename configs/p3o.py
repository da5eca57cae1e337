"""P3O: the batch's effective sample size caps the weights and scales the KL to the behavior policy.

Source: "Trust the Batch, On- or Off-Policy: Adaptive Policy Optimization for RL Post-Training"
(arXiv:2605.12380) and the authors' code. There is no clip range and no coefficient to choose. Its
ablations are `--config.loss="p3o(kl_term=False)"`, `p3o(cap='none')`, `p3o(cap='inverse_ess')`,
`p3o(ess='sequence')` and `p3o(ess='one')`; `p3o(ess_scope=16)` computes the effective sample size
in blocks of 16 rollouts, as the authors' code does.

  python -m rlvr_jax.main --config=configs/p3o.py --workdir=runs/p3o

Other fields are as in configs/quickstart.py. Card: docs/methods/p3o.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "p3o"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
