import contextlib
import errno
import functools
import gc
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rlvr_jax.storage.files import DiskFullError, with_crc32
from rlvr_jax.train.checkpointing import checkpoint, checkpoint_files
from rlvr_jax.types import TrainState

# Reading a damaged file leaves tensorstore's other reads unfinished; their complaints are not ours.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module", autouse=True)
def what_is_old_is_not_collected():
  """Or each collection would visit all that the modules before this one have left."""
  gc.freeze()
  yield
  gc.unfreeze()


@pytest.fixture(autouse=True)
def collect_unfinished_reads():
  yield
  gc.collect()


def make_state(step, width=8):
  """A state with every kind of leaf, all values depending on the step."""
  kernel = jnp.sin(jnp.arange(4.0 * width).reshape(4, width) + step)
  params = {
    "layers": {"kernel": kernel, "scale": jnp.arange(4, dtype=jnp.bfloat16) / 3 + step},
    "flag": jnp.array([True, False, step % 2 == 0]),
    "empty": jnp.zeros((0, 3)),
  }
  opt_state = optax.adamw(1e-3).init({"w": kernel})
  return TrainState(
    params=params,
    opt_state=opt_state,
    advantage_state=(),
    step=jnp.int32(step),
    skipped=jnp.int32(0),
    skipped_in_a_row=jnp.int32(0),
  )


def assert_same_bits(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    x, y = np.asarray(x), np.asarray(y)
    assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


@pytest.fixture
def checkpointer(tmp_path):
  opened = checkpoint.Checkpointer(tmp_path / "checkpoints", keep=2)
  yield opened
  opened.close()


def save_one(directory, step=3, **kwargs):
  saver = checkpoint.Checkpointer(directory)
  saver.save(step, make_state(step), host={"position": step}, **kwargs)
  saver.close()


def restore(directory, state=None):
  opened = checkpoint.Checkpointer(directory)
  try:
    return opened.restore(make_state(0) if state is None else state)
  finally:
    opened.close()


# --- round trip -----------------------------------------------------------------------------------


def test_round_trip_is_bit_exact(checkpointer):
  state = make_state(5)
  special = jnp.array([jnp.nan, -0.0, jnp.inf, 1e-42])
  state.params["special"] = special
  host = {"position": [1, {"seed": 2**60}], "loss": 0.1 + 0.2, "text": "é\n", "none": None}
  assert checkpointer.save(5, state, host=host)
  restored = checkpointer.restore(jax.eval_shape(lambda: state))
  assert restored.step == 5
  assert restored.host == host
  assert restored.arrays == {}
  assert jax.tree.structure(restored.state) == jax.tree.structure(state)
  assert_same_bits(restored.state, state)


def test_nothing_saved_restores_nothing(checkpointer):
  assert checkpointer.restore(make_state(0)) is None
  assert checkpointer.steps() == []


def test_arrays_come_and_go_between_steps(checkpointer):
  arrays = {
    "0-tokens": np.arange(6, dtype=np.int32).reshape(2, 3),
    "0-mask": np.array([True, False]),
    "1-tokens": np.zeros((0, 3), np.int32),
    "1-rewards": np.float32([0.5, np.nan]),
  }
  checkpointer.save(1, make_state(1), host={}, arrays=arrays)
  found = checkpointer.restore(make_state(0)).arrays
  assert {*found} == {*arrays} and all(isinstance(array, np.ndarray) for array in found.values())
  assert_same_bits(found, arrays)
  checkpointer.save(2, make_state(2), host={})
  assert checkpointer.restore(make_state(0)).arrays == {}


def test_caller_may_change_everything_after_save(checkpointer):
  """Donated buffers and NumPy arrays are reused while the files are still being written."""
  update = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
  state = {str(i): jnp.zeros((256, 1024)) for i in range(8)}
  abstract = jax.eval_shape(lambda: state)
  rollouts, host = np.zeros(1000), {"count": [0]}
  for step in (1, 2, 3):
    state = update(state)
    checkpointer.save(step, state, host=host, arrays={"rollouts": rollouts})
    rollouts += 1
    host["count"][0] += 1
    for _ in range(4):
      state = update(state)
    restored = checkpointer.restore(abstract)
    expected = 5 * (step - 1) + 1
    assert all(np.all(np.asarray(x) == expected) for x in restored.state.values())
    assert np.all(restored.arrays["rollouts"] == step - 1)
    assert restored.host == {"count": [step - 1]}


def test_state_moves_between_meshes(checkpointer):
  values = jnp.arange(64.0).reshape(8, 8)

  def on_mesh(shape, spec):
    mesh = jax.make_mesh(shape, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, spec)

  before = on_mesh((2, 4), PartitionSpec("data", "fsdp"))
  after = on_mesh((4, 2), PartitionSpec(None, "data"))
  checkpointer.save(1, {"w": jax.device_put(values, before)}, host={})
  abstract = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=after)}
  restored = checkpointer.restore(abstract).state["w"]
  assert restored.sharding.is_equivalent_to(after, 2)
  np.testing.assert_array_equal(restored, values)


