import contextlib
import json
import subprocess
import sys

import pytest

from rlvr_jax.storage.places import Workdir
from rlvr_jax.train.checkpointing.workdir import (
  StartFiles,
  WorkdirError,
  WorkdirLock,
  check_config,
  open_workdir,
)


def test_a_workdir_is_held_by_one_process(tmp_path):
  code = (
    "import sys; from rlvr_jax.train.checkpointing.workdir import WorkdirLock\n"
    "lock = WorkdirLock(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
  )
  process = subprocess.Popen(
    [sys.executable, "-c", code, str(tmp_path / "run")],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == "held\n"
  holder = rf"in use by process {process.pid}\b.*--workdir"
  with pytest.raises(WorkdirError, match=holder):
    WorkdirLock(tmp_path / "run")
  process.kill()
  process.communicate()
  with contextlib.closing(WorkdirLock(tmp_path / "run")):  # the kernel freed it
    with pytest.raises(WorkdirError):
      WorkdirLock(tmp_path / "run")
  WorkdirLock(tmp_path / "run").close()


def test_a_link_in_the_place_of_the_lock_is_refused(tmp_path):
  theirs = tmp_path / "theirs"
  theirs.write_text("kept")
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / ".lock").symlink_to(theirs)
  with pytest.raises(OSError, match=r"\.lock is a symbolic link"):
    WorkdirLock(tmp_path / "run")
  assert theirs.read_text() == "kept"


def test_config_json_follows_the_last_start_of_a_run_with_samplers(tmp_path):
  workdir = Workdir(tmp_path / "run")
  written = lambda: json.loads((tmp_path / "run" / "config.json").read_text())
  alone = {"seed": 1, "fleet": {"samplers": False, "silent_s": 3}}
  check_config(workdir, json.dumps(alone))
  check_config(
    workdir, json.dumps(alone | {"fleet": {"samplers": False, "silent_s": 9}}), may_differ=["fleet"]
  )
  assert written() == alone
  fleet = alone | {"fleet": {"samplers": True, "silent_s": 60}}
  check_config(workdir, json.dumps(fleet), may_differ=["fleet"])
  assert written() == fleet
  with pytest.raises(WorkdirError):
    check_config(workdir, json.dumps(fleet | {"seed": 2}), may_differ=["fleet"])
  assert written() == fleet
  check_config(workdir, json.dumps(alone), may_differ=["fleet"])
  assert written() == alone  # samplers that come now are told that it has none


def test_a_newer_field_has_what_earlier_runs_had(tmp_path):
  """`prompts.tools` of a run that began before there was one is empty; no other field is."""
  workdir, old = Workdir(tmp_path / "run"), {"prompts": {"format": "chat"}}
  check_config(workdir, json.dumps(old))
  check_config(workdir, json.dumps({"prompts": {"format": "chat", "tools": ""}}))
  for value in ("python", 0, None, False):
    with pytest.raises(WorkdirError, match=r'prompts\.tools: "" in the workdir'):
      check_config(workdir, json.dumps({"prompts": {"format": "chat", "tools": value}}))
  with pytest.raises(WorkdirError, match=r"prompts\.system: absent in the workdir"):
    check_config(workdir, json.dumps({"prompts": {"format": "chat", "system": ""}}))


def test_a_task_under_its_earlier_name_says_how_it_is_called_now(tmp_path):
  workdir, name = Workdir(tmp_path / "run"), "experiments.pretrained.task:sums"
  check_config(workdir, json.dumps({"task": {"name": name}, "seed": 1}))
  new = json.dumps({"task": {"name": "sums"}, "seed": 1})
  with pytest.raises(WorkdirError) as caught:
    check_config(workdir, new)
  path = tmp_path / "run" / "config.json"
  told = f"{name} is called sums now: write sums in its place in {path}."
  assert str(caught.value).endswith(told)
  path.write_text(path.read_text().replace(name, "sums"))
  check_config(workdir, new)


