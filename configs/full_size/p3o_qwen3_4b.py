"""P3O at its paper's size: Qwen3-4B-Thinking-2507 on DeepScaleR, 64 problems per refresh.

Source: "Trust the Batch, On- or Off-Policy: Adaptive Policy Optimization for RL Post-Training"
(arXiv:2605.12380) and the settings in the authors' repository: 256 rollouts per refresh, 4 per
problem, 32 rollouts per update (8 updates); responses up to 2048 tokens, prompts up to 4096;
AdamW at 1e-5 with β 0.9 and 0.95, decay 0.01, gradients clipped at 0.5, warm-up over a tenth of the
run, then a cosine; 500 refreshes. No clip range, no coefficient.

  python -m rlvr_jax.main --config=configs/full_size/p3o_qwen3_4b.py \\
    --workdir=/mnt/rlvr_jax/runs/p3o \\
    --config.model.checkpoint=gs://BUCKET/Qwen3-4B-Thinking-2507 \\
    --config.task.kwargs.data_dir=gs://BUCKET/deepscaler \\
    --config.task.kwargs.held_out_data_dir=gs://BUCKET/aime_2024

The 8 problems of an update split over 8 groups of chips, so `tensor` is 2 on 16 chips; on v5e:8x8,
add --config.mesh.tensor=8. Rollouts from an 8-bit copy: --config.sources.quantized.fraction=1.0.
Card: docs/methods/p3o.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs.full_size import base


def get_config() -> ConfigDict:
  c = base.get_config()
  c.num_updates = 4000
  c.model.preset = "qwen3_4b"
  c.model.overrides.rope_theta = 5_000_000.0  # of the 2507 release
  c.task = dict(
    name="published",
    kwargs=dict(
      dataset="deepscaler",
      data_dir="",  # required
      split="train",  # "": nothing to train on, for --mode=eval
      held_out_dataset="aime_2024",
      held_out_data_dir="",  # required
    ),
  )
  c.max_prompt_length = 4096
  c.max_response_length = 2048
  c.mesh.tensor = 2
  c.batch.prompts, c.batch.group_size = 8, 4
  # Most prompts are far shorter than 4096: a row holds 150 tokens and their 4 rollouts of 2048.
  c.batch.tokens_per_micro_batch = c.batch.tokens_per_row = 9216
  c.schedule = "updates_per_refresh(batches=8)"
  c.loss = "p3o"
  c.optimizer = "adamw(b2=0.95, weight_decay=0.01)"
  c.learning_rate = "cosine(peak=1e-5, warmup=400)"
  c.max_gradient_norm = 0.5
  return c