def test_host_values_in_the_state_are_refused(checkpointer):
  with pytest.raises(TypeError, match=r"'a\.b' is int"):
    checkpointer.save(1, {"a": {"b": 1}}, host={})


# --- retention ------------------------------------------------------------------------------------


def test_keeps_the_latest_and_the_best_also_over_a_restart(tmp_path):
  metrics = {1: 0.1, 2: 0.9, 3: None, 4: 0.9, 5: float("nan"), 6: 0.2}
  for step, metric in metrics.items():
    saver = checkpoint.Checkpointer(tmp_path, keep=2)
    saver.save(step, make_state(step), host={}, metric=metric)
    saver.close()
    assert saver.steps()[-1] == step
  assert saver.steps() == [2, 5, 6]  # of 2 and 4, which are equal, the earlier
  assert_same_bits(restore(tmp_path).state, make_state(6))


def test_what_was_measured_after_a_step_was_saved_stays(tmp_path):
  state = make_state(1)
  with contextlib.closing(checkpoint.Checkpointer(tmp_path, keep=1)) as saver:
    saver.save(1, state, host={"evaluated": 0}, arrays={"x": np.ones(2)})
  for host, metric in ((dict(evaluated=1), 0.6), (dict(evaluated=2), None), (dict(later=1), 0.7)):
    with contextlib.closing(checkpoint.Checkpointer(tmp_path, keep=1)) as saver:
      assert not saver.save(1, state, host=host, metric=metric)
      restored = saver.restore(make_state(0))
    assert restored.host == dict(evaluated=1)
    assert_same_bits((restored.state, restored.arrays), (state, {"x": np.ones(2)}))
  with contextlib.closing(checkpoint.Checkpointer(tmp_path, keep=1)) as saver:
    saver.save(2, make_state(2), host={}, metric=0.5)
  assert saver.steps() == [1, 2]  # the metric of step 1 is in its files


def test_keeps_the_last_at_or_before_a_step_while_told_to(tmp_path):
  def save(step, keep_at_or_before):
    """Opens the folder anew, as after a restart; the steps left."""
    saver = checkpoint.Checkpointer(tmp_path, keep=1)
    saver.save(step, make_state(step), host={}, keep_at_or_before=keep_at_or_before)
    saver.close()
    return saver.steps()

  assert save(2, 3) == [2]
  assert save(4, 3) == [2, 4]  # 3 was not saved, the greatest before it is kept
  assert save(6, 4) == [4, 6]
  assert save(8, 1) == [8]  # nothing that early is left
  assert save(10, 9) == [8, 10]
  assert save(12, None) == [12]


def test_only_complete_steps_count(checkpointer):
  checkpointer.save(1, make_state(1), host={})
  assert checkpointer.steps() == []
  checkpointer.save(2, make_state(2), host={})
  assert checkpointer.steps() == [1]
  checkpointer.wait()
  assert checkpointer.steps() == [1, 2]


def test_earlier_steps_are_restored_in_turn_and_later_ones_discarded(checkpointer):
  for step in (1, 2):
    checkpointer.save(step, make_state(step), host={"n": step}, arrays={"x": np.full(2, step)})
  for step, restored in zip((2, 1), checkpointer.intact(make_state(0)), strict=True):
    assert (restored.step, restored.host) == (step, {"n": step})
    assert restored.arrays["x"].tolist() == [step, step]
    assert_same_bits(restored.state, make_state(step))
  checkpointer.discard_after(1)
  assert [path.name for path in checkpointer.directory.iterdir()] == ["1"]
  assert checkpointer.steps() == [1]


