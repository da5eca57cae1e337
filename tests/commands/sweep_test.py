"""A sweep: its list of runs, what it refuses, and runs that fail, are killed and are continued."""

import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import pytest
from train import tiny

from rlvr_jax.commands import choose, sweep
from rlvr_jax.evaluate import compare
from rlvr_jax.storage.places import Workdir
from rlvr_jax.train.checkpointing.workdir import WorkdirError, WorkdirLock
from rlvr_jax.train.setup import config_file

TINY = str(pathlib.Path(tiny.__file__))
QUICKSTART = str(tiny.ROOT / "configs" / "quickstart.py")


def written(tmp_path, listed):
  """A sweep's file."""
  path = tmp_path / "sweep.py"
  path.write_text(f"def get_sweep():\n  return {listed!r}\n")
  return str(path)


def runs(tmp_path, listed, given=None):
  return sweep.read_runs(written(tmp_path, listed), TINY, given or {}, "runs/x")


# --- the list of runs -----------------------------------------------------------------------------


def test_every_override_becomes_a_run(tmp_path):
  listed = [
    {"seed": 0},
    {"seed": 1, "loss": "ppo_clip(epsilon_high=0.28)", "evaluation.ks": (1,)},
    {"config": QUICKSTART, "label": "Quick, start", "sources.checkpoint.workdir": "{workdir}/a_0"},
    {"veto.enabled": True},
  ]
  found = runs(tmp_path, listed, {"num_updates": "3"})
  loss = "loss=ppo_clip(epsilon_high=0.28), evaluation.ks=(1,)"
  assert [run.label for run in found] == [
    "tiny",
    f"tiny, {loss}",
    "Quick, start",
    "tiny, veto.enabled=True",
  ]
  assert [run.seed for run in found] == [0, 1, 0, 0]
  assert [run.name for run in found] == [
    *("tiny_0", "tiny_loss_ppo_clip_epsilon_high_0.28_evaluation.ks_1_1"),
    *("quick_start_0", "tiny_veto.enabled_true_0"),
  ]
  assert found[2].flags == (
    f"--config={QUICKSTART}",
    "--config.sources.checkpoint.workdir=runs/x/a_0",
    "--config.num_updates=3",
  )
  config = config_file.read(found[1].flags)
  assert (config.num_updates, config.loss) == (3, "ppo_clip(epsilon_high=0.28)")
  assert config.evaluation.ks == (1,) and config_file.read(found[3].flags).veto.enabled is True
  command = shlex.split(found[1].command(pathlib.Path("runs/x")))
  assert command[:3] == ["python", "-m", "rlvr_jax.main"] and tuple(command[3:-1]) == found[1].flags
  assert command[-1] == f"--workdir=runs/x/{found[1].name}"


def test_folders_of_one_label_may_have_the_seed_in_their_names(tmp_path):
  folder = "{workdir}/run_2/"  # in which 2 is no seed
  listed = [{"label": "a", "seed": n, "start.checkpoint": f"{folder}b_{n}"} for n in (2, 10)]
  assert [run.seed for run in runs(tmp_path, listed)] == [2, 10]


def test_labels_of_other_scripts_have_folders_of_their_own(tmp_path):
  labels = ["GRPO", "μ-GRPO", "α", "β", "学习", "é", "a_-+b", ".x"]
  names = [run.name for run in runs(tmp_path, [{"label": label} for label in labels])]
  assert names == ["grpo_0", "μ_grpo_0", "α_0", "β_0", "学习_0", "é_0", "a_b_0", "x_0"]


