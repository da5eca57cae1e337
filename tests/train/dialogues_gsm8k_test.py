"""GSM8K with Python as a tool, from scratch: dialogues of a program, its output and the answer."""

import json
import os
import pathlib

import pytest
from train import tiny

from rlvr_jax.commands.train import train
from rlvr_jax.configs import base
from rlvr_jax.environments.python import extract_program
from rlvr_jax.train.setup.build import build

SHARED = os.environ.get("RLVR_SHARED")
pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(not SHARED, reason="RLVR_SHARED is not set"),
]


def get_config():
  """A policy over bytes that knows four demonstrations by heart."""
  c = base.get_config()
  c.num_updates = 2
  data_dir = str(pathlib.Path(SHARED or "", "data", "gsm8k"))
  c.task = dict(name="train.gsm8k_programs:programs", kwargs=dict(data_dir=data_dir))
  c.environment.name = "python(limit_s=5.0)"
  c.environment.max_turns = 3
  c.environment.processes = 1
  c.max_prompt_length = 101
  c.max_response_length = 128
  c.model.overrides = dict(num_layers=2, unroll_layers=2)
  c.warm_start.num_steps = 120
  c.warm_start.batch_size = 4
  c.warm_start.learning_rate = "constant(peak=3e-3)"
  c.batch.prompts, c.batch.group_size = 4, 4
  c.evaluation.num_samples, c.evaluation.ks = 1, (1,)
  c.grading.num_workers = 1
  c.logging.rollouts_every, c.logging.rollouts_per_refresh = 1, 16
  return c


def test_dialogues_are_a_program_its_output_and_the_answer(tmp_path):
  workdir = tmp_path / "run"
  train(build(get_config()), workdir)
  records = tiny.records(workdir, "train")
  assert [record["step"] for record in records] == [1, 2]
  assert all(record["outcome/environment_failed"] == 0 for record in records)
  lines = (workdir / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
  samples = [json.loads(line) for line in lines]
  right = [s for s in samples if s["outcome"] == "correct" and len(s["turns"]) == 3]
  assert len(right) >= 8, [sample["turns"] for sample in samples]
  for sample in right:
    program, output, answer = sample["turns"]
    # What the program prints is what stands in the dialogue, and the answer follows it.
    expressions = [line[len("print(") : -1] for line in extract_program(program).splitlines()]
    assert output == "\n".join(str(eval(expression)) for expression in expressions)
    assert answer.removeprefix("\n") == f"#### {sample['answer']}"
    assert sample["completion"] == program + output + answer and sample["reward"] == 1
  assert len({sample["prompt"] for sample in right}) >= 2
