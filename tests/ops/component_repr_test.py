"""A component prints as the call that makes it."""

import functools

import pytest

from rlvr_jax import advantages, geometry, losses, reweighting
from rlvr_jax.advantages import stateless
from rlvr_jax.losses import Loss

CALLS = [
  (advantages, "grpo(epsilon=0.5)"),
  (advantages, "grpo_mean()"),
  (advantages, "pass_at_k(k=3, form='plug_in')"),
  (advantages, "power_asym(alpha=3.0, delta=0.2)"),
  (losses, "p3o(ess='batch', ess_scope=16, cap='none', kl_term=False)"),
  (losses, "ppo_clip(epsilon_low=0.1, epsilon_high=0.3, dual_clip=None)"),
  (geometry, "sketch(copies=2, hidden_size=8, vocabulary_size=8, seed=1)"),
]


@pytest.mark.parametrize(("package", "call"), CALLS, ids=[call for _, call in CALLS])
def test_it_is_the_call_with_every_hyper_parameter(package, call):
  assert repr(eval(call, vars(package))) == call


def test_hyper_parameters_of_a_partial_function_and_of_a_state():
  assert "max_rank=3," in repr(reweighting.salt(max_rank=3, scope="group"))
  shown = repr(advantages.fade(schedule="logarithmic", decay_updates=7))
  assert shown.startswith("fade(alpha_max=3.0, ") and shown.endswith("decay_updates=7)")


def halved(*, share, half=True):
  scale = share / 2 if half else share
  return stateless(lambda batch: scale * batch.rewards)


def test_what_no_function_keeps_is_not_made_up():
  assert repr(halved(share=0.4)) == "halved(share=…, half=…)"
  by_hand = Loss(functools.partial(max, key=None), needs_proximal=True)
  assert repr(by_hand) == (
    "Loss(statistics=None, needs_proximal=True, of_responses=False, ratio_to='sampler')"
  )
