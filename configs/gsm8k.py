"""GRPO on GSM8K, from scratch over bytes: a test of the pipeline, not of the score.

The task is grade-school word problems (arXiv 2110.14168) as published: 7473 for training, 1319 held
out, graded by the final number. The policy is a 0.8 M-parameter transformer that has read 128
demonstrations and nothing else, so that nearly all of its answers are wrong and most groups have no
signal. The recipe shows that real questions pass through the whole pipeline. For a score, start
from a pretrained policy.

  python -m rlvr_jax.main --config=configs/gsm8k.py --workdir=runs/gsm8k \\
    --config.task.kwargs.data_dir=DIR

DIR holds train.jsonl and test.jsonl from github.com/openai/grade-school-math.

Hardware: 2 CPU cores. Expected held-out pass@1: near zero.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import base


def get_config() -> ConfigDict:
  c = base.get_config()
  c.num_updates = 20

  c.task = dict(
    name="published",
    kwargs=dict(
      dataset="gsm8k",
      data_dir="",  # required
      split="train",  # "": nothing to train on, for --mode=eval
      prepared_dir="~/.cache/rlvr_jax/published",  # for records prepared from them
      warm_start_size=128,
      held_out_size=64,
      prompt="{question}\n",
    ),
  )
  # In bytes. The longest question has 991; of the first 128 solutions the longest has 750, the
  # median 221.
  c.max_prompt_length = 992
  c.max_response_length = 768

  c.batch.prompts, c.batch.group_size = 4, 8
  c.warm_start.num_steps = 20
  c.warm_start.batch_size = 8

  c.evaluation.every = 10
  c.evaluation.num_samples = 1
  c.evaluation.ks = (1,)
  c.evaluation.batch_prompts = 16
  c.checkpoint.every = 1
  c.logging.rollouts_every = 1
  return c
