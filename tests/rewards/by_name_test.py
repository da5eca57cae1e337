"""Graders from their strings: names, hyper-parameters, and who imports a user's module."""

import sys

import pytest

from rlvr_jax.rewards import GraderPool, GraderStartError, by_name
from rlvr_jax.rewards.by_name import load_grader, parse_grader

OWN = """
import os

def near(completion, reference, *, tolerance=0.0):
  return float(abs(float(completion) - reference["answer"]) <= tolerance)

def near_self_test(*, tolerance):
  assert tolerance >= 0, f"tolerance = {tolerance} is negative"

def either(completion, reference, tolerance=1.0):
  return tolerance

async def awaited(completion, reference): return 1

def judged(completion, reference, judge): return 1
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
  """A module of graders that only workers can import by now."""
  monkeypatch.chdir(tmp_path)
  name = f"graders_of_{tmp_path.name}"
  (tmp_path / f"{name}.py").write_text(OWN)
  yield name
  sys.modules.pop(name, None)


def test_hyper_parameters_reach_a_grader_and_its_self_test_in_the_workers(own):
  with GraderPool(f"{own}:near(tolerance=0.5)") as pool:
    grades = pool.grade(["7.4", "7.6"], [{"answer": 7}] * 2)
  assert [grade.score for grade in grades] == [1.0, 0.0]
  with GraderPool(f"{own}:either(tolerance=0.25)") as pool:
    assert pool.grade([""], [{}])[0].score == 0.25
  with pytest.raises(GraderStartError, match=r"tolerance = -1 is negative"):
    GraderPool(f"{own}:near(tolerance=-1)")
  assert own not in sys.modules


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("near(tolerence=1)", r"near takes no 'tolerence'; .*near takes \['tolerance'\]"),
    ("near(completion='7')", "completion of .*near comes from the run; leave it out"),
    ("awaited", "is a coroutine or generator function; a grader must be a plain function"),
    ("judged", "missing a required argument: 'judge'"),
  ],
)
def test_what_a_user_s_module_lacks_is_told_when_workers_load_it(
  own, monkeypatch, tmp_path, text, message
):
  parse_grader("config.grading.grader", f"{own}:{text}")
  assert own not in sys.modules
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ValueError, match=message):
    load_grader(f"{own}:{text}")


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("mathematic", r"unknown; did you mean 'mathematics'"),
    ("Grade", "'Grade' is unknown"),
    ("code(rewards='all')", r"code takes no 'rewards'; code takes \['reward'\]"),
    ("gsm8k(reference={})", "reference of gsm8k comes from the run"),
    ("pattern", "missing a required (keyword-only )?argument: 'regex'"),
    (None, "is not a component"),
  ],
)
def test_what_is_refused_before_any_worker_starts(text, message):
  for use in (lambda: parse_grader("f", text), lambda: GraderPool(text)):
    with pytest.raises(ValueError, match=message) as error:
      use()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", by_name.__all__)
def test_every_name_is_a_grader(name):
  text = "pattern(regex='a')" if name == "pattern" else name
  assert str(parse_grader("f", f" {text} ")) == text
  if name not in ("code", "reasoning_gym"):  # whose self-tests take a second
    load_grader(text)
