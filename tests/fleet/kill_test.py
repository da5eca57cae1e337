"""Programs of a fleet on a disk, killed with −9 at random moments: every batch comes once."""

import pathlib
import random
import subprocess
import sys
import time

import pytest
from fleet import toy

from rlvr_jax.storage.objects import FolderObjects

ROOT = pathlib.Path(__file__).parents[2]
UPDATES, SIZE, LAG = 60, 6, 2


@pytest.mark.slow
def test_programs_are_killed_at_random_moments(tmp_path):
  rng = random.Random(0)
  running, started = {}, []

  def start(role, name):
    log = open(tmp_path / f"{len(started)}_{name}.log", "wb")
    command = [sys.executable, "-m", "fleet.toy", role, str(tmp_path), str(UPDATES)]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
    running[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    started.append(name)

  def names(kind):
    return [n for n in FolderObjects(tmp_path / "own").list() if n.startswith(kind)]

  start("trainer", "trainer")
  start("s0", "s0")
  start("s1", "s1")
  kills = 0
  try:
    deadline = time.monotonic() + 480
    while (running["trainer"].poll()) is None and time.monotonic() < deadline:
      before = len(names("store/"))
      time.sleep(rng.random())
      if kills < 20 and len(names("store/")) > before:  # it works
        name = rng.choice(["trainer", "trainer", "s0", "s1"])
        running[name].kill()
        running[name].wait()
        kills += 1
        start("trainer" if name == "trainer" else f"{name}-{kills}", name)
    logs = "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert running["trainer"].wait(1) == 0, logs
    for name in ("s0", "s1"):
      assert running[name].wait(30) == 0, logs
  finally:
    for process in running.values():
      process.kill()
  assert kills >= 10
  store = toy.Files(FolderObjects(tmp_path / "own")).read()
  assert sorted(store) == [(t, i) for t in range(UPDATES) for i in range(SIZE)]
  for (number, index), group in store.items():
    assert group.samples[0]["prompt"] == f"{number} + {index}?"
    for version, bits in group.versions.items():
      assert number - LAG <= version <= number and bits == f"bits {version}"
