"""The command that counts what a reader opens."""

import ast
import textwrap

import pytest
from reading import __main__ as reading
from reading import counts


def test_returns_and_those_that_lead_on():
  calls = reading.read_once([
    [
      ["loop", "run", "", ""],
      ["batches", "take", "loop", "run"],
      ["files", "read", "batches", "take"],
      ["batches", "grade", "batches", "take"],  # inside the file: coming back is no return
      ["loop", "callback", "batches", "grade"],
      ["loop", "inner", "loop", "callback"],
      ["pool", "submit", "loop", "inner"],
      ["files", "write", "pool", "submit"],
      ["batches", "take", "pool", "submit"],  # read before
    ],
    [["pool", "work", "", ""], ["files", "sync", "pool", "work"]],
  ])  # fmt: skip
  returns = reading.returns_of(calls)
  assert [(call.file, call.name) for call in returns] == [
    ("loop", "callback"), ("files", "write"), ("pool", "work"), ("files", "sync")
  ]  # fmt: skip
  assert [call.name for call in returns if reading.leads_on(call, calls)] == ["callback", "work"]


def test_what_the_source_says():
  tree = ast.parse(
    textwrap.dedent("""
      def f(parts: Parts, config: ConfigDict):
        assert parts.a is not None and parts.b is not None
        assert parts.c is None

      def g(self, *, run: Run, config: ml_collections.ConfigDict): ...

      def h(settings: ml_collections.ConfigDict, parts: PartsOfSpeech):
        assert settings.a
      """)
  )
  assert counts.assertions(tree) == 1
  assert counts.signatures(tree, counts.WHOLES["parts"]) == 2
  assert counts.signatures(tree, counts.WHOLES["configuration"]) == 2
  graph = {"loop": {"store", "engine"}, "engine": {"store"}, "store": set()}
  assert counts.floors(graph) == 3


@pytest.mark.slow
def test_a_run_is_read_from_its_draw_to_its_update():
  read = reading.Reading(reading.recorded(reading.ROOT, "plain"))
  assert next(iter(read.functions)) == "train/loop.py"
  assert {"rollouts/engine.py", "data/draws.py", "rollouts/packing.py"} <= set(read.host)
  assert {"update/step.py", "losses/ppo_clip.py", "advantages/grpo.py"} <= set(read.numeric)
  assert not any(file.startswith(("commands/", "evaluate/")) for file in read.functions)
