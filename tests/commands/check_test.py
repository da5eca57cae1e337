"""The preflight check: what it finds, what it says, and how it ends."""

import json
import re
import sys
import textwrap
import types

import pytest
from train import tiny
from train.multiprocess_test import Processes
from train.sums import sums

from rlvr_jax.commands import check
from rlvr_jax.commands.check import FAIL, OK, WARN, PreflightError
from rlvr_jax.data.byte_pairs import save, train_byte_pairs

NAMES = (
  "devices processes clocks workdir tokenizer data config prompt lengths checkpoint space grader"
  " memory"
)
MESH = dict(mesh__fsdp=4, mesh__tensor=2)  # the eight devices
ON_MESH = ["--config.mesh.fsdp=4", "--config.mesh.tensor=2"]


def found(capsys, workdir, **fields):
  """{check: (status, text)} of the lines, and the error's message."""
  config, message = tiny.config(**fields), ""
  if config.model.checkpoint:
    config.model.overrides = {}
  try:
    check.check(config, str(workdir))
  except PreflightError as error:
    message = str(error)
  lines = [line.split(None, 2) for line in capsys.readouterr().out.splitlines()]
  return {
    name: (status, text) for status, name, text in lines if status in (OK, WARN, FAIL)
  }, message


def checked(tmp_path, name, **fields):
  """(status, text) of one check, after those that it needs; raises what the program would say."""
  preflight = check.Preflight(tiny.config(**MESH | fields), str(tmp_path / "run"))
  needed = ("tokenizer", "data", "config")
  for other in needed[: needed.index(name)] if name in needed else needed:
    getattr(preflight, f"check_{other}")()
  return getattr(preflight, f"check_{name}")()


def test_a_run_that_will_work(capsys, tmp_path):
  lines, message = found(capsys, tmp_path / "run", **MESH)
  assert list(lines) == NAMES.split() and not message
  assert {status for status, _ in lines.values()} == {OK}, lines
  assert lines["devices"][1] == "8 of cpu, 8 on each host"
  assert lines["data"][1] == (
    "1000 training problems, 80 warm-start problems, 10 held-out problems"
  )
  assert "graders: rewards.user_graders:unhurried" in lines["grader"][1]
  first = sums().train[0]
  assert lines["prompt"][1] == f"the first has {len(first.question)} tokens: {first.question!r}"
  graded = f"of the first one, {first.solution!r} is correct, {first.answer!r} was extracted"
  assert graded in lines["grader"][1]
  phases = r"\(update: \1, generation: .*, checkpoint: .*, warm start: .*\)"
  assert re.fullmatch(rf"(\d\.\d) of [\d.]+ GiB at the peak {phases}", lines["memory"][1])
  assert list((tmp_path / "run").iterdir()) == []  # nothing of it is left


@pytest.mark.parametrize(
  "fields",
  [dict(mesh__fsdp=-1), dict(mesh__data=2, mesh__fsdp=-1, mesh__tensor=2),
   dict(**MESH, generation_mesh__data=8, generation_mesh__same_devices=True)],
)  # fmt: skip
def test_a_mesh_of_all_devices_is_no_false_alarm(fields, tmp_path):
  preflight = check.Preflight(tiny.config(**fields), str(tmp_path))
  assert preflight.check_devices() == (OK, "8 of cpu, 8 on each host")


