"""Runs whose rollouts are dialogues: what they write, repeat, resume and evaluate."""

import json
import shutil

import numpy as np
import pytest
from train import tiny

from rlvr_jax.commands.eval import evaluate_checkpoint
from rlvr_jax.commands.train import train
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.train.setup.build import build

HIGH, MAX_TURNS = 7, 3
DIALOGUES = dict(
  task=dict(name="guess", kwargs=dict(low=1, high=HIGH, turns=MAX_TURNS, held_out_size=8)),
  environment__name=f"guess(low=1, high={HIGH})",
  environment__max_turns=MAX_TURNS,
  environment__processes=1,
  max_prompt_length=4,
  max_response_length=9,
  num_updates=4,
  checkpoint__keep=10,
)


def config(**fields):
  """The tiny run on guesses of a number."""
  of_run = DIALOGUES | fields
  changed = tiny.config()
  with changed.unlocked():
    changed.task = of_run.pop("task")
    changed.update_from_flattened_dict({k.replace("__", "."): v for k, v in of_run.items()})
  return changed


get_config = config  # this file is a configuration, too


@pytest.fixture(scope="module", name="whole")
def _whole(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("whole") / "run"
  train(build(config()), workdir)
  return workdir


def batches(workdir):
  store = RolloutStore(workdir / "rollouts", writable=False)
  return [store.read(number)[0] for number in store.numbers()]


def samples(workdir):
  return [json.loads(line) for line in (workdir / "rollouts.jsonl").read_text().splitlines()]


def test_the_record_of_a_dialogue(whole):
  ended = set()
  for arrays in batches(whole):
    turns, mask, tokens = arrays["turns"], arrays["mask"], arrays["tokens"]
    for p, g in np.ndindex(turns.shape[:2]):
      text = bytes(t for t in tokens[p, g] if t < 256).decode()
      replies = bytes(tokens[p, g][turns[p, g] % 2 == 1].tolist()).decode()
      assert set(replies) <= {"<", ">", "?"} and turns[p, g].max() <= 2 * (MAX_TURNS - 1)
      assert not mask[p, g][turns[p, g] % 2 == 1].any(), text
      assert (arrays["behavior_logprobs"][p, g][turns[p, g] % 2 == 1] == 0).all()
      ended.add(turns[p, g].max())
  assert len(ended) == MAX_TURNS  # some end after each number of turns


def test_a_found_number_is_the_reward(whole):
  for sample in samples(whole):
    said = [int(text) for text in sample["turns"][::2] if text.isdigit()]
    replies = sample["turns"][1::2]
    if sample["outcome"] == "correct":
      assert sample["reward"] == 1 and len(sample["turns"]) % 2 == 1
      # It lies where the replies said.
      for guess, reply in zip(said, replies, strict=False):
        if len(said) == len(replies) + 1 and reply in "<>":
          assert (guess < said[-1]) == (reply == ">")
    else:
      assert sample["outcome"] in ("turn_limit", "length_limit") and sample["reward"] == 0


def test_the_metrics_of_dialogues(whole):
  for record in tiny.records(whole, "train"):
    assert 1 < record["dialogue/turns"] <= record["dialogue/turns_max"] <= MAX_TURNS
    assert record["dialogue/environment_tokens"] >= record["dialogue/turns"] - 1
    outcomes = [value for name, value in record.items() if name.startswith("outcome/")]
    assert sum(outcomes) == pytest.approx(1) and record["outcome/turn_limit"] > 0
    assert record["agreement/policy_mean"] < 1e-5 if "agreement/policy_mean" in record else True
  evaluated = tiny.records(whole, "eval")
  assert all("eval/outcome/turn_limit" in record for record in evaluated)
  for record in evaluated:
    solved = [record[f"eval/solved_in_turns/{turns}"] for turns in range(1, MAX_TURNS + 1)]
    assert solved == sorted(solved) and solved[-1] == pytest.approx(record["eval/pass@1"])
    assert record["eval/gap_to_best_play"] == pytest.approx(1 - record["eval/pass@1"])
    # 1 of 7 numbers is found at the first guess, if all guesses have the same probability.
    assert 0 < solved[0] < solved[-1]


@pytest.mark.slow
def test_most_dialogues_at_a_limit_are_warned_of(tmp_path, capfd):
  train(build(config(environment__max_turns=1, num_updates=1)), tmp_path / "run")
  out = capfd.readouterr().out
  assert "of the dialogues sampled for update 1 ended by turn_limit" in out
  assert "raise config.environment.max_turns" in out


@pytest.mark.slow
def test_two_processes_of_environments_give_the_same_run(whole, tmp_path):
  train(build(config(environment__processes=2)), tmp_path / "run")
  assert tiny.records(tmp_path / "run") == tiny.records(whole)
  assert tiny.rollouts(tmp_path / "run") == tiny.rollouts(whole)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3])
