"""Python as a tool: runs the policy's program in a sandbox, and replies with its output."""

from __future__ import annotations

from typing import Any, NamedTuple

from rlvr_jax.codejudge import fences, tasks
from rlvr_jax.codejudge.sandboxes import Sandboxes
from rlvr_jax.environments.base import Environment, Problem, Refused, Turn
from rlvr_jax.environments.calls import Call, find_call, without_thoughts
from rlvr_jax.ops.checks import check_between, check_integer
from rlvr_jax.workers.worker import waiting

_MAX_WAIT_S = 3600.0  # the most seconds of a wait for other dialogues' programs
_NAME = "python"  # the name of the tool
_NO_OUTPUT = "[no output]"


def extract_program(text: str) -> str | None:
  """Extracts the last fenced block of Python, after any "</think>"; None if there is none.

  An unclosed block extends to the end of the text, since a stop string may have cut its fence.
  There is no program in a "<think>" that is never closed.
  """
  blocks = fences.find_blocks(without_thoughts(text).replace("\r\n", "\n"))
  return next((block.text for block in reversed(blocks) if block.is_python), None)


class _Options(NamedTuple):
  """Hyper-parameters of `python`."""

  limit_s: float
  memory_mib: int
  max_output: int
  state: bool


_sandboxes = Sandboxes()


class _Python:
  """The programs of one dialogue."""

  roles = ("tool",)

  def __init__(self, options: _Options):
    self._options = options
    self._earlier: list[str] = []

  def reset(self, problem: Problem, seed: int) -> None:
    del problem, seed

  def step(self, text: str) -> Turn:
    """Runs the program in the policy's text, and replies with its output."""
    try:
      source = _find_program(text)
    except ValueError as error:
      return Turn(f"[{error}]", role="tool")
    if source is None:
      return Turn(done=True)
    options = self._options
    with waiting(_MAX_WAIT_S), _sandboxes.take() as (sandbox, leave_core):
      result = tasks.run(
        sandbox, source, earlier=self._earlier, time_limit_s=options.limit_s,
        memory_mib=options.memory_mib, on_asleep=leave_core,
      )  # fmt: skip
    if "died" in result:
      raise Refused(
        f"the program broke its sandbox, whose process ended with the status {result['died']}"
      )
    if self._options.state and result.get("status") == 0:
      self._earlier.append(source)
    return Turn(_describe(result, self._options), role="tool")


def _find_program(text: str) -> str | None:
  """The program of the last tool call, or else the last fenced program; None if there is none.

  Raises:
    ValueError: the tool call names another tool or has no program; or it cannot be read, and the
      text has no fenced program.
  """
  fenced = extract_program(text)
  try:
    call = find_call(text, [_NAME])
  except ValueError:
    if fenced is None:
      raise
    return fenced  # the tag belongs to a program or to prose, not to a call
  return fenced if call is None else _program_of(call)


def _program_of(call: Call) -> str:
  """The program of a tool call.

  Raises:
    ValueError: the call names another tool, or has no program.
  """
  source = call.arguments.get("code")
  if call.name != _NAME or not isinstance(source, str):
    raise ValueError('the tool is called "python", and its argument "code" is a text')
  return source


def _describe(result: dict[str, Any], options: _Options) -> str:
  """The reply that describes a program's result."""
  if "timeout" in result:
    return f"[stopped: it took longer than {options.limit_s:g} s]"
  if "memory" in result:
    return f"[stopped: it used more than {options.memory_mib} MiB]"
  output = result["output"]
  if len(output) > options.max_output:
    num_left_out = len(output) - options.max_output
    output = f"{output[: options.max_output]}\n[{num_left_out} characters are left out]\n"
  error = result["stderr"].strip()
  if result["status"] and not error:
    error = f"[exit status {result['status']}]"
  if output and error and not output.endswith("\n"):
    output += "\n"
  return (output + error).rstrip() or _NO_OUTPUT


def python(
  *,
  limit_s: float = 5.0,
  memory_mib: int = tasks.MEMORY_MIB,
  max_output: int = 4000,
  state: bool = False,
) -> Environment:
  """Runs the policy's last fenced program (```python), and replies with its output, as a tool.

  If `calls.find_call` finds a tool call in the turn, the call's argument `code` is run instead.
  With `config.prompts.tools = "python"` the chat template tells the policy how to write a call. A
  call that cannot be read gets a reply that says so, unless the turn has a fenced program.

  The program runs in the sandbox of `rlvr_jax.codejudge`, with the limits of that sandbox. The
  program can import only the standard library, and its standard input is empty. The reply is the
  program's standard output, then the end of its standard error, which has the traceback. If the
  program exceeded its time or memory, the reply says only that. If the program broke its
  sandbox, the environment raises `Refused`, which ends the dialogue. A turn without a program ends
  the dialogue, which the task's grader then judges.

  With `state`, the dialogue's earlier programs are run again before each program. Programs that
  ended with an error or were stopped at a limit are left out. The earlier programs run in the
  program's namespace, and their output is dropped. So their other effects are repeated, their
  random numbers may differ, and their time counts towards the limit.

  The programs of one worker take turns. When a program first sleeps, the next program may start.
  Besides the running program, up to 3 programs that have slept may be unfinished.

  Args:
    limit_s: limit of a program's processor time, seconds, in (0, 120]. The time that the program
      sleeps has a separate limit of the same length.
    memory_mib: limit of a program's memory, MiB, ≥ 64. A smaller `memory_mib` of the pool takes
      precedence.
    max_output: the most characters of standard output in a reply, ≥ 1.
    state: whether programs see the variables of the dialogue's earlier programs.
  Raises:
    ValueError: a hyper-parameter is out of range.
    SandboxError: the sandbox does not work here.
  """
  check_between("python", "limit_s", limit_s, low=0.0, high=tasks.MAX_TIME_LIMIT_S, open_low=True)
  check_integer("python", "memory_mib", memory_mib, low=tasks.LEAST_MEMORY_MIB)
  check_integer("python", "max_output", max_output, low=1)
  if not isinstance(state, bool):
    raise ValueError(f"python: state = {state!r} is not a bool; set it to True or False")
  _sandboxes.open()
  return _Python(_Options(limit_s, memory_mib, max_output, state))
