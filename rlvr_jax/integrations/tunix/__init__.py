"""P3O, SALT, FADE and μ-GRPO's loss for the GRPO learner of google-tunix; see docs/tunix.md.

Importing this package registers three policy losses with Tunix, `rlvr_jax.p3o`, `rlvr_jax.mu_grpo`
and `rlvr_jax.salt`. Register losses with other hyper-parameters by Tunix's own decorator:

    register_policy_loss_fn("p3o_cap_only")(policy_loss(losses.p3o(kl_term=False)))

Axes are as in `rlvr_jax.types`; Tunix's arrays have B = P·G rollouts, ordered by group.
"""

try:
  from tunix.rl import algo_core, function_registry
except ImportError as error:
  raise ImportError(
    "rlvr_jax.integrations.tunix needs google-tunix 0.1.7 or newer; install it with:"
    ' pip install "rlvr_jax[tunix]"'
  ) from error

from rlvr_jax import losses as _losses
from rlvr_jax.integrations.tunix.fade import Fade as Fade
from rlvr_jax.integrations.tunix.fade import policy_entropy as policy_entropy
from rlvr_jax.integrations.tunix.policy import policy_loss as policy_loss
from rlvr_jax.integrations.tunix.policy import train_batch as train_batch
from rlvr_jax.integrations.tunix.salt import salt_coefficients as salt_coefficients
from rlvr_jax.integrations.tunix.salt import salt_loss as salt_loss
from rlvr_jax.integrations.tunix.salt import split_head as split_head
from rlvr_jax.ops.veto import negative_advantage_veto as _veto

_MU_GRPO = policy_loss(_losses.ppo_clip(epsilon_low=1.0, epsilon_high=4.0), negative_veto=_veto())
for _name, _loss in {
  "p3o": policy_loss(_losses.p3o()),
  "mu_grpo": _MU_GRPO,
  "salt": salt_loss(algo_core.grpo_loss_fn),
}.items():
  function_registry.register_policy_loss_fn(f"rlvr_jax.{_name}")(_loss)

__all__ = [
  "Fade",
  "policy_entropy",
  "policy_loss",
  "salt_coefficients",
  "salt_loss",
  "split_head",
  "train_batch",
]
