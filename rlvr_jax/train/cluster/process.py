"""The training process and its operating system: memory, caches, signals, deadlines, exits."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import pathlib
import platform
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import ClassVar, NoReturn

from absl import logging

DEADLINE_S = 3600.0  # seconds between calls of `restart_deadline`; longer than any program takes

# glibc's <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8

COMMIT = "RLVR_JAX_COMMIT"  # environment variable: the commit, where the code is not in a checkout
_FEW_CORES = 8  # up to so many cores, all threads share one arena of malloc
MUCH_FREED = 2**29  # bytes; if more are free, the kernel gets them back between phases of a run
_YOUNG_OBJECTS = 10_000


def keep_freed_memory() -> None:
  """Makes glibc reuse freed memory instead of returning it to the kernel.

  XLA on a CPU allocates and frees its buffers at every step. With glibc's defaults, the page faults
  of new memory took up to half of the time. Call this before any thread begins, since glibc then
  fixes the number of its arenas. With other C libraries this does nothing.
  """
  if platform.libc_ver()[0] != "glibc":
    return
  libc = ctypes.CDLL("libc.so.6")
  libc.mallopt(_M_MMAP_MAX, 0)
  if usable_cores() <= _FEW_CORES:
    # Other arenas than the first would still map blocks of 64 MiB and more anew each time.
    libc.mallopt(_M_ARENA_MAX, 1)
  libc.mallopt(_M_TRIM_THRESHOLD, -1)  # never trim; 2**31 - 1 would trim at 2 GiB of free memory
  libc.mallopt(_M_TOP_PAD, 2**26)


class _Malloc(ctypes.Structure):
  """glibc's `struct mallinfo2`."""

  _fields_: ClassVar = [
    (name, ctypes.c_size_t)
    for name in (
      *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
      *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
    )
  ]


def return_freed_memory() -> None:
  """Gives freed memory back to the kernel, if glibc has kept more than `MUCH_FREED` bytes.

  See `keep_freed_memory` for why glibc keeps memory. The buffer of a compiled program is one piece,
  which may not fit into the gaps that other programs have left. So the kept memory adds up over the
  phases of an update. Smaller amounts are not given back, since page faults at every step would
  cost more.
  """
  if platform.libc_ver()[0] != "glibc":
    return
  libc = ctypes.CDLL("libc.so.6")
  if not hasattr(libc, "mallinfo2"):  # before glibc 2.33
    return
  count_bytes = ctypes.CFUNCTYPE(_Malloc)(("mallinfo2", libc))
  if count_bytes().fordblks > MUCH_FREED:
    libc.malloc_trim(0)


def collect_garbage_less_often() -> None:
  """Makes Python look for cycles of objects after 10,000 new objects, not after 700.

  Otherwise records that live for a burst of decoding steps, such as the turns of dialogues, would
  be promoted to the oldest generation. Every few batches Python would then search all objects,
  which takes 0.2 s after jax has been loaded.
  """
  gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])


def lacks_bfloat16(info: pathlib.Path = pathlib.Path("/proc/cpuinfo")) -> bool:
  """Whether this machine's processor is known to lack bfloat16 arithmetic."""
  text = info.read_text() if info.exists() else ""
  lines = [line.partition(":") for line in text.splitlines()]
  features = next((text for name, _, text in lines if name.strip() in ("flags", "Features")), "")
  return bool(features) and "bf16" not in features


def quiet_compiler() -> None:
  """Silences XLA's log on CPUs: it reports harmless events, such as slow compilation, as errors.

  Errors that end a compilation are still raised. TF_CPP_MIN_LOG_LEVEL has precedence. Runs of
  several processes keep the log, which says why a process has lost the other processes.
  """
  import jax

  is_alone = jax.default_backend() == "cpu" and jax.process_count() == 1
  if is_alone and os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":  # jax itself sets 1
    jax.config.update("jax_logging_level", "CRITICAL")  # also silences Python's loggers …
    jax.config.update("jax_logging_level", "NOTSET")  # … which this turns on again


