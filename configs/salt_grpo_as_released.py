"""SALT on GRPO as the authors' public code appears to compute it, in two ways unlike the paper.

Source: the code released with "SALT: When More Rollouts Don't Help in Group-Based Policy
Optimization and How to Make Them Matter" (arXiv:2606.05800). Two things differ from the paper's
definition, which configs/salt_grpo.py implements. Both are inferred from reading that code; nobody
has measured them on a GPU, and they need not be what the authors intended.

1. The feature has no softmax term: g_i = Σ_t h ⊗ (−onehot(y)), not Σ_t h ⊗ (p − onehot(y)), with
   the hidden state h, the token y and the policy's probabilities p at position t. The code computes
   the logits of all samples in one graph, retains it, and runs one backward pass per sample. Where
   flash-attn is installed, the cross-entropy's backward pass overwrites the logits in place, by
   default. The first sample's pass leaves 0 in place of the other samples' logits, so that
   p = exp(0 − log-normalizer) ≈ 0 from the second sample on. tests/geometry/streaming_test.py
   transcribes the sequence into NumPy: all features but the first are those of `feature='sampled'`.
   The first sample's exact feature is not imitated here.
2. A Gram matrix covers the rollouts of one GPU's micro-batch, not of a mini-batch. In that code the
   size of a micro-batch is a setting, and a micro-batch may mix prompts; here a Gram matrix covers
   one group of 8 rollouts.

  python -m rlvr_jax.main --config=configs/salt_grpo_as_released.py \
    --workdir=runs/salt_grpo_as_released

docs/methods/salt.md compares the paper's and this definition of SALT, and their results.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import salt_grpo


def get_config() -> ConfigDict:
  c = salt_grpo.get_config()
  c.gram = "streaming(feature='sampled')"
  c.reweighting = "salt(scope=8)"
  return c
