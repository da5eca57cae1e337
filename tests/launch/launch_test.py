"""Command lines and manifests; runs on a fake cloud, preempted and brought to their end."""

import argparse
import contextlib
import distutils.core
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import setuptools  # noqa: F401  (its setup, not that of distutils, is what setup.py calls)
import yaml
from absl import flags
from ml_collections import config_flags
from rewards.user_graders import SECONDS
from train import tiny
from train.fleet import fleets

from rlvr_jax import main as program_of_runs  # noqa: F401  (defines its flags)
from rlvr_jax.launch import __main__ as command_line
from rlvr_jax.launch import fleet, supervise, tpu_vm
from rlvr_jax.launch.package import make_package
from rlvr_jax.launch.run import EXTRAS, Run
from rlvr_jax.launch.shell import CommandError, LaunchError, Shell
from rlvr_jax.launch.slices import find_slice
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.train.fleet import roles

GOLDEN = pathlib.Path(__file__).parent / "golden"
PROGRAM = ["--", "--config=configs/full_size/fade_qwen25_7b.py"]
PROGRAM += ["--workdir=/mnt/rlvr_jax/runs/fade", "--config.loss=ppo_clip(epsilon_high=0.28)"]
IN_BUCKET = [*PROGRAM[:2], "--workdir=gs://mine/runs/fade"]
PLACE = "--name=fade --zone=us-west4-a --project=mine"
IMAGE = "--image=us-docker.pkg.dev/mine/images/rlvr_jax"
COMMANDS = {
  "tpu_vm_start": f"tpu_vm start {PLACE} --type=v5litepod-64 --spot --nfs=10.0.0.2:/share"
  " --service_account=run@mine.iam.gserviceaccount.com --env=HF_HUB_OFFLINE=1",
  "tpu_vm_start_slices": f"tpu_vm start {PLACE} --type=v5p-32 --num_slices=2 --keep",
  "tpu_vm_start_fleet": f"tpu_vm start {PLACE} --type=v5p-32 --samplers=2"
  " --sampler_type=v5litepod-16 --sampler_config=mesh.tensor=4 --spot=samplers",
  "tpu_vm_status": f"tpu_vm status {PLACE}",
  "tpu_vm_logs": f"tpu_vm logs {PLACE}",
  "tpu_vm_stop": f"tpu_vm stop {PLACE}",
  "xpk_start": f"xpk start {PLACE} --cluster=pods --type=v5p-32 --num_slices=2 {IMAGE} --env=A=b",
  "xpk_stop": f"xpk stop {PLACE} --cluster=pods",
  "jobset_start": f"jobset start --name=fade --type=v5litepod-64 --claim=shared --spot {IMAGE}"
  " --env=A=b --retries=3",
  "jobset_start_bucket": f"jobset start --name=fade --type=v5p-32 {IMAGE}",
  "jobset_start_fleet": f"jobset start --name=fade --type=v5p-32 --samplers=2"
  f" --sampler_type=v5litepod-16 --spot=samplers {IMAGE}",
  "jobset_status": "jobset status --name=fade",
  "jobset_stop": "jobset stop --name=fade",
  "local_start": "local start --name=fade --processes=2",
  "local_start_fleet": "local start --name=fade --processes=1 --samplers=1 --sampler_processes=2"
  " --sampler_config=mesh.data=2",
}

BUCKET = ("tpu_vm_start_slices", "jobset_start_bucket")  # with a workdir in a bucket
BUCKET += ("tpu_vm_start_fleet", "jobset_start_fleet")


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
def launch(checkout, monkeypatch, capsys):
  """Calls the command line in the checkout; returns what it printed."""
  monkeypatch.chdir(checkout)

  def call(arguments, program=()):
    command_line.main([*arguments.split(), *program])
    return capsys.readouterr().out

  return call