def test_reading_removes_nothing(tmp_path):
  with contextlib.closing(checkpoint.Checkpointer(tmp_path, keep=9)) as saver:
    for step in (1, 2, 3):
      saver.save(step, make_state(step), host={})
  restore(tmp_path)
  assert checkpoint_files.saved_steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_clock_that_is_set_during_a_save_ends_nothing(checkpointer, monkeypatch, every):
  clock = time.time
  calls = 0

  def set_forward(at):
    nonlocal calls
    calls += 1
    return clock() + 400 * 86400.0 * (calls >= at)

  for step in range(1, 36, every):  # the clock is read some 100 times
    calls = 0
    monkeypatch.setattr(time, "time", functools.partial(set_forward, 3 * step))
    checkpointer.save(step, {"x": jnp.full(3, step)}, host={})
    checkpointer.wait()
    monkeypatch.undo()
    assert checkpointer.steps()[-1] == step


def test_keeping_nothing_is_refused(tmp_path):
  with pytest.raises(ValueError, match="keep = 0"):
    checkpoint.Checkpointer(tmp_path, keep=0)


# --- damage ---------------------------------------------------------------------------------------


def files_of(step_directory):
  return sorted(p for p in step_directory.rglob("*") if p.is_file() and p.stat().st_size)


def outcome(directory, expected, capsys):
  """ "skipped", or "intact" if what was restored is exactly what was saved."""
  found = restore(directory)
  said = capsys.readouterr().out
  if found.step == 2:
    assert f"warning: the checkpoint {directory / '3'} is damaged" in said
    assert_same_bits(found.state, make_state(2))
    return "skipped"
  assert found.step == 3 and found.host == {"position": 3} and not said
  assert_same_bits(found.state, make_state(3))
  assert_same_bits(found.arrays, expected)
  return "intact"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
  directory = tmp_path_factory.mktemp("pristine")
  arrays = {"tokens": np.arange(500, dtype=np.int32)}
  save_one(directory, 2)
  save_one(directory, 3, arrays=arrays)
  return directory, arrays


