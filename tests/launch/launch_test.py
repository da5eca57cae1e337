"""Command lines; programs on this machine; preempted runs on a fake cloud."""

import argparse
import contextlib
import distutils.core
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import setuptools  # noqa: F401  (its setup, not that of distutils, is what setup.py calls)
from absl import flags
from ml_collections import config_flags
from rewards.user_graders import SECONDS
from train import tiny
from train.fleet import fleets

from rlvr_jax import main as program_of_runs  # noqa: F401  (defines its flags)
from rlvr_jax.launch import __main__ as command_line
from rlvr_jax.launch import local, tpu_vm
from rlvr_jax.launch.package import EXTRAS, make_package
from rlvr_jax.launch.run import Run
from rlvr_jax.launch.shell import CommandError, LaunchError, Shell
from rlvr_jax.launch.slices import Machines, find_slice
from rlvr_jax.rollouts.store import RolloutStore

GOLDEN = pathlib.Path(__file__).parent / "golden"
RECIPE = "configs/full_size/fade_qwen25_7b.py"
PROGRAM = ["--", f"--config={RECIPE}"]
PROGRAM += ["--workdir=/mnt/rlvr_jax/runs/fade", "--config.loss=ppo_clip(epsilon_high=0.28)"]
IN_BUCKET = [*PROGRAM[:2], "--workdir=gs://mine/runs/fade"]
PLACE = "--name=fade --zone=us-west4-a --project=mine"
CLUSTER = f"{PLACE} --cluster=pods"
IMAGE = "--image=us-docker.pkg.dev/mine/images/rlvr_jax"
COMMANDS = {
  "tpu_vm_start": f"tpu_vm start {PLACE} --type=v5litepod-64 --spot --nfs=10.0.0.2:/share"
  " --service_account=run@mine.iam.gserviceaccount.com --env=HF_HUB_OFFLINE=1",
  "tpu_vm_start_fleet": f"tpu_vm start {PLACE} --type=v5p-32 --num_slices=2 --samplers=1"
  " --sampler_type=v5litepod-16 --sampler_config=mesh.tensor=4 --spot=samplers --keep",
  "tpu_vm_status": f"tpu_vm status {PLACE}",
  "tpu_vm_logs": f"tpu_vm logs {PLACE} --num_slices=2",
  "tpu_vm_logs_sampler": f"tpu_vm logs {PLACE} --num_slices=2 --sampler=3",
  "tpu_vm_stop": f"tpu_vm stop {PLACE}",
  "tpu_vm_stop_all": "tpu_vm stop --all --zone=us-west4-a --project=mine",
  "xpk_start": f"xpk start {CLUSTER} --type=v5p-32 --storage=runs {IMAGE} --env=A=b --retries=3",
  "xpk_start_fleet": f"xpk start {CLUSTER} --type=v5p-32 --num_slices=2 --samplers=2"
  f" --sampler_type=v5litepod-16 --spot=samplers {IMAGE}",
  "xpk_status": f"xpk status {CLUSTER}",
  "xpk_logs_sampler": f"xpk logs {CLUSTER} --sampler=1",
  "xpk_stop": f"xpk stop {CLUSTER}",
  "local_start_fleet": "local start --name=fade --processes=2 --samplers=1"
  " --sampler_config=mesh.data=2",
  "local_logs": "local logs --name=fade",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
  """A clean git checkout of what a run needs."""
  root = tmp_path_factory.mktemp("checkout")
  ignore = shutil.ignore_patterns("__pycache__")
  for folder in ("rlvr_jax", "configs", "tests/train", "tests/rewards"):
    shutil.copytree(tiny.ROOT / folder, root / folder, symlinks=True, ignore=ignore)
  shutil.copy(tiny.ROOT / "setup.py", root)
  (root / ".gitignore").write_text("__pycache__\n")
  for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=all"]):
    git(root, *arguments)
  return root


def git(root, *arguments):
  who = ["-c", "user.name=me", "-c", "user.email=me@example.com"]
  subprocess.run(["git", "-C", str(root), *who, *arguments], check=True)


@pytest.fixture
def launch(checkout, monkeypatch, tmp_path, capsys):
  """Calls the command line in the checkout; returns what it printed.

  A dry run may call gcloud for the list of machines only.
  """
  monkeypatch.chdir(checkout)
  gcloud = tmp_path / "bin" / "gcloud"
  gcloud.parent.mkdir()
  listed = r"fade\tACTIVE\t1\ntheirs\tACTIVE\t\nwide\tSUSPENDED\t2\n"
  gcloud.write_text(f"#!/bin/sh\n[ $4 = list ] && printf '{listed}'\n")
  gcloud.chmod(0o755)
  monkeypatch.setenv("PATH", str(gcloud.parent), prepend=os.pathsep)
  monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

  def call(arguments, program=()):
    command_line.main([*arguments.split(), *program])
    return capsys.readouterr().out

  return call


# --- command lines --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_the_commands_are_those_on_record(launch, tmp_path, name):
  """They are also all that is printed before anything is created."""
  shared = name in ("tpu_vm_start", "xpk_start", "local_start_fleet")
  program = PROGRAM if shared else IN_BUCKET
  output = launch(f"{COMMANDS[name]} --dry_run", program if " start " in COMMANDS[name] else ())
  output = re.sub(r"\b[0-9a-f]{12}\b", "COMMIT", output).replace(sys.executable, "PYTHON")
  output = re.sub(r"(?<= scp )\S+(?=/COMMIT)|(?<=--script-dir=)\S+", "FOLDER", output)
  output = output.replace(str(tmp_path), "HOME")
  assert output == (GOLDEN / f"{name}.txt").read_text(), "if it is meant, put this there"


SWEEP = ["--", "--mode=sweep", "--config=configs/grpo.py", "--sweep=configs/base.py"]


def test_a_recipe_of_the_commit_has_a_name(launch):
  program = ["--", "--config=full_size/fade_qwen25_7b", *IN_BUCKET[2:]]
  assert "--config=full_size/fade_qwen25_7b " in launch(f"{ON_TPU} --dry_run", program)


def test_a_sweep_is_one_process_that_knows_its_commit(launch):
  output = launch("local start --name=fade --processes=2 --dry_run", [*SWEEP, "--workdir=runs/x"])
  (command,) = [line for line in output.splitlines() if "rlvr_jax.main" in line]
  assert "--process" not in command and "--mode=sweep" in command
  on_host = [*SWEEP, "--workdir=gs://bucket/sweep"]
  output = launch(f"tpu_vm start {PLACE} --type=v5litepod-8 --dry_run", on_host)
  assert "--distributed" not in output and "--mode=sweep" in output
  assert re.search(r"--setenv=RLVR_JAX_COMMIT=[0-9a-f]{12}\b", output)
  for arguments in ("--type=v5litepod-64", "--type=v5litepod-8 --num_slices=2"):
    with pytest.raises(LaunchError, match="--mode=sweep runs on one host, but these"):
      launch(f"tpu_vm start {PLACE} {arguments} --dry_run", on_host)


ON_TPU = f"tpu_vm start {PLACE} --type=v5p-32"
ON_GKE = f"xpk start {CLUSTER} --type=v5p-32 {IMAGE}"


ALL = "give --name=NAME; or stop every run with `stop --all`, without --name"
NOT_MOUNTED = "on a file system that is not mounted"


@pytest.mark.parametrize(
  ("arguments", "program", "words"),
  [
    (f"tpu_vm start {PLACE} --type=v5e-64", PROGRAM, "v5litepod-64"),
    (f"tpu_vm start {PLACE} --type=v5p-12", PROGRAM, "v5p-8, v5p-16, v5p-32, v5p-64"),
    (f"tpu_vm start {PLACE} --type=h100-8", PROGRAM, "allowed: v4-…, v5litepod-…"),
    (ON_TPU, [], "--config is missing"),
    (ON_TPU, ["--", "--config=mine.py"], "--config=mine.py is not in the commit"),
    (ON_TPU, ["--", "--config=/tmp/mine.py"], "--config=/tmp/mine.py is not in the commit"),
    (ON_TPU, [*SWEEP[:-1], "--sweep=mine.py"], "--sweep=mine.py is not in the commit"),
    (ON_TPU, ["--", PROGRAM[1], "--workdir=runs/a"], "--workdir=runs/a is relative"),
    (ON_TPU, PROGRAM, NOT_MOUNTED),
    (ON_GKE, PROGRAM, NOT_MOUNTED),
    (f"{ON_TPU} --env=A", PROGRAM, "write --env=NAME=VALUE"),
    ("tpu_vm stop --zone=a", [], ALL),
    (f"tpu_vm stop --all {PLACE}", [], ALL),
    ("tpu_vm start --all --zone=a", PROGRAM, ALL),
    (f"tpu_vm stop {PLACE} --sampler=1", [], "--sampler=1 goes with `logs` alone"),
    ("xpk stop --all --zone=a --cluster=b", [], "xpk cluster delete --cluster=b --zone=a"),
    (f"tpu_vm logs {PLACE}", PROGRAM, "`logs` takes no flags of rlvr_jax.main; leave out --c"),
    (f"xpk start {CLUSTER} --type=v5p-32", PROGRAM, "--image is needed"),
    ("local start --name=a --samplers=-1", PROGRAM, "give a number of samplers"),
    (
      "local start --name=a --samplers=2",
      PROGRAM[:2],
      "--workdir is missing: samplers and trainer",
    ),
    ("local start --name=a --samplers=2", [*PROGRAM, "--mode=check"], "not with --mode=check"),
    ("local start --name=a --sampler_config=mesh.data=4", PROGRAM, "add --samplers=N"),
    (f"{ON_TPU} --samplers=2 --sampler_type=v5p-1", IN_BUCKET, "--sampler_type=v5p-1 is unknown"),
    (f"{ON_TPU} --sampler_type=v5p-8", IN_BUCKET, "--sampler_type=v5p-8 needs samplers: add"),
    (f"{ON_GKE} --spot=samplers", IN_BUCKET, "--spot=samplers needs samplers: add"),
  ],
)
def test_mistakes_have_a_message(launch, arguments, program, words):
  with pytest.raises(LaunchError, match=re.escape(words)):
    launch(f"{arguments} --dry_run", program)


@pytest.mark.parametrize("name", ["A", "a_b", "-a", "a" * 29, "ends-"])
def test_names_are_those_that_every_target_accepts(launch, capsys, name):
  with pytest.raises(SystemExit):
    launch(f"local status --name={name}")
  assert "use up to 28 lowercase letters" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["retries=-1", "processes=0", "devices=x"])