# --- command lines --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_the_commands_are_those_on_record(launch, name):
  program = IN_BUCKET if name in BUCKET else PROGRAM
  starts = " start " in COMMANDS[name]
  output = launch(f"{COMMANDS[name]} --dry_run", program if starts else ())
  output = re.sub(r"\b[0-9a-f]{12}\b", "COMMIT", output).replace(sys.executable, "PYTHON")
  assert output == (GOLDEN / f"{name}.txt").read_text(), "if it is meant, put this there"


SWEEP = ["--", "--mode=sweep", "--config=configs/grpo.py", "--sweep=configs/base.py"]


def test_a_sweep_is_one_process_that_knows_its_commit(launch):
  output = launch("local start --name=fade --processes=2 --dry_run", [*SWEEP, "--workdir=runs/x"])
  (command,) = [line for line in output.splitlines() if "rlvr_jax.main" in line]
  assert "--process" not in command and "--mode=sweep" in command
  on_host = [*SWEEP, "--workdir=gs://bucket/sweep"]
  output = launch(f"tpu_vm start {PLACE} --type=v5litepod-8 --dry_run", on_host)
  assert "--distributed" not in output and "--mode=sweep" in output
  assert re.search(r"--setenv=RLVR_JAX_COMMIT=[0-9a-f]{12}\b", output)
  for arguments in ("--type=v5litepod-64", "--type=v5litepod-8 --num_slices=2"):
    with pytest.raises(LaunchError, match="--mode=sweep runs on one host, these are"):
      launch(f"tpu_vm start {PLACE} {arguments} --dry_run", on_host)
  with pytest.raises(LaunchError, match=r"--sweep=mine\.py is not in the commit: add it with git"):
    launch("local start --name=fade --dry_run", [*SWEEP[:-1], "--sweep=mine.py"])


def test_the_manifest_is_yaml_that_kubernetes_takes(launch):
  output = launch(f"{COMMANDS['jobset_start']} --dry_run", PROGRAM)
  jobset = yaml.safe_load(output.partition("<<'END'\n")[2].partition("END\n")[0])
  (job,) = jobset["spec"]["replicatedJobs"]
  pods = job["template"]["spec"]
  (container,) = pods["template"]["spec"]["containers"]
  assert pods["parallelism"] == pods["completions"] == 16
  assert container["resources"]["limits"] == {"google.com/tpu": 4}
  assert container["command"][-1] == PROGRAM[-1] and "--distributed" in container["command"]
  assert container["env"] == [{"name": "A", "value": "b"}]