def damage(kind, path, rng):
  data = bytearray(path.read_bytes())
  if kind == "cut":
    data = data[: len(data) // 2]
  elif kind == "flip":
    data[rng.integers(len(data))] ^= 1 << rng.integers(8)
  elif kind == "remove":
    path.unlink()
    return
  path.write_bytes(bytes(data))


@pytest.mark.parametrize("kind", ["cut", "flip", "remove"])
def test_damage_to_any_file_is_named_and_skipped_or_harmless(pristine, tmp_path, capsys, kind):
  source, arrays = pristine
  rng = np.random.default_rng(0)
  outcomes = {}
  for path in files_of(source / "3"):
    directory = tmp_path / "copy"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(source, directory)
    damage(kind, directory / path.relative_to(source), rng)
    if path.parent.name == "manifest" and kind == "remove":
      continue  # see the test of foreign directories
    outcomes[path] = outcome(directory, arrays, capsys)
  # Where the values lie, damage must not go unseen.
  (stored,) = files_of(source / "3" / "arrays" / "d")
  assert outcomes[stored] == "skipped"
  if kind != "remove":
    assert outcomes[source / "3" / "manifest" / "metadata"] == "skipped"


@pytest.mark.parametrize(
  ("step", "first_token", "array"), [(4, 0, r"params\.\S+"), (3, 7, "host-tokens")]
)
def test_values_that_changed_behind_valid_files_are_seen(
  pristine, tmp_path, capsys, step, first_token, array
):
  """The checksum alone must see it: the files are whole, of another save."""
  source, arrays = pristine
  tokens = arrays["tokens"].copy()
  tokens[0] = first_token
  shutil.copytree(source, tmp_path / "copy")
  shutil.rmtree(tmp_path / "copy" / "3" / "arrays")
  save_one(tmp_path / "other", step, arrays={"tokens": tokens})
  shutil.copytree(tmp_path / "other" / str(step) / "arrays", tmp_path / "copy" / "3" / "arrays")
  assert restore(tmp_path / "copy").step == 2
  assert re.search(rf"copy/3 is damaged: .*'{array}' has checksum", capsys.readouterr().out)


def test_a_damaged_checkpoint_is_kept_aside_when_the_run_goes_on(pristine, tmp_path):
  shutil.copytree(pristine[0], tmp_path / "copy")
  for path in files_of(tmp_path / "copy" / "3" / "arrays"):
    path.write_bytes(b"")
  for _ in range(2):  # the second time it is of a step that was saved again
    with contextlib.closing(checkpoint.Checkpointer(tmp_path / "copy")) as saver:
      restored = saver.restore(make_state(0))
      assert_same_bits(restored.state, make_state(2))
      saver.discard_after(restored.step)
      saver.save(3, make_state(3), host={})
    assert saver.steps() == [2, 3]
    damage("cut", tmp_path / "copy" / "3" / "manifest" / "metadata", None)
  kept = {path.name for path in (tmp_path / "copy").iterdir()}
  assert kept == {"2", "3", "damaged-3.0", "damaged-3.1"}


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again(pristine, tmp_path, capsys):
  shutil.copytree(pristine[0], tmp_path / "copy")
  for step in "23":
    damage("cut", tmp_path / "copy" / step / "manifest" / "metadata", None)
  for _ in range(2):
    with pytest.raises(
      checkpoint_files.TornCheckpointError, match=r"copy/2 is damaged: .*remove that folder"
    ):
      restore(tmp_path / "copy")
    assert "copy/3 is damaged" in capsys.readouterr().out


def test_a_checkpoint_under_another_number_is_damaged(pristine, tmp_path, capsys):
  shutil.copytree(pristine[0], tmp_path / "copy")
  shutil.copytree(pristine[0] / "2", tmp_path / "copy" / "12")
  assert restore(tmp_path / "copy").step == 3
  said = capsys.readouterr().out
  assert re.search(r"copy/12 is damaged: .*step 2, in a directory of another step", said)


@pytest.mark.parametrize(
  ("cause", "words"),
  [
    (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "open files"),
    (MemoryError("std::bad_alloc"), "restoring failed"),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), "restoring failed"),
  ],
)
def test_what_the_process_lacks_is_no_damage(pristine, monkeypatch, cause, words):
  def fails(*_, **__):
    raise ValueError(f"restoring failed: {cause.args[-1]}") from cause  # as Orbax wraps it

  monkeypatch.setattr(checkpoint_files.ocp.PyTreeCheckpointHandler, "restore", fails)
  with pytest.raises(checkpoint_files.CheckpointError, match=rf"3 cannot be read: .*{words}") as e:
    restore(pristine[0])
  assert not isinstance(e.value, checkpoint_files.TornCheckpointError)


@pytest.mark.slow
def test_libraries_are_silent_and_damage_is_reported_without_tracebacks(pristine, tmp_path):
  """In a process of its own: pytest takes what a library's thread raises."""
  shutil.copytree(pristine[0], tmp_path / "copy")
  (tmp_path / "copy" / "3" / "arrays" / "manifest.ocdbt").unlink()
  code = """
    import gc, sys
    import checkpoint_test
    checkpoint_test.save_one(sys.argv[2])
    checkpoint_test.restore(sys.argv[2])
    checkpoint_test.restore(sys.argv[1])
    gc.collect()
  """
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code), tmp_path / "copy", tmp_path / "other"],
    env=os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.stderr == ""
  assert done.stdout.count("\n") == 1 and "copy/3 is damaged" in done.stdout


def test_errors_of_orbax_s_tasks_are_not_printed(caplog):
  checkpoint_files.silence_orbax()
  logger = logging.getLogger("asyncio")
  logger.error("Task exception was never retrieved: coro=<x() defined at /a/orbax/b.py:3>")
  logger.error("Task exception was never retrieved: coro=<y() defined at /a/others/b.py:3>")
  (record,) = caplog.records
  assert "/a/others/" in record.getMessage()


# --- parameters alone -----------------------------------------------------------------------------