def test_numbers_of_programs_are_checked(launch, capsys, flag):
  with pytest.raises(SystemExit):
    launch(f"local start --name=a --{flag} --dry_run", PROGRAM)
  assert f"{flag.partition('=')[2]!r}: give an integer, " in capsys.readouterr().err


PLACES = {"ZONE": "us-east5-a", "REGION": "us-east5", "PROJECT": "mine", "BUCKET": "mine"}


def documented():
  """The launches that the guide shows, with names for its placeholders."""
  docs = tiny.ROOT / "docs"
  text = "".join((docs / page).read_text() for page in ("tpu.md", "launch.md")).replace("\\\n", "")
  text = re.sub(rf"\b({'|'.join(PLACES)})\b", lambda found: PLACES[found[1]], text)
  text = text.replace("start … --", "start --name=fade --zone=us-east5-a --type=v5p-32 --")
  text = text.replace("--config=…", f"--config={RECIPE}")
  found = re.findall("^    python -m rlvr_jax.launch (.*)", text, re.MULTILINE)
  assert {line.split()[0] for line in found} == {"local", "tpu_vm", "xpk"}
  return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # ml_collections' import of a config
@pytest.mark.parametrize("line", documented())
def test_the_commands_of_the_guide_are_accepted(launch, line):
  own, _, program = shlex.split(line), *line.partition(" -- ")[1:]
  split = [*own, "--"].index("--")
  assert launch(f"{shlex.join(own[:split])} --dry_run", own[split:])
  if not program:
    return
  given = shlex.split(program)
  values = flags.FlagValues()
  config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=["main", *given])
  known = ["mode", "workdir", "checkpoint", "profile", "trackers"]
  assert set(known) <= set(flags.FLAGS)
  for name in known:
    flags.DEFINE_string(name, "", "", flag_values=values)
  values(["main", *given])  # raises for flags and fields that do not exist
  assert values.config.num_updates > 0


