"""What is refused of a teacher, before compilation, and whole runs with one."""

import json
import shutil

import jax
import numpy as np
import pytest
from train import tiny

from docs import glossary
from rlvr_jax.commands.ahead_of_time import memory_tables
from rlvr_jax.commands.train import train
from rlvr_jax.data import ByteTokenizer
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.setup.teachers import check_same_tokens

FEW = dict(num_updates=2, warm_start__num_steps=2, evaluation__every=2)


def fields(checkpoint="initial", distillation="opd", **others):
  return FEW | dict(teacher__checkpoint=str(checkpoint), distillation=distillation) | others


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The workdir of a run whose policy teaches."""
  folder = tmp_path_factory.mktemp("teacher")
  train(build(tiny.config(**FEW, seed=5).lock()), folder)
  return folder


def write_run(folder, **changes):
  """A folder like that of a run, with a configuration and an empty checkpoint."""
  config = json.loads(tiny.config(**changes).to_json_best_effort())
  (folder / "checkpoints" / "3").mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps(config))
  return folder / "checkpoints" / "3"


REFUSED = {
  "no teacher": (
    dict(distillation="opd"),
    r"config\.distillation = 'opd' needs a teacher; set config\.teacher\.checkpoint to",
  ),
  "no distillation": (
    dict(teacher__checkpoint="initial"),
    r"config\.teacher\.checkpoint = 'initial' has no effect with config\.distillation = 'none'",
  ),
  "unknown": (fields(distillation="odp"), r"config\.distillation = 'odp'.*opd"),
  "k1": (fields(distillation="kl_estimate(estimator='k1')"), "which is 0; choose 'k2'"),
  "weight": (fields(teacher__weight=-1.0), r"config\.teacher: weight = -1\.0"),
  "temperature": (fields(teacher__temperature=0.0), r"config\.teacher: temperature = 0\.0"),
  "of responses": (
    fields(loss="topr"),
    r"config\.distillation = 'opd' gives each token its own advantage, but config\.loss = 'topr'",
  ),
  "top k": (
    fields(distillation="kl(support='student', top_k=300)"),
    r"top_k = 300 is above the vocabulary of 264 tokens; lower it",
  ),
  "no folder": (
    fields("nowhere"),
    r"config\.teacher\.checkpoint = 'nowhere' is neither WORKDIR/checkpoints/STEP of a run, nor",
  ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_teacher_that_cannot_teach_is_refused_in_one_line(changes, message):
  with pytest.raises(ValueError, match=message) as error:
    build(tiny.config(**changes).lock())
  assert "\n" not in str(error.value)


def test_a_loss_of_full_responses_takes_a_teacher_s_loss():
  assert build(tiny.config(**fields(distillation="opd_score", loss="topr")).lock())


def test_another_vocabulary_is_refused(tmp_path):
  checkpoint = write_run(tmp_path, model__overrides=dict(vocab_size=512))
  with pytest.raises(ValueError, match="has a vocabulary of 512 tokens, the policy one of 264"):
    build(tiny.config(**fields(checkpoint)).lock())


def test_a_run_is_refused_without_a_step_and_with_adapters(tmp_path):
  checkpoint = write_run(tmp_path, lora__rank=2)
  with pytest.raises(ValueError, match=r"is a run; name one of its checkpoints"):
    build(tiny.config(**fields(tmp_path)).lock())
  with pytest.raises(ValueError, match=r"has adapters alone; export that run"):
    build(tiny.config(**fields(checkpoint)).lock())
  with pytest.raises(ValueError, match=r"checkpoints/9' has no checkpoint of a run"):
    build(tiny.config(**fields(checkpoint.with_name("9"))).lock())


class Shifted(ByteTokenizer):
  def vocabulary(self):
    return {token: number + 1 for token, number in super().vocabulary().items()}


def test_another_tokenizer_is_refused_by_name():
  check_same_tokens("x", ByteTokenizer(), ByteTokenizer())
  with pytest.raises(ValueError, match=r"x has another tokenizer \(Shifted\).*258 of 258 tokens"):
    check_same_tokens("x", Shifted(), ByteTokenizer())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["opd", "kl"])
def test_a_run_learns_from_another_one_s_checkpoint(form, run, tmp_path):
  """Its metrics are documented; resumed it goes on to the same bits."""
  checkpoint = run / "checkpoints" / "2"
  every = dict(teacher__reward_weight=0.0, diagnostics__every=1)
  c = lambda: tiny.config(**fields(checkpoint, form, **every)).lock()
  train(build(c()), tmp_path / "whole")
  assert not glossary.missing(tmp_path / "whole")
  (first, last) = tiny.records(tmp_path / "whole", "train")
  assert first["teacher/kl_k3"] > 0 and np.isfinite(last["teacher/kl_k1"])
  parts = build(c())
  (teacher,) = parts.teachers
  read = jax.device_get(teacher.read())
  own = Checkpointer(run / "checkpoints").restore(parts.placement.state).state.params
  jax.tree.map(np.testing.assert_array_equal, read, jax.device_get(own))
  teacher.check(parts.tokenizer)
  table = memory_tables(parts, compiled=False)
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(teacher.params))
  assert all(t["teachers"] == size for t in table.values())
  shutil.rmtree(tmp_path / "whole" / "checkpoints" / "2")
  train(build(c()), tmp_path / "whole")
  assert tiny.records(tmp_path / "whole", "train") == [first, last]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["initial", "base"])
def test_adapters_learn_from_their_base(checkpoint, tmp_path):
  """Before the first update both teachers are the policy, so that the teacher's part is zero."""
  c = tiny.config(
    **fields(checkpoint, lora__rank=2, teacher__reward_weight=0.0) | dict(warm_start__num_steps=0)
  )
  train(build(c.lock()), tmp_path)
  first, _ = tiny.records(tmp_path, "train")
  assert first["teacher/kl_k3"] == 0 and first["update/gradient_norm"] == 0