def current_commit() -> str | None:
  """Commit of this code, with -dirty if files differ from it; None if unknown."""
  if COMMIT in os.environ:
    return os.environ[COMMIT]
  root = pathlib.Path(__file__).parents[3]
  try:
    if pathlib.Path(_run_git(root, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
      return None  # the code is inside another checkout
    changed = _run_git(root, "status", "--porcelain", "--untracked-files=no")
    return _run_git(root, "rev-parse", "HEAD") + ("-dirty" if changed else "")
  except (OSError, subprocess.CalledProcessError):
    return None


def _run_git(root: pathlib.Path, *arguments: str) -> str:
  command = ["git", "-C", str(root), *arguments]
  return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def usable_cores() -> int:
  """Number of cores that this process may use."""
  limited = hasattr(os, "sched_getaffinity")
  return len(os.sched_getaffinity(0)) if limited else os.cpu_count() or 1


def memory_limit() -> int:
  """Bytes of memory that the processes of this host may use together, within the control group."""
  group = pathlib.Path("/sys/fs/cgroup/memory.max")
  text = group.read_text().strip() if group.exists() else "max"
  total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return min(total, int(text)) if text.isdigit() else total


def enable_compilation_cache(workdir: str) -> None:
  """Caches compiled programs, so that a resumed run does not compile again.

  JAX_COMPILATION_CACHE_DIR has precedence over the folder of `compilation_cache`.
  JAX_ENABLE_COMPILATION_CACHE=false turns the cache off.
  """
  import jax

  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = compilation_cache(workdir, jax.default_backend(), jax.process_count())
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def compilation_cache(workdir: str, backend: str, processes: int) -> str:
  """The folder that caches compiled programs.

  On accelerators, where compiling a program may take minutes, all runs of a user share one folder.
  So a second run, or another run of a sweep, finds the programs of the first run. A run on CPUs, or
  of several processes, has the folder in its workdir. The workdir can be read by all processes;
  only process 0 writes to the folder.

  Args:
    workdir: the workdir of the run.
    backend: "tpu", "gpu" or "cpu".
    processes: number of processes of the run.
  """
  of_run = os.path.join(workdir, "compilation_cache")
  if backend == "cpu" or processes > 1:
    return of_run
  shared = pathlib.Path("~/.cache/rlvr_jax/compiled")
  try:
    shared = shared.expanduser()
    shared.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=shared):
      return str(shared)
  except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
    logging.warning(
      "%s, where compiled programs are kept for all runs, cannot be written: %s. This run keeps its"
      " programs in %s; JAX_COMPILATION_CACHE_DIR names another folder",
      *(shared, error, of_run),
    )
    return of_run


def open_closed_streams() -> None:
  """Opens /dev/null in place of standard streams that the caller closed, such as by >&-.

  Otherwise the next files to be opened would get these streams' descriptors, and printed text would
  go into the files.
  """
  for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # on the lowest free descriptor
      os.set_inheritable(getattr(sys, name).fileno(), True)


def describe_error(error: BaseException) -> str:
  """The message of an error that ends the program; errors of the system get a remedy."""
  # Imported here: it loads fsspec, which --help does not need.
  from rlvr_jax.storage.files import is_out_of_descriptors

  if not is_out_of_descriptors(error):
    return str(error)
  limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  return (
    f"too many open files: this process may have {limit} open files. Raise the limit, such as with"
    f" `ulimit -n 4096`, then rerun the same command ({type(error).__name__}: {str(error)[:100]}…)"
  )


def exit_immediately(message: str) -> NoReturn:
  """Ends the process with the message as its last line; call it after closing files.

  Libraries would print more, in an orderly exit and from threads that are still running. So stderr
  is redirected to /dev/null before the message is written to a duplicate of stderr.
  """
  sys.stdout.flush()
  sys.stderr.flush()
  terminal = os.dup(sys.stderr.fileno())
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
  time.sleep(0.2)  # time for writes that have already begun
  os.write(terminal, f"{message}\n".encode(errors="backslashreplace"))
  os._exit(1)


@contextlib.contextmanager
def exit_after(seconds: float, message: str) -> Iterator[None]:
  """Context that ends the process with a message if the context takes longer than `seconds`."""
  timer = threading.Timer(seconds, exit_immediately, [message])
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


_open_deadlines = 0


@contextlib.contextmanager
def deadline() -> Iterator[None]:
  """Context that ends the process `DEADLINE_S` seconds after the last `restart_deadline`.

  The process then prints the tracebacks of all threads. Collectives and the thread pools of
  libraries have no time limit of their own.
  """
  global _open_deadlines
  _open_deadlines += 1
  restart_deadline()
  try:
    yield
  finally:
    _open_deadlines -= 1
    restart_deadline()


_total_wait_s = 0.0


@contextlib.contextmanager
def measure_wait() -> Iterator[None]:
  """Context around a wait for devices or processes, with a `deadline`; counts the time waited."""
  global _total_wait_s
  start = time.perf_counter()
  try:
    with deadline():
      yield
  finally:
    _total_wait_s += time.perf_counter() - start


def total_wait_s() -> float:
  """Seconds that this process has spent in `measure_wait` so far."""
  return _total_wait_s


def restart_deadline() -> None:
  """Restarts the deadline, if one is open."""
  if _open_deadlines:
    # A Python thread could not do this: native code that hangs may hold the interpreter's lock.
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True, file=2)  # stderr may be silenced
  else:
    faulthandler.cancel_dump_traceback_later()


