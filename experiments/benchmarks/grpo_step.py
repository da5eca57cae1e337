"""Times one GRPO step, rollout and update, with the functions of the training loop.

  python experiments/benchmarks/grpo_step.py --workload=w1 --steps=8

The small model has Qwen 3's architecture, width 256, 4 layers, 4 heads, 2 key/value heads of 64,
MLP 768, vocabulary 512, tied, 3.28 M parameters. All compute in float32, with random weights:

  w1  16 prompts × 8 rollouts of 64 tokens, the small model
  w2  4 prompts × 32 rollouts of 128
  w3  8 prompts × 8 rollouts of up to 512, with a stop token in a vocabulary of 128
  w4  8 prompts × 8 rollouts of 64, the shape of SmolLM2-135M (Llama)
  w5  2 prompts × 4 rollouts of 32, the shape of Qwen2.5-0.5B
  w6  32 prompts of 128 tokens × 8 rollouts of 256, the same shape; for accelerators

Other prompts have 24 to 32 tokens. Responses of w3 have nearly geometric lengths; with these random
weights their mean is 190, so compare seconds per token. All others have full length, since the stop
token is outside the vocabulary. One AdamW update per batch, no reference policy, a grader in
constant time. A step includes data, rollout, decoding to text, grading in a worker process, the
update, and metrics in metrics.jsonl and TensorBoard.

The last line is one JSON object; seconds are medians over the steps after two warm-up steps.
`--compute_dtype=bfloat16` is for accelerators; JAX_PLATFORMS names the device, a CPU by default.
`slot_steps_of_lockstep` are decoding steps times slots, divided by those of rows that all decode
until the longest response ends. `peak_rss_mib` is of the largest process. Quote ratios to another
system measured in the same session, not single times.
"""

from __future__ import annotations

import json
import os
import pathlib
import resource
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Iterable

_STARTED = time.perf_counter()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

from absl import app, flags

from rlvr_jax.train.cluster.process import keep_freed_memory

keep_freed_memory()

import jax
import numpy as np

from rlvr_jax.configs import base
from rlvr_jax.data import ByteTokenizer, Problem, Task
from rlvr_jax.rewards.grading import GraderPool
from rlvr_jax.rewards.outcome import Grade, Outcome
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.train.begin import make_run
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.loop import Run, RunState, next_batch, update
from rlvr_jax.train.reporting.log import RunLog
from rlvr_jax.train.reporting.writer import open_writer
from rlvr_jax.train.session import logged_run
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.setup.programs import RowTokens
from rlvr_jax.train.start import parameters
from rlvr_jax.train.start.rows import RunRows

_SMALL = dict(preset="small", rope_theta=1_000_000.0, tokens_per_micro_batch=1152)
_SMOLLM = dict(
  **dict(preset="small", width=576, num_layers=30, num_heads=9, num_kv_heads=3, mlp_width=1536),
  **dict(qk_norm=False, norm_epsilon=1e-5, rope_theta=100_000.0),
  **dict(remat="dots", tokens_per_micro_batch=1152),
)
_QWEN = dict(preset="qwen2.5_0.5b", compute_dtype="float32", tokens_per_micro_batch=1152)
_LARGE = dict(preset="qwen2.5_0.5b", prompt_length=128, tokens_per_micro_batch=0)
_WORKLOADS = {
  "w1": dict(prompts=16, group_size=8, response_length=64, vocab_size=512, **_SMALL),
  "w2": dict(prompts=4, group_size=32, response_length=128, vocab_size=512, **_SMALL),
  "w3": dict(prompts=8, group_size=8, response_length=512, vocab_size=128, **_SMALL),
  "w4": dict(prompts=8, group_size=8, response_length=64, vocab_size=49_152, **_SMOLLM),
  "w5": dict(prompts=2, group_size=4, response_length=32, vocab_size=151_936, **_QWEN),
  "w6": dict(prompts=32, group_size=8, response_length=256, vocab_size=151_936, **_LARGE),
}
_OF_BATCH = (
  *("prompts", "group_size", "prompt_length", "response_length", "tokens_per_micro_batch"),
  "preset",
)
PROMPT_LENGTH = 32
_WARMUP_STEPS = 2