@pytest.mark.parametrize(
  ("listed", "given", "message"),
  [
    ([{"sed": 0}], {}, r"sweep\.py, \{'sed': 0\}: --config\.sed=0: the configuration has no field"),
    ([{"num_updates": "many"}], {}, r"'many'"),
    ([{"config": "nowhere.py"}], {}, r"nowhere\.py"),
    ([{"loss": "ppo"}, {"loss": "ppo"}], {}, r"several runs have the name 'tiny_loss"),
    ([{"label": "GRPO+"}, {"label": "grpo-"}], {},
     r"several runs have the name 'grpo_0', from the label 'GRPO\+' and 'grpo-'; .* other letters"),
    ([{"label": "a", "loss": "ppo_clip"}, {"label": "a", "loss": "reinforce", "seed": 1}], {},
     r"label 'a' and seeds 0 and 1 differ by more than the seed: --config.loss=ppo_clip --config"),
    ([{"label": "a", "start.checkpoint": f"/runs/{name}/{seed}", "seed": seed}
      for seed, name in enumerate("bc")], {}, r"seed: --config.start.checkpoint=/runs/b/0 .*/c/1"),
    ([{"label": "a", "tokenizer": "/t"}, {"label": "a", "seed": 1}], {}, r"--config.tokenizer=/t;"),
    ([{"label": 3}], {}, r'the label 3 is not text; write \{"label": "3"\}'),
    ([{"seed": 0}, {"seed": 1}], {"seed": "3"}, r"--config\.seed applies to all runs, but .*sev"),
    ([{"model.overrides": {"width": 8}}], {}, r"'model\.overrides' is a dict; set its fields one"),
    ([], {}, r"get_sweep\(\) returned \[\]; it must be a list of dicts, one per run"),
    ({"seed": 0}, {}, r"it must be a list of dicts, one per run, such as \[\{\"seed\": 0\}"),
  ],
)  # fmt: skip
def test_a_mistake_is_named_before_anything_runs(tmp_path, listed, given, message):
  with pytest.raises(ValueError, match=message):
    runs(tmp_path, listed, given)


def test_a_file_that_is_no_sweep(tmp_path):
  with pytest.raises(ValueError, match=r"--sweep=none\.py does not exist; give a Python file that"):
    sweep.read_runs("none.py", TINY, {}, "runs/x")
  path = tmp_path / "broken.py"
  path.write_text("def get_sweep():\n  return 1 / 0\n")
  with pytest.raises(ValueError, match=r"broken\.py: ZeroDivisionError: division by zero"):
    sweep.read_runs(str(path), TINY, {}, "runs/x")