def test_parameters_are_read_out_of_a_run_changing_nothing_there(pristine, tmp_path):
  shutil.copytree(pristine[0], tmp_path / "checkpoints")
  (tmp_path / "checkpoints" / "4.orbax-checkpoint-tmp-0").mkdir()  # a save under way
  saver = checkpoint.Checkpointer(tmp_path / "warm_start")
  saver.save(9, make_state(9).params, host={})
  saver.close()
  contents = lambda: {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
  before = contents()
  abstract = jax.eval_shape(lambda: make_state(0).params)
  for folder, step in (("checkpoints", 3), ("checkpoints", 2), ("warm_start", 9)):
    params = checkpoint_files.read_params(tmp_path / folder / str(step), abstract)
    assert_same_bits(params, make_state(step).params)
  assert contents() == before


def test_parameters_of_another_shape_are_refused_naming_the_leaf(pristine):
  message = r"'params\.layers\.kernel' is float32\[4, 8\] in it and float32\[4, 9\] in this run"
  with pytest.raises(checkpoint_files.ForeignCheckpointError, match=message):
    checkpoint_files.read_params(pristine[0] / "3", make_state(0, width=9).params)


@pytest.mark.parametrize(
  ("what", "message"),
  [
    ("arrays", r"'params\.\S+' has checksum"),
    ("manifest", "it is the checkpoint of step 2, in"),
  ],
)
def test_damaged_parameters_are_refused(pristine, tmp_path, what, message):
  """Also where all files are whole, but the values are of another save."""
  shutil.copytree(pristine[0], tmp_path / "copy")
  path = tmp_path / "copy" / "3" / what
  shutil.rmtree(path)
  shutil.copytree(pristine[0] / "2" / what, path)
  with pytest.raises(checkpoint_files.TornCheckpointError, match=message):
    checkpoint_files.read_params(tmp_path / "copy" / "3", make_state(0).params)
  params = checkpoint_files.read_params(tmp_path / "copy" / "2", make_state(0).params)
  assert_same_bits(params, make_state(2).params)


# --- foreign --------------------------------------------------------------------------------------


def without(params):
  del params["layers"]["scale"]


@pytest.mark.parametrize(
  ("change", "leaf"),
  [
    (without, r"scale' is bfloat16\[4\] in it and absent"),
    (lambda params: params["layers"].update(bias=jnp.zeros(2)), r"bias' is absent in it"),
    (lambda params: params["layers"].update(scale=jnp.zeros(4)), r"scale' is bfloat16\[4\]"),
  ],
)
def test_another_state_is_refused_naming_the_leaf(pristine, change, leaf):
  state = make_state(0)
  change(state.params)
  with pytest.raises(checkpoint_files.ForeignCheckpointError, match=leaf):
    restore(pristine[0], state)


def test_a_directory_of_another_program_is_refused(tmp_path):
  (tmp_path / "7").mkdir()
  (tmp_path / "7" / "model.bin").write_bytes(b"weights")
  with pytest.raises(checkpoint_files.ForeignCheckpointError, match="not a checkpoint of rlvr_jax"):
    restore(tmp_path)


def test_another_format_is_refused(pristine, tmp_path):
  shutil.copytree(pristine[0], tmp_path / "copy")
  path = tmp_path / "copy" / "3" / "manifest" / "metadata"
  manifest = json.loads(path.read_text())
  del manifest["crc32"]
  first = {"crc32": 0, "manifest": manifest | {"marker": "rlvr_jax checkpoint 1"}}
  for number, other in (
    (1, first),
    (9, with_crc32(manifest | {"marker": "rlvr_jax checkpoint 9"})),
  ):
    path.write_text(json.dumps(other))
    with pytest.raises(checkpoint_files.ForeignCheckpointError, match=f"checkpoint {number}'"):
      restore(tmp_path / "copy")


# --- kills and full disks -------------------------------------------------------------------------


def run_saver(body, directory):
  """A program with the names of this file; its argument is a folder."""
  code = "import os, resource, signal, sys\nimport jax\nfrom checkpoint_test import *\n"
  path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
  return subprocess.Popen(
    [sys.executable, "-c", code + textwrap.dedent(body), str(directory)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | {"PYTHONPATH": path},
  )


def big_state(step):
  return {f"leaf-{i}": jnp.sin(jnp.arange(200_000.0) * (i + 1) + step) for i in range(4)}


@pytest.mark.slow
def test_killed_in_the_middle_of_saves(tmp_path):
  """Whatever the moment, the last committed step is whole and the next run goes on from it."""
  body = """
    saver = checkpoint.Checkpointer(sys.argv[1], keep=1)
    start = max(saver.steps(), default=0)
    for step in range(start + 1, 10_000):
      saver.save(step, big_state(step), host={"step": step})
      print(step, flush=True)
  """
  rng = np.random.default_rng(0)
  last = 0
  for _ in range(4):
    process = run_saver(body, tmp_path)
    started = [int(process.stdout.readline()) for _ in range(3)][-1]
    time.sleep(rng.uniform(0, 0.15))
    process.send_signal(signal.SIGKILL)
    started = max([started, *map(int, process.stdout.read().split())])
    process.communicate()
    opened = checkpoint.Checkpointer(tmp_path, keep=1)
    restored = opened.restore(jax.eval_shape(lambda: big_state(0)))
    opened.close()
    # A save begins only when the one before is committed; the last may be, too.
    assert started - 1 <= restored.step <= started + 1 and restored.step > last
    assert restored.host == {"step": restored.step}
    assert_same_bits(restored.state, big_state(restored.step))
    last = restored.step
    leftovers = [p.name for p in tmp_path.iterdir() if not p.name.isdigit()]
    assert leftovers == []


@pytest.mark.slow
def test_killed_while_an_old_checkpoint_is_removed(tmp_path):
  """Half a checkpoint is never offered, and is gone after the next start."""
  body = """
    import os
    def kill_at_second(event, args, seen=[]):
      if event == "os.remove" and sys.argv[1] in os.readlink(f"/proc/self/fd/{args[1]}"):
        seen.append(args[0])
        if len(seen) == 2:
          os.kill(os.getpid(), signal.SIGKILL)
    saver = checkpoint.Checkpointer(sys.argv[1], keep=1)
    saver.save(1, big_state(1), host={})
    saver.wait()
    whole = {str(path.relative_to(saver.directory)) for path in saver.directory.rglob("*")}
    print(len(whole), flush=True)
    sys.addaudithook(kill_at_second)
    for step in (2, 3):
      saver.save(step, big_state(step), host={})
    saver.close()
  """
  process = run_saver(body, tmp_path)
  whole = int(process.communicate()[0])
  assert process.returncode == -signal.SIGKILL
  half = [path for path in tmp_path.rglob("*") if path.name == "arrays" and "1" in path.parts]
  assert half and 0 < len(list(half[0].parent.rglob("*"))) < whole - 1
  opened = checkpoint.Checkpointer(tmp_path, keep=1)
  assert opened.steps() and 1 not in opened.steps()
  assert opened.restore(jax.eval_shape(lambda: big_state(0))).step == opened.steps()[-1]
  assert {path.name for path in tmp_path.iterdir()} == set(map(str, opened.steps()))
  opened.close()


@pytest.mark.slow
def test_disk_that_fills_while_writing(tmp_path):
  """A file size limit stands in for a full disk: writing fails in the middle of the data."""
  body = """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    saver = checkpoint.Checkpointer(sys.argv[1], keep=1)
    saver.save(1, big_state(1), host={})
    saver.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
      saver.save(2, big_state(2), host={})
      saver.wait()
    except DiskFullError as error:
      print(error)
    else:
      print("not noticed")
  """
  process = run_saver(body, tmp_path)
  out, err = process.communicate()
  assert "no space for a checkpoint" in out and "resumes from step 1" in out, (out, err)
  assert process.returncode == 0, err
  restored = restore(tmp_path, jax.eval_shape(lambda: big_state(0)))
  assert restored.step == 1
  assert_same_bits(restored.state, big_state(1))


def test_too_little_space_is_seen_before_writing(checkpointer, monkeypatch):
  checkpointer.save(1, make_state(1), host={})
  checkpointer.wait()
  usage = shutil.disk_usage(checkpointer.directory)
  monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
  with pytest.raises(DiskFullError, match=r"0\.0 MiB free, 4\.0 MiB needed.*from step 1"):
    checkpointer.save(2, make_state(2), host={})
  monkeypatch.undo()
  assert checkpointer.steps() == [1]
  assert checkpointer.save(2, make_state(2), host={})