def test_a_resumed_run_repeats_itself(whole, tmp_path, step):
  cut = tmp_path / "cut"
  shutil.copytree(whole, cut)
  for later in range(step + 1, 5):
    shutil.rmtree(cut / "checkpoints" / str(later))
  for shard in (cut / "rollouts").glob("0*"):  # the later batches are sampled again
    if int(shard.name.partition(".")[0]) >= step // 2 + 1:
      shard.unlink()
  train(build(config()), cut)
  assert tiny.records(cut, "train") == tiny.records(whole, "train")
  assert tiny.rollouts(cut) == tiny.rollouts(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
  "fields",
  [
    dict(schedule="asynchronous(max_lag=2)"),
    dict(schedule="fixed_lag(lag=2)", dynamic_sampling=dict(enabled=True, max_batches=60)),
    dict(sources__temperature=dict(fraction=0.5, temperature=1.3, recorded="sampled")),
    dict(loss="p3o", advantage="fade", reweighting="salt", veto__enabled=True),
    dict(loss="gspo", advantage="opo", aggregation="constant", overlong__buffer=4),
  ],
  ids=["asynchronous", "dynamic sampling", "sources", "p3o fade salt veto", "gspo opo constant"],
)
def test_dialogues_go_with_everything(fields, tmp_path):
  train(build(config(**fields)), tmp_path / "run")
  trained = tiny.records(tmp_path / "run", "train")
  assert [record["step"] for record in trained] == [1, 2, 3, 4]
  assert all(np.isfinite(record["loss/surrogate"]) for record in trained)


@pytest.mark.slow
def test_an_evaluation_by_itself(whole, tmp_path):
  changed = config()
  values = evaluate_checkpoint(build(changed), tmp_path / "eval", whole / "checkpoints" / "4")
  (last,) = [r for r in tiny.records(whole, "eval") if r["step"] == 4]
  for name in ("pass@1", "solved_in_turns/1", "gap_to_best_play"):
    assert values[f"eval/{name}"] == last[f"eval/{name}"]


def test_bad_settings_are_refused_before_anything_runs():
  for field, value, message in (
    ("environment__name", "guss(low=1)", "did you mean 'guess'"),
    ("environment__name", "guess(lo=1)", "lo"),
    ("environment__max_turns", 0, "max_turns"),
    ("environment__cut", "tails", "tail"),
    ("environment__stop_strings", ("",), "stop string"),
    ("environment__max_reply_length", 3, "has 7 tokens"),
  ):
    with pytest.raises(ValueError, match=message):
      build(config(**{field: value}))


def test_scores_that_are_not_binary_are_refused_where_they_must_be():
  discounted = dict(environment__name="retry(discount=0.5)", advantage="fade")
  with pytest.raises(
    ValueError, match=r"may give other scores; set config\.grading\.outcomes\.correct"
  ):
    build(config(**discounted))
  build(config(**discounted, grading__outcomes__correct="1"))
  build(config(**discounted | dict(environment__name="retry(tries=2)")))
