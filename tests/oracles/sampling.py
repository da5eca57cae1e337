"""Rollouts of a batch of prompts by an engine, for tests that need no stream of requests."""

from rlvr_jax.rollouts.serve import make_requests, serve, stack_groups


def sample(engine, trained, frozen, prompts, key, group_size):
  """The `Rollouts` of one batch of prompts; all of it NumPy but the parameters."""
  asked = make_requests(prompts, key, group_size, owner=None)
  served = serve(engine, engine.load(trained, frozen), asked)
  groups = {group.prompt_index: group for groups in served for group in groups}
  return stack_groups([groups[request.prompt_index] for request in asked])
