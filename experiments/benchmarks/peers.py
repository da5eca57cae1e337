"""Times a GRPO step of TRL or of Tunix on the workloads of `grpo_step.py`.

  python -m venv .peers && .peers/bin/pip install torch google-tunix trl transformers
  .peers/bin/python experiments/benchmarks/peers.py --peer=trl --workload=w3 --steps=4

Run it and `grpo_step.py` in turn, and compare only seconds from one session. The model has the same
shape and random weights; prompts have 24 to 32 tokens of one character each. Both peers use their
best settings on a CPU: freed memory is kept, TRL computes without bf16 and without gradient
checkpointing, Tunix's KV cache is just long enough. Timers wrap the peers' own methods:

* rollout: TRL's `_generate`, Tunix's `RLCluster.generate`
* update: from the end of TRL's `_prepare_inputs` to the end of its step; Tunix's `update_actor`

The last line is one JSON object with medians over the steps after two warm-up steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import string
import sys
import tempfile
import time

WORKLOADS = {
  "w1": dict(prompts=16, group_size=8, new=64, vocab_size=512, stop=None),
  "w2": dict(prompts=4, group_size=32, new=128, vocab_size=512, stop=None),
  "w3": dict(prompts=8, group_size=8, new=512, vocab_size=128, stop=127),
}
PROMPT_LENGTH = 32
WARMUP = 2
KEEP = dict(MALLOC_MMAP_MAX_="0", MALLOC_ARENA_MAX="1", MALLOC_TRIM_THRESHOLD_=str(1 << 40))


class Timer:
  """Records the seconds of wrapped methods, by name."""

  def __init__(self):
    self.seconds: dict[str, list[float]] = {}
    self.lengths: list[float] = []

  def add(self, name: str, since: float) -> None:
    self.seconds.setdefault(name, []).append(time.perf_counter() - since)

  def wrap(self, thing, method: str, name: str, after=lambda result: None) -> None:
    call = getattr(thing, method)

    def timed(*args, **kwargs):
      start = time.perf_counter()
      result = call(*args, **kwargs)
      after(result)
      self.add(name, start)
      return result

    setattr(thing, method, timed)


def make_assets(folder: str, shape: dict) -> list[str]:
  """Writes a model and its tokenizer into a folder; returns the prompts."""
  import tokenizers
  import torch
  import transformers

  size = shape["vocab_size"]
  stop = shape["stop"] or size  # outside the vocabulary: no response ends early
  pad = size - 2
  letters = string.ascii_lowercase + " "
  # One token per character; the other tokens never occur in texts.
  vocabulary = {letter: index for index, letter in enumerate(letters)}
  vocabulary |= {chr(0x4E00 + i): i for i in range(len(letters), size) if i not in (pad, stop)}
  vocabulary |= {"<pad>": pad, "<stop>": stop}
  words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
  words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
  words.decoder = tokenizers.decoders.Fuse()
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="<pad>", eos_token="<stop>", padding_side="left"
  ).save_pretrained(folder)
  torch.manual_seed(0)
  config = transformers.Qwen3Config(
    vocab_size=size, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=1024,
    tie_word_embeddings=True, rope_theta=1e6,
    pad_token_id=pad, eos_token_id=stop, bos_token_id=None,
  )  # fmt: skip
  transformers.Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
  rng = random.Random(0)
  lengths = [PROMPT_LENGTH if i % 4 == 0 else rng.randint(24, PROMPT_LENGTH) for i in range(64)]
  return ["".join(rng.choices(letters, k=length)) for length in lengths]


def count_e(prompts, completions, **_) -> list[float]:
  """A reward in constant time."""
  del prompts
  return [float(text.count("e")) for text in completions]


def make_trl_settings(folder: str, shape: dict, steps: int):
  import trl

  return trl.GRPOConfig(
    output_dir=os.path.join(folder, "out"),
    use_cpu=True,
    bf16=False,
    fp16=False,
    gradient_checkpointing=False,
    per_device_train_batch_size=shape["prompts"] * shape["group_size"],
    max_steps=steps,
    num_generations=shape["group_size"],
    max_completion_length=shape["new"],
    beta=0.0,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    loss_type="grpo",
    learning_rate=1e-5,
    lr_scheduler_type="constant",
    max_grad_norm=1.0,
    shuffle_dataset=False,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    model_init_kwargs={"dtype": "float32"},
    disable_tqdm=True,
  )


def run_trl(folder: str, prompts: list[str], shape: dict, steps: int, timer: Timer) -> dict:
  import datasets
  import torch
  import transformers
  import trl

  torch.set_num_threads(os.cpu_count())
  # Complete batches of prompts, always in the same order.
  rows = [{"prompt": prompts[i % len(prompts)]} for i in range(steps * shape["prompts"])]

  class StepTimer(transformers.TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
      self.start = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
      timer.add("update", self.prepared)
      timer.add("step", self.start)

  step_timer = StepTimer()
  trainer = trl.GRPOTrainer(
    model=folder,
    reward_funcs=count_e,
    train_dataset=datasets.Dataset.from_list(rows),
    processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    callbacks=[step_timer],
    args=make_trl_settings(folder, shape, steps),
  )
  lengths = lambda out: timer.lengths.append(statistics.mean(map(len, out[1])))
  timer.wrap(trainer, "_generate", "rollout", lengths)
  prepare = trainer._prepare_inputs

  def prepare_and_mark(batch):
    out = prepare(batch)
    step_timer.prepared = time.perf_counter()
    return out

  trainer._prepare_inputs = prepare_and_mark
  trainer.train()
  return {"trl": trl.__version__, "torch": torch.__version__}


def load_tunix_model(folder: str, shape: dict):
  """Loads the model; returns it and a mesh of one device."""
  import jax
  import jax.numpy as jnp
  from tunix.models.qwen3 import model as qwen3
  from tunix.models.qwen3 import params as qwen3_params

  auto = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=auto)
  config = qwen3.ModelConfig(
    num_layers=4, vocab_size=shape["vocab_size"], embed_dim=256, hidden_dim=768, num_heads=4,
    head_dim=64, num_kv_heads=2, rope_theta=1_000_000, norm_eps=1e-6, use_tied_embedding=True,
    dtype=jnp.float32, param_dtype=jnp.float32,
  )  # fmt: skip
  with mesh:
    return qwen3_params.create_model_from_safe_tensors(
      folder, config, mesh, dtype=jnp.float32
    ), mesh


def make_tunix_settings(mesh, shape: dict, steps: int):
  import optax
  from tunix.rl import rl_cluster
  from tunix.rl.rollout import base_rollout

  role = rl_cluster.Role
  batch = shape["prompts"]
  return rl_cluster.ClusterConfig(
    role_to_mesh={r: mesh for r in (role.ACTOR, role.REFERENCE, role.ROLLOUT)},
    rollout_engine="vanilla",
    offload_to_cpu=False,
    training_config=rl_cluster.RLTrainingConfig(
      actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5)),
      eval_every_n_steps=10**9,
      max_steps=steps,
      mini_batch_size=batch,
      train_micro_batch_size=batch,
    ),
    rollout_config=base_rollout.RolloutConfig(
      max_tokens_to_generate=shape["new"],
      max_prompt_length=PROMPT_LENGTH,
      kv_cache_size=PROMPT_LENGTH + shape["new"],
      temperature=1.0,
      top_p=1.0,
      top_k=None,
    ),
  )


def run_tunix(folder: str, prompts: list[str], shape: dict, steps: int, timer: Timer) -> dict:
  import importlib.metadata

  import jax
  import numpy as np
  import transformers
  from flax import nnx
  from tunix.rl import rl_cluster
  from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner

  model, mesh = load_tunix_model(folder, shape)
  batch = shape["prompts"]
  cluster = rl_cluster.RLCluster(
    actor=model,
    reference=None,
    tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
    cluster_config=make_tunix_settings(mesh, shape, steps),
  )
  grpo = GRPOConfig(num_generations=shape["group_size"], num_iterations=1, beta=0.0, epsilon=0.2)
  learner = GRPOLearner(rl_cluster=cluster, reward_fns=count_e, algo_config=grpo)
  length = lambda out: timer.lengths.append(float(np.mean([len(t) for t in out.tokens])))
  ready = lambda _: jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
  timer.wrap(cluster, "generate", "rollout", length)
  timer.wrap(cluster, "update_actor", "update", ready)
  timer.wrap(learner, "_run_global_step", "step")
  batches = (
    {"prompts": np.array([prompts[(s * batch + i) % len(prompts)] for i in range(batch)])}
    for s in range(steps)
  )
  learner.train(batches)
  return {"tunix": importlib.metadata.version("google-tunix"), "jax": jax.__version__}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--peer", choices=["trl", "tunix"], required=True)
  parser.add_argument("--workload", choices=sorted(WORKLOADS), required=True)
  parser.add_argument("--steps", type=int, default=8)
  args = parser.parse_args()
  if os.environ.get("MALLOC_MMAP_MAX_") != "0":  # malloc reads these at process start
    os.environ.update(KEEP, JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    os.execv(sys.executable, [sys.executable, *sys.argv])
  shape = WORKLOADS[args.workload]
  timer = Timer()
  run = {"trl": run_trl, "tunix": run_tunix}[args.peer]
  with tempfile.TemporaryDirectory() as folder:
    versions = run(folder, make_assets(folder, shape), shape, WARMUP + args.steps, timer)
  medians = {
    f"{name}_s_median": round(statistics.median(seconds[WARMUP:]), 4)
    for name, seconds in timer.seconds.items()
  }
  settings = {"peer": args.peer, "workload": args.workload, "versions": versions}
  print(json.dumps(settings | medians | {"mean_length": statistics.mean(timer.lengths[WARMUP:])}))


if __name__ == "__main__":
  main()
