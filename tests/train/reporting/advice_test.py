"""What a run says of its data, and of settings that its metrics do not speak for."""

import re

import pytest
from train import tiny
from train.sums import sums

from rlvr_jax.train.reporting import advice
from rlvr_jax.train.session import announce_data, logged_run
from rlvr_jax.train.setup.build import build, make_schedule

# --- data -----------------------------------------------------------------------------------------


def test_a_run_begins_with_both(capsys):
  """A warm start of 150 batches of 64, of 60 demonstrations."""
  fields = dict(num_steps=150, batch_size=64)
  config = tiny.config(**{f"warm_start__{name}": x for name, x in fields.items()})
  parts = build(config, task=sums(warm_start_size=60))
  announce_data(parts.schedule, logged_run(parts), parts.sources.num_live, False)
  assert capsys.readouterr().out.splitlines() == [
    # Two batches of 8 prompts at every fourth of 12 updates.
    "12 updates sample 48 prompts from 1,000 training problems, 0.048 passes over them",
    "warning: the warm start makes 160 passes over 60 demonstrations; from about 20 passes on, the"
    " policy memorizes them. Lower config.warm_start.num_steps = 150 to at most 18, or give more"
    " demonstrations (for most tasks, config.task.kwargs.warm_start_size)",
  ]


@pytest.mark.parametrize(
  ("fields", "expected"),
  [
    (dict(schedule="on_policy", num_updates=250), "250 updates sample 2,000 prompts .*, 20 passes"),
    (dict(schedule="asynchronous", num_updates=25), "25 updates sample 200 prompts .*, 2 passes"),
    (dict(schedule="on_policy", dynamic_sampling__enabled=True),
     "12 updates sample at least 96 prompts from 100 training problems, at least 0.96 passes"),
  ],
)  # fmt: skip
def test_planned_passes(fields, expected):
  config = tiny.config(**fields)
  line = advice.planned_passes(
    make_schedule(config.schedule, num_updates=config.num_updates, seed=config.seed),
    num_updates=config.num_updates,
    groups=8,
    problems=100,
    dynamic_sampling=config.dynamic_sampling.enabled,
  )
  assert re.match(expected, line)


def test_more_than_twenty_passes_are_warned_of():
  def warns(steps, checkpoint=""):
    config = tiny.config(warm_start__num_steps=steps, warm_start__batch_size=64)
    task = sums(warm_start_size=60)
    warm_start = advice.plan_warm_start(config.warm_start, task, checkpoint=checkpoint)
    return advice.on_demonstrations(warm_start) != ""

  assert not warns(18)  # 19.2 passes
  assert warns(19)  # 20.3
  assert not warns(0)
  assert not warns(150, checkpoint="another run's")  # in place of the warm start


GOOD = {
  "groups/effective": 0.5, "groups/all_wrong": 0.3, "groups/all_correct": 0.2,
  "policy/entropy": 0.5,
}  # fmt: skip


@pytest.mark.parametrize(
  ("steps", "values", "expected"),
  [
    (150, {}, ""),
    (15, {"policy/entropy": 0.05}, ""),  # of long regular answers
    (15, {"dynamic_sampling/prompts_per_group": 4.0}, ""),
    (150, {"groups/effective": 0.03, "policy/entropy": 0.05},
     "an entropy of 0.050 nats per token, and 3% of its groups .* memorized in 160 passes over 60"
     " demonstrations. Lower config.warm_start.num_steps = 150, or give more"),
    (15, {"policy/entropy": 0.01}, "memorized in 16 passes over 60 .*. Lower config.warm_start"),
    (15, {"groups/effective": 0.05, "groups/all_wrong": 0.95},
     "5% of its groups .* It seldom succeeds. Raise config.warm_start.num_steps = 15"),
    (15, {"groups/effective": 0.05, "groups/all_correct": 0.9},
     "It solves most problems already. Choose harder ones"),
    (15, {"groups/effective": 1.0, "dynamic_sampling/prompts_per_group": 20.0}, "5% of its groups"),
    (0, {"groups/effective": 0.0, "policy/entropy": 0.0}, ""),
  ],
)  # fmt: skip
def test_what_a_warm_start_leaves_is_judged_by_the_first_update(steps, values, expected):
  text = advice.on_first_update(advice.WarmStart(steps, 64, 60), GOOD | values)
  assert re.search(expected, text) if expected else text == ""


def test_a_warm_start_is_not_judged_by_an_update_on_nothing():
  """Where every rollout is left out, the warning of its cause is the right one."""
  assert advice.on_first_update(advice.WarmStart(150, 64, 60), {}) == ""


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.5, 0.51])
def test_responses_that_are_mostly_truncated_are_named_with_their_limit(share):
  text = advice.on_responses({"response/truncated": share}, 3, 64)["truncation"]
  assert bool(text) == (share > 0.5)
  assert not text or re.match(r"51% .* update 3 .* config\.max_response_length = 64 tokens", text)


@pytest.mark.parametrize(
  ("shares", "cause", "expected"),
  [
    (dict(turn_limit=0.2, length_limit=0.3), "limits", ""),
    (dict(turn_limit=0.3, length_limit=0.4), "limits",
     "70% .* update 2 ended so: turn_limit 30%, length_limit 40%, environment_limit 0%.*"
     r"raise config\.max_response_length"),
    (dict(turn_limit=0.6), "limits", r"60% .*raise config\.environment\.max_turns"),
    (dict(environment_refused=0.6), "environment_refused", "60% .* look at the turns"),
  ],
)  # fmt: skip
def test_dialogues_that_mostly_end_by_limits_have_the_remedy_of_the_most_frequent(
  shares, cause, expected
):
  statistics = {"dialogue/turns": 2.0, "response/truncated": 1.0}
  statistics |= {f"outcome/{name}": share for name, share in shares.items()}
  texts = advice.on_responses(statistics, 2, 64)
  assert re.match(expected, texts.pop(cause)) if expected else texts.pop(cause) == ""
  assert [*texts.values()] == [""]


@pytest.mark.parametrize(
  ("outcome", "what"),
  [("crashed", "the grader crashed on "), ("environment_failed", "the environment failed in ")],
)
def test_a_fault_is_named_with_its_first_error(outcome, what):
  fine = {"outcome": "environment_refused", "detail": "no"}
  fault = {"outcome": outcome, "detail": "KeyError: 1"}
  texts = advice.on_faults([fine, fault, {**fault, "detail": "2"}, fine], "responses", "See {}")
  expected = f"{what}50% of the responses; the first error is: KeyError: 1. See {outcome}"
  assert sorted(texts.values()) == ["", expected]
  assert {*advice.on_faults([fine], "responses", "")} and not any(
    advice.on_faults([fine], "responses", "").values()
  )


@pytest.mark.parametrize(("filled", "share"), [(0.5, ""), (0.49, "51%")])
def test_padding_is_named_with_the_settings_of_rows(filled, share):
  text = advice.on_padding(filled, 3, tiny.config().batch)["padding"]
  assert text.partition(" of the positions in update 3")[0] == share
  assert not text or "lower config.batch.tokens_per_micro_batch (now 0) or" in text