def end_with_parent(parent: int) -> None:
  """Requests shutdown of this process, by SIGTERM, once the process `parent` has ended."""

  def watch() -> None:
    while os.getppid() == parent:
      time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)

  threading.Thread(target=watch, name="parent", daemon=True).start()


# --- shutdown -------------------------------------------------------------------------------------

_shutdown_requested = threading.Event()
_handling_signals = False


class EndRequestedError(Exception):
  """Shutdown was requested before the work was finished; the same command resumes it."""


def shutdown_requested() -> bool:
  """Whether shutdown was requested: by SIGTERM, as before a preemption, or by Ctrl-C."""
  return _shutdown_requested.is_set()


def request_shutdown() -> None:
  """Requests shutdown, as a signal does."""
  _shutdown_requested.set()


def handles_shutdown_signals() -> bool:
  """Whether the process is within `handle_shutdown_signals`."""
  return _handling_signals


@contextlib.contextmanager
def handle_shutdown_signals(pass_on: Callable[[], None]) -> Iterator[None]:
  """Context in which SIGTERM, SIGINT and SIGHUP request shutdown; for the main thread only.

  A separate thread receives signals at once, even while the main thread is in native code. A second
  Ctrl-C ends the process immediately. If SIGHUP is ignored, as under nohup, it stays ignored.

  Args:
    pass_on: called at each signal, in the thread that receives it, to request shutdown of the other
      processes.
  """
  global _handling_signals
  numbers = [signal.SIGTERM, signal.SIGINT]
  if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
    numbers.append(signal.SIGHUP)
  reader, writer = socket.socketpair()
  writer.setblocking(False)
  old_handlers = [signal.signal(number, lambda *_: None) for number in numbers]
  old_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
  thread = threading.Thread(target=_watch_signals, args=(reader, numbers, pass_on), name="signals")
  thread.start()
  _handling_signals = True
  try:
    yield
  finally:
    _handling_signals = False
    signal.set_wakeup_fd(old_descriptor)
    for number, handler in zip(numbers, old_handlers, strict=True):
      signal.signal(number, handler)
    writer.close()  # ends the thread
    thread.join()
    reader.close()
    _shutdown_requested.clear()


def _watch_signals(
  reader: socket.socket, numbers: Collection[int], pass_on: Callable[[], None]
) -> None:
  """Handles signals, in a thread; Python writes their numbers to the other end of `reader`."""
  interrupts = 0
  while received := reader.recv(64):
    interrupts += received.count(signal.SIGINT)
    if interrupts > 1:
      os._exit(128 + signal.SIGINT)
    if set(received) & set(numbers):
      request_shutdown()
      pass_on()
