"""What a reader opens from a problem to its gradient, and how the host half hangs together.

  python -m tests.reading                          # all variants, about three minutes
  python -m tests.reading --variants=plain,fleet --functions
  python -m tests.reading --root=FOLDER            # of another checkout's package

A tiny run is recorded (`tracer`) from the moment at which the problems of a batch are drawn until
the update on it has been dispatched. Set-up, evaluations, checkpoints and the end are left out.

Files: those of which the run enters a function. *Host half* are the rooms of `HOST`, and all others
are the *numeric half*, which jax traces when it makes the programs of the first update.

Of the files of the host half some are *services*, which he knows by name: the log, files, and what
processes tell each other (`SERVICES`). He *follows* the path through the others from which it goes
on to a further file; the rest are helpers, where it ends.

Returns: how often a reader comes back to a file that he has left. He reads each function once, at
its first call, with the functions nested in it. The path is the files of the functions in the order
in which they are read, thread by thread and process by process. A function adds its file to the
path unless its caller is in the same file. So a call into another file counts, and coming back by
return does not. A return is a step of the path to a file that it had left before. It *leads on* if
from there the reader goes to a further file. The other returns end in the file, as helpers do.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from reading import counts, runs, tracer  # noqa: E402

TIMEOUT_S = 300.0


def recorded(root, variant):
  """The records of all processes of a run, the trainer's first, then in the order of their start.

  Args:
    root: folder of the checkout whose package is read.
    variant: of `runs.VARIANTS`.
  Raises:
    RuntimeError: the run failed or takes too long; with the end of what it printed.
  """
  with tempfile.TemporaryDirectory() as folder:
    site, found = pathlib.Path(folder, "site"), pathlib.Path(folder, "found")
    site.mkdir()
    found.mkdir()
    (site / "sitecustomize.py").write_text("from reading import tracer\n\ntracer.install()\n")
    path = os.pathsep.join(map(str, (site, root, ROOT / "tests")))
    variables = {
      "JAX_PLATFORMS": "cpu",
      "PYTHONPATH": path,
      tracer.FOLDER: str(found),
      tracer.PACKAGE: str(pathlib.Path(root, "rlvr_jax")),
      tracer.UPDATES: "4" if variant in runs.WITH_THREADS else "1",
    }
    workdir = pathlib.Path(folder, "run")
    config = f"--config={pathlib.Path(runs.__file__)}:{variant}"
    arguments = [[config], ["--mode=sample", "--trust_run"]] if variant == "fleet" else [[config]]
    with contextlib.ExitStack() as stack:
      programs = [
        stack.enter_context(program([*each, f"--workdir={workdir}"], root, variables, folder))
        for each in arguments
      ]
      deadline = time.monotonic() + TIMEOUT_S
      while any(each.poll() is None for each in programs):
        failed = any(each.poll() for each in programs) or time.monotonic() > deadline
        if failed:
          text = pathlib.Path(folder, "log").read_text(errors="replace")
          raise RuntimeError(f"the run {variant} failed or did not end:\n{text[-3000:]}")
        time.sleep(0.1)
    records = [json.loads(path.read_text()) for path in found.glob("*.json")]
  if not any(record["is_trainer"] and record["threads"] for record in records):
    raise RuntimeError(f"no window was recorded of the run {variant}: has {tracer.LOOP} moved?")
  return sorted(records, key=lambda record: (not record["is_trainer"], record["process"]))


@contextlib.contextmanager
def program(arguments, root, variables, folder):
  """The program in the background; killed at the end if it is still there."""
  with open(pathlib.Path(folder, "log"), "ab") as log:
    process = subprocess.Popen(
      [sys.executable, "-m", "rlvr_jax.main", *arguments],
      cwd=root, env=os.environ | variables, stdout=log, stderr=log,
    )  # fmt: skip
  try:
    yield process
  finally:
    process.kill()
    process.wait()


class Call(NamedTuple):
  """The first call of a function: where a reader reads it."""

  file: str
  name: str
  from_file: str  # "" at the start of a thread
  from_name: str


def read_once(threads):
  """The calls of all threads, one after the other, without the functions that were read before."""
  found = {}
  for call in itertools.chain.from_iterable(threads):
    found.setdefault(tuple(call[:2]), Call(*call))
  return list(found.values())


def returns_of(calls):
  """The calls that come back to a file which the reader has left."""
  found, path = [], []
  for call in calls:
    if call.file == call.from_file or path[-1:] == [call.file]:
      continue
    if call.file in path:
      found.append(call)
    path.append(call.file)
  return found


def leads_on(call, calls):
  """Whether the function, or one of its file that it calls, is the first to call another file."""
  inside, more = set(), {(call.file, call.name)}
  while more:
    inside |= more
    of_ours = [each for each in calls if (each.from_file, each.from_name) in inside]
    if any(each.file != call.file for each in of_ours):
      return True
    more = {(each.file, each.name) for each in of_ours} - inside
  return False


class Reading:
  """What a reader opens for one variant.

  Attributes:
    calls, traced: in the window; and of what jax traces.
    functions: file → names of the functions entered, in the order in which they are read.
    returns, passing: the returns into the host half; those of them that lead on.
  """

  def __init__(self, records):
    self.calls = read_once(thread for record in records for thread in record["threads"])
    self.traced = read_once(record["traced"] for record in records)
    self.functions = {}
    for call in (*self.calls, *self.traced):
      names = self.functions.setdefault(call.file, [])
      names += [call.name] * (call.name not in names)
    self.returns = [call for call in returns_of(self.calls) if counts.is_host(call.file)]
    self.passing = [call for call in self.returns if leads_on(call, self.calls)]

  @property
  def host(self):
    """Files of the host half."""
    return [file for file in self.functions if counts.is_host(file)]

  @property
  def followed(self):
    """Files of the host half, services aside, from which the path goes on to a further file."""
    goes_on = {
      call.from_file
      for call in self.calls
      if call.from_file != call.file and not counts.is_service(call.file)
    }
    return [file for file in self.host if file in goes_on and not counts.is_service(file)]

  @property
  def numeric(self):
    """Files of the numeric half."""
    return [file for file in self.functions if not counts.is_host(file)]


def report(variant, reading, *, functions):
  """Prints what a variant opens."""
  print(f"\n## {variant}\n")
  run = {call.file for call in reading.calls}
  for title, files in (("host", reading.host), ("numeric", reading.numeric)):
    print(f"The {title} half, {len(files)} files:\n")
    for number, file in enumerate(files, start=1):
      back = [call for call in reading.returns if call.file == file]
      on = [call.name for call in back if call in reading.passing]
      by_jax = "" if file in run else ", by jax alone"
      came_back = f", {len(back)} returns" if back else ""
      kind = ", a service" if counts.is_service(file) else ""
      kind = ", followed" if file in reading.followed else kind
      through = f", {len(on)} that lead on: {', '.join(on)}" if on else ""
      entered = f"{len(reading.functions[file])} functions"
      print(f"{number:3} {file}: {entered}{kind}{by_jax}{came_back}{through}")
      if functions:
        print(f"      {', '.join(reading.functions[file])}")
    print()


def main(arguments):
  parser = argparse.ArgumentParser(
    prog="python -m tests.reading", description=__doc__.split("\n")[0]
  )
  parser.add_argument("--root", default=str(ROOT), help="checkout whose package is read")
  parser.add_argument("--variants", default=",".join(runs.VARIANTS), help="'' for none")
  parser.add_argument("--functions", action="store_true", help="name the functions entered")
  options = parser.parse_args(arguments)
  root = pathlib.Path(options.root).resolve()
  readings = {}
  for variant in filter(None, options.variants.split(",")):
    began = time.monotonic()
    readings[variant] = Reading(recorded(root, variant))
    report(variant, readings[variant], functions=options.functions)
    print(f"({time.monotonic() - began:.0f} s)", file=sys.stderr)
  print(counts.table(root / "rlvr_jax", readings))


if __name__ == "__main__":
  main(sys.argv[1:])