@pytest.mark.parametrize(
  ("arguments", "program", "message"),
  [
    (f"tpu_vm start {PLACE} --type=v5e-64", PROGRAM, "Cloud spells it v5litepod-64"),
    (f"tpu_vm start {PLACE} --type=v5p-12", PROGRAM, "v5p-8, v5p-16, v5p-32, v5p-64"),
    (f"tpu_vm start {PLACE} --type=h100-8", PROGRAM, "allowed: v4-…, v5litepod-…"),
    (f"tpu_vm start {PLACE} --type=v5p-32", [], "--config is missing: give the program's flags"),
    (f"tpu_vm start {PLACE} --type=v5p-32", ["--", "--config=mine.py"], "is not in the commit"),
    (f"tpu_vm start {PLACE} --type=v5p-32", ["--", PROGRAM[1], "--workdir=runs/a"], "is relative"),
    (
      f"tpu_vm start {PLACE} --type=v5p-32",
      ["--", PROGRAM[1], "--workdir=s3://b/fade"],
      "is a URL, which only --mode=export writes: give gs://BUCKET/FOLDER, or a folder of a file",
    ),
    (f"tpu_vm start {PLACE} --type=v5p-32 --env=A", PROGRAM, "--env=A: write --env=NAME=VALUE"),
    (f"tpu_vm logs {PLACE}", PROGRAM, "takes no flags of the program"),
    ("jobset start --name=a --type=v5p-32", PROGRAM, "--image is needed"),
    (
      f"jobset start --name=a --type=v5p-32 {IMAGE}",
      PROGRAM,
      "--workdir=/mnt/rlvr_jax/runs/fade is on a file system that is not mounted: add --claim, or",
    ),
    (f"tpu_vm start {PLACE} --type=v5p-32", PROGRAM, "is not mounted: add --nfs, or give a folder"),
    ("local start --name=a --samplers=-1", PROGRAM, "--samplers=-1: give a number of samplers"),
    ("local start --name=a --samplers=2", PROGRAM[:2], "--workdir is missing: samplers meet"),
    (
      "local start --name=a --samplers=2",
      [*PROGRAM, "--mode=check"],
      "--samplers=2 goes with --mode=train, not with --mode=check",
    ),
    (
      "local start --name=a --samplers=2",
      [*PROGRAM, "--config.fleet.samplers=False"],
      "--config.fleet.samplers=False is of a run that samples by itself",
    ),
    (
      "local start --name=a --samplers=2",
      [*PROGRAM, "--config.schedule=on_policy()"],
      "--config.schedule=on_policy() has no real-time bound, which --samplers needs: set it to",
    ),
    (
      "local start --name=a --samplers=2 --sampler_config=batch.prompts=4",
      PROGRAM,
      "--sampler_config=batch.prompts=4: write FIELD=VALUE with a field of mesh, generation_mesh,",
    ),
    (
      "local start --name=a --sampler_config=mesh.data=4",
      PROGRAM,
      "--sampler_config=mesh.data=4 is for samplers: add --samplers=N",
    ),
    (
      f"tpu_vm start {PLACE} --type=v5p-32 --samplers=2",
      IN_BUCKET,
      "--sampler_type= is unknown; allowed: v4-…, v5litepod-…",
    ),
    (
      f"tpu_vm start {PLACE} --type=v5p-32 --sampler_type=v5litepod-16",
      IN_BUCKET,
      "--sampler_type=v5litepod-16 is for samplers: add --samplers=N",
    ),
    (
      f"jobset start --name=a --type=v5p-32 --spot=samplers {IMAGE}",
      IN_BUCKET,
      "--spot=samplers is for samplers: add --samplers=N",
    ),
    ("jobset scale --name=a --samplers=2", [], "a was not started with --samplers on this machine"),
    ("local scale --name=a", [], "scale needs --samplers=N, how many there are to be"),
  ],
)
def test_mistakes_have_a_message(launch, arguments, program, message):
  with pytest.raises(LaunchError, match=re.escape(message)):
    launch(f"{arguments} --dry_run", program)


def test_the_fields_of_a_sampler_are_those_that_it_may_set():
  assert fleet.OF_A_SAMPLER == roles.OF_A_SAMPLER


@pytest.mark.parametrize("name", ["A", "a_b", "-a", "a" * 41, "ends-"])
def test_names_are_those_that_every_target_accepts(launch, capsys, name):
  with pytest.raises(SystemExit):
    launch(f"jobset status --name={name}")
  assert "use up to 40 small letters" in capsys.readouterr().err


PLACES = {"ZONE": "us-east5-a", "REGION": "us-east5", "PROJECT": "mine", "BUCKET": "mine"}
RECIPE = "configs/full_size/fade_qwen25_7b.py"


def documented():
  """The launches that the guide shows, with names for its placeholders."""
  text = (tiny.ROOT / "docs" / "tpu.md").read_text().replace("\\\n", "")
  text = re.sub(rf"\b({'|'.join(PLACES)})\b", lambda found: PLACES[found[1]], text)
  text = text.replace("start … --", "start --name=fade --zone=us-east5-a --type=v5p-32 --")
  text = text.replace("--config=…", f"--config={RECIPE}")
  return re.findall("^    python -m rlvr_jax.launch (.*)", text, re.MULTILINE)


def test_the_guide_shows_launches():
  assert {line.split()[0] for line in documented()} == {"local", "tpu_vm", "xpk", "jobset"}
  assert len(documented()) >= 9


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
  with pytest.raises(LaunchError, match="kubectl is not installed, or not on PATH"):
    launch("jobset status --name=fade")


