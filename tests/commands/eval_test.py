"""Evaluation as a command: the loop's own numbers, problem by problem, resumed bit for bit."""

import json

import pytest
from train import tiny

from rlvr_jax.commands.eval import PROBLEMS_FILE, RESULT_FILE, evaluate_checkpoint
from rlvr_jax.commands.train import train
from rlvr_jax.evaluate.held_out import accuracy
from rlvr_jax.train.checkpointing.checkpoint_files import CheckpointError
from rlvr_jax.train.checkpointing.workdir import WorkdirError
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.start.parameters import checkpoint_folder, load_policy

FIELDS = dict(num_updates=1, warm_start__num_steps=100, learning_rate="linear(peak=3e-3, warmup=0)")


@pytest.fixture(scope="module")
def parts():
  return build(tiny.config(**FIELDS))


@pytest.fixture(scope="module")
def run(parts, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run")
  return workdir, train(parts, workdir)


@pytest.mark.slow
def test_a_checkpoint_has_the_accuracy_that_the_loop_found(run, parts, tmp_path, capsys):
  workdir, of_loop = run
  folder = workdir / "checkpoints" / "1"
  values = evaluate_checkpoint(parts, tmp_path, folder)
  assert values == of_loop
  assert 0 < values["eval/pass@1"] < 1
  assert json.loads((tmp_path / RESULT_FILE).read_text()) == values
  lines = (tmp_path / PROBLEMS_FILE).read_text().splitlines()
  records = [json.loads(line) for line in lines]
  assert [record["problem"] for record in records] == list(range(10))
  assert accuracy([record["samples"] for record in records], ks=(1, 2), seed=12345) == values
  # Killed in the second batch: the first stays as it is, the rest is drawn again, the same.
  (tmp_path / PROBLEMS_FILE).write_text("\n".join(lines[:6]) + '\n{"problem": 6, "pro')
  assert evaluate_checkpoint(parts, tmp_path, folder) == values
  assert (tmp_path / PROBLEMS_FILE).read_text().splitlines() == lines
  # Whole lines that are missing in between count as much as torn ones.
  (tmp_path / PROBLEMS_FILE).write_text("\n".join(lines[:5] + lines[6:]) + "\n")
  assert evaluate_checkpoint(parts, tmp_path, folder) == values
  assert (tmp_path / PROBLEMS_FILE).read_text().splitlines() == lines
  # A line that was edited, cut to fewer samples, or is not JSON is sampled again, with a warning.
  edited = lines[2].replace('"outcome": "wrong"', '"outcome": "correct"', 1)
  fewer = json.dumps(records[2] | {"samples": records[2]["samples"][:1]})
  for line in (edited, fewer, "no JSON"):
    assert line != lines[2]
    capsys.readouterr()
    (tmp_path / PROBLEMS_FILE).write_text("\n".join([*lines[:2], line, *lines[3:]]) + "\n")
    assert evaluate_checkpoint(parts, tmp_path, folder) == values
    assert (tmp_path / PROBLEMS_FILE).read_text().splitlines() == lines
    said = "problems.jsonl, line 3 is damaged or out of order: problems"
    assert said in capsys.readouterr().out
  # Another policy, or another question, is another evaluation.
  with pytest.raises(WorkdirError, match="evaluated"):
    evaluate_checkpoint(parts, tmp_path, workdir / "checkpoints" / "0")
  with pytest.raises(WorkdirError, match=r"evaluation\.seed"):
    evaluate_checkpoint(build(tiny.config(**FIELDS, evaluation__seed=1)), tmp_path, folder)


@pytest.mark.slow
def test_a_training_reward_is_no_measure_of_itself(run, tmp_path):
  """Held-out problems keep the task's grader, unless the evaluation names another."""
  workdir, of_loop = run
  folder, digits = workdir / "checkpoints" / "1", "rewards.user_graders:digits"
  rewarded = build(tiny.config(**FIELDS, grading__grader=digits, grading__extra=((digits, 1.0),)))
  assert evaluate_checkpoint(rewarded, tmp_path / "own", folder) == of_loop
  other = build(tiny.config(**FIELDS, evaluation__grader=digits))
  values = evaluate_checkpoint(other, tmp_path / "other", folder)
  assert values["eval/pass@1"] == 0 < of_loop["eval/pass@1"]


def sample(outcome, extracted):
  return {"outcome": outcome, "extracted": extracted, "stopped": True}


def test_accuracy_counts_outcomes_and_majorities():
  rows = [
    [sample("correct", "7"), sample("correct", "7"), sample("wrong", "8")],
    [sample("wrong", "1"), sample("crashed", ""), sample("wrong", "1")],
  ]
  values = accuracy(rows, ks=(1, 3), seed=0)
  assert values["eval/mean"] == pytest.approx(1 / 3)
  assert values["eval/pass@1"] == pytest.approx(1 / 3)
  assert values["eval/pass@3"] == pytest.approx(1 / 2)
  assert values["eval/majority"] == pytest.approx(1 / 2)
  assert values["eval/outcome/crashed"] == pytest.approx(1 / 6)
  contradicted = [[sample("correct", "7"), sample("wrong", "7"), sample("wrong", "7")]]
  assert "eval/majority" not in accuracy(contradicted, ks=(1,), seed=0)  # and nothing is raised
  without = [[{**s, "extracted": ""} for s in row] for row in rows]
  assert "eval/majority" not in accuracy(without, ks=(1,), seed=0)


@pytest.mark.slow
def test_a_run_is_evaluated_as_the_network_it_was(run):
  workdir, _ = run
  overrides = {**tiny.get_config().model.overrides, "rope_theta": 5.0}
  other = build(tiny.config(**FIELDS, model__overrides=overrides))
  with pytest.raises(CheckpointError, match=r"another network.*rope_theta"):
    load_policy(other.initial, workdir / "checkpoints" / "1")
  folder = checkpoint_folder(str(workdir))
  assert folder == checkpoint_folder(str(workdir / "checkpoints")) == workdir / "checkpoints" / "1"


@pytest.mark.slow
def test_the_command_says_what_it_lacks(tmp_path):
  said = tiny.run(tmp_path / "a", "--mode=eval", f"--checkpoint={tmp_path}", expect=1)
  assert "has no checkpoint; give the --workdir of a run" in said


@pytest.mark.parametrize(
  ("text", "error", "message"),
  [
    ("garbage", WorkdirError, r"config\.json is not JSON"),
    ("[]", WorkdirError, r"config\.json is a JSON list, not an object with the fields"),
    ("{}", CheckpointError, r"config\.json is not the configuration of a run .*'tokenizer'"),
    ('{"model": 3}', CheckpointError, r"config\.json is not the configuration of a run"),
  ],
)
def test_a_run_with_a_damaged_configuration_is_refused(parts, tmp_path, text, error, message):
  """Also by --mode=export, which takes the policy from the same function."""
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(error, match=message):
    load_policy(parts.initial, tmp_path / "checkpoints" / "1")