def in_chat(folder, lines):
  """Fields of a run whose tokenizer has a chat template, and whose task has these lines."""
  save(train_byte_pairs(["one and two are three"] * 9, vocab_size=264), folder)
  template = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}<|assistant|>"
  )
  (folder / "chat_template.jinja").write_text(template)
  (folder / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  kwargs = dict(train=str(folder / "mine.jsonl"), held_out_size=1, grader="gsm8k")
  task = dict(name="jsonl", kwargs=kwargs)
  chat = dict(tokenizer=str(folder), prompts__format="chat", warm_start__num_steps=0)
  return dict(**chat, task=task)


@pytest.mark.slow
def test_messages_are_shown_as_the_model_will_see_them(capsys, tmp_path):
  of = lambda n: [dict(role="system", content="Be brief."), dict(role="user", content=f"{n}?")]
  fields = MESH | in_chat(tmp_path, [{"prompt": of(n), "answer": n} for n in (1, 2)])
  lines, _ = found(capsys, tmp_path / "run", **fields, max_prompt_length=200)
  shown = r": '<\|system\|>Be brief.<\|im_end\|><\|user\|>[12]\?<\|im_end\|><\|assistant\|>'$"
  assert re.search(shown, lines["prompt"][1]), lines
  fields |= dict(prompts__system="Be long.", max_prompt_length=200)
  lines, message = found(capsys, tmp_path / "run", **fields)
  assert message == "1 check failed: data" and lines["config"][0] == WARN
  assert "its own system message, 'Be brief.'; set config.prompts.system = ''" in lines["data"][1]


def test_a_prompt_is_shown_as_the_model_will_see_it(tmp_path):
  """With the tokens of the template, and without its middle if it is long."""

  def shown(**fields):
    preflight = check.Preflight(tiny.config(**MESH | fields), str(tmp_path / "run"))
    preflight.check_tokenizer()
    preflight.check_data()
    preflight.parts = types.SimpleNamespace(task=preflight.task, tokenizer=preflight.tokenizer)
    return preflight.check_prompt().text

  long = [{"prompt": f"{n}" + "x" * 5000 + "end?", "answer": n} for n in (10, 11)]
  in_lines = in_chat(tmp_path, long)
  chat = {name: field for name, field in in_lines.items() if name != "task"}
  text = shown(**chat, max_prompt_length=200)
  assert text.endswith(f": '<|user|>{sums().train[0].question}<|im_end|><|assistant|>'")
  of_bytes = dict(tokenizer="bytes", prompts__format="plain", max_prompt_length=6000)
  text = shown(**in_lines | of_bytes)
  assert re.search(r"has 5006 tokens: '1\dx+ … \[\d+ characters\] … x+end\?'$", text), text
  assert len(text) < 1000


@pytest.mark.parametrize(
  ("name", "fields", "text"),
  [
    ("devices", dict(mesh__fsdp=16), "config.mesh has 16: choose sizes of the axes that give 8"),
    ("devices", dict(mesh__data=8, generation_mesh__data=2), "generation_mesh together have 10"),
    ("data", dict(task=dict(name="published", kwargs=dict(dataset="gsm8k", data_dir="/nowhere"))),
     "/nowhere"),
    ("tokenizer", dict(tokenizer="/nowhere"),
     "config.tokenizer = '/nowhere' and config.prompts = "),
    ("config", dict(**MESH, loss="ppo_clap"), "config.loss = 'ppo_clap'"),
    ("grader", dict(**MESH, grading__grader="rewards.faulty_graders:faulty"),
     "crashed on the answer"),
    ("memory", dict(**MESH, model__overrides__num_layers=20, model__overrides__mlp_width=10**9),
     "lower config.warm_start.batch_size, or take a smaller network"),
  ],
)  # fmt: skip
def test_what_fails_is_named_with_its_remedy(capsys, tmp_path, name, fields, text):
  lines, message = found(capsys, tmp_path / "run", **fields)
  assert lines[name][0] == FAIL and text in lines[name][1], lines
  assert name in message and re.search(r"\d checks? failed: ", message)
  later = NAMES.split()[NAMES.split().index(name) + 1 :]
  if name in ("tokenizer", "data", "config"):  # what is built on it says why it was not checked
    assert all(lines[n][0] == WARN and "not checked: " in lines[n][1] for n in later), lines


def test_an_environment_plays_the_first_problem(tmp_path):
  name = "environments.faulty_environments:says(text='a', question='messages')"
  fields = dict(environment__processes=1, environment__name=name, max_prompt_length=40)
  status, text = checked(tmp_path, "environment", **fields)
  assert status == OK and "|a' to 'no answer' within " in text
  assert " tokens: 'be kind\\nseed " in text


def test_a_checkpoint_without_its_weights(capsys, tmp_path):
  sizes = dict(vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
  heads = dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
  (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes, **heads}))
  fields = dict(model__checkpoint=str(tmp_path), model__preset="", **MESH)
  lines, message = found(capsys, tmp_path / "run", **fields)
  assert lines["checkpoint"][0] == FAIL and str(tmp_path) in lines["checkpoint"][1], lines
  assert lines["config"][0] == OK and message == "1 check failed: checkpoint"


def test_what_is_slow_is_warned_of(tmp_path, monkeypatch):
  """A sketch that costs more than the exact Gram matrix, and bfloat16, which this CPU lacks."""
  monkeypatch.setattr("rlvr_jax.train.setup.compiler_options.lacks_bfloat16", lambda: True)
  sketch = dict(reweighting="salt", gram="sketch")
  fields = dict(**sketch, model__overrides__compute_dtype="bfloat16")
  status, text = checked(tmp_path, "config", **fields)
  expected = (
    "config.gram = 'sketch' costs as much as 128.0 products of .* at a width of 32, .* 'streaming'"
    " only 10.0;"
  )
  assert status == WARN and re.search(expected, text), text
  assert "compute_dtype = 'float32' is faster" in text


