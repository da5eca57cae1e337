"""GRPO teaches a from-scratch policy to find a number by asking: "higher", "lower", found.

A 0.4 M-parameter transformer over bytes sees "1-15:" and guesses, say, "12"; the environment
answers ">", "<", or that the number is found. A rollout is a dialogue of at most four turns; its
reward is 1 if the number is found. The warm start shows random guesses, so that the policy knows
the form but not the game. The best play, bisection, finds any of 15 numbers in four turns.

  python -m rlvr_jax.main --config=configs/quickstart_dialogue.py --workdir=runs/dialogue

Hardware: 2 CPU cores. Time: about 2 minutes on quiet cores, 147 seconds of
processor time in all.
Expected held-out pass@1, start to end: 0.24 to 0.59 (seed 0). The best play has a pass@1 of 1; the
run prints how far below it the policy is. Seeds differ much: experiments/dialogues/README.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import base


def get_config() -> ConfigDict:
  c = base.get_config()
  c.num_updates = 120
  c.task = dict(name="guess", kwargs=dict(low=1, high=15, turns=4))
  c.environment.name = "guess(low=1, high=15)"
  c.environment.max_turns = 4
  c.environment.processes = 1
  c.max_prompt_length = 5  # bytes: "1-15:"
  c.max_response_length = 16  # bytes of all turns: four guesses, their ends, three replies
  c.model.overrides = dict(num_layers=2, unroll_layers=2)
  c.warm_start.num_steps = 100
  c.batch.prompts, c.batch.group_size = 32, 16
  c.sampling.slots = 128
  c.learning_rate = "linear(peak=1e-3)"
  c.evaluation.every = 40
  c.evaluation.batch_prompts = 256
  c.checkpoint.every = 100
  c.logging.print_every = 10
  return c