def test_a_missing_program_is_named(launch, monkeypatch):
  monkeypatch.setenv("PATH", "/nowhere")
  with pytest.raises(LaunchError, match="xpk is not installed, or not on PATH"):
    launch(f"xpk status {CLUSTER}")


@pytest.mark.parametrize(
  ("name", "chips", "hosts"),
  [
    *[("v5litepod-8", 8, 1), ("v5p-8", 4, 1), ("v4-64", 32, 8), ("v6e-256", 256, 64)],
  ],
)
def test_slices(name, chips, hosts):
  assert find_slice(name)[:3] == (name, chips, hosts)


# --- what is shipped ------------------------------------------------------------------------------


def test_a_dirty_tree_is_refused_or_marked(checkout, tmp_path):
  root = shutil.copytree(checkout, tmp_path / "copy", symlinks=True)
  clean = make_package(root)
  assert re.fullmatch("[0-9a-f]{12}", clean.version)
  (root / "new.py").write_text("x = 1\n")
  (root / "setup.py").unlink()
  with pytest.raises(LaunchError, match=r"in 2 files \(setup.py, new.py\): commit them, or add"):
    make_package(root)
  dirty = make_package(root, allow_dirty=True)
  assert re.fullmatch(f"{clean.version}-dirty-[0-9a-f]{{8}}", dirty.version)
  assert set(dirty.files) == {*clean.files, "new.py"} - {"setup.py"}
  (root / "new.py").write_text("x = 2\n")
  assert make_package(root, allow_dirty=True).version != dirty.version


@pytest.mark.parametrize("kind", ["archive", "folder"])
def test_the_package_has_the_files_of_the_commit(checkout, tmp_path, kind):
  package = make_package(checkout / "rlvr_jax")
  if kind == "folder":
    package.copy(tmp_path)
  else:
    subprocess.run(["tar", "-xzf", package.write(tmp_path), "-C", tmp_path], check=True)
  assert (tmp_path / "rlvr_jax" / "configs").readlink() == pathlib.Path("../configs")
  for name in package.files:
    assert (tmp_path / name).read_bytes() == (checkout / name).read_bytes() if "." in name else True
  assert "rlvr_jax/main.py" in package.files and "configs/quickstart.py" in package.files


