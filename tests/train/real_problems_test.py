"""Published problems, a checkpoint folder with its tokenizer, real graders: all the way through."""

import importlib
import json
import os
import pathlib

import jax
import numpy as np
import pytest
from train import tiny

from rlvr_jax.configs import base
from rlvr_jax.data.byte_pairs import read_texts, save, train_byte_pairs
from rlvr_jax.evaluate.run_files import read_metrics
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.huggingface import save_checkpoint
from rlvr_jax.models.presets import preset

SHARED = os.environ.get("RLVR_SHARED")
pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(not SHARED, reason="RLVR_SHARED is not set"),
]
DATA = pathlib.Path(SHARED or "", "data")
METHODS = {"salt_grpo": "gsm8k", "p3o": "mbpp"}
SECTIONS = ("advantage", "reweighting", "gram", "loss", "aggregation", "veto", "schedule")
VOCAB = 384


def get_config(arguments):
  """`real_problems_test.py:METHOD,DATASET,CHECKPOINT,PREPARED`, as the program takes it."""
  method, dataset, checkpoint, prepared = arguments.split(",")
  c = base.get_config()
  recipe = importlib.import_module(f"rlvr_jax.configs.{method}").get_config()
  for section in SECTIONS:
    c[section] = recipe[section]
  c.num_updates = 4
  c.task = dict(
    name="published",
    kwargs=dict(
      dataset=dataset,
      data_dir=str(DATA / dataset),
      prepared_dir=prepared,
      held_out_size=4,
      max_question_characters=90,
    ),
  )
  c.tokenizer = "checkpoint"
  c.prompts.format = "chat"
  c.prompts.too_long = "drop"
  c.model = dict(preset="", checkpoint=checkpoint, overrides={})
  c.max_prompt_length, c.max_response_length = 800, 16
  c.warm_start.num_steps = 0
  c.batch.prompts, c.batch.group_size = 4, 4
  c.evaluation.num_samples = 2
  c.evaluation.ks = (1, 2)
  c.evaluation.batch_prompts = 4
  # Those who know nothing are never right: what they write of digits is worth something too.
  c.grading.extra = (("rewards.user_graders:digits", 1.0),)
  c.grading.outcomes.wrong = c.grading.outcomes.unparseable = "score"
  return c


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  """A folder such as a published model's: weights, tokenizer with chat template, stop tokens."""
  folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
  config = preset("tiny", vocab_size=VOCAB, num_layers=1, width=32, mlp_width=64, unroll_layers=1)
  params = transformer(config).init(jax.random.key(3))
  save_checkpoint(folder, params, config, dtype="float32")
  texts = list(read_texts([DATA / "gsm8k" / "test.jsonl"], ["question", "answer"]))[:200]
  save(train_byte_pairs(texts, VOCAB), folder)
  return folder


def run(checkpoint, workdir, method, dataset, *flags):
  prepared = checkpoint.parent / "prepared"
  file = f"{__file__}:{method},{dataset},{checkpoint},{prepared}"
  tiny.run(workdir, *flags, config_file=file)
  return [record for record in read_metrics(workdir) if record["phase"] == "train"]


def check(records, workdir):
  """Every update has finite numbers and graded completions; rewards that differ have an effect."""
  assert [record["step"] for record in records] == [1, 2, 3, 4]
  for record in records:
    outcomes = {name: v for name, v in record.items() if name.startswith("outcome/")}
    assert sum(outcomes.values()) == pytest.approx(1) and outcomes["outcome/crashed"] == 0
    assert all(np.isfinite(v) for v in record.values() if isinstance(v, float))
  assert all(record["update/gradient_norm"] > 0 for record in records)
  assert sum(record["groups/effective"] for record in records) > 0
  texts = (workdir / "rollouts.jsonl").read_text().splitlines()
  samples = [json.loads(line) for line in texts]
  trained = [sample for sample in samples if sample["phase"] == "train"]
  assert trained and all(sample["prompt"] and sample["outcome"] for sample in trained)


@pytest.mark.parametrize(("method", "dataset"), METHODS.items())
def test_trains_from_a_checkpoint_folder(method, dataset, checkpoint, tmp_path):
  records = run(checkpoint, tmp_path / "run", method, dataset)
  check(records, tmp_path / "run")