_WORKLOAD = flags.DEFINE_enum("workload", "w1", sorted(_WORKLOADS), "Shapes of the step.")
_STEPS = flags.DEFINE_integer("steps", 8, "Measured steps.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens_per_micro_batch", None, "By default the workload's.")
_SLOTS = flags.DEFINE_integer("slots", 0, "Responses decoded at a time; 0 for all.")
_DTYPE = flags.DEFINE_string("compute_dtype", "", "Of the network; by default the workload's.")
_TRACE = flags.DEFINE_string("trace", "", "Folder of a trace of the last step; none by default.")


class EndlessTokenizer(ByteTokenizer):
  """Tokenizer with a stop token outside the vocabulary, so that all responses have full length.

  Every id is decoded as a letter, so that rewards differ in a vocabulary of any size.
  """

  def __init__(self, vocab_size: int):
    self.vocab_size = vocab_size
    self.stop_ids = (vocab_size,)

  def decode(self, ids: Iterable[int]) -> str:
    return "".join(chr(ord("a") + id % 26) for id in ids)


class StoppingTokenizer(ByteTokenizer):
  """Tokenizer with a stop token in a vocabulary of 128, sampled about uniformly at first."""

  vocab_size = 128
  pad_id = 126
  stop_ids = (127,)


def count_e(completion: str, reference: dict) -> Grade:
  """Grades in constant time, with rewards that differ between rollouts."""
  del reference
  share = completion.count("e") / max(len(completion), 1)
  return Grade(Outcome.WRONG, share)


def make_config(workload: str, tokens_per_micro_batch: int | None = None):
  """The run of a workload; None: with the tokens per micro-batch that suit it on a CPU."""
  shape = _WORKLOADS[workload]
  c = base.get_config()
  c.model.preset = shape["preset"]
  c.model.overrides = {field: x for field, x in shape.items() if field not in _OF_BATCH}
  c.max_prompt_length = shape.get("prompt_length", PROMPT_LENGTH)
  c.max_response_length = shape["response_length"]
  c.batch.prompts, c.batch.group_size = shape["prompts"], shape["group_size"]
  if tokens_per_micro_batch is None:
    tokens_per_micro_batch = shape["tokens_per_micro_batch"]
  c.batch.tokens_per_micro_batch = tokens_per_micro_batch
  c.learning_rate = "constant(peak=1e-5, warmup=0)"
  c.warm_start.num_steps = 0
  c.grading.outcomes.wrong = "score"
  c.logging.print_every = 10**9
  return c


def make_tokenizer(workload: str) -> ByteTokenizer:
  if workload == "w3":
    return StoppingTokenizer()
  return EndlessTokenizer(_WORKLOADS[workload]["vocab_size"])


