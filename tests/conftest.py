"""Set before jax is imported: CPU only, eight fake devices, one compile cache for all processes."""

import gc
import os

import compiled

os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the time is compilation, and much is compiled again and again: by the workers of one
# session, by the programs that tests start, and by the next session. All inherit this; one that is
# set already is used.
_session = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  _session = compiled.open_session(compiled.kept_folder())
  os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_session)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Else the name of the folder is part of an entry's key, and no session finds those of another.
os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
# Where in the source an operation comes from is not written into the programs.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

# A process keeps all that jax has compiled, millions of objects: it is seldom searched for garbage,
# and not once more when the process ends.
gc.set_threshold(1000, 20, 100)

import jax
import jax.experimental
import pytest
from jax.experimental.compilation_cache import compilation_cache

if not hasattr(jax, "enable_x64"):  # before jax 0.8
  jax.enable_x64 = jax.experimental.enable_x64

# Compiled quickly rather than well. XLA reads it when a device is first asked for.
_flags = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if jax.__version_info__ < (0, 11):  # later ones have no other emitter
  _flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_flags])


@pytest.fixture
def no_compilation_cache(monkeypatch):
  """For what a fresh compilation alone tells; also in the programs that the test starts."""
  monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()
  yield
  jax.config.update("jax_enable_compilation_cache", True)
  compilation_cache.reset_cache()


@pytest.fixture
def x64():
  """Runs a test in float64."""
  with jax.enable_x64(True):
    yield


# --- a bucket -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emulator():
  """See `gcs_emulator`."""
  import gcs_emulator  # not where no bucket is needed

  with gcs_emulator.emulated() as emulator:
    yield emulator


@pytest.fixture
def folder(request):
  """A folder of the bucket that has nothing yet."""
  return request.node.name.translate({ord(letter): "_" for letter in "[]"})


@pytest.fixture
def url(emulator, folder):
  """It, as runs name it."""
  return f"gs://bucket/{folder}"


def pytest_sessionfinish():
  gc.freeze()
  if _session is not None:
    compiled.close_session(_session, compiled.kept_folder())


def pytest_collection_modifyitems(items):
  """Quick folders first: a mistake in a formula shows before runs of the whole program start.

  Of these the longest first, as the last one to end leaves the other processes idle.
  """
  programs = [
    "staleness_test.py", "main_test.py", "resume_test.py", "loop_test.py", "multiprocess_test.py"
  ]  # fmt: skip

  def order(item):
    name = item.path.name
    return (programs.index(name) + 1 if name in programs else 0, "train" in item.path.parts)

  items.sort(key=order)