@pytest.mark.parametrize(
  ("name", "chips", "hosts", "topology"),
  [
    *[("v5litepod-1", 1, 1, "1x1"), ("v5litepod-8", 8, 1, "2x4"), ("v5litepod-64", 64, 16, "8x8")],
    *[("v5p-8", 4, 1, "2x2x1"), ("v5p-32", 16, 4, "2x2x4"), ("v4-64", 32, 8, "2x4x4")],
    ("v6e-256", 256, 64, "16x16"),
  ],
)
def test_slices(name, chips, hosts, topology):
  found = find_slice(name)
  assert (found.chips, found.hosts, found.topology) == (chips, hosts, topology)
  assert found.chips_per_host * hosts == chips


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


def test_the_archive_has_the_files_of_the_commit(checkout, tmp_path):
  package = make_package(checkout / "rlvr_jax")
  subprocess.run(["tar", "-xzf", package.write(tmp_path / "a.tar.gz"), "-C", tmp_path], check=True)
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


# --- processes on this machine --------------------------------------------------------------------

FAILS_AT_FIRST = """
import pathlib, sys
path = pathlib.Path(sys.argv[1] + sys.argv[3])
path.write_text(path.read_text() + "." if path.exists() else ".")
sys.exit(len(path.read_text()) <= int(sys.argv[2]))
"""
WAITS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
pathlib.Path(sys.argv[1]).touch()
time.sleep(100)
"""


def supervised(folder, program, *arguments, retries=0):
  command = [sys.executable, "-c", program, *map(str, arguments)]
  commands = [[*command, str(process)] for process in range(2)]
  run = {"commands": commands, "directory": str(folder), "environment": {}, "retries": retries}
  run |= {"samplers": 0, "sampler_commands": []}
  (folder / "run.json").write_text(json.dumps(run))
  return [sys.executable, "-m", "rlvr_jax.launch.supervise", str(folder)]


@pytest.mark.parametrize(
  ("failures", "state", "attempt"),
  [
    (0, "finished", 0),
    (2, "finished", 2),
    pytest.param(3, "failed", 2, marks=pytest.mark.slow),
  ],
)
def test_processes_that_fail_start_again_up_to_a_limit(tmp_path, failures, state, attempt):
  command = supervised(tmp_path, FAILS_AT_FIRST, tmp_path / "count", failures, retries=2)
  done = subprocess.run(command, cwd=tiny.ROOT, timeout=100)
  found = json.loads((tmp_path / "state.json").read_text())
  assert (found["state"], found["attempt"]) == (state, attempt)
  assert done.returncode == (state != "finished")


def test_a_request_to_end_reaches_every_process_and_nothing_starts_again(tmp_path):
  command = supervised(tmp_path, WAITS, tmp_path / "began", retries=5)
  process = subprocess.Popen(command, cwd=tiny.ROOT)
  wait_for((tmp_path / "began").exists)
  time.sleep(0.5)  # both have their handler
  process.send_signal(signal.SIGHUP)  # the terminal has gone
  process.send_signal(signal.SIGTERM)
  assert process.wait(100) == 1
  found = json.loads((tmp_path / "state.json").read_text())
  assert (found["state"], found["attempt"], found["statuses"]) == ("stopped", 0, [143, 143])


def test_one_that_fails_ends_the_others(tmp_path, monkeypatch):
  monkeypatch.setattr(supervise, "_SHUTDOWN_S", 0.5)
  program = "import sys, time; sys.exit(3) if sys.argv[1] == '1' else time.sleep(100)"
  supervised(tmp_path, program)
  before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
  before[signal.SIGHUP] = signal.getsignal(signal.SIGHUP)
  try:
    assert supervise.supervise(tmp_path) == "failed"
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
  assert json.loads((tmp_path / "state.json").read_text())["statuses"] == [-signal.SIGKILL, 3]


def test_a_port_is_chosen_for_every_attempt(tmp_path):
  program = "import sys; print(sys.argv[1])"
  command = supervised(tmp_path, program, f"127.0.0.1:{supervise.PORT}")
  assert subprocess.run(command, cwd=tiny.ROOT, timeout=100).returncode == 0
  ports = {(tmp_path / f"process_{i}.log").read_text() for i in range(2)}
  assert len(ports) == 1 and re.fullmatch(r"127\.0\.0\.1:\d+\n", ports.pop())


SAMPLES = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (folder / "gave_back").touch() or sys.exit(143))
(folder / str(os.getpid())).touch()
while not (folder / "trained").exists():
  time.sleep(0.02)
"""


