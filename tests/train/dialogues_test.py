"""Runs whose rollouts are dialogues: what they write, repeat, resume and evaluate."""

import json
import shutil

import numpy as np
import pytest
from train import tiny

from rlvr_jax.colab import rollouts
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
  evaluation__num_samples=8,  # few would leave it to chance whether a first guess is right
)
SCORED = dict(
  environment__name=f"train.scored_guess:scored_guess(high={HIGH})",
  advantage="mt_grpo(turn_weight=0.5)",
  batch__tokens_per_micro_batch=128,
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
  return [tiny.read_stored(store, number)[0] for number in store.numbers()]


def samples(workdir):
  return [json.loads(line) for line in (workdir / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_notebook_reads_turns(whole):
  read = rollouts.load(whole)
  assert len({r.policy_turns for r in read}) == MAX_TURNS
  for r in read:
    assert [*np.unique(r.turn_numbers)] == [*range(len(r.turns))]
    assert (r.surprisals[r.turn_numbers % 2 == 1] == 0).all()
    assert set(r.turns[1::2]) <= {"<", ">", "?"} and "".join(r.turns) == r.completion


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_metrics_of_dialogues(whole):
  for record in tiny.records(whole, "train"):
    assert 1 < record["dialogue/turns"] <= record["dialogue/turns_max"] <= MAX_TURNS
    assert record["dialogue/environment_tokens"] >= record["dialogue/turns"] - 1
    assert record["dialogue/policy_tokens"] >= record["dialogue/turns"]
    outcomes = [value for name, value in record.items() if name.startswith("outcome/")]
    assert sum(outcomes) == pytest.approx(1) and record["outcome/turn_limit"] > 0
    assert record["agreement/policy_mean"] < 1e-5 if "agreement/policy_mean" in record else True
  times = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
  times = [record for record in times if record.get("time/replies")]
  assert times
  for record in times:
    assert 0 < record["time/waiting_share"] <= 1 - record["time/slots_busy"]
    assert record["time/rebuilt_per_token"] > 0
  evaluated = tiny.records(whole, "eval")
  assert all("eval/outcome/turn_limit" in record for record in evaluated)
  for record in evaluated:
    solved = [record[f"eval/solved_in_turns/{turns}"] for turns in range(1, MAX_TURNS + 1)]
    assert solved == sorted(solved) and solved[-1] == pytest.approx(record["eval/pass@1"])
    assert record["eval/gap_to_best_play"] == pytest.approx(1 - record["eval/pass@1"])
    # 1 of 7 numbers is found at the first guess, if all guesses have the same probability.
    assert 0 < solved[0] < solved[-1]


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
def test_what_environments_break_is_left_out_and_told(tmp_path, capfd):
  name = "environments.faulty_environments:breaking_guess"
  train(build(config(environment__name=name, num_updates=2)), tmp_path / "run")
  assert "the environment failed in " in (out := capfd.readouterr().out)
  assert "the first error is: OSError: no " in out
  for record in tiny.records(tmp_path / "run", "train"):
    assert 0.3 < record["outcome/environment_failed"] < 1 and np.isfinite(record["loss/surrogate"])
  details = set()
  for sample in samples(tmp_path / "run"):
    assert (sample["reward"] is None) == (sample["outcome"] == "environment_failed")
    assert ("detail" in sample) == (sample["outcome"] == "environment_failed")
    details.add(sample.get("detail", "").partition(" (")[0])
  assert details == {"", "OSError: no reset", "OSError: no turn"}


@pytest.fixture(scope="module", name="scored")
def _scored(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("scored") / "run"
  train(build(config(**SCORED)), workdir)
  return workdir


def scores_of(turns):
  """What `scored_guess` gives the policy's turns that it replies to."""
  low, high, found = 1, HIGH, []
  for text, reply in zip(turns[::2], turns[1::2], strict=False):
    if reply == "?":
      found.append(None)
      continue
    guessed = int(text)
    found.append(float(low <= guessed <= high))
    low, high = (max(low, guessed + 1), high) if reply == ">" else (low, min(high, guessed - 1))
  return found


@pytest.mark.slow
def test_the_scores_of_turns_are_recorded_and_compared(scored):
  for arrays, record in zip(batches(scored), tiny.records(scored, "train")[:2], strict=True):
    found = arrays["turn_scores"][~np.isnan(arrays["turn_scores"])]
    assert {*found} <= {0.0, 1.0} and record["dialogue/turn_score"] == pytest.approx(found.mean())
    at = ~np.isnan(arrays["turn_scores"])
    assert not (arrays["turns"][at] % 2).any() and arrays["turn_scores"].dtype == np.float32
  lines = samples(scored)
  for sample in lines:
    expected = scores_of(sample["turns"])
    found = sample.get("turn_scores", [None] * len(sample["turns"]))
    assert found[::2][: len(expected)] == expected and not any(found[1::2])
  assert any(0.0 in sample.get("turn_scores", ()) for sample in lines)
  for record in tiny.records(scored, "train"):
    assert 0 < record["advantage/turns_compared"] <= 1 and record["rows/micro_batches"] > 1
    assert np.isfinite(record["loss/surrogate"]) and record["update/skipped"] == 0


REFUSED = [
  (dict(environment__name="guss(low=1)"), "guess"),
  (dict(environment__name="guess(lo=1)"), "lo"),
  (dict(environment__max_turns=0), "max_turns"),
  (dict(environment__name="retry(tries=4)"), r"max_turns = 3"),
  (dict(environment__name="retry", environment__max_turns=2), "3 tries"),  # by default
  (dict(environment__cut="tails"), "tail"),
  (dict(environment__stop_strings=("",)), "stop string"),
  (dict(environment__max_reply_length=3), "7 tokens"),
  (dict(environment__deadline_s=0.0), r"deadline_s = 0\.0"),
  (dict(environment__memory_mib=0), "memory_mib = 0"),
  (dict(environment__processes=100_000), "processes = 100000"),
  # What needs one score of a rollout, or scores of turns.
  (SCORED | dict(environment__name=""), "no turns"),
  (SCORED | dict(reweighting="salt"), "one coefficient per rollout"),
  (SCORED | dict(loss="gmpo"), "full responses"),
  (dict(environment__name="retry(discount=0.5)", advantage="fade"), r"outcomes\.correct"),
]


@pytest.mark.parametrize(("fields", "word"), REFUSED)
def test_what_dialogues_cannot_be_is_refused_before_anything_runs(fields, word):
  with pytest.raises(ValueError, match=word):
    build(config(**fields))


def test_tries_of_equal_worth_have_binary_scores():
  build(config(environment__name="retry(tries=2)", advantage="fade"))