def test_a_folder_outside_git_is_named(tmp_path):
  with pytest.raises(LaunchError, match=f"{tmp_path} is not in a git checkout"):
    make_package(tmp_path)


def test_the_image_and_the_machines_install_the_same_extras():
  distribution = distutils.core.run_setup(str(tiny.ROOT / "setup.py"), stop_after="init")
  assert set(EXTRAS.split(",")) <= set(distribution.extras_require)
  dockerfile = (tiny.ROOT / "Dockerfile").read_text()
  assert f'".[{EXTRAS}]"' in dockerfile and "FROM python:3.12" in dockerfile


# --- programs on this machine ---------------------------------------------------------------------

FAILS_AT_FIRST = """
import pathlib, sys
path = pathlib.Path(sys.argv[1] + sys.argv[3])
path.write_text(path.read_text() + "." if path.exists() else ".")
sys.exit(len(path.read_text()) <= int(sys.argv[2]))
"""


@pytest.fixture
def begun(monkeypatch, tmp_path):
  """Starts Python code as the processes of a program, each with its number as last argument."""
  monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

  def start(code, *arguments, name="try", count=2, retries=0):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    commands = lambda port: [[*command, str(i)] for i in range(count)]
    return local.Program(name, commands, {}, retries)

  return start


@pytest.mark.parametrize(
  ("failures", "state"),
  [(2, "finished"), pytest.param(3, "failed", marks=pytest.mark.slow)],
)
def test_processes_that_fail_start_again_up_to_a_limit(begun, tmp_path, failures, state):
  assert local.supervise(begun(FAILS_AT_FIRST, tmp_path / "count", failures, retries=2)) == state
  assert [len((tmp_path / f"count{i}").read_text()) for i in range(2)] == [3] * 2


def test_one_that_fails_ends_the_others(begun, monkeypatch, capsys):
  monkeypatch.setattr(local, "_END_S", 0.5)
  code = "import sys, time; sys.exit(3) if sys.argv[1] == '1' else time.sleep(100)"
  assert local.supervise(begun(code)) == "failed"
  assert f"statuses [{-signal.SIGKILL}, 3]" in capsys.readouterr().out


def test_the_processes_of_a_program_share_a_port_and_the_first_is_printed(
  monkeypatch, tmp_path, capsys
):
  monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
  commands = lambda port: [[sys.executable, "-c", f"print({port})"]] * 2
  assert local.supervise(local.Program("try", commands, {}, 0)) == "finished"
  logs = [(local.folder_of("try") / f"process_{i}.log").read_text() for i in range(2)]
  assert logs[0] == logs[1] == capsys.readouterr().out and 1024 < int(logs[0]) < 65536


SAMPLES = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (folder / "gave_back").touch() or sys.exit(143))
(folder / f"pid_{os.getpid()}").touch()
while not (folder / "trained").exists():
  time.sleep(0.02)
"""
TRAINS = "import pathlib, sys, time; status = int(sys.argv[2])\n"
TRAINS += "while not (pathlib.Path(sys.argv[1]) / 'go').exists(): time.sleep(0.02)\n"
TRAINS += "status or (pathlib.Path(sys.argv[1]) / 'trained').touch(); sys.exit(status)"


@pytest.mark.parametrize(("status", "state"), [(0, "finished"), (1, "failed")])
def test_samplers_come_back_and_end_with_their_trainer(begun, tmp_path, status, state):
  """By themselves where it has finished, else with SIGTERM."""
  trainer = begun(TRAINS, tmp_path, status, count=1)
  names = ("try-sampler-0", "try-sampler-1")
  samplers = [begun(SAMPLES, tmp_path, name=name, count=1, retries=1) for name in names]
  pids = lambda: [int(path.name[4:]) for path in tmp_path.glob("pid_*")]

  def act():
    wait_for(lambda: len(pids()) == 2)
    os.kill(pids()[0], signal.SIGKILL)
    wait_for(lambda: len(pids()) == 3)
    (tmp_path / "go").touch()

  thread = threading.Thread(target=act)
  thread.start()
  assert local.supervise(trainer, samplers) == state
  thread.join()
  assert [s.state for s in samplers] == [state if state == "finished" else "stopped"] * 2
  assert (tmp_path / "gave_back").exists() or status == 0


WAITS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
pathlib.Path(sys.argv[1], "began" + sys.argv[2]).touch()
time.sleep(100)
"""
HOLDS = """
import sys
from rlvr_jax.launch import local
commands = lambda port: [[sys.executable, "-c", *sys.argv[1:], str(i)] for i in range(2)]
with local._lock("try"):
  print(local.supervise(local.Program("try", commands, {}, 5)))
"""