def make_task(longest: int = PROMPT_LENGTH) -> Task:
  """Questions of 24 to 32 tokens; three quarters of `longest` to all of it."""
  rng = np.random.default_rng(0)
  letters = list(string.ascii_lowercase + " ")

  def make_problem(index: int) -> Problem:
    length = longest if index % 4 == 0 else int(rng.integers(3 * longest // 4, longest + 1))
    question = "".join(rng.choice(letters, size=length))
    return Problem(question=question, answer="", solution="", reference={})

  problems = [make_problem(index) for index in range(64)]
  return Task(
    name="letters",
    train=problems,
    warm_start=(),
    held_out=tuple(problems[:4]),
    grader="experiments.benchmarks.grpo_step:count_e",
  )


def measure_steps(run: Run, now: RunState, num_steps: int) -> dict[str, list[float]]:
  """Measures seconds, response tokens and slot-steps of every step."""
  measurements: dict[str, list[float]] = {
    name: [] for name in ("steps", "rollouts", "updates", "tokens", "of_lockstep")
  }
  for number in range(num_steps):
    if _TRACE.value and number == num_steps - 1:
      jax.profiler.start_trace(_TRACE.value)
    start = time.perf_counter()
    batch = next_batch(run, now)
    lengths = batch.train.mask.sum(axis=-1)
    slot_steps = batch.timings["time/slot_steps"]
    update_start = time.perf_counter()
    measurements["rollouts"].append(batch.timings["time/generate_seconds"])
    now = update(run, now, batch)
    run.log.finish_update()
    end = time.perf_counter()
    measurements["steps"].append(end - start)
    measurements["updates"].append(end - update_start)
    measurements["tokens"].append(int(lengths.sum()))
    measurements["of_lockstep"].append(slot_steps / float(lengths.size * lengths.max()))
  if _TRACE.value:
    jax.profiler.stop_trace()
  return measurements


def peak_rss_mib() -> float:
  """Most resident memory of this process, or of the largest of its children that have ended."""
  kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
  return round(max(resource.getrusage(kind).ru_maxrss for kind in kinds) / 1024, 1)


def main(argv: list[str]) -> None:
  del argv
  imported = time.perf_counter() - _STARTED
  config = make_config(_WORKLOAD.value, _TOKENS.value)
  config.sampling.slots = _SLOTS.value
  if _DTYPE.value:
    config.model.overrides["compute_dtype"] = _DTYPE.value
  task, tokenizer = make_task(config.max_prompt_length), make_tokenizer(_WORKLOAD.value)
  parts = build(config, task=task, tokenizer=tokenizer)
  with (
    tempfile.TemporaryDirectory() as workdir,
    GraderPool(parts.task.grader) as pool,
    open_writer(workdir) as writer,
    RolloutStore(os.path.join(workdir, "rollouts"), writable=True) as store,
  ):
    checkpointer = Checkpointer(os.path.join(workdir, "checkpoints"))
    params = parts.initial.trained()
    frozen = parts.initial.frozen()
    num_parameters = sum(x.size for x in jax.tree.leaves(params))
    log = RunLog(logged_run(parts), writer)
    answers = lambda: parts.make_answers(pool)
    rows = RunRows(
      parts.placement,
      parts.shape,
      parts.model.config,
      has_first_phase=parts.method.has_first_phase,
      configured=RowTokens(config.batch.tokens_per_row, config.batch.tokens_per_micro_batch),
      recorded=None,
      record=lambda _: None,
    )
    run = make_run(parts, rows, frozen, log, checkpointer, answers, store, initial=params)
    state = parameters.first_state(
      parts.method, parts.placement.state, params, 0.0, start=config.start
    )
    state = jax.block_until_ready(state)
    now = RunState(0, state, run.batches.position(), dict(log.counters))
    measurements = measure_steps(run, now, _WARMUP_STEPS + _STEPS.value)
    checkpointer.close()
  shape = _WORKLOADS[_WORKLOAD.value]
  count = shape["prompts"] * shape["group_size"]
  steps, rollouts, updates, tokens, of_lockstep = measurements.values()

  def median(values: list[float]) -> float:
    return statistics.median(values[_WARMUP_STEPS:])

  result = {
    "workload": _WORKLOAD.value,
    "steps": _STEPS.value,
    "tokens_per_micro_batch": config.batch.tokens_per_micro_batch,
    "slots": parts.programs.engine.settings.slots,
    "parameters": num_parameters,
    "jax": jax.__version__,
    "device": jax.devices()[0].device_kind,
    "step_s_median": round(median(steps), 4),
    "rollout_s_median": round(median(rollouts), 4),
    "update_s_median": round(median(updates), 4),
    "first_step_s": round(steps[0], 3),
    "import_s": round(imported, 3),
    "slot_steps_of_lockstep": round(statistics.mean(of_lockstep[_WARMUP_STEPS:]), 3),
    "response_tokens_mean": statistics.mean(tokens[_WARMUP_STEPS:]) / count,
    "rollout_new_tokens_per_s": round(median(tokens) / median(rollouts), 1),
    "update_sequence_tokens_per_s": round(
      (count * config.max_prompt_length + median(tokens)) / median(updates), 1
    ),
    "step_new_tokens_per_s": round(median(tokens) / median(steps), 1),
    "peak_rss_mib": peak_rss_mib(),
    "peak_device_mib": round(
      (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**20, 1
    ),
    "all_step_s": [round(s, 3) for s in steps],
    "all_rollout_s": [round(s, 3) for s in rollouts],
    "all_update_s": [round(s, 3) for s in updates],
  }
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