def test_config_of_the_workdir(tmp_path):
  loss = "ppo_clip"
  config = {"seed": 1, "loss": loss, "ks": [1, 8], "mesh": {"data": 1}}
  workdir = tmp_path / "run"
  check_config(Workdir(workdir), json.dumps(config))
  assert json.loads((workdir / "config.json").read_text()) == config
  check_config(Workdir(workdir), json.dumps(config))
  other = {**config, "seed": 2, "loss": "gspo", "mesh": {"data": 1, "fsdp": 2}}
  with pytest.raises(WorkdirError) as caught:
    check_config(Workdir(workdir), json.dumps(other))
  message = str(caught.value)
  assert "  seed: 1 in the workdir, 2 now\n" in message
  assert '  loss: "ppo_clip" in the workdir, "gspo" now\n' in message
  assert "  mesh.fsdp: absent in the workdir, 2 now\n" in message
  assert "ks" not in message and "another --workdir" in message
  assert json.loads((workdir / "config.json").read_text()) == config

  wider = {**config, "mesh": {"data": 8}}
  check_config(Workdir(workdir), json.dumps(wider), may_differ=["mesh"])
  with pytest.raises(WorkdirError, match=r"mesh\.data"):
    check_config(Workdir(workdir), json.dumps(wider), may_differ=["mes"])


@pytest.mark.parametrize("left", ["checkpoints", "metrics.jsonl", "problems.jsonl"])
def test_a_run_whose_configuration_is_gone_is_not_resumed_under_another(tmp_path, left):
  (tmp_path / left).mkdir()
  with pytest.raises(WorkdirError, match=rf"config\.json is missing, but .* has {left} of"):
    check_config(Workdir(tmp_path), json.dumps({"seed": 7}))
  assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("{", "is not JSON"),
    ("", "is not JSON"),
    ("[1]", "is a JSON list, not"),
    ("3", "is a JSON int"),
  ],
)
def test_config_that_is_none(tmp_path, text, message):
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(WorkdirError, match=rf"config\.json {message}.* Put back a copy"):
    check_config(Workdir(tmp_path), '{"seed": 1}')


@pytest.mark.parametrize(
  ("folder", "why"),
  [("/proc/x", "No such file or directory"), ("/tmp/" + 300 * "x", "File name too long")],
)
def test_a_workdir_that_cannot_be(folder, why):
  said = rf"--workdir={folder} cannot be written: {why}\. Choose a folder that this user can write"
  with contextlib.ExitStack() as stack, pytest.raises(WorkdirError, match=said):
    open_workdir(folder, lambda x: stack.enter_context(contextlib.closing(x)))


def started(folder, *, begins):
  """What a start does to a workdir; `begins`: whether it succeeds."""
  with contextlib.ExitStack() as stack:
    workdir, files = open_workdir(folder, lambda x: stack.enter_context(contextlib.closing(x)))
    files.check_config("{}", ())
    (workdir.local / "rollouts").mkdir(exist_ok=True)
    (workdir.local / "sources.json").write_text("new")
    if begins:
      files.keep()


def test_a_start_that_fails_leaves_nothing(tmp_path):
  started(tmp_path / "runs" / "a", begins=False)
  assert not (tmp_path / "runs").exists()
  started(tmp_path / "runs" / "a", begins=True)
  assert {x.name for x in (tmp_path / "runs" / "a").iterdir()} == {
    ".lock", "config.json", "rollouts", "sources.json"
  }  # fmt: skip
  started(tmp_path / "runs" / "a", begins=False)  # a run that has begun keeps everything
  assert (tmp_path / "runs" / "a" / "config.json").exists()


def test_a_start_that_fails_keeps_what_was_there(tmp_path):
  (tmp_path / "warm_start").mkdir()
  (tmp_path / "warm_start" / "mine").write_text("kept")
  started(tmp_path, begins=False)
  assert [x.name for x in tmp_path.rglob("*")] == ["warm_start", "mine"]


def test_a_start_that_is_refused_removes_nothing(tmp_path):
  with contextlib.closing(WorkdirLock(tmp_path)), pytest.raises(WorkdirError, match="in use"):
    started(tmp_path, begins=False)
  assert (tmp_path / ".lock").exists()
  (tmp_path / "config.json").write_text('{"seed": 1}')
  with pytest.raises(WorkdirError, match="another configuration"):
    started(tmp_path, begins=False)
  assert (tmp_path / "config.json").read_text() == '{"seed": 1}'
  assert StartFiles(Workdir(tmp_path)).close() is None and (tmp_path / "config.json").exists()