def test_a_process_that_has_ended_is_not_alive():
  with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
    assert supervise.began(process.pid) != supervise.began(os.getpid())
    began = supervise.began(process.pid)
    assert began and began == supervise.began(process.pid)
    process.stdin.close()
    deadline = time.monotonic() + 30
    while supervise.began(process.pid):  # though its parent has not waited for it
      assert time.monotonic() < deadline
    assert process.returncode is None
  assert supervise.began(process.pid) is None


def test_a_process_that_has_taken_over_the_number_is_left_alone(tmp_path, monkeypatch, launch):
  monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
  folder = Run("try", (), {}, 1, None).folder
  folder.mkdir(parents=True)
  state = {"state": "running", "attempt": 0, "processes": [], "samplers": {}}
  with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
    for began in ({}, {"began": "x 1"}, {"began": supervise.began(os.getpid())}):
      (folder / "state.json").write_text(json.dumps({"pid": other.pid, **began, **state}))
      assert launch("local stop --name=try") == "try: killed\n"
    assert other.poll() is None  # SIGTERM would have ended it
    own = {"pid": other.pid, "began": supervise.began(other.pid)}
    (folder / "state.json").write_text(json.dumps({**own, **state}))
    assert launch("local stop --name=try") == "try: killed\n" and other.wait(30) == -signal.SIGTERM


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"pid": 1}', '{"state": "running"}'])
def test_a_damaged_state_has_a_message(tmp_path, monkeypatch, launch, text):
  monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
  folder = Run("try", (), {}, 1, None).folder
  folder.mkdir(parents=True)
  (folder / "state.json").write_text(text)
  for verb in ("status", "stop", "scale --samplers=1", "logs"):
    (folder / "process_0.log").touch()
    with pytest.raises(LaunchError, match=r"state\.json is not the state of a run.* remove it"):
      launch(f"local {verb} --name=try")


def test_samplers_beside_a_trainer_come_back_and_are_scaled(tmp_path, monkeypatch, launch):
  """Each is started again by itself; one that is scaled away gets SIGTERM; all end with the run."""
  monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
  folder = Run("try", (), {}, 1, None).folder
  folder.mkdir(parents=True)
  command = supervised(folder, SAMPLES.replace("sys.exit(143)", "sys.exit(1)"), folder, retries=1)
  run = json.loads((folder / "run.json").read_text())
  run |= {"sampler_commands": [[sys.executable, "-c", SAMPLES, str(folder)]], "samplers": 2}
  (folder / "run.json").write_text(json.dumps(run))
  process = subprocess.Popen(command, cwd=tiny.ROOT)
  state = lambda: json.loads((folder / "state.json").read_text())
  began = lambda count: len(list(folder.glob("[0-9]*"))) == count
  wait_for(lambda: began(4))
  os.kill(state()["samplers"]["0"]["processes"][0], signal.SIGKILL)
  assert launch("local scale --name=try --samplers=3") == "try: 3 samplers\n"
  wait_for(lambda: began(6))
  lines = launch("local status --name=try").splitlines()
  assert [line.partition(":")[0] for line in lines] == [
    "try",
    *(f"try-sampler-{i}" for i in range(3)),
  ]
  attempts = [json.loads(line.partition(": ")[2])["attempt"] for line in lines]
  assert attempts == [0, 1, 0, 0] and not (folder / "gave_back").exists()
  launch("local scale --name=try --samplers=1")
  assert (folder / "gave_back").exists() and state()["samplers"].keys() == {"0"}
  (folder / "trained").touch()
  assert process.wait(100) == 0
  assert (state()["state"], state()["samplers"]["0"]["state"]) == ("finished", "finished")
  with pytest.raises(LaunchError, match="try does not run: start it with --samplers=2"):
    launch("local scale --name=try --samplers=2")


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