@pytest.mark.parametrize("how", ["stop", "terminal", "kill"])
def test_a_run_is_seen_and_stopped_from_elsewhere(launch, tmp_path, how):
  """Once, by whatever asks; a second start is refused while it goes on."""
  assert launch("local status --name=try").startswith("try: does not run")
  command = [sys.executable, "-c", HOLDS, WAITS, str(tmp_path)]
  with subprocess.Popen(
    command,
    cwd=tiny.ROOT,
    stdout=subprocess.PIPE,
    text=True,
    preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # also under nohup
  ) as process:
    wait_for(lambda: all((tmp_path / f"began{i}").exists() for i in range(2)))
    assert launch("local status --name=try").startswith(f"try: runs, as process {process.pid};")
    with pytest.raises(LaunchError, match="try is running already"):
      launch("local start --name=try", PROGRAM)
    left = children(process.pid, str(tmp_path))
    if how == "stop":
      (tmp_path / "state/rlvr_jax/launch/notes").write_text("of somebody else")
      (dry,) = launch("local stop --all --dry_run").splitlines()
      assert dry == f"try: would be asked to stop, process {process.pid}"
      assert launch("local stop --all").startswith("try: stopped\n")
    else:
      process.send_signal(signal.SIGHUP if how == "terminal" else signal.SIGKILL)
    assert process.communicate(timeout=100)[0] == ("" if how == "kill" else "stopped\n")
  assert launch("local stop --name=try") == "try: does not run\n"
  for pid in left if how == "kill" else ():  # a run's own processes would end, see --parent
    os.kill(pid, signal.SIGKILL)


def children(pid, word):
  """The processes that a process has started whose command has a word."""
  found = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
  return [int(p) for p in found if word in pathlib.Path(f"/proc/{p}/cmdline").read_text()]


def wait_for(condition, seconds=300):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "the condition was not met in time"
    time.sleep(0.05)


# --- runs on a fake cloud -------------------------------------------------------------------------

TINY = ["--config=tests/train/tiny.py", "--config.mesh.data=2", "--config.num_updates=6"]


@pytest.fixture
def cloud(checkout, tmp_path):
  """The environment of a laptop with a fake cloud, in which hosts have one device each."""
  fake = fakes().install(tmp_path / "cloud")
  path = os.pathsep.join([str(checkout), str(checkout / "tests")])
  flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
  return fake | {"PYTHONPATH": path, "XLA_FLAGS": flags}


def fakes():
  sys.path.insert(0, str(pathlib.Path(__file__).parent))
  try:
    import fake_cloud
  finally:
    sys.path.pop(0)
  return fake_cloud


ARGUMENTS = {
  "local": ["--processes=2", "--retries=1"],
  "tpu_vm": ["--zone=here", "--type=v5litepod-8", "--poll_s=0.5", "--spot", "--retries=2"],
}


def command(target, verb, *flags):
  return [sys.executable, "-m", "rlvr_jax.launch", target, verb, "--name=try", *flags]


def start(target, cloud, checkout, workdir, *flags, config=TINY, options=()):
  environment = f"--env=PYTHONPATH={cloud['PYTHONPATH']}"
  program = ["--", *config, f"--workdir={workdir}", *flags]
  return subprocess.Popen(
    [*command(target, "start", *ARGUMENTS[target], *options, environment), *program],
    cwd=checkout,
    env=cloud,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    # A shell starts what it has in the background without it.
    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
  )


@pytest.fixture(scope="module")
def laptop(checkout, tmp_path_factory):
  """The environment of local launches, whose state is in a folder of their own."""
  path = os.pathsep.join([str(checkout), str(checkout / "tests")])
  state = tmp_path_factory.mktemp("state")
  return os.environ | {"XDG_STATE_HOME": str(state), "PYTHONPATH": path}


@pytest.fixture(scope="module")
def undisturbed(laptop, checkout, tmp_path_factory):
  """(workdir, output) of the run as two local processes, from beginning to end."""
  workdir = tmp_path_factory.mktemp("undisturbed") / "run"
  process = start("local", laptop, checkout, workdir)
  output = process.communicate(timeout=tiny.TIMEOUT_S)[0]
  assert process.returncode == 0, output[-5000:]
  return workdir, output


@pytest.mark.slow
def test_a_local_run_is_stopped_and_killed_and_goes_on(laptop, checkout, undisturbed, tmp_path):
  assert "held-out after update 6" in undisturbed[1]
  workdir = tmp_path / "run"
  laptop = laptop | {SECONDS: "0.3"}  # by the grader, so that there is time to interrupt
  process = start("local", laptop, checkout, workdir)
  tiny.wait_for(tiny.has_record(workdir, 1, "train"), process)
  process.send_signal(signal.SIGINT)
  output = process.communicate(timeout=tiny.TIMEOUT_S)[0]
  assert process.returncode == 1 and "shutdown requested: saved after update" in output
  process = start("local", laptop, checkout, workdir)  # with --retries=1
  folder = pathlib.Path(laptop["XDG_STATE_HOME"], "rlvr_jax", "launch", "try")
  wait_for(lambda: "resumed at update" in (folder / "process_0.log").read_text())
  os.kill(children(process.pid, "--process_id=1")[0], signal.SIGKILL)
  output = process.communicate(timeout=tiny.TIMEOUT_S)[0]
  assert process.returncode == 0 and output.count("resumed at update") == 2, output[-5000:]
  assert tiny.outcome(workdir) == tiny.outcome(undisturbed[0])


