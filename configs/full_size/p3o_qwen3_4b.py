"""P3O at its paper's size: Qwen3-4B-Thinking-2507 on DeepScaleR, 256 problems per refresh.

Source: "Trust the Batch, On- or Off-Policy: Adaptive Policy Optimization for RL Post-Training"
(arXiv:2605.12380) and the settings that the authors' repository, FeynRL, has for this model. In
these settings, a refresh has 256 problems with 4 rollouts each, and one update per refresh trains
on all 1,024 rollouts. Responses have up to 2048 tokens, and prompts up to 4096. The optimizer is
AdamW at 1e-5 with β 0.9 and 0.95, decay 0.01, gradients clipped at 0.5, warm-up over a tenth of the
500 updates, then a cosine. The authors' settings use GRPO with a clip of 0.4; the loss here is P3O,
without clip range or coefficient. If the policy trains on its own rollouts, the effective
sample size e is near 1, and P3O equals REINFORCE up to rounding. P3O differs from REINFORCE with
other sources of rollouts or other schedules.

  python -m rlvr_jax.main --config=configs/full_size/p3o_qwen3_4b.py \\
    --workdir=/mnt/rlvr_jax/runs/p3o \\
    --config.model.checkpoint=gs://BUCKET/Qwen3-4B-Thinking-2507 \\
    --config.task.kwargs.data_dir=gs://BUCKET/deepscaler \\
    --config.task.kwargs.held_out_data_dir=gs://BUCKET/aime_2024

Settings tuned for a slice: p3o_qwen3_4b.py:v5p:2x2x4 and p3o_qwen3_4b.py:v5e:8x8. On v5e:8x8, half
of a refresh's rollouts are sampled at a time. To sample from an 8-bit copy of the policy:
--config.sources.quantized.fraction=1.0. To train on rollouts that are one update old:
--config.schedule="fixed_lag(lag=1)". Card: docs/methods/p3o.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs.full_size import base

SLICES = {  # for lognormal(mean=800, prompt=150)
  "v5p:2x2x4": {
    "mesh.data": 2,
    "mesh.fsdp": 4,
    "mesh.tensor": 2,
    "generation_mesh.data": 2,
    "generation_mesh.fsdp": 1,
    "generation_mesh.tensor": 8,
    "generation_mesh.same_devices": True,
    "sampling.slots": 1024,
    "model.overrides.remat": "dots",
    "compiler_options.training": base.FUSED_GATHERS,
  },
  "v5e:8x8": {
    "mesh.data": 4,
    "mesh.fsdp": 4,
    "mesh.tensor": 4,
    "sampling.slots": 512,
    "model.overrides.remat": "dots",
    "compiler_options.training": base.FUSED_GATHERS,
  },
}


def get_config(topology: str = "") -> ConfigDict:
  c = base.get_config()
  c.num_updates = 500
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
  c.batch.prompts, c.batch.group_size = 256, 4
  # Most prompts are far shorter than 4096: a row holds 150 tokens and their 4 rollouts of 2048.
  c.batch.tokens_per_micro_batch = c.batch.tokens_per_row = 9216
  c.loss = "p3o(ess_scope=16)"  # of a micro-batch over all ranks
  c.optimizer = "adamw(b2=0.95, weight_decay=0.01)"
  c.learning_rate = "cosine(peak=1e-5, warmup=50)"
  c.max_gradient_norm = 0.5
  return base.set_for_slice(c, SLICES, topology)
