"""What is refused of a teacher, before compilation, and whole runs with one."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
from train import tiny

from docs import glossary
from rlvr_jax.commands import ahead_of_time
from rlvr_jax.commands.ahead_of_time import memory_tables
from rlvr_jax.commands.export import export
from rlvr_jax.commands.train import FAILURES, train
from rlvr_jax.costs import programs
from rlvr_jax.data import ByteTokenizer
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.loop import next_batch
from rlvr_jax.train.session import check_teachers, open_session
from rlvr_jax.train.setup import problem_filters
from rlvr_jax.train.setup.build import build, make_task
from rlvr_jax.train.setup.teachers import (
  TeacherError,
  check_same_tokens,
  describe_long_teachers,
  make_prompts,
)
from rlvr_jax.types import Prompts, Sampling
from rlvr_jax.update.agreement import response_logprobs

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


REFUSED = {  # settings, and a word of the message
  "no teacher": (dict(distillation="opd"), "needs a teacher"),
  "no distillation": (dict(teacher__checkpoint="initial"), "no effect .* 'none'"),
  "unread privileged": (dict(teacher__privileged="hint"), "privileged = 'hint' has no effect"),
  "unread temperature": (dict(teacher__temperature=0.5), "temperature = 0.5 has no effect"),
  "unread weight": (dict(teacher__reward_weight=0.0), "reward_weight = 0.0 has no effect"),
  "unknown": (fields(distillation="odp"), "odp.*opd"),
  "k1": (
    fields(distillation="kl_estimate(estimator='k1')"),
    "choose estimator = 'k2', or config.distillation = 'opd'",
  ),
  "weight": (fields(teacher__weight=-1.0), r"weight = -1\.0"),
  "measured beside less": (
    fields(teacher__weight=0.0, teacher__reward_weight=0.5),
    "weight above 0",
  ),
  "temperature": (fields(teacher__temperature=0.0), r"temperature = 0\.0"),
  "of responses": (fields(loss="topr"), "'topr'"),
  "top k": (fields(distillation="kl(support='student', top_k=300)"), "vocabulary of 264"),
  "no adapters": (fields("base"), "without its adapters"),
  "no folder": (fields("nowhere"), "'nowhere' is neither"),
}


def test_a_loss_of_full_responses_takes_a_teacher_s_loss():
  assert build(tiny.config(**fields(distillation="opd_score", loss="topr")).lock())


def test_another_vocabulary_is_refused(tmp_path):
  checkpoint = write_run(tmp_path, model__overrides=dict(vocab_size=512))
  with pytest.raises(ValueError, match="has a vocabulary of 512 tokens, but the policy has 264"):
    build(tiny.config(**fields(checkpoint)).lock())


def test_a_run_is_refused_without_a_step_and_with_adapters(tmp_path):
  checkpoint = write_run(tmp_path, lora__rank=2)
  with pytest.raises(ValueError, match=r"is a run; name one of its checkpoints"):
    build(tiny.config(**fields(tmp_path)).lock())
  with pytest.raises(ValueError, match=r"has only adapters; export that run"):
    build(tiny.config(**fields(checkpoint)).lock())
  with pytest.raises(ValueError, match=r"checkpoints/9' does not exist, or its run has no"):
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


def test_an_export_teaches_as_its_checkpoint_does(tmp_path):
  """Its tokenizer is compared token by token; one with two tokens exchanged is refused."""
  source = build(tiny.config(**FEW, seed=5).lock())
  export(source, str(tmp_path / "export"), None)
  parts = build(tiny.config(**fields(tmp_path / "export")).lock())
  (teacher,) = parts.teachers
  teacher.check(parts.tokenizer)
  params = jax.device_get(source.initial.trained())
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(teacher.read()), params)
  path = tmp_path / "export" / "tokenizer.json"
  content = json.loads(path.read_text())
  vocabulary = content["model"]["vocab"]
  vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
  path.write_text(json.dumps(content))
  with pytest.raises(ValueError, match=r"export' has another tokenizer .*: 2 of 258 tokens differ"):
    teacher.check(parts.tokenizer)


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


# --- several teachers, and what a teacher reads besides -------------------------------------------


def lines(folder, changed=None, count=24):
  """A task of a user's own lines, of two kinds, with hints; one line may be changed."""
  found = []
  for n in range(count):
    line = {"question": f"{n}+1=", "answer": str(n + 1), "kind": "ab"[n % 2], "hint": f"{n}, then"}
    found.append(line | (changed or {} if n == 7 else {}))
  text = lambda lines: "".join(
    json.dumps({k: v for k, v in line.items() if v is not None}) + "\n" for line in lines
  )
  (folder / "lines.jsonl").write_text(text(found))
  held_out = [{"question": f"{n}+2=", "answer": str(n + 2)} for n in range(8)]  # without a hint
  (folder / "held_out.jsonl").write_text(text(held_out))
  kwargs = dict(
    train=str(folder / "lines.jsonl"),
    held_out=str(folder / "held_out.jsonl"),
    grader="rewards.user_graders:unhurried",
    prompt="{question}",
  )
  return dict(name="jsonl", kwargs=kwargs)


