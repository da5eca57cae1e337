"""The ground of all runs on a real language model: SmolLM2-135M-Instruct adds and subtracts.

  --config=experiments/language_model/config.py

Chat with numbers from 1 to 20, without a system message; the answer is marked as the last number of
a response of at most 24 tokens. The policy's own temperature is 0.5. 13 of the 20 numbers
are held out: 260 problems, none of whose numbers is trained on. README.md has the published model's
pass@1.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import pretrained

TEMPERATURE = 0.5


def get_config() -> ConfigDict:
  c = pretrained.get_config()
  c.num_updates = 60
  c.prompts.system = ""
  c.max_response_length = 24
  c.task.kwargs = dict(largest=20, held_out_numbers=13)
  c.policy_temperature = c.sampling.temperature = c.evaluation.sampling.temperature = TEMPERATURE
  c.evaluation.every = 20
  c.evaluation.batch_prompts = 65
  c.checkpoint.every = 50
  return c
