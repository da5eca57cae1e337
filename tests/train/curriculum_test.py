"""A run on a curriculum of one's own lines: resumed it repeats itself bit for bit."""

import contextlib
import json
import shutil

import pytest
from train import tiny

from rlvr_jax.commands.train import train
from rlvr_jax.data.curriculum import Curriculum
from rlvr_jax.train.setup.build import build


@pytest.fixture(scope="module", name="config_of")
def _config_of(tmp_path_factory):
  lines = [dict(prompt=f"{a}+{b}=", answer=str(a + b)) for a in range(6) for b in range(6)]
  path = tmp_path_factory.mktemp("own") / "sums.jsonl"
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  own = dict(train=str(path), held_out_size=4, grader="rewards.user_graders:unhurried",
             solution="{answer}", warm_start_size=20)  # fmt: skip

  def config_of(**fields):
    config = tiny.config(num_updates=6, checkpoint__keep=10, **fields)
    parts = dict(mine=dict(name="jsonl", kwargs=own))
    with config.unlocked():
      config.task = dict(name="curriculum", kwargs=dict(parts=parts, rate=1.0, floor=0.5))
    return config

  return config_of


@pytest.fixture(scope="module", name="parts")
def _parts(config_of):
  parts = build(
    config_of(
      schedule="updates_per_refresh(batches=2)",
      grading__extra=(("pattern(regex='.')", 0.1),),  # changes references, not the curriculum
      prompts__too_long="drop",
    )
  )
  assert isinstance(parts.task.train, Curriculum) and len(parts.task.train) == 12
  return parts


@pytest.mark.slow
def test_a_resumed_run_samples_the_same_problems(parts, tmp_path):
  whole = tmp_path / "whole"
  train(parts, whole)
  trained = tiny.records(whole, "train")
  seen = [record["curriculum/seen"] for record in trained]
  assert seen[0] == pytest.approx(8 / 12) and seen[1] < 1 == seen[-1]
  assert len({record["curriculum/estimate"] for record in trained}) > 3  # they have moved
  for step, forgotten in ((3, False), (3, True), (4, True)):
    cut = tmp_path / f"cut {step} {forgotten}"
    shutil.copytree(whole, cut)
    for later in range(step + 1, 7):
      shutil.rmtree(cut / "checkpoints" / str(later))
    if forgotten:  # the later batches are sampled again, by the curriculum's saved state
      for shard in (cut / "rollouts").iterdir():
        with contextlib.suppress(ValueError):
          if int(shard.name.partition(".")[0]) >= (step + 1) // 2 * 2:
            shard.unlink()
    train(parts, cut)
    assert tiny.records(cut, "train") == trained
    assert tiny.rollouts(cut) == tiny.rollouts(whole)
