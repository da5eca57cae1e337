"""GRPO teaches a small pretrained language model to add and subtract.

The policy is SmolLM2-135M-Instruct, dequantized from 4 bits. Asked in chat "What is 23 + 8?", with
the system message "Answer with the number only.", it writes whole sentences, and is right one time
in 25. Its only feedback is whether the last number of a response is right. Held-out problems have
numbers that no training problem has.

  pip install "rlvr_jax[gguf,hf,plot]"
  python -m rlvr_jax.models.pretrained
  python -m rlvr_jax.main --config=configs/pretrained.py --workdir=runs/pretrained

In a checkout, `make pretrained` runs all three commands. Hardware: 2 CPU cores. Results, time,
memory and controls: experiments/pretrained/README.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import base


def get_config() -> ConfigDict:
  c = base.get_config()
  c.num_updates = 40

  c.model.preset = ""
  c.model.checkpoint = "~/.cache/rlvr_jax/pretrained/SmolLM2-135M-Instruct"
  c.tokenizer = "checkpoint"
  c.task = dict(name="sums", kwargs=dict())
  c.prompts.format = "chat"
  c.prompts.system = "Answer with the number only."
  c.max_prompt_length = 48  # tokens; a question takes 30
  c.max_response_length = 16
  c.warm_start.num_steps = 0

  c.batch.prompts, c.batch.group_size = 8, 8
  c.learning_rate = "constant(peak=1e-5)"

  c.evaluation.every = 10
  c.evaluation.batch_prompts = 16
  c.checkpoint.every = 20
  return c