def test_a_workdir_that_cannot_be_written(tmp_path):
  (tmp_path / "run").write_text("a file")
  status, text = check.Preflight(tiny.config(**MESH), str(tmp_path / "run")).check_workdir()
  assert status == FAIL and "Choose a --workdir" in text


def test_all_graders_of_a_mixture_are_named(tmp_path):
  parts = {}
  for name, grader in (("words", "gsm8k"), ("sums", "rewards.user_graders:unhurried")):
    file = tmp_path / f"{name}.jsonl"
    lines = ({"prompt": f"{name}{n}?", "answer": str(n)} for n in range(9))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts[name] = dict(name="jsonl", kwargs=dict(train=str(file), held_out_size=2, grader=grader))
  mixed = dict(parts=parts, weights=dict(words=1.0, sums=1.0), seed=0)
  task = dict(name="mixture", kwargs=mixed)
  status, text = checked(tmp_path, "grader", task=task, warm_start__num_steps=0)
  graders = "rewards.user_graders:unhurried, gsm8k"
  assert status == OK and text.startswith(f"18 problems were graded; graders: {graders};")


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_plain_prompt_for_a_chat_model_is_warned_of(tmp_path, where):
  save(train_byte_pairs(["one and two are three"] * 9, vocab_size=264), tmp_path)
  template = "{{ messages[0].content }}"
  is_json = where.endswith("json")
  config = json.loads((tmp_path / "tokenizer_config.json").read_text()) if is_json else {}
  text = json.dumps(config | {"chat_template": template}) if is_json else template
  (tmp_path / where).write_text(text)
  status, told = checked(tmp_path, "tokenizer", tokenizer=str(tmp_path))
  assert status == WARN and "set config.prompts.format = 'chat'" in told


@pytest.mark.parametrize(
  ("findings", "lines"),
  [
    ([(OK, "a"), (OK, "b")], ["ok    disk        a"]),
    (
      [(FAIL, "a"), (OK, "b"), (OK, "c")],
      ["FAIL  disk        process 0: a", "ok    disk        b"],
    ),
    (
      [(OK, "a"), (OK, "b"), (FAIL, "c")],
      ["ok    disk        a", "FAIL  disk        process 2: c"],
    ),
    ([(FAIL, "a")], ["FAIL  disk        a"]),
  ],
)
def test_hosts_that_differ_have_lines_of_their_own(findings, lines):
  assert list(check._format_lines("disk", findings)) == lines


@pytest.mark.slow
def test_the_program_ends_with_a_status(tmp_path):
  output = tiny.run(
    tmp_path / "run", "--mode=check", *ON_MESH, "--config.batch.prompts=0", expect=1
  )
  assert output.strip().splitlines()[-1] == "error: 1 check failed: config"


APART = """
  import sys, time
  from rlvr_jax.commands import check
  from rlvr_jax.train.cluster import multihost
  from train import tiny

  me, folder = int(sys.argv[2]), sys.argv[3]
  multihost.initialize(sys.argv[1], 2, me)
  if me:  # a host whose clock is wrong, with a disk of its own, and another configuration
    now = time.time
    time.time = lambda: now() + 60
  with multihost.exit_on_error():
    check.check(tiny.config(mesh__data=2, seed=me), f"{folder}/{me}")
"""


@pytest.mark.slow
def test_hosts_that_do_not_agree_are_told_apart(tmp_path):
  program = textwrap.dedent(APART)
  command_of = lambda coordinator, i: [
    *(sys.executable, "-c", program, coordinator, str(i), str(tmp_path))
  ]
  statuses, outputs = Processes(command_of, devices=1).ended()
  assert statuses == [1, 1], outputs
  for line in (
    "ok    devices     2 of cpu, 1 on each host",
    r"FAIL  processes   process 1: differs from process 0 in config\. Start the same command",
    r"FAIL  clocks      they differ by 6\d\.\d s: run `sudo systemctl restart chrony` on each host",
    r"FAIL  workdir     .*/0 is not shared: this host sees the files of 1 of 2 hosts",
    "ok    grader      110 problems were graded; graders: rewards.user_graders:unhurried",
  ):
    assert re.search(f"(?m)^{line}", outputs[0]), line + outputs[0]
  assert "checks failed: processes, clocks, workdir" in outputs[0]