def two(first="initial", second="initial"):
  pairs = (("a", str(first)), ("b", str(second)))
  return dict(
    distillation="opd",
    teacher__checkpoints=pairs,
    teacher__by="kind",
    teacher__reward_weight=0.0,
  )


PRIVILEGED = dict(teacher__privileged="hint", teacher__max_prompt_length=24)
REFUSED |= {  # fields that do not go together
  "both": (two() | dict(teacher__checkpoint="base"), "both set"),
  "no pair": (two() | dict(teacher__checkpoints=("math", "initial")), "not a pair of texts"),
  "no checkpoint": (two() | dict(teacher__checkpoints=(("math", 3),)), "not a pair of texts"),
  "no folder of a pair": (two("initial", "nowhere"), "of 'b' = 'nowhere'"),
  "by alone": (fields(teacher__by="kind"), "set both"),
  "itself": (fields("policy"), "the student itself"),
  "no place": (fields(**PRIVILEGED, teacher__prompt="{question}"), "lacks {privileged}"),
  "no length": (fields(teacher__privileged="hint"), "max_prompt_length = 0"),
  "whole distributions": (
    fields(distillation="kl", **PRIVILEGED),
    "its teacher must read the prompt of the policy",
  ),
  "dialogues": (fields(**PRIVILEGED, environment__name="guess"), "environment"),
}


@pytest.mark.parametrize(("changes", "word"), REFUSED.values(), ids=REFUSED)
def test_a_teacher_that_cannot_teach_is_refused_in_one_line(changes, word):
  with pytest.raises(ValueError, match=word) as error:
    build(tiny.config(**changes).lock())
  assert "\n" not in str(error.value)


def configured(task, **changes):
  c = tiny.config(**FEW | changes | dict(warm_start__num_steps=0))
  c.task = task
  return c.lock()


@pytest.mark.parametrize(
  ("fields_of_teacher", "changes"),
  [
    (two(), {
      r"lines\.jsonl, line 8: its field 'kind', .* teacher 'c', but .* has only \['a', 'b'\]":
        {"kind": "c"},
    }),
    (fields(**PRIVILEGED), {
      r"line 8: it has no text in the field 'hint', which config\.teacher\.privileged names":
        {"hint": None},
      r"a teacher's prompt has 3\d tokens but": {"hint": "x" * 30},
    }),
  ],
  ids=["by", "privileged"],
)  # fmt: skip
def test_a_line_without_what_its_teacher_needs_is_named(fields_of_teacher, changes, tmp_path):
  parts = build(configured(lines(tmp_path), **fields_of_teacher))
  check_teachers(parts)
  for message, changed in changes.items():
    task = make_task(configured(lines(tmp_path, changed)).task)
    with pytest.raises(TeacherError, match=message):  # of which main prints the message
      check_teachers(dataclasses.replace(parts, task=task))
  assert issubclass(TeacherError, FAILURES)


@pytest.mark.slow
def test_each_of_two_teachers_scores_its_own_problems(run, tmp_path):
  """As each would alone; what the policy before the first update teaches itself is nothing."""
  task, other = lines(tmp_path), run / "checkpoints" / "2"
  first = {}
  for name, changes in {
    "both": two("initial", other),
    "other": fields(other, teacher__reward_weight=0.0),
  }.items():
    train(build(configured(task, **changes)), tmp_path / name)
    first[name], _ = tiny.records(tmp_path / name, "train")
  both = first["both"]
  assert not glossary.missing(tmp_path / "both")
  assert both["teacher/a/kl_k3"] < 1e-9 < both["teacher/b/kl_k3"]  # rows differ in rounding
  assert both["teacher/a/token_share"] + both["teacher/b/token_share"] == pytest.approx(1)
  np.testing.assert_allclose(
    both["teacher/kl_k3"], both["teacher/b/token_share"] * both["teacher/b/kl_k3"], rtol=1e-5
  )
  np.testing.assert_allclose(both["teacher/b/kl_k3"], first["other"]["teacher/kl_k3"], rtol=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["policy", "initial"])