def command(target, verb, *flags):
  return [sys.executable, "-m", "rlvr_jax.launch", target, verb, "--name=try", *flags]


ARGUMENTS = {
  "local": ["--processes=2", "--retries=1"],
  "tpu_vm": ["--zone=here", "--type=v5litepod-8", "--poll_s=0.5", "--spot", "--retries=2"],
  "jobset": [
    "--type=v5litepod-8",
    "--num_slices=2",
    "--poll_s=0.5",
    "--image=here/a",
    "--retries=2",
  ],
  "xpk": [
    "--type=v5litepod-8",
    "--poll_s=0.5",
    "--image=here/a",
    "--cluster=b",
    "--zone=here",
    "--retries=2",
  ],
}


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
def test_local_prints_what_the_first_process_does(undisturbed):
  assert "held-out after update 6" in undisturbed[1] and "commit " in undisturbed[1]


@pytest.mark.slow
def test_a_local_run_is_stopped_and_killed_and_goes_on(laptop, checkout, undisturbed, tmp_path):
  workdir = tmp_path / "run"
  call = lambda verb: subprocess.run(
    command("local", verb), cwd=checkout, env=laptop, capture_output=True, text=True
  )
  laptop = laptop | {SECONDS: "0.3"}  # by the grader, so that there is time to interrupt
  process = start("local", laptop, checkout, workdir)
  wait_for(lambda: '"running"' in call("status").stdout)
  again = start("local", laptop, checkout, workdir)
  assert (
    "try is running already" in again.communicate(timeout=tiny.TIMEOUT_S)[0]
    and again.returncode == 1
  )
  tiny.wait_for(tiny.has_record(workdir, 1, "train"), process)
  assert call("stop").stdout == "try: stopped\n"
  output = process.communicate(timeout=tiny.TIMEOUT_S)[0]
  assert process.returncode == 1 and "shutdown requested: saved after update" in output
  process = start("local", laptop, checkout, workdir)  # with --retries=1
  folder = pathlib.Path(laptop["XDG_STATE_HOME"], "rlvr_jax", "launch", "try")
  wait_for(lambda: "resumed at update" in (folder / "process_0.log").read_text())
  pids = json.loads((folder / "state.json").read_text())["processes"]
  os.kill(pids[1], signal.SIGKILL)
  output = process.communicate(timeout=tiny.TIMEOUT_S)[0]
  assert process.returncode == 0 and output.count("resumed at update") == 2, output[-5000:]
  assert tiny.outcome(workdir) == tiny.outcome(undisturbed[0])


FLEET = "tests/train/fleet/fleets.py"
FLAGS = [f"--config={FLEET}", "--config.num_updates=60"]


@pytest.mark.slow
def test_a_local_fleet_is_scaled_and_killed_and_ends(laptop, checkout, tmp_path):
  workdir = tmp_path / "run"
  laptop = laptop | {"XDG_STATE_HOME": str(tmp_path)}
  call = lambda verb, *flags: subprocess.run(
    command("local", verb, *flags), cwd=checkout, env=laptop, capture_output=True, text=True
  )
  process = start(
    "local", laptop, checkout, workdir, config=FLAGS, options=["--processes=1", "--samplers=2"]
  )
  folder = pathlib.Path(laptop["XDG_STATE_HOME"], "rlvr_jax", "launch", "try")
  state = lambda: json.loads((folder / "state.json").read_text())
  tiny.wait_for(tiny.has_record(workdir, 2, "train"), process)
  assert "waits for a run" in text(folder, 0)  # it was there before the trainer
  os.kill(state()["samplers"]["0"]["processes"][0], signal.SIGKILL)
  assert call("scale", "--samplers=3").stdout == "try: 3 samplers\n"
  joined = lambda: (workdir / "fleet").exists() and "version" in text(folder, 2)
  wait_for(lambda: joined() or process.poll() is not None)
  assert call("scale", "--samplers=1").stdout == "try: 1 samplers\n"
  for number in (1, 2):
    assert "others sample its groups" in text(folder, number)
  output = process.communicate(timeout=tiny.TIMEOUT_S)[0]
  assert process.returncode == 0, output[-5000:]
  assert state()["samplers"]["0"] == {"state": "finished", "attempt": 1, "statuses": [0]}
  fleets.check_store(workdir, 60)


