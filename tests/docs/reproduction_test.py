"""docs/reproduction.md: every claim once, no number of a result written by hand, up to date."""

import json
import re

import pytest

from docs import reproduction
from docs.verdicts import IN_SHORT, VERDICTS_BY_ID
from experiments import evidence, full_size
from experiments.testbed.arms import SEEDS, committed
from rlvr_jax.ops import caches

# Digits that are conditions, not results: they are of the arms, the claims and the methods.
CONDITION = re.compile(
  r"\b[GUS] = \d+|[εκμα] = [\d.]+|pass@\d+|α is 0\b|above 1\b|α fixed at [01]|int8|fp8|bf(loat)?16"
  r"|(temperature|bonus of|rise of|lag) [\d.]+|95 %|1024|256 rollouts|\[0, 5\]|of (a )?7B"
  r"|\b[SPFM]\d\b|P3O|30 or 60 s"
)
PAGE = reproduction.PAGE.read_text(encoding="utf-8")


def test_the_page_is_up_to_date():
  assert reproduction.page() == PAGE, f"write it by: {reproduction.COMMAND}"


def test_every_claim_is_on_the_page_once():
  assert len(reproduction.IDS) == 26
  assert sorted(VERDICTS_BY_ID) == sorted(reproduction.IDS)
  rows = re.findall(r"^\| ([SPFM]\d+) \|", PAGE, re.MULTILINE)
  assert sorted(rows) == sorted(reproduction.IDS)


@pytest.mark.parametrize("name", reproduction.IDS)
def test_a_verdict_has_its_evidence(name):
  verdict = VERDICTS_BY_ID[name]
  assert verdict.verdict in reproduction.VERDICTS
  assert verdict.evidence.count("{}") == len(verdict.values)
  assert not re.findall(r"\d", CONDITION.sub("", verdict.evidence)), "a result written by hand"
  assert set(verdict.arms) <= set(evidence.CLAIMS) | set(evidence.ABLATIONS)
  if verdict.verdict in ("reproduced", "in part", "not"):
    assert verdict.values and verdict.conditions and verdict.link
  if verdict.verdict == "queued":
    assert verdict.arms


def test_each_paper_has_its_summary_without_results():
  assert IN_SHORT.keys() == reproduction.PAPERS.keys()
  for text in IN_SHORT.values():
    assert text in PAGE and not re.findall(r"\d", CONDITION.sub("", text))


def test_a_result_written_by_hand_is_seen():
  for text in ("PR is 11.6", "it rises by 0.04", "in 3 of 5 seeds"):
    assert re.findall(r"\d", CONDITION.sub("", text))


def run(label, seed, last):
  evaluations = {"updates": [0, 10], "eval/pass@1": [0.25, last]}
  return {"label": label, "seed": seed, "evaluations": evaluations}


def test_values_are_those_of_the_runs():
  found = {
    "a": [run("a", seed, 0.5 + 0.1 * seed) for seed in range(3)],
    "b": [run("b", seed, 0.4 + 0.1 * seed) for seed in range(3)],
  }
  final = lambda result: result["evaluations"]["eval/pass@1"][-1]
  assert reproduction.paired(found, "a", "b", final) == "+0.100 [+0.100, +0.100]"
  assert reproduction.mean(found["a"], final) == "0.6 ± 0.2"
  with pytest.raises(ValueError, match="share fewer than two seeds"):
    reproduction.paired({"a": found["a"][:1], "b": found["b"][1:]}, "a", "b", final)


def test_what_has_finished_is_no_longer_queued(tmp_path):
  assert reproduction.queued(["GRPO", "P3O"], set()) == 2 * len(SEEDS)
  (tmp_path / "fade").mkdir()
  (tmp_path / "fade" / "testbed.json").write_text(json.dumps([run("GRPO", 0, 0.5)]))
  done = committed(tmp_path)
  assert done == {("GRPO", 0)} and reproduction.queued(["GRPO"], done) == len(SEEDS) - 1
  assert reproduction.hours(12) == "1.0"


def test_hours_on_hardware_are_those_of_the_compiled_programs():
  assert full_size.BURST == caches._STEPS
  path = full_size.COSTS / "gsm8k_qwen25_15b_lora" / "costs_v5e_1x1.json"
  report = json.loads(path.read_text(encoding="utf-8"))
  update, burst = (max(report["costs"][x]["seconds"].values()) for x in ("update", "generation"))
  assert (
    report["conditions"]["prompts"] * report["conditions"]["group_size"]
  ) == full_size.ROLLOUTS
  expected = 192 * (update + 2 * 32 * burst) * 3 / 3600  # 256 rollouts in 128 slots
  assert full_size.hours("gsm8k_qwen25_15b_lora", "v5e_1x1") == pytest.approx(expected)


def test_the_arms_on_hardware_have_their_rollouts():
  listed = full_size.get_sweep()
  assert len(listed) == 1 + 3 * len(evidence.CLAIMS)
  large = [fields for fields in listed if fields["label"] == "GRPO, G = 32"]
  assert [fields["batch.prompts"] * fields["batch.group_size"] for fields in large] == 3 * [256]
  stages = [fields for fields in listed if fields["label"] == "suffix, μ = 96"]
  assert stages[0]["schedule"] == "stages(count=2)" and stages[0]["num_updates"] == 192