def test_the_example_of_the_guide_is_a_sweep(tmp_path):
  guide = (tiny.ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
  path = tmp_path / "examples.py"
  path.write_text(re.search(r"```python\n(.*?)```", guide, re.DOTALL)[1])
  found = sweep.read_runs(str(path), QUICKSTART, {}, "runs/examples")
  assert len(found) == 9 and [run.name for run in found[:4]] == [
    *("grpo_0", "rloo_0", "rloo_g_16_0", "grpo_1"),
  ]


def test_flags_that_do_not_go_together(tmp_path):
  prepared = lambda mode, file, **more: choose.prepare_command(
    mode, tiny.get_config(), str(tmp_path), None, None, sweep_file=file, **more
  )
  with pytest.raises(ValueError, match="--mode=sweep needs --sweep=FILE"):
    prepared("sweep", None)
  with pytest.raises(ValueError, match="--sweep goes with --mode=sweep, not with --mode=train"):
    prepared("train", "sweep.py")
  with pytest.raises(ValueError, match="--profile goes with --mode=train, not with --mode=sweep"):
    prepared("sweep", "sweep.py", profile="1:2")
  with pytest.raises(ValueError, match="--minutes goes with --mode=sweep, not"):
    choose.prepare_command("train", tiny.get_config(), "runs/x", None, None, minutes=5.0)
  argv = ["main", f"--config={TINY}", "--config.num_updates", "5", "--workdir=x"]
  file = written(tmp_path, [{"seed": 4}])
  action = choose._prepare_sweep(file, "runs/x", argv, ["wandb", "trackio"])
  (run,), workdir = action.args
  assert run.flags == (f"--config={TINY}", "--config.seed=4", "--config.num_updates=5")
  assert workdir == "runs/x" and action.keywords["more"] == ["--trackers=wandb,trackio"]


# --- results --------------------------------------------------------------------------------------


def test_a_finished_run_must_have_been_the_same(tmp_path):
  (run,) = runs(tmp_path, [{"seed": 2}])
  folder = Workdir(tmp_path)
  assert sweep._read_finished([run], folder) == {}
  (tmp_path / run.name).mkdir()
  result = tmp_path / run.name / "result.json"
  content = {"command": run.command(tmp_path)}
  result.write_text(json.dumps(content))
  assert sweep._read_finished([run], folder) == {"tiny_2": content}
  other = run._replace(flags=(*run.flags, "--config.num_updates=9"))
  expected = r"tiny_2 finished with other flags; these differ: --config\.num_updates=9\. Use"
  with pytest.raises(WorkdirError, match=expected):
    sweep._read_finished([other], folder)


def test_a_sweep_tells_its_last_result_and_the_time_left():
  evaluations = {"updates": [0, 9], "eval/pass@1": [0.1, 0.43121], "eval/pass@1_low": [0.0, 0.4]}
  results = [{"seconds": s, "evaluations": evaluations} for s in (100.0, 140.0)]
  assert sweep._format_status(results, 3) == "held-out pass@1 0.431; 3 runs left, about 6 min"
  assert sweep._format_status([], 3) == "3 runs left"
  assert sweep._format_status(results[:1], 0) == "held-out pass@1 0.431; 0 runs left"
  assert sweep._format_status([{"seconds": 9.0, "evaluations": {}}], 1) == "1 run left, about 9 s"


def test_a_workdir_that_a_run_still_has_is_waited_for(tmp_path, monkeypatch):
  sweep._wait_until_free(tmp_path)
  lock = WorkdirLock(tmp_path)
  monkeypatch.setattr(sweep, "_GRACE_S", 0.1)
  with pytest.raises(WorkdirError, match="is in use by process"):
    sweep._wait_until_free(tmp_path)
  lock.close()
  sweep._wait_until_free(tmp_path)


# --- processes ------------------------------------------------------------------------------------

METHODS = {"grpo": {}, "rloo": {"advantage": "rloo"}, "cispo": {"loss": "cispo"}}


def three_by_three(seeds=3):
  return [
    {"label": label, "seed": seed, "num_updates": 8, **fields}
    for label, fields in METHODS.items()
    for seed in range(seeds)
  ]


def command(file, workdir):
  program = [sys.executable, "-m", "rlvr_jax.main", "--mode=sweep", f"--config={TINY}"]
  return [*program, f"--sweep={file}", f"--workdir={workdir}"]


def done(file, workdir):
  """Runs a sweep to its end; its exit status and what it printed."""
  ended = subprocess.run(
    command(file, workdir),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    cwd=tiny.ROOT,
    env=tiny.environment(),
    timeout=4 * tiny.TIMEOUT_S,
  )
  return ended.returncode, ended.stdout


def seen(results):
  """What two sweeps have in common: all but what a clock measured, and the folders."""
  kept = []
  for result in results:
    columns = {k: v for k, v in result["evaluations"].items() if k != "seconds"}
    kept.append([result["label"], result["seed"], result["number"], result["commit"], columns])
  return kept


@pytest.mark.slow
def test_a_failing_run_costs_itself_alone(tmp_path):
  few = {"num_updates": 1, "warm_start.num_steps": 2}
  listed = [{"label": "bad", "loss": "no_such_loss"}, {"label": "good", **few}]
  file, workdir = written(tmp_path, listed), tmp_path / "runs"
  status, printed = done(file, workdir)
  assert status == 1 and "1 run of 2 failed; the same command retries them" in printed
  assert "'no_such_loss' is unknown" in printed and "bad_0/output.log ends with" in printed
  (result,) = compare.read_results(workdir)
  assert result["label"] == "good" and result["evaluations"]["updates"] == [0, 1]
  assert result["layout"]["device"] == "cpu"
  finished_at = (workdir / "good_0" / "output.log").stat().st_mtime_ns
  status, printed = done(file, workdir)
  assert status == 1 and "sweep of 2 runs in" in printed
  assert re.search(r"/runs: held-out pass@\d 0\.\d{3}; 1 run left, about \d+ (s|min)\n", printed)
  assert (workdir / "good_0" / "output.log").stat().st_mtime_ns == finished_at


def records(workdir, name):
  path = workdir / name / "metrics.jsonl"
  return len(path.read_text().splitlines()) if path.exists() else 0


def kill_sweep(process, workdir):
  """Its run ends by itself, as nobody would wait for it."""
  del workdir
  process.kill()


def kill_run(process, workdir):
  """A run's process, so that the sweep goes on without it."""
  del process
  (holder,) = {(path / ".lock").read_text().strip() for path in running(workdir)}
  os.kill(int(holder), signal.SIGKILL)


def kill_all(process, workdir):
  del workdir
  os.killpg(process.pid, signal.SIGKILL)


def ask(process, workdir):
  del workdir
  process.terminate()


def running(workdir):
  """Folders of the runs that have begun and have no result."""
  return [p.parent for p in workdir.glob("*/.lock") if not (p.parent / "result.json").exists()]


@pytest.mark.soak
def test_a_sweep_killed_five_times_ends_with_the_same_table(tmp_path):
  file = written(tmp_path, three_by_three())
  calm, killed = tmp_path / "calm", tmp_path / "killed"
  status, printed = done(file, calm)
  assert status == 0 and "all runs have finished" in printed, printed
  expected = compare.read_results(calm)
  assert [r["seed"] for r in expected] == 3 * [0, 1, 2]
  # In the middle of a run, from the first one on; the last time while a run begins.
  plan = [
    ("grpo_0", 6, kill_all),
    ("grpo_2", 6, kill_sweep),
    ("rloo_1", 5, ask),
    ("rloo_2", 6, kill_sweep),
    ("cispo_1", 0, kill_all),
  ]
  for name, count, kill in plan:
    with open(tmp_path / "log", "ab") as log:
      process = subprocess.Popen(
        command(file, killed),
        cwd=tiny.ROOT,
        env=tiny.environment(),
        stdout=log,
        stderr=log,
        start_new_session=True,
      )
    begun = lambda name=name, count=count: (
      (killed / name / ".lock").exists() and records(killed, name) >= count
    )
    tiny.wait_for(begun, process)
    assert not (killed / name / "result.json").exists()
    kill(process, killed)
    assert process.wait() != 0 or kill is ask
  status, printed = done(file, killed)
  assert status == 0, printed
  found = compare.read_results(killed)
  assert seen(found) == seen(expected)
  assert compare.comparison_table(found) == compare.comparison_table(expected)


@pytest.mark.slow
def test_a_killed_run_is_continued_by_the_same_command(tmp_path):
  """A killed run fails, and the next one begins; then shutdown of the sweep is requested."""
  listed = three_by_three(seeds=1)[:2]
  file, workdir = written(tmp_path, listed), tmp_path / "runs"
  log = tmp_path / "log"
  with open(log, "ab") as output:
    process = subprocess.Popen(
      command(file, workdir), cwd=tiny.ROOT, env=tiny.environment(), stdout=output, stderr=output
    )
  tiny.wait_for(lambda: records(workdir, "grpo_0") >= 6, process)
  kill_run(process, workdir)
  tiny.wait_for(lambda: records(workdir, "rloo_0") >= 6, process)
  ask(process, workdir)
  assert process.wait(timeout=tiny.TIMEOUT_S) == 0
  printed = log.read_text()
  assert "grpo_0 failed with signal 9" in printed
  assert "shutdown requested before rloo_0 finished; rerun the same command" in printed
  status, printed = done(file, workdir)
  assert status == 0, printed
  for result in compare.read_results(workdir):
    assert result["evaluations"]["updates"] == [0, 5, 8]
    text = (workdir / f"{result['label']}_0" / "output.log").read_text()
    assert text.count("held-out after update 0") == 1  # the second process went on


# --- time limit -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sitting_ends_with_status_3_and_the_next_one_goes_on(tmp_path):
  file, workdir = written(tmp_path, three_by_three(seeds=1)[:1]), tmp_path / "runs"
  ended = subprocess.run(
    [*command(file, workdir), "--minutes=0"],
    capture_output=True,
    text=True,
    cwd=tiny.ROOT,
    env=tiny.environment(),
  )
  assert ended.returncode == sweep.UNFINISHED_STATUS == 3, ended.stderr
  assert "rerun the same command to continue" in ended.stdout + ended.stderr
  assert not (workdir / "grpo_0" / "result.json").exists()
  status, printed = done(file, workdir)
  assert status == 0, printed
  assert compare.read_results(workdir)[0]["evaluations"]["updates"] == [0, 5, 8]


def test_a_run_s_configuration_is_swept_with_trust(tmp_path):
  values = json.loads(config_file.read([f"--config={TINY}"]).to_json_best_effort())
  values["advantage"] = "commands.no_module:factory"
  config = tmp_path / "config.json"
  config.write_text(json.dumps(values))
  path = written(tmp_path, [{"seed": 1}])
  with pytest.raises(ValueError, match="names code outside of rlvr_jax"):
    sweep.read_runs(path, str(config), {}, "runs/x")
  (run,) = sweep.read_runs(path, str(config), {}, "runs/x", trusting=True)
  assert run.seed == 1
