"""Set before jax is imported: CPU only, eight fake devices. Children share a compile cache."""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import pytest

# After jax has read its environment: this process compiles everything itself, as tests of memory
# and of compilation counts need; the programs that tests start reuse one another's work.
_cache = tempfile.TemporaryDirectory(prefix="rlvr_jax_compile_cache_")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"


@pytest.fixture
def x64():
  """Runs a test in float64."""
  with jax.enable_x64(True):
    yield


def pytest_collection_modifyitems(items):
  """Quick folders first: a mistake in a formula shows before runs of the whole program start."""
  programs = ("main_test.py", "loop_test.py", "resume_test.py", "geometry_test.py")

  def order(item):
    return (item.path.name in programs, "train" in item.path.parts)

  items.sort(key=order)