@pytest.mark.slow
def test_a_local_run_ends_with_its_launcher(laptop, checkout, tmp_path):
  process = start("local", laptop, checkout, tmp_path / "run", "--config.num_updates=1000000")
  tiny.wait_for(tiny.has_record(tmp_path / "run", 1, "train"), process)
  pids = children(process.pid, "rlvr_jax.main")
  process.kill()
  wait_for(lambda: not any(map(fakes().alive, pids)))
  folder = pathlib.Path(laptop["XDG_STATE_HOME"], "rlvr_jax", "launch", "try")
  assert "shutdown requested: saved after update" in (folder / "process_0.log").read_text()


FLEET = "tests/train/fleet/fleets.py"
FLAGS = [f"--config={FLEET}", "--config.num_updates=60"]


@pytest.mark.slow
def test_a_local_fleet_loses_a_sampler_and_ends(laptop, checkout, tmp_path):
  workdir = tmp_path / "run"
  options = ["--processes=1", "--samplers=2"]
  process = start("local", laptop, checkout, workdir, config=FLAGS, options=options)
  tiny.wait_for(tiny.has_record(workdir, 2, "train"), process)
  os.kill(children(process.pid, "--mode=sample")[0], signal.SIGKILL)
  output = process.communicate(timeout=tiny.TIMEOUT_S)[0]
  assert process.returncode == 0, output[-5000:]
  assert f"try-sampler-0: statuses [{-signal.SIGKILL}], starts again; 0 retries" in output
  fleets.check_store(workdir, 60)


@pytest.mark.soak
def test_preempted_tpu_vms_come_back_to_the_same_end(cloud, checkout, undisturbed, tmp_path):
  process = start("tpu_vm", cloud, checkout, tmp_path / "run")
  with ended(process, tmp_path / "cloud"):
    tiny.wait_for(tiny.has_record(tmp_path / "run", 2, "train"), process)
    assert fakes().preempt(tmp_path / "cloud", "try"), "not saved within 20 s"
    output = process.communicate(timeout=tiny.TIMEOUT_S)[0]
  assert process.returncode == 0, output[-5000:]
  assert "try: SUSPENDED" in output and output.count("queued-resources create") == 2
  assert "shutdown requested: saved after update" in output and "resumed at update" in output
  assert "held-out after update 6" in output
  # The machines are given back, and the run has not noticed.
  assert not (tmp_path / "cloud" / "resource-try.json").exists()
  assert tiny.outcome(tmp_path / "run") == tiny.outcome(undisturbed[0])


def test_stop_all_leaves_nothing_of_ours(cloud, checkout, tmp_path):
  """Programs end, preempted and requested machines go too; what others have made stays."""
  folder, flags = tmp_path / "cloud", ["--zone=here", "--type=v5litepod-8", "--poll_s=0.5"]
  program = ["--", f"--config={TINY[0][9:]}", "--workdir=/nowhere/run"]
  process = subprocess.Popen(
    [*command("tpu_vm", "start", *flags), *program], cwd=checkout, env=cloud
  )
  with ended(process, folder):
    wait_for(lambda: list(folder.glob("machine-*/units/*.json")))
    process.send_signal(signal.SIGKILL)  # the laptop is gone
    for name, state, label in [
      ("fade-sampler-0", "SUSPENDED", "rlvr_jax_slices=1"),
      ("wide", "WAITING_FOR_RESOURCES", "rlvr_jax_slices=2"),
      ("theirs", "ACTIVE", "team=vision"),
    ]:
      resource = {"name": name, "state": state, "homes": [], "port": 0, "label": label}
      fakes().write(folder / f"resource-{name}.json", resource)
    stopped = subprocess.run(
      [sys.executable, "-m", "rlvr_jax.launch", "tpu_vm", "stop", "--all", "--zone=here"],
      cwd=checkout, env=cloud, capture_output=True, text=True,
    )  # fmt: skip
    assert [path.stem for path in folder.glob("resource-*.json")] == ["resource-theirs"]
    assert not list(folder.glob("machine-*/units/*.json"))
  assert stopped.returncode == 0, stopped.stderr
  assert "theirs: ACTIVE, without the label rlvr_jax_slices: not touched" in stopped.stdout
  assert stopped.stdout.endswith("no machines of rlvr_jax.launch are left in here\n")


