"""Times a GRPO step of TRL or of Tunix on the workloads of `grpo_step.py`.

  python -m venv .peers && .peers/bin/pip install torch google-tunix trl transformers
  .peers/bin/python experiments/benchmarks/peers.py --peer=trl --workload=w3 --steps=4

Run it and `grpo_step.py` in turn, and compare only seconds from one session. The model has the same
shape and random weights; prompts have 24 to 32 tokens of one character each. Both peers use their
best settings on a CPU: freed memory is kept, TRL computes without bf16 and without gradient
checkpointing, Tunix's KV cache is just long enough, and both sample a batch at once. An update has
`--micro` micro-batches, by default the fewest that fit beside the weights. Timers wrap the peers'
own methods. `--device=cuda --bf16` times TRL on a GPU, with transformers' generate:

* rollout: TRL's `_generate`, Tunix's `RLCluster.generate`
* update: from the end of TRL's `_prepare_inputs` to the end of its step; Tunix's `update_actor`

The last line is one JSON object with medians over the steps after two warm-up steps.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import random
import resource
import statistics
import string
import sys
import tempfile
import time

SMALL = dict(
  **dict(architecture="Qwen3", width=256, layers=4, heads=4, kv_heads=2, mlp=768),
  **dict(rope_theta=1_000_000, epsilon=1e-6, micro=1),
)
SMOLLM = dict(
  **dict(architecture="Llama", width=576, layers=30, heads=9, kv_heads=3, mlp=1536),
  **dict(rope_theta=100_000, epsilon=1e-5, micro=4),
)
QWEN = dict(
  **dict(architecture="Qwen2", width=896, layers=24, heads=14, kv_heads=2, mlp=4864),
  **dict(rope_theta=1_000_000, epsilon=1e-6, micro=1),
)
HEAD_DIM = 64
WORKLOADS = {
  "w1": dict(prompts=16, group_size=8, new=64, vocab_size=512, stop=None, **SMALL),
  "w2": dict(prompts=4, group_size=32, new=128, vocab_size=512, stop=None, **SMALL),
  "w3": dict(prompts=8, group_size=8, new=512, vocab_size=128, stop=127, **SMALL),
  "w4": dict(prompts=8, group_size=8, new=64, vocab_size=49_152, stop=None, **SMOLLM),
  "w5": dict(prompts=2, group_size=4, new=32, vocab_size=151_936, stop=None, **QWEN),
}
# The package of each architecture in Tunix, and its setting for an output head tied to embeddings.
TUNIX = dict(
  Qwen3=("qwen3", "use_tied_embedding"),
  Llama=("llama3", "weight_tying"),
  Qwen2=("qwen2", "use_tied_embedding"),
)
PROMPT_LENGTH = 32
WARMUP = 2
KEEP = dict(
  **dict(MALLOC_MMAP_MAX_="0", MALLOC_ARENA_MAX="1"),
  **dict(MALLOC_TRIM_THRESHOLD_=str(1 << 40), MALLOC_TOP_PAD_=str(1 << 26)),
)


class Timer:
  """Records the seconds of wrapped methods, by name."""

  def __init__(self):
    self.seconds: dict[str, list[float]] = {}
    self.lengths: list[float] = []

  def add(self, name: str, since: float) -> None:
    self.seconds.setdefault(name, []).append(time.perf_counter() - since)

  def per_step(self, name: str, steps: int) -> list[float]:
    """Seconds of each step, which may have several calls of a method."""
    seconds = self.seconds[name]
    calls = len(seconds) // steps
    assert calls * steps == len(seconds), f"{name}: {len(seconds)} calls in {steps} steps"
    return [sum(seconds[step * calls : (step + 1) * calls]) for step in range(steps)]

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
  vocabulary |= {chr(0x10000 + i): i for i in range(len(letters), size) if i not in (pad, stop)}
  vocabulary |= {"<pad>": pad, "<stop>": stop}
  words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
  words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
  words.decoder = tokenizers.decoders.Fuse()
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="<pad>", eos_token="<stop>", padding_side="left"
  ).save_pretrained(folder)
  torch.manual_seed(0)
  architecture = shape["architecture"]
  config = getattr(transformers, f"{architecture}Config")(
    vocab_size=size, hidden_size=shape["width"], intermediate_size=shape["mlp"],
    num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"],
    num_key_value_heads=shape["kv_heads"], head_dim=HEAD_DIM, max_position_embeddings=1024,
    tie_word_embeddings=True, rope_theta=float(shape["rope_theta"]),
    rms_norm_eps=shape["epsilon"], pad_token_id=pad, eos_token_id=stop, bos_token_id=None,
  )  # fmt: skip
  network = getattr(transformers, f"{architecture}ForCausalLM")(config)
  network.to(torch.float32).save_pretrained(folder)
  rng = random.Random(0)
  lengths = [PROMPT_LENGTH if i % 4 == 0 else rng.randint(24, PROMPT_LENGTH) for i in range(64)]
  return ["".join(rng.choices(letters, k=length)) for length in lengths]


def count_e(prompts, completions, **_) -> list[float]:
  """A reward in constant time; in a large vocabulary too, one token in 26 counts as an e."""
  del prompts
  return [float(sum((ord(x) - ord("e")) % 26 == 0 for x in text)) for text in completions]


def make_trl_settings(folder: str, shape: dict, steps: int):
  import trl

  return trl.GRPOConfig(
    output_dir=os.path.join(folder, "out"),
    use_cpu=shape["device"] == "cpu",
    bf16=shape["bf16"],
    fp16=False,
    gradient_checkpointing=False,
    per_device_train_batch_size=shape["prompts"] * shape["group_size"] // shape["micro"],
    gradient_accumulation_steps=shape["micro"],
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
      self.start, self.prepared = time.perf_counter(), None

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
    # The first micro-batch of a step waits for the rollouts of all.
    step_timer.prepared = step_timer.prepared or time.perf_counter()
    return out

  trainer._prepare_inputs = prepare_and_mark
  trainer.train()
  return {"trl": trl.__version__, "torch": torch.__version__}


def load_tunix_model(folder: str, shape: dict):
  """Loads the model; returns it and a mesh of one device."""
  import jax
  import jax.numpy as jnp

  auto = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=auto)
  package, tied = TUNIX[shape["architecture"]]
  network = importlib.import_module(f"tunix.models.{package}.model")
  params = importlib.import_module(f"tunix.models.{package}.params")
  config = network.ModelConfig(  # in float32 by default
    num_layers=shape["layers"], vocab_size=shape["vocab_size"], embed_dim=shape["width"],
    hidden_dim=shape["mlp"], num_heads=shape["heads"], head_dim=HEAD_DIM,
    num_kv_heads=shape["kv_heads"], rope_theta=shape["rope_theta"], norm_eps=shape["epsilon"],
    **{tied: True},
  )  # fmt: skip
  with mesh:
    return params.create_model_from_safe_tensors(folder, config, mesh, dtype=jnp.float32), mesh


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
      train_micro_batch_size=batch // shape["micro"],
      rollout_micro_batch_size=batch,
      compute_logps_micro_batch_size=batch,
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


def summarize(timer: Timer, shape: dict, steps: int) -> dict[str, float]:
  """Medians of the steps after the warm-up, tokens per second, and the peak of memory."""
  medians = {
    name: statistics.median(timer.per_step(name, steps)[WARMUP:]) for name in timer.seconds
  }
  length = statistics.mean(timer.lengths[WARMUP:])
  responses = shape["prompts"] * shape["group_size"]
  tokens = responses * length
  kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
  return {f"{name}_s_median": round(median, 4) for name, median in medians.items()} | {
    "mean_length": length,
    "rollout_new_tokens_per_s": round(tokens / medians["rollout"], 1),
    "update_sequence_tokens_per_s": round(
      (responses * PROMPT_LENGTH + tokens) / medians["update"], 1
    ),
    "step_new_tokens_per_s": round(tokens / medians["step"], 1),
    "peak_rss_mib": round(max(resource.getrusage(kind).ru_maxrss for kind in kinds) / 1024, 1),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--peer", choices=["trl", "tunix"], required=True)
  parser.add_argument("--workload", choices=sorted(WORKLOADS), required=True)
  parser.add_argument("--steps", type=int, default=8)
  parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of TRL")
  parser.add_argument("--bf16", action="store_true", help="bfloat16 over float32 weights, of TRL")
  parser.add_argument("--micro", type=int, help="micro-batches of an update, in whole groups")
  args = parser.parse_args()
  if os.environ.get("MALLOC_MMAP_MAX_") != "0":  # malloc reads these at process start
    os.environ.update(KEEP, JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    os.execv(sys.executable, [sys.executable, *sys.argv])
  shape = WORKLOADS[args.workload]
  micro = shape["micro"] if args.micro is None else args.micro
  if micro < 1 or shape["prompts"] % micro:
    parser.error(f"--micro={micro} must divide the {shape['prompts']} prompts of {args.workload}")
  if args.peer != "trl" and (args.bf16 or args.device != "cpu"):
    parser.error("--device and --bf16 are for --peer=trl")
  shape = shape | {"micro": micro, "device": args.device, "bf16": args.bf16}
  timer = Timer()
  run = {"trl": run_trl, "tunix": run_tunix}[args.peer]
  steps = WARMUP + args.steps
  with tempfile.TemporaryDirectory() as folder:
    versions = run(folder, make_assets(folder, shape), shape, steps, timer)
  print(
    json.dumps(vars(args) | {"micro": micro, "versions": versions} | summarize(timer, shape, steps))
  )


if __name__ == "__main__":
  main()
