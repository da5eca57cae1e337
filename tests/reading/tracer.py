"""Records which functions of the package a run enters, in every process of it.

The command `reading` puts a module `sitecustomize` on the path, which calls `install`. So the
trainer, samplers and workers all record themselves, each into a file of the folder FOLDER.

What is recorded. A function is the outermost one around a piece of code: nested functions, lambdas
and comprehensions are read with it. Constructors that Python generates, and properties, are left
out. Code is *traced* if jax calls it to make a program; it is recorded in the first turn of the
loop, where the programs are made. Everything else is recorded in a *window* of the steady state:
from the moment at which problems are drawn, after the first update, until an update has been
dispatched. That is the next one, or with threads and samplers the fourth one after it.

The trainer's window begins and ends that of the other processes. A process without the loop lists
the functions of the window in the order in which it first entered them, be it before the window.
"""

import json
import os
import pathlib
import sys
import threading
import types
from typing import NamedTuple

FOLDER = "READING_FOLDER"
PACKAGE = "READING_PACKAGE"
UPDATES = "READING_UPDATES"  # dispatched in the window
LOOP, UPDATE = "train/loop.py", ("update/step.py", "train_step")
# A program is made in these files of jax; `tree_util` alone calls us without making one.
_MAKES_PROGRAMS = ("jax/_src/linear_util.py", "jax/_src/pjit.py", "jax/_src/api.py")
_COMMAND_LINE = ("main.py", "commands/")
_GENERATED = ("<module>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")
_SILENT = ("__repr__", "__hash__", "__eq__")  # called by jax to compare and name programs


_NOBODY = ("", "")


class Function(tuple):
  """(file below the package, name with its class), of a code object that is recorded."""

  is_draw = False
  is_update = False


class Entry(NamedTuple):
  """A call on the stack."""

  function: Function
  frame: types.FrameType
  traced: bool  # whether jax makes a program of it


class Recorder:
  """The functions that this process enters.

  Attributes:
    folder, package: where the process writes, and what it records.
    is_sampler: whether this is a sampler's process, which has no loop.
    codes: code object → its function, or None.
    lock: threads record one at a time.
    trainer, follower: whether this is the window.
    before: thread → {function: that which called it first; `_NOBODY` at a thread's start}.
    entered: likewise, of the window.
    traced: likewise of the code that jax traces, in one table.
  """

  def __init__(self, folder, package, updates):
    self.folder, self.package = pathlib.Path(folder), str(package)
    self.is_sampler = "--mode=sample" in sys.orig_argv
    self.codes, self.lock = {}, threading.RLock()
    self.trainer, self.follower = Trainer(updates, self.folder), Follower(self.folder)
    self.before, self.entered, self.traced = {}, {}, {}

  def install(self):
    threading.setprofile(self)
    sys.setprofile(self)

  def __call__(self, frame, event, argument):
    if event == "return":
      self.trainer.left(frame)
    elif event == "call" and (function := self.function_at(frame)) is not None:
      self.enter(frame, function)

  def function_at(self, frame):
    try:
      return self.codes[frame.f_code]
    except KeyError:
      function = self.codes[frame.f_code] = self.function_of(frame)
      return function

  def enter(self, frame, function):
    with self.lock:  # an error here would end the thread that is recorded
      self._enter(frame, function)

  def _enter(self, frame, function):
    self.trainer.move_on(frame, function, self)
    in_window, done = self.trainer.window, self.trainer.done
    if not self.trainer.site:
      in_window, done = self.follower.window(), self.follower.done
    if done:
      sys.setprofile(None)
      return
    thread = threading.get_ident()
    before = self.before.setdefault(thread, {})
    now = self.entered.setdefault(thread, {}) if in_window else before
    if function in now or (function in before and not in_window) or function in self.traced:
      return
    stack = self.stack(frame)
    if not stack:
      return
    if stack[-1].traced:
      if not self.trainer.dispatched and (stack[0].function[0] == LOOP or self.is_sampler):
        self.traced[function] = stack[-2].function if len(stack) > 1 else _NOBODY
        self.write()
      return
    caller = _NOBODY
    for function, _, traced in stack:
      if not traced:
        for known in (before, now):
          known.setdefault(function, caller)
        caller = function
    if in_window:
      self.write()

  def function_of(self, frame):
    """The function of a frame's code; None if it is not recorded."""
    code = frame.f_code
    if code.co_name == "__getitem__" and code.co_filename.endswith("tests/train/sums.py"):
      function = Function(("", "a problem of the task"))
      function.is_draw = True
      return function
    if not code.co_filename.startswith(self.package):
      return None
    name = code.co_qualname.partition(".<locals>")[0]
    if name in _GENERATED or name.endswith(_SILENT) or self.is_property(frame, name):
      return None
    file = os.path.relpath(code.co_filename, self.package)
    function = Function((file, name))
    function.is_draw = file.startswith("data/") and code.co_name == "__getitem__"
    function.is_update = function == UPDATE
    return function

  @staticmethod
  def is_property(frame, name):
    owner, _, last = name.rpartition(".")
    found = frame.f_globals.get(owner) if owner else None
    declared = getattr(found, "__dict__", {}).get(last)
    return declared is not None and type(declared).__name__ in ("property", "cached_property")

  def stack(self, frame):
    """The calls of the package on the stack, the outermost first.

    In the loop's thread from the loop on; in others without the program's command line.
    """
    frames, found, traced = [], [], False
    while frame is not None:
      frames.append(frame)
      frame = frame.f_back
    for each in reversed(frames):
      function = self.function_at(each)
      if function is None:
        traced = traced or each.f_code.co_filename.endswith(_MAKES_PROGRAMS)
      elif function[0] and not function[0].startswith(_COMMAND_LINE):
        if function[0] == LOOP and all(outer.function[0] != LOOP for outer in found):
          found = []
        found.append(Entry(function, each, traced))
    return found

  def write(self):
    """Writes what is recorded so far, since a worker may be killed at its end."""
    threads = [
      [[*function, *caller] for function, caller in self.in_order(thread)]
      for thread in list(self.entered)
    ]
    traced = [[*function, *caller] for function, caller in self.traced.items()]
    found = dict(
      process=os.getpid(), is_trainer=bool(self.trainer.site), threads=threads, traced=traced
    )
    path = self.folder / f"{os.getpid()}.json"
    temporary = path.with_suffix(f".{threading.get_ident()}")
    temporary.write_text(json.dumps(found))
    temporary.replace(path)

  def in_order(self, thread):
    """The window's functions with their callers; outside the loop in the order of the whole run."""
    entered = self.entered[thread]
    if thread == self.trainer.thread:
      return list(entered.items())
    return [(f, caller) for f, caller in list(self.before[thread].items()) if f in entered]