def text(folder, number):
  """What a sampler of a local fleet has printed."""
  return (folder / f"sampler_{number}_process_0.log").read_text()


@pytest.mark.soak
def test_preempted_tpu_vms_come_back_to_the_same_end(cloud, checkout, undisturbed, tmp_path):
  process = start("tpu_vm", cloud, checkout, tmp_path / "run")
  with ended(process, tmp_path / "cloud"):
    tiny.wait_for(tiny.has_record(tmp_path / "run", 2, "train"), process)
    assert fakes().preempt(tmp_path / "cloud"), "not saved within 20 s"
    output = process.communicate(timeout=tiny.TIMEOUT_S)[0]
  assert process.returncode == 0, output[-5000:]
  assert "try: SUSPENDED" in output and output.count("queued-resources create") == 2
  assert "shutdown requested: saved after update" in output and "resumed at update" in output
  assert "held-out after update 6" in output
  # The machines are given back, and the run has not noticed.
  assert not (tmp_path / "cloud" / "resource.json").exists()
  assert tiny.outcome(tmp_path / "run") == tiny.outcome(undisturbed[0])


@pytest.mark.soak
@pytest.mark.parametrize("target", ["jobset", "xpk"])
def test_a_preempted_pod_restarts_all(cloud, checkout, undisturbed, tmp_path, target):
  process = start(target, cloud, checkout, tmp_path / "run")
  with ended(process, tmp_path / "cloud"):
    tiny.wait_for(tiny.has_record(tmp_path / "run", 2, "train"), process)
    assert fakes().preempt_pod(tmp_path / "cloud", 1), "not saved within 20 s"
    output = process.communicate(timeout=tiny.TIMEOUT_S)[0]
  assert process.returncode == 0, output[-5000:]
  jobset = fakes().read(tmp_path / "cloud" / "jobset.json")
  assert jobset["attempts"] == [[143, 143], [0, 0]]
  assert "try: Completed" in output and "builds submit" in output
  assert tiny.outcome(tmp_path / "run") == tiny.outcome(undisturbed[0])


def test_machines_that_cloud_does_not_make_are_not_waited_for(cloud, checkout, tmp_path):
  resource = {"name": "try", "state": "FAILED", "homes": [], "port": 0}
  fakes().write(tmp_path / "cloud" / "resource.json", resource)
  process = start("tpu_vm", cloud, checkout, tmp_path / "run")
  output = process.communicate(timeout=tiny.TIMEOUT_S)[0]
  assert process.returncode == 1 and "Quota limit exceeded" in output
  assert "error: Cloud did not make the machines of try" in output


@pytest.mark.parametrize("text", ["", "Warning: no output"])
def test_hosts_that_say_nothing_are_not_taken_for_finished(launch, checkout, text):
  """Their machines would be deleted."""

  class Silent(Shell):
    def capture(self, command):
      return text

  place = argparse.Namespace(zone="here", project="", num_slices=1)
  watch = tpu_vm._Watch(Run("try", (), {}, 1, None), place, Silent())
  with pytest.raises(CommandError, match="no host of try has reported its state"):
    watch.read_host_states()


@pytest.mark.slow
def test_a_program_that_fails_is_reported_after_its_retries(cloud, checkout, tmp_path):
  process = start("tpu_vm", cloud, checkout, tmp_path / "run", "--config.loss=nothing")
  with ended(process, tmp_path / "cloud"):
    output = process.communicate(timeout=tiny.TIMEOUT_S)[0]
  assert process.returncode == 1
  assert "error: try has failed 3 times" in output and "config.loss = 'nothing'" in output
  assert (tmp_path / "cloud" / "resource.json").exists()  # to look at