def test_a_policy_that_reads_the_hint_teaches_itself(checkpoint, tmp_path):
  """Its log-probabilities are those of the network on the longer prompt, place by place."""
  c = configured(lines(tmp_path), **fields(checkpoint, **PRIVILEGED, teacher__reward_weight=0.0))
  parts = build(c)
  with open_session(parts, tmp_path / "run") as session:
    run, now = session.run, session.now
    batch = next_batch(run, now)
    prepared = run.scorer.prepare(batch, now.state, now.step)
    texts = [group.samples[0]["privileged"] for group in batch.groups]
    assert all(text.endswith(", then") for text in texts)
    tokens = parts.tokenizer.encode
    for p, text in enumerate(texts):
      prompt = tokens(f"{batch.groups[p].samples[0]['prompt']}\n{text}\n")
      own = dict(tokens=np.asarray([prompt], np.int32), lengths=np.asarray([len(prompt)], np.int32))
      logprobs = response_logprobs(
        now.state.params,
        {},
        Prompts(**own),
        np.asarray(prepared.tokens[p : p + 1]),
        np.asarray(batch.groups[p].arrays["lengths"])[None],
        model=parts.model,
        sampling=Sampling(),
      )
      mask = np.asarray(prepared.mask[p]) > 0
      np.testing.assert_allclose(
        np.asarray(logprobs)[0][mask], prepared.teacher_logprobs[p][mask], atol=2e-4
      )
    assert np.abs(prepared.teacher_logprobs - prepared.behavior_logprobs).max() > 0.01


# --- what a teacher takes -------------------------------------------------------------------------


@functools.cache
def of_prompts(length):
  """A run whose teacher reads prompts of so many tokens."""
  return programs.build_shapes_only(
    tiny.config(**fields(teacher__privileged="hint", teacher__max_prompt_length=length)),
    sharding.make_mesh(),
  )


def test_memory_is_that_of_the_prompts_that_the_teacher_reads(monkeypatch):
  """By arithmetic, and in the program that is compiled for the compiler's figure."""
  monkeypatch.setattr(programs, "compile_program", lambda name, lower: rows.append(lower()))
  activations, longest = [], []
  for length in (80, 8000):
    parts, rows = of_prompts(length), []
    monkeypatch.setattr(ahead_of_time, "lowerings", lambda parts: {})
    table = memory_tables(parts, compiled=True)["teacher, estimated"]
    activations.append(table["activations"])
    (lowered,) = rows
    shapes = {x.shape for x in jax.tree.leaves(lowered.in_avals)}
    longest.append(max(shape[-1] for shape in shapes if len(shape) == 3))
    assert (8, length) in shapes  # the prompts
  assert longest[0] < 200 and longest[1] >= 8000
  assert activations[1] > 5 * activations[0]


def test_a_teacher_s_rows_are_within_what_attention_takes():
  settings = tiny.config(teacher__privileged="hint", teacher__max_prompt_length=8000).teacher
  layout = of_prompts(8000).teacher_prompts.row_layout
  with pytest.raises(ValueError, match="attention takes rows of at most 4096"):
    make_prompts(settings, ByteTokenizer(), lambda length: layout, longest_row=4096)


def test_prompts_beyond_the_positions_of_the_teacher_are_told():
  """Of the policy's own network too, where the teacher reads more than the policy."""
  parts = of_prompts(80)
  tell = describe_long_teachers
  (teacher,) = parts.teachers
  folder = "checkpoint folder"
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(problem_filters, "longest_text", lambda path: {folder: 50}[path])
    (text,) = tell([teacher], parts.teacher_prompts, parts.shape, folder)
    assert "'initial' was made for 50 tokens" in text
    assert "config.teacher.max_prompt_length + config.max_response_length = 84" in text
    assert tell([teacher], None, parts.shape, folder) == []  # as the policy's own prompts
    short = parts.shape._replace(max_prompt_length=48)
    other = teacher._replace(checkpoint="there", published=folder)
    (text,) = tell([other], None, short, "")
    assert "config.max_prompt_length + config.max_response_length = 52" in text
    assert tell([other._replace(published="")], None, short, folder) == []