class Trainer:
  """Where the trainer's loop is: before its first update, then before, in, or after the window."""

  def __init__(self, updates, folder):
    self.updates, self.folder = updates, folder  # that the window has still to dispatch
    self.site = ()  # (code, line) that calls the update
    self.frame = None  # the call of this code that is going on
    self.thread = 0
    self.dispatched = False  # whether the first update is
    self.window = self.done = self._passed = False

  def move_on(self, frame, function, recorder):
    """Takes notice that a function is entered."""
    if not self.site:
      if function.is_update:
        self._find_site(frame, recorder)
      return
    if frame.f_code is self.site[0]:
      self.frame = frame
    elif self.frame is not None and threading.get_ident() == self.thread:
      passed = self.frame.f_lineno > self.site[1]
      if passed and not self._passed:
        self._has_dispatched()
      self._passed = passed
    if function.is_draw and self.dispatched and not self.done and not self.window:
      self.window = True
      (self.folder / "begin").touch()

  def left(self, frame):
    """Takes notice that a call returns."""
    if frame is self.frame:
      if not self._passed:
        self._has_dispatched()
      self.frame, self._passed = None, False

  def _find_site(self, frame, recorder):
    stack = recorder.stack(frame)
    if stack[0].function[0] != LOOP or not stack[-1].traced:
      return  # a program that is made before the loop
    caller = [entry for entry in stack if not entry.traced][-1]
    self.site, self.frame = (caller.frame.f_code, caller.frame.f_lineno), caller.frame
    self.thread = threading.get_ident()

  def _has_dispatched(self):
    if self.window:
      self.updates -= 1
      if not self.updates:
        self.window, self.done = False, True
        (self.folder / "end").touch()
    self.dispatched = True


class Follower:
  """Whether another process, the trainer, is in its window."""

  def __init__(self, folder):
    self.folder, self.began, self.done = folder, False, False

  def window(self):
    self.began = self.began or (self.folder / "begin").exists()
    self.done = self.done or (self.began and (self.folder / "end").exists())
    return self.began and not self.done


def install():
  """Records this process from now on, where the environment says into which folder."""
  if folder := os.environ.get(FOLDER):
    Recorder(folder, os.environ[PACKAGE], int(os.environ[UPDATES])).install()
