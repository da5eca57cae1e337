"""A small mixture of experts whose sampler has the weights in float8, for three methods.

The quickstart's sums of three digits, with a policy of 0.98 M parameters: 16 experts, of which a
token takes two, in each of three layers. Policy and sampler compute in bfloat16, and all rollouts
come from a float8 copy of the weights: routers choose by activations that both round differently.
The methods differ only in the loss and its aggregation; none has a KL to a reference.

  --config=experiments/mixtures/config.py:METHOD

METHOD is grpo (ppo_clip), gspo or p3o.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart
from rlvr_jax.ops.checks import check_choice

METHODS = {
  "grpo": ("ppo_clip(epsilon_low=0.2, epsilon_high=0.2)", "token_mean"),
  "gspo": ("gspo", "sequence_mean"),
  "p3o": ("p3o", "token_mean"),
}


def get_config(method: str = "gspo") -> ConfigDict:
  check_choice("get_config", "method", method, tuple(METHODS))
  c = quickstart.get_config()
  c.loss, c.aggregation = METHODS[method]
  c.num_updates = 80

  with c.unlocked():
    c.model.overrides = dict(
      width=64,
      num_layers=3,
      unroll_layers=3,
      num_experts=16,
      experts_per_token=2,
      expert_width=96,
      normalized_expert_weights=True,
      compute_dtype="bfloat16",
    )
  c.model.record_routes = True
  c.sources.quantized.fraction = 1.0
  c.sources.quantized.format = "float8_e4m3fn"

  c.warm_start.num_steps = 250
  c.warm_start.learning_rate = "constant(peak=3e-3)"
  c.batch.prompts = 32
  c.learning_rate = "constant(peak=1e-3)"

  c.evaluation.every = 20
  c.checkpoint.every = 1000
  c.logging.print_every = 20
  c.logging.rollouts_every = 1000
  return c
