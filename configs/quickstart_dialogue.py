"""GRPO teaches a from-scratch policy to find a number by asking: "higher", "lower", found.

A 0.8 M-parameter transformer over bytes sees "1-31:" and guesses, "17"; the environment answers
">", "<", or that the number is found. A rollout is a dialogue of at most five turns; its reward is
1 if the number is found. The warm start shows guesses at random, so that the policy knows the form
and nothing of the game. The best play, bisection, finds any of 31 numbers in five turns.

  python -m rlvr_jax.main --config=configs/quickstart_dialogue.py --workdir=runs/dialogue

Hardware: 2 CPU cores. Time: 14 minutes on cores that others kept busy.
Expected held-out pass@1, start to end: 0.14 to 0.28 (seed 0), still rising; best play has 1.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import base


def get_config() -> ConfigDict:
  c = base.get_config()
  c.num_updates = 200
  c.task = dict(name="guess", kwargs=dict(low=1, high=31))
  c.environment.name = "guess(low=1, high=31)"
  c.environment.max_turns = 5
  c.environment.processes = 1
  c.max_prompt_length = 24  # bytes; of a demonstration with its history
  c.max_response_length = 24  # bytes of all turns: five guesses, their ends, four replies
  c.warm_start.num_steps = 100
  c.batch.prompts, c.batch.group_size = 32, 16
  c.sampling.slots = 128
  c.learning_rate = "linear(peak=3e-4)"
  c.evaluation.batch_prompts = 256
  c.checkpoint.every = 100
  c.logging.print_every = 10
  return c