@pytest.mark.soak
def test_a_run_goes_on_without_its_launcher_until_it_is_stopped(cloud, checkout, tmp_path):
  process = start("tpu_vm", cloud, checkout, tmp_path / "run", "--config.num_updates=1000000")
  with ended(process, tmp_path / "cloud"):
    tiny.wait_for(tiny.has_record(tmp_path / "run", 1, "train"), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    reached = len(tiny.records(tmp_path / "run", "train"))
    wait_for(lambda: len(tiny.records(tmp_path / "run", "train")) > reached)
    place = ["--zone=here"]
    call = lambda verb: subprocess.run(
      command("tpu_vm", verb, *place), cwd=checkout, env=cloud, capture_output=True, text=True
    )
    assert call("status").stdout.count(" running") == 2
    homes = fakes().read(tmp_path / "cloud" / "resource.json")["homes"]
    assert call("stop").returncode == 0
  logs = [pathlib.Path(homes[0], "units", "rlvr_jax-try.service.log").read_text()]
  assert "shutdown requested: saved after update" in logs[0]
  assert not (tmp_path / "cloud" / "resource.json").exists()


@pytest.mark.soak
@pytest.mark.parametrize("target", ["tpu_vm", "jobset"])
def test_a_fleet_on_a_cloud(cloud, checkout, tmp_path, target):
  """A sampler is preempted, others come and go; every batch counts once."""
  workdir, folder = tmp_path / "run", tmp_path / "cloud"
  place = ["--zone=here"] if target == "tpu_vm" else []
  call = lambda verb, *flags: subprocess.run(
    command(target, verb, *place, *flags), cwd=checkout, env=cloud, capture_output=True, text=True
  )
  kind = {"tpu_vm": "resource", "jobset": "jobset"}[target]
  present = lambda: sorted(p.stem.rpartition("-")[2] for p in folder.glob(f"{kind}-*.json"))
  config = [*FLAGS, "--config.mesh.data=2"]
  options = ["--samplers=2", "--sampler_type=v5litepod-1", "--sampler_config=mesh.data=1"]
  process = start(target, cloud, checkout, workdir, config=config, options=options)
  with ended(process, folder):
    tiny.wait_for(tiny.has_record(workdir, 2, "train"), process)
    assert present() == ["0", "1"]
    fakes_preempt = fakes().preempt if target == "tpu_vm" else fakes().preempt_pod
    number = [] if target == "tpu_vm" else [0]
    assert fakes_preempt(folder, *number, name=f"{kind}-try-sampler-0"), "not ended within 20 s"
    assert "3 samplers" in call("scale", "--samplers=3").stdout
    wait_for(lambda: present() == ["0", "1", "2"] or process.poll() is not None)
    assert "try-sampler-2" in call("status").stdout
    assert "1 samplers" in call("scale", "--samplers=1").stdout
    wait_for(lambda: present() == ["0"] or process.poll() is not None)
    assert process.poll() is None
    output = process.communicate(timeout=tiny.TIMEOUT_S)[0]
  assert process.returncode == 0, output[-5000:]
  assert present() == []
  fleets.check_store(workdir, 60)
  numbers = range(60)
  store = RolloutStore(workdir / "rollouts", writable=False)
  assert len({s["sampler"] for number in numbers for s in tiny.read_stored(store, number)[2]}) >= 2


@contextlib.contextmanager
def ended(process, folder):
  """At the end nothing that the fakes have started is left."""
  try:
    yield
  finally:
    process.kill()
    for path in folder.glob("resource*.json"):
      fakes().kill_hosts(fakes().read(path), signal.SIGKILL)
    for path in folder.glob("jobset*.json"):
      jobset = fakes().read(path)
      for pid in (*([jobset["controller"]] if "controller" in jobset else []), *jobset["pods"]):
        fakes().kill_group(pid, signal.SIGKILL)