def test_a_run_that_does_not_end_leaves_no_other_run_alone(monkeypatch, tmp_path):
  monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
  asked = []

  def stop(name, args, shell):
    asked.append(name)
    raise LaunchError(f"{name} has not saved")

  monkeypatch.setattr(local, "stop", stop)
  with local._lock("a"), local._lock("b"):
    with pytest.raises(LaunchError, match="a has not saved; b has not saved"):
      local.stop_all(argparse.Namespace(), Shell())
  assert asked == ["a", "b"]


def test_machines_that_stop_all_cannot_delete_are_named(capsys):
  class Stuck(Shell):
    def capture(self, command):
      return "try\tACTIVE\t1\nother\tACTIVE\t1\n"

    def run(self, command):
      deleted.append(command[5])
      raise CommandError("no network")

  deleted = []
  with pytest.raises(LaunchError, match="machines still exist and are billed: try, other; run"):
    tpu_vm.stop_all(argparse.Namespace(zone="here", project=""), Stuck())
  assert deleted == ["try", "try", "other", "other"]  # each is stopped, then deleted


def test_stop_deletes_samplers_whose_trainer_is_gone_and_knows_the_slices():
  class Gone(Shell):
    def capture(self, command):
      if "filter" in " ".join(command):
        return "try-sampler-0\ntry-sampler-1\n"
      return "try\tACTIVE\t2\ntry-sampler-0\tACTIVE\t1\n"

    def run(self, command):
      told.append(f"{command[4]} {command[5]}")
      if told[-1] == "delete try":
        raise CommandError("NOT_FOUND")

  told = []
  with pytest.raises(LaunchError, match="could not delete try; `status` says"):
    tpu_vm.stop("try", argparse.Namespace(zone="here", project="", num_slices=1), Gone())
  assert told == [
    *("ssh try-0", "ssh try-1", "delete try"),
    *("ssh try-sampler-0", "delete try-sampler-0", "ssh try-sampler-1", "delete try-sampler-1"),
  ]


class Cloud(Shell):
  """Answers as gcloud does, with the states of each program's machines and hosts, in order."""

  def __init__(self, states):
    super().__init__()
    self.states = {name: iter(text.split()) for name, text in states.items()}
    self.told = []

  def capture(self, command):
    found = re.search(r"name~/(.*)\$", " ".join(command))
    if found:  # of the queued resource
      state = next(self.states[found[1]])
      if state == "offline":
        raise CommandError("no network")
      return state.replace("none", "")
    return f"rlvr_jax-state host {next(self.states[command[5] + ' hosts'])}"

  def run(self, command):
    script = command[-3] if "ssh" in command else ""
    verb = "stop" if "stopped" in script and "systemd-run" not in script else command[4]
    self.told.append(f"{verb} {command[5]}")

  def follow(self, command):
    return subprocess.Popen(["true"])


def supervise(states, retries=1, samplers=0):
  """What the fake was told while programs are supervised."""
  cloud = Cloud(states)
  place = argparse.Namespace(zone="here", project="")
  machines = Machines(find_slice("v5p-8"), 1, True)
  watches = []
  for name in ("try", *(f"try-sampler-{i}" for i in range(samplers))):
    setup = tpu_vm._Setup(Run(name, (), {}, retries), machines, "", pathlib.Path("a.tgz"), "a", "")
    watches.append(tpu_vm._Watch(setup, tpu_vm.QueuedResource(name, 1, place, cloud)))
  try:
    tpu_vm._supervise(watches, 0.0)
  finally:
    cloud.told.append("end")
  return cloud.told


def test_preempted_machines_are_replaced_and_hosts_prepared_again():
  states = "none WAITING ACTIVE ACTIVE SUSPENDED offline WAITING ACTIVE ACTIVE ACTIVE"
  told = supervise({"try": states, "try hosts": "running missing finished"})
  begin = ["create try", "scp a.tgz", "ssh try"]
  assert told == [*begin, "delete try", *begin, *begin[1:], "end"]


def test_a_sampler_that_fails_is_left_alone(capsys):
  states = {"try": "none " + "ACTIVE " * 4, "try hosts": "running running finished"}
  states["try-sampler-0"] = "none FAILED"  # Cloud does not make it
  states["try-sampler-1"] = "none SUSPENDED SUSPENDED"  # once more than it is retried
  told = supervise(states, samplers=2)
  assert told.count("create try-sampler-1") == 2 and told.count("create try-sampler-0") == 1
  assert "describe try-sampler-0" in told and told[-1] == "end"
  assert capsys.readouterr().err.count("goes on without this sampler") == 2


@pytest.mark.parametrize(
  ("states", "hosts", "message"),
  [
    ("none FAILED", "", "Google Cloud did not create the machines of try"),
    ("none SUSPENDED FAILED", "", "Google Cloud did not create the machines of try"),
    ("none SUSPENDED SUSPENDED", "", "SUSPENDED, and --retries = 1 allows no further replacement:"),
    ("none WAITING none", "", "were deleted during the run"),
    ("none SUSPENDED WAITING none", "", "were deleted during the run"),
    ("none ACTIVE ACTIVE", "failed", "try has failed 2 times"),
    ("none ACTIVE ACTIVE", "stopped", "try was stopped: run the same command again"),
    ("offline", "", "no network"),
  ],
)
def test_a_run_that_cannot_go_on_has_a_message(states, hosts, message):
  with pytest.raises(LaunchError, match=message):
    supervise({"try": states, "try hosts": hosts})


