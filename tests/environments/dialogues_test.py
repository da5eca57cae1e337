"""Environments in worker processes, and some that do their worst to them."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import pytest
from codejudge.processes import descendants, running, wait_until

from rlvr_jax.environments import Turn, guess, python
from rlvr_jax.environments.base import MAX_REPLY, cut, declared_roles
from rlvr_jax.environments.by_name import make_environment
from rlvr_jax.environments.dialogues import EnvironmentPool, EnvironmentStartError, Started
from rlvr_jax.workers.pool import Failure

HERE = pathlib.Path(__file__).parent
WAIT_S = 60.0
FAULTY = "faulty_environments:faulty"


@pytest.fixture(autouse=True, scope="module")
def _environments_importable():
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(HERE)
    yield


@pytest.fixture(scope="module")
def pool(_environments_importable):
  """One for the tests that leave its workers as they are, or replaced."""
  with EnvironmentPool(
    FAULTY, deadline_s=1.0, memory_mib=1024, variables={"GREETING": "hello"}
  ) as opened:
    yield opened


def problem(question="q", **reference):
  return {"question": question, "answer": "", "reference": reference}


def start(pool, seed=0, question="q"):
  started = pool.reset(problem(question), seed).result(WAIT_S)
  assert isinstance(started, Started)
  return started.dialogue


def ask(pool, dialogue, text):
  return pool.step(dialogue, text).result(WAIT_S)


def test_output_of_an_environment_is_kept_nowhere(pool):
  assert os.readlink(f"/proc/{pool.worker_pids()[0]}/fd/1") == os.devnull
  assert os.readlink(f"/proc/{pool.worker_pids()[0]}/fd/2") == os.devnull


def test_messages_of_reset(pool):
  messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "seed 3"}]
  assert pool.reset(problem("messages"), 3).result(WAIT_S).messages == messages
  assert pool.reset(problem(), 3).result(WAIT_S).messages is None
  failure = pool.reset(problem("bad messages"), 3).result(WAIT_S)
  assert failure.kind == "failed" and "expected a role, 'system' or 'user'" in failure.detail


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("return bytes", Turn("a\ufffd\ufffdb")),
    ("return surrogates", Turn("a\ufffdb😀")),
    ("return tool", Turn("a", role="tool")),
    ("return done", Turn("", True, 0.5)),
    ("return judge", Turn(done=True)),
    ("print", Turn("read ''")),
    ("modules", Turn("[]")),
    ("variable GREETING", Turn("hello")),
  ],
)
def test_turns(pool, text, expected):
  assert ask(pool, start(pool), text) == expected


@pytest.mark.parametrize(
  ("text", "kind", "detail"),
  [
    ("return none", "failed", "step returned None, expected a Turn"),
    ("return text", "failed", "step returned 'a text', expected a Turn"),
    ("return nan", "refused", r"score = nan, expected a number within ±1e\+30"),
    ("return large", "refused", "score = 1000.*, expected a number"),
    ("return score text", "failed", "score = '1', expected a number or None"),
    ("return int", "failed", "a reply of type int, expected text"),
    ("return role", "failed", "role = 'assistant', expected one of"),
    ("return flag", "failed", "done = 1, expected True or False"),
    ("raise a fault", "failed", r"ValueError: a fault \(.*faulty_environments.py, line"),
    ("exit 3", "failed", "process ended: exit status 3"),
    ("signal 6", "memory", "signal SIGABRT"),
    ("eat", "memory", "MemoryError"),
    ("refuse that is rude", "refused", "^that is rude$"),
    ("late by a lot", "timeout", "^by a lot$"),
    ("wait 0.2 60", "timeout", "it waited longer than the limit of the wait"),
    ("hang", "timeout", "it took longer than 1 s"),
  ],
)
def test_a_failure_ends_its_dialogue_and_no_other(pool, text, kind, detail):
  innocent = start(pool, seed=5)
  assert ask(pool, innocent, "a") == Turn("5 q|a")
  guilty = start(pool)
  assert ask(pool, guilty, "b") == Turn("0 q|b")
  failure = ask(pool, guilty, text)
  assert isinstance(failure, Failure) and failure.kind == kind
  assert re.search(detail, failure.detail), failure.detail
  with pytest.raises(ValueError, match="has ended"):
    ask(pool, guilty, "a")
  assert ask(pool, innocent, "c") == Turn("5 q|a|c")


def test_the_text_is_not_to_blame_for_a_repetition_that_fails(pool, tmp_path):
  innocent = start(pool, question=f"once {tmp_path / 'begun'}")
  assert isinstance(ask(pool, innocent, "a"), Turn)
  ask(pool, start(pool), "exit 3")  # ends the worker of both
  failure = ask(pool, innocent, "c")
  assert isinstance(failure, Failure) and failure.kind == "failed"


def test_long_replies_are_cut_and_say_so(pool):
  half = MAX_REPLY // 2
  assert ask(pool, start(pool), f"long {half}") == Turn("é" * half)
  reply = ask(pool, start(pool), f"long {3 * half}").reply
  assert len(reply.encode()) in (MAX_REPLY - 1, MAX_REPLY)
  assert reply.endswith(
    f"[Cut: this text had {3 * MAX_REPLY} bytes, at most {MAX_REPLY} are kept.]"
  )
  assert cut("a" * 99 + "é", 100).startswith("a" * 30) and "had 101 bytes" in cut("a" * 101, 100)


def test_steps_under_way_when_a_neighbour_kills_the_worker(pool):
  dialogues = [start(pool, seed) for seed in range(20)]
  for dialogue in dialogues:
    ask(pool, dialogue, "a")
  futures = [
    pool.step(dialogue, "exit 1" if seed == 7 else "wait 60 0.3" if seed == 3 else "b")
    for seed, dialogue in enumerate(dialogues)
  ]
  turns = [future.result(WAIT_S) for future in futures]
  assert turns.pop(7).kind == "failed"
  texts = {3: "wait 60 0.3"}
  assert turns == [Turn(f"{n} q|a|{texts.get(n, 'b')}") for n in range(20) if n != 7]


@pytest.mark.slow
def test_waiting_dialogues_do_not_hold_up_others(_environments_importable):
  # A limit of a step that a busy machine keeps to, also while forty threads begin.
  with EnvironmentPool(FAULTY, deadline_s=2.0, memory_mib=1024) as pool:
    waiting = [pool.step(start(pool), "wait 60 3.0") for _ in range(40)]  # more than threads
    started = time.monotonic()
    dialogue = start(pool)
    assert ask(pool, dialogue, "a") == Turn("0 q|a")
    assert not all(future.done() for future in waiting)
    # Above the limit of a step, which does not count the time of waiting.
    # Nor do threads take the address space that the pool's memory_mib allows.
    assert {future.result(WAIT_S) for future in waiting} == {Turn("0 q|wait 60 3.0")}
    assert time.monotonic() - started < 30


def test_misuse_is_an_exception_of_the_future_or_the_call(pool):
  dialogue = start(pool)
  slow = pool.step(dialogue, "sleep 0.2")
  with pytest.raises(ValueError, match="has a step under way"):
    ask(pool, dialogue, "a")
  assert slow.result(WAIT_S) == Turn("0 q|sleep 0.2")
  with pytest.raises(TypeError, match="JSON-serializable"):
    pool.reset(problem(answer=object()), 0)
  with pytest.raises(TypeError, match="text = b'a' has type bytes, expected str"):
    pool.step(dialogue, b"a")
  with pytest.raises(ValueError, match="seed = 'a'"):
    pool.reset(problem(), "a")


def test_an_environment_is_closed_once_however_its_dialogue_ends(tmp_path):
  log = tmp_path / "log"
  log.touch()
  with EnvironmentPool(f"faulty_environments:closing(log={str(log)!r})", deadline_s=5.0) as pool:
    dialogues = [start(pool, seed) for seed in range(4)]
    assert ask(pool, dialogues[0], "done").done
    assert ask(pool, dialogues[1], "raise").kind == "failed"
    pool.close_dialogue(dialogues[2])
    for dialogue in dialogues[:3]:
      pool.close_dialogue(dialogue)
    assert ask(pool, dialogues[3], "a") == Turn("a", role="tool")
    assert log.read_text().split() == ["0", "1", "2"]


def test_close_cannot_take_away_a_result_that_was_reached():
  with EnvironmentPool("faulty_environments:badly_closing", deadline_s=0.5) as pool:
    other = start(pool)
    assert ask(pool, other, "a 1") == Turn("a 1")
    for act in ("hang", "raise", "signal 9"):
      assert ask(pool, start(pool), f"{act} done") == Turn(done=True, score=1.0)
      assert ask(pool, start(pool), f"{act} refuse") == Failure("refused", "no")
    assert ask(pool, other, "a 2") == Turn("a 2")  # repeated where its process was replaced


def test_roles_of_replies_are_declared(pool):
  assert pool.roles == ("user", "tool")
  assert (declared_roles(python()), declared_roles(guess())) == (["tool"], ["user"])
  name = "faulty_environments:closing(roles=('user',))"
  with EnvironmentPool(name, deadline_s=5.0) as undeclared:
    assert undeclared.roles == ("user",)
    failure = ask(undeclared, start(undeclared), "a")
    assert failure.kind == "failed" and "roles = ('tool',)" in failure.detail


def test_a_closed_dialogue_has_ended(pool):
  dialogue = start(pool)
  pending = pool.step(dialogue, "sleep 0.1")
  pool.close_dialogue(dialogue)
  pool.close_dialogue(dialogue)
  with pytest.raises(RuntimeError, match="was closed"):
    pending.result(WAIT_S)
  with pytest.raises(ValueError, match="has ended"):
    ask(pool, dialogue, "a")
  assert ask(pool, start(pool), "a") == Turn("0 q|a")


def _play(pool, seed):
  """Four turns of one dialogue, of which some fail."""
  texts = [["a", "chess", "b", "c"][(seed + turn) % 4] + str(seed) for turn in range(4)]
  if seed % 50 == 9:
    texts[2] = "exit 1"
  dialogue = start(pool, seed)
  turns = []
  for text in texts:
    turns.append(ask(pool, dialogue, text))
    if isinstance(turns[-1], Failure):
      break
  return turns


def test_many_dialogues_at_once_are_as_one_by_one(pool):
  with EnvironmentPool(FAULTY, processes=2, deadline_s=20.0) as two:
    replies = {}

    def play(seeds):
      for seed in seeds:
        replies[seed] = _play(two, seed)

    threads = [threading.Thread(target=play, args=(range(n, 30, 10),)) for n in range(10)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(WAIT_S)
  assert replies == {seed: _play(pool, seed) for seed in range(30)}


# --- grades ---------------------------------------------------------------------------------------


class _Grade:
  outcome = "wrong"
  score = 0.25

  def __init__(self, feedback):
    self.feedback = feedback
    self.detail = "not for a policy"


class _Grader:
  """Grades when told to, as another pool would."""

  def __init__(self):
    self.asked = []

  def submit(self, texts, references):
    future = Future()
    self.asked.append((texts, references, future))
    return future

  def answer(self, index, note=""):
    wait_until(lambda: len(self.asked) > index)
    ((text,), (reference,), future) = self.asked[index]
    if text == "crash":
      future.set_exception(OSError("no grader"))
    else:
      future.set_result([_Grade(f"{text} {reference['gold']}{note}")])


def test_grades_come_from_the_parent_and_are_asked_once(tmp_path):
  grader = _Grader()
  log = tmp_path / "log"
  name = f"faulty_environments:graded(log={str(log)!r})"
  with EnvironmentPool(name, deadline_s=1.0, grade=grader.submit) as pool:
    first, second, third = (
      pool.reset(problem(gold=gold), 0).result(WAIT_S).dialogue for gold in ("x", "y", "z")
    )
    graded = pool.step(first, "grade t")
    time.sleep(1.2)  # more than a step's limit
    assert ask(pool, second, "a") == Turn("0 q|a")
    grader.answer(0)
    assert graded.result(WAIT_S) == Turn('["wrong", 0.25, "t x"]')
    failing = pool.step(second, "grade crash")
    grader.answer(1)
    assert failing.result(WAIT_S).kind == "failed"
    assert "OSError: no grader" in failing.result().detail
    under_way = pool.step(third, "grade u")
    wait_until(lambda: len(grader.asked) == 3)
    os.kill(pool.worker_pids()[0], signal.SIGKILL)
    # Both dialogues are repeated: the recorded grade is not asked for again.
    assert ask(pool, first, "b") == Turn("0 q|grade t|b")
    wait_until(lambda: len(grader.asked) == 4)
    grader.answer(2, ", too late, for a worker that has ended")
    grader.answer(3)
    assert under_way.result(WAIT_S) == Turn('["wrong", 0.25, "u z"]')
    assert ask(pool, third, "c") == Turn("0 q|grade u|c")
  assert len(grader.asked) == 4 and len(log.read_text().split()) == 5


# --- start and end --------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("environment", "message"),
  [
    ("gues", "environment = 'gues': 'gues' is unknown; did you mean 'guess'?"),
    ("retry(grade=1)", "grade of retry comes from the run; leave it out"),
  ],
)
def test_what_is_refused_before_any_worker_starts(environment, message):
  with pytest.raises(ValueError, match=re.escape(message)) as caught:
    EnvironmentPool(environment, deadline_s=1.0)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("environment", "message"),
  [
    (
      "faulty_environments:graded",
      "graded needs the argument `grade`, but there is no grader; pass `grade` to",
    ),
    ("faulty_environments:without_reset", "has no reset(problem, seed)"),
    ("faulty_environments:closing(roles='tool')", "has roles = 'tool'"),
  ],
)
def test_what_is_no_environment_is_refused(environment, message):
  with pytest.raises(ValueError, match=re.escape(message)) as caught:
    make_environment("environment", environment)
  assert "\n" not in str(caught.value)


def test_an_environment_that_cannot_start_says_why():
  with pytest.raises(EnvironmentStartError, match="low = 3 is above high = 2") as caught:
    EnvironmentPool("guess(low=3, high=2)", deadline_s=1.0)
  assert "\n" not in str(caught.value)


def test_a_start_that_takes_too_long():
  started = time.monotonic()
  with pytest.raises(EnvironmentStartError, match=r"startup_timeout_s = 0\.5"):
    EnvironmentPool("faulty_environments:stuck", deadline_s=1.0, startup_timeout_s=0.5)
  assert time.monotonic() - started < 30


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"processes": 0}, "processes = 0"),
    ({"variables": {"A=": "1"}}, "variables has 'A='"),
  ],
)
def test_wrong_arguments(arguments, message):
  with pytest.raises(ValueError, match=message):
    EnvironmentPool(FAULTY, **{"deadline_s": 1.0, **arguments})


def test_closing_takes_no_time_and_leaves_nothing():
  marker = "61.7331"  # a sleep that no one else is sleeping
  pool = EnvironmentPool(FAULTY, processes=2, deadline_s=60.0)
  pids = pool.worker_pids()
  first, second = start(pool), start(pool)
  futures = [pool.step(first, f"child {marker}"), pool.step(second, "hang")]
  pattern = ["pgrep", "-f", f"^sleep {marker}"]
  wait_until(lambda: not subprocess.run(pattern, capture_output=True).returncode)
  started = time.monotonic()
  pool.close()
  pool.close()
  assert time.monotonic() - started < 10
  for future in futures:
    with pytest.raises(RuntimeError, match="pool is closed"):
      future.result(0)
  with pytest.raises(RuntimeError, match="pool is closed"):
    pool.reset(problem(), 0)
  wait_until(lambda: subprocess.run(pattern, capture_output=True).returncode)
  for pid in pids:  # not even zombies
    with pytest.raises(ProcessLookupError):
      os.kill(pid, 0)


def test_what_environments_have_started_ends_with_their_worker():
  """Also in a session of its own, from a process that has ended, or without our variables."""
  seconds = {"apart": "62.7311", "twice": "62.7312", "bare": "62.7313", "crash": "62.7314"}
  pattern = ["pgrep", "-f", r"^sleep 62\.731"]
  count = lambda: len(subprocess.run(pattern, capture_output=True).stdout.split())
  with EnvironmentPool(FAULTY, deadline_s=60.0) as pool:
    crashed = pool.step(start(pool), f"leave {seconds['crash']} crash").result(WAIT_S)
    assert isinstance(crashed, Failure)
    wait_until(lambda: not count())
    for how in ("apart", "twice", "bare"):
      assert isinstance(ask(pool, start(pool), f"leave {seconds[how]} {how}"), Turn)
    wait_until(lambda: count() == 3)
  wait_until(lambda: not count())


def test_a_callback_may_close_the_pool():
  pool = EnvironmentPool(FAULTY, deadline_s=5.0)
  future = pool.step(start(pool), "a")
  future.add_done_callback(lambda _: pool.close())
  assert future.result(WAIT_S) == Turn("0 q|a")
  wait_until(lambda: not running(set(pool.worker_pids())))


@pytest.mark.parametrize("text", ["leave 60.1 apart", "spin"])
def test_workers_end_with_a_killed_parent(text):
  code = (
    "import time\n"
    "from rlvr_jax.environments.dialogues import EnvironmentPool\n"
    f"pool = EnvironmentPool({FAULTY!r}, deadline_s=1.0)\n"
    "problem = {'question': '', 'answer': '', 'reference': {}}\n"
    f"pool.step(pool.reset(problem, 0).result(60).dialogue, {text!r})\n"
    "print('under way', flush=True)\n"
    "time.sleep(60)\n"
  )
  path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
  parent = subprocess.Popen(
    [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
  )
  assert parent.stdout.readline() == b"under way\n"
  time.sleep(0.3)
  children = descendants(parent.pid)
  parent.kill()
  parent.wait()
  parent.stdout.close()
  assert children
  wait_until(lambda: not running(children))
