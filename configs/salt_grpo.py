"""SALT on GRPO: full weight on directions that the batch's gradients share, less on the residual.

Source: "SALT: When More Rollouts Don't Help in Group-Based Policy Optimization and How to Make Them
Matter" (arXiv:2606.05800) and the authors' code. As in that code, the rank k of the shared subspace
is ρ_s = 1 times the Gram matrix's participation ratio, with 1 ≤ k ≤ 64. The residual has a weight
α, with 0 ≤ α ≤ 1, also as in that code. The Gram matrix is computed exactly from the output head's
gradients of all 512 rollouts of the batch; the paper uses a mini-batch. Differs from
configs/grpo.py in the reweighting alone.

Ablations: a fixed α is `--config.reweighting="salt(alpha_min=0.5, alpha_max=0.5)"`, a fixed k sets
`min_rank` and `max_rank` to the same number; others are `salt(positive_part=False)`,
`channels='shared'`, `channels='residual'`, `random_subspace=True` and `scope='group'`. An estimate
of the Gram matrix is `--config.gram=sketch`. The estimate is cheap with the wide head of a
large model, but not with this small head. configs/salt_grpo_as_released.py computes what the
authors' public code appears to compute.

Expected here, after 64 updates: see experiments/recipes/README.md. With answers of four bytes the
effective number of rollouts n_eff is above 1. So α, which is 1 − n_eff clipped to [0, 1], is 0, and
SALT learns less than GRPO (experiments/salt_geometry/README.md).

  python -m rlvr_jax.main --config=configs/salt_grpo.py --workdir=runs/salt_grpo

Other fields are as in configs/grpo.py. Card: docs/methods/salt.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import grpo


def get_config() -> ConfigDict:
  c = grpo.get_config()
  c.reweighting = "salt"
  return c