def test_preempted_machines_that_stop_deletes_first_do_not_come_back(monkeypatch):
  def run(self, command):
    if command[4] == "delete":
      raise CommandError("NOT_FOUND")
    self.told.append(command[4])

  monkeypatch.setattr(Cloud, "run", run)
  with pytest.raises(LaunchError, match="the machines of try were deleted during the run"):
    supervise({"try": "none ACTIVE SUSPENDED none", "try hosts": "running"})


def test_machines_are_requested_again_until_that_works(monkeypatch):
  fails, create = iter([False, True, False]), tpu_vm.QueuedResource.create

  def create_or_fail(*arguments):
    if next(fails):
      raise CommandError("no network")
    create(*arguments)

  monkeypatch.setattr(tpu_vm.QueuedResource, "create", create_or_fail)
  told = supervise({"try": "none ACTIVE SUSPENDED none ACTIVE ACTIVE", "try hosts": "finished"})
  assert told.count("create try") == 2 and told.count("delete try") == 1


@pytest.mark.parametrize("text", ["", "Warning: no output"])
def test_hosts_that_say_nothing_are_not_taken_for_finished(text):
  """Their machines would be deleted."""

  class Silent(Shell):
    def capture(self, command):
      return text

  place = argparse.Namespace(zone="here", project="")
  with pytest.raises(CommandError, match="no host of try has reported its state"):
    tpu_vm.QueuedResource("try", 1, place, Silent()).host_states()


@pytest.mark.soak
def test_a_run_goes_on_without_its_launcher_until_it_is_stopped(cloud, checkout, tmp_path):
  process = start("tpu_vm", cloud, checkout, tmp_path / "run", "--config.num_updates=1000000")
  with ended(process, tmp_path / "cloud"):
    tiny.wait_for(tiny.has_record(tmp_path / "run", 1, "train"), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    reached = len(tiny.records(tmp_path / "run", "train"))
    wait_for(lambda: len(tiny.records(tmp_path / "run", "train")) > reached)
    call = lambda verb: subprocess.run(
      command("tpu_vm", verb, "--zone=here"),
      cwd=checkout,
      env=cloud,
      capture_output=True,
      text=True,
    )
    assert call("status").stdout.count(" running") == 2
    homes = fakes().read(tmp_path / "cloud" / "resource-try.json")["homes"]
    assert call("stop").returncode == 0
  logs = [pathlib.Path(homes[0], "units", "rlvr_jax-try.service.log").read_text()]
  assert "shutdown requested: saved after update" in logs[0]
  assert not (tmp_path / "cloud" / "resource-try.json").exists()


@pytest.mark.soak
def test_a_fleet_on_a_cloud(cloud, checkout, tmp_path):
  """A sampler is preempted, others come and go by `start`; every batch counts once."""
  workdir, folder = tmp_path / "run", tmp_path / "cloud"
  present = lambda: sorted(path.stem for path in folder.glob("resource-try-*.json"))
  expected = lambda count: [f"resource-try-sampler-{i}" for i in range(count)]
  config = [*FLAGS, "--config.mesh.data=2"]
  options = ["--sampler_type=v5litepod-1", "--sampler_config=mesh.data=1"]
  begin = lambda samplers: start(
    "tpu_vm", cloud, checkout, workdir, config=config, options=[*options, f"--samplers={samplers}"]
  )
  process = begin(2)
  with ended(process, folder):
    wait_for(tiny.has_record(workdir, 2, "train"), tiny.TIMEOUT_S)
    assert present() == expected(2)
    assert fakes().preempt(folder, "try-sampler-0"), "not ended within 20 s"
    for count in (3, 1):
      process.send_signal(signal.SIGINT)  # it is followed no more
      assert process.wait(tiny.TIMEOUT_S) in (0, 130)
      process = begin(count)
      wait_for(lambda count=count: present() == expected(count))
    wait_for(tiny.has_record(workdir, 60, "train"), tiny.TIMEOUT_S)
    output = process.communicate(timeout=tiny.TIMEOUT_S)[0]
    assert process.returncode == 0, output[-5000:]
    assert present() == []
  fleets.check_store(workdir, 60)
  store = RolloutStore(workdir / "rollouts", writable=False)
  samples = [s for number in range(60) for s in tiny.read_stored(store, number)[2]]
  assert len({sample["sampler"] for sample in samples}) >= 2


@contextlib.contextmanager
def ended(process, folder):
  """At the end nothing that the fakes have started is left."""
  try:
    yield
  finally:
    process.kill()
    for path in folder.glob("resource*.json"):
      fakes().kill_hosts(fakes().read(path), signal.SIGKILL)
