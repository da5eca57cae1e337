"""Grading in worker processes, and graders that do their worst to it."""

import os
import pathlib
import re
import signal
import subprocess
import time

import pytest
from codejudge.processes import descendants, running, wait_until

from rlvr_jax.rewards import GraderPool, GraderStartError, Outcome
from rlvr_jax.workers.pool import default_workers

FAULTY = "faulty_graders:faulty"
HERE = pathlib.Path(__file__).parent


@pytest.fixture(autouse=True, scope="module")
def _graders_importable():
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(HERE)
    yield


def _pool(grader=FAULTY, *, timeout_s=0.4, **kwargs):
  return GraderPool(grader, timeout_s=timeout_s, **kwargs)


@pytest.fixture(name="pool", scope="module")
def _patient_pool():
  """One worker that grades whatever harms no other item."""
  with _pool(timeout_s=5) as pool:
    yield pool


@pytest.fixture(name="gsm8k", scope="module")
def _gsm8k_pool():
  with GraderPool("gsm8k") as pool:
    yield pool


def _outcomes(grades):
  return [grade.outcome.value for grade in grades]


def _exists(pid):
  """Whether a process is there, as a zombie at least."""
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True


def test_a_timeout_costs_its_item_and_kills_the_worker_with_its_children():
  marker = "61.4142"  # a sleep that no one else is sleeping
  quick = ["sleep 0.1"] * 8  # longer than the limit together, which is per item
  completions = [*quick, "spin", "ok b", f"child {marker}", "ok c"]
  with _pool(timeout_s=0.4) as pool:
    (before,) = pool.worker_pids()
    started = time.monotonic()
    grades = pool.grade(completions, [{}] * len(completions))
    assert _outcomes(grades) == ["correct"] * 8 + ["timeout", "correct", "timeout", "correct"]
    assert [grade.detail for grade in grades[-3::2]] == ["b", "c"]
    assert 1.6 <= time.monotonic() - started < 50  # the shortest fault would take 60
    assert pool.worker_pids() != [before]
    assert not _exists(before)
    pattern = f"^sleep {marker}"
    wait_until(lambda: subprocess.run(["pgrep", "-f", pattern], capture_output=True).returncode)


def test_fault_inside_a_grader_costs_no_worker(pool):
  faults = [
    ("raise boom", {}, "ValueError: boom"),
    ("sys.exit 0", {}, "SystemExit: 0"),
    ("garbage", {"return": None}, "returned None"),
    ("garbage", {"return": ["correct", 1.0]}, "expected a Grade or a number"),
    ("garbage", {"return": float("nan")}, "score nan"),
    ("garbage", {"return": 1e39}, "score 1e+39"),
    ("garbage", {"return": -(10**400)}, "within ±1e+30"),
    ("garbage", {}, "KeyError: 'return'"),
    ("no-memory", {}, "MemoryError"),  # without a limit it is the machine that has none
  ]
  before = pool.worker_pids()
  for completion, reference, detail in faults:
    grades = pool.grade([completion, "ok"], [reference, {}])
    assert _outcomes(grades) == ["crashed", "correct"]
    assert detail in grades[0].detail
  assert pool.worker_pids() == before


def test_long_details_are_cut(pool):
  (grade,) = pool.grade(["detail"], [{}])
  assert (grade.outcome, grade.score, len(grade.detail)) == (Outcome.WRONG, 0.5, 1000)


def test_answers_come_back_and_long_ones_stay_different(gsm8k):
  long = "9" * 5000
  answers = ["72", long, long + "1"]
  grades = gsm8k.grade(answers, [{"answer": long}] * 3)
  assert _outcomes(grades) == ["wrong", "correct", "wrong"]
  assert grades[0].answer == "72"
  assert grades[1].answer[:100] == grades[2].answer[:100] == "9" * 100
  assert grades[1].answer != grades[2].answer
  assert max(len(grade.answer) for grade in grades) < 1000


def test_a_plain_number_is_a_score(pool):
  scores = [True, False, 1, 0.75, -2.5]
  grades = pool.grade(["score"] * 5, [{"return": score} for score in scores])
  assert [grade.score for grade in grades] == [1.0, 0.0, 1.0, 0.75, -2.5]
  assert _outcomes(grades) == ["correct", "wrong", "correct", "wrong", "wrong"]


def test_environment_reaches_the_workers_also_new_ones():
  completions = ["environment OWN_SWITCH", "exit 1", "environment OWN_SWITCH"]
  with _pool(timeout_s=5, environment={"OWN_SWITCH": "on"}) as pool:
    grades = pool.grade(completions, [{}] * 3)
    (hash_seed,) = pool.grade(["environment PYTHONHASHSEED"], [{}])
  assert [grade.detail for grade in grades[::2]] == ["on", "on"]
  assert hash_seed.detail == "0"
  assert "OWN_SWITCH" not in os.environ


def test_what_a_text_can_cause_is_not_a_crash():
  """Else a policy could learn to have its worst rollouts left out."""
  texts = [
    ("eat", "wrong", "MemoryError"),
    ("recursion", "wrong", "recursion limit exceeded"),
    # A full stack of C; an allocation in C that fails, as in GMP.
    (f"signal {signal.SIGSEGV.value}", "wrong", "signal SIGSEGV"),
    (f"signal {signal.SIGABRT.value}", "wrong", "signal SIGABRT"),
    ("hang", "timeout", "it took longer than 1 s"),
    # The kernel without memory, or a person; an end of its own; what is written into the replies.
    (f"signal {signal.SIGKILL.value}", "crashed", "signal SIGKILL"),
    (f"signal {signal.SIGTERM.value}", "crashed", "signal SIGTERM"),
    ("exit 3", "crashed", "exit status 3"),
    ("flood", "crashed", "line of over|not JSON"),
  ]
  with _pool(timeout_s=1, memory_mib=2048) as pool:
    for completion, outcome, detail in texts:
      grades = pool.grade(["ok", completion, "ok"], [{}] * 3)
      assert _outcomes(grades) == ["correct", outcome, "correct"], completion
      assert re.search(detail, grades[1].detail) and grades[1].score == 0.0, grades[1]


def test_a_sleeper_gives_back_the_items_behind_it():
  completions = ["nap 0.3", *(f"ok {i}" for i in range(40))] * 3
  graded = []
  with _pool(timeout_s=60, on_grade=lambda: graded.append(1)) as pool:
    for _ in range(2):  # those that slept go on grading
      grades = pool.grade(completions, [{}] * len(completions))
      assert [grade.detail for grade in grades] == [text.split()[1] for text in completions]
  assert len(graded) == 2 * len(completions)


def test_a_grader_may_set_handlers_of_signals_while_a_program_sleeps():
  tests = {"style": "asserts", "tests": ["assert f() == 1"], "time_limit_s": 60.0}
  program = "import time\ntime.sleep(60)\ndef f(): return 1"
  sleeping = {"grader": "code", "reference": tests}
  with GraderPool("by_reference", preload=["code"], timeout_s=30) as pool:
    sleeper = pool.submit([program], [sleeping])
    alarm = {"grader": FAULTY, "reference": {}}
    assert _outcomes(pool.grade(["alarm"] * 3, [alarm] * 3)) == ["correct"] * 3
    assert not sleeper.done()


def test_worker_has_no_jax_and_one_thread(pool):
  modules, threads = pool.grade(["modules", "environment OMP_NUM_THREADS"], [{}] * 2)
  assert (modules.detail, threads.detail) == ("[]", "1")


def test_results_are_in_the_order_of_the_inputs():
  delays = [0.1, 0.0, 0.05, 0.0, 0.0, 0.02] * 3
  with _pool(num_workers=2, timeout_s=5) as pool:
    first = pool.submit([f"sleep {delay}" for delay in delays], [{}] * 18)
    second = pool.submit([f"ok {i}" for i in range(200)], [{}] * 200)
    assert not first.done()  # submit does not wait
    assert [grade.detail for grade in second.result(10)] == [str(i) for i in range(200)]
    assert [grade.detail for grade in first.result(10)] == [str(delay) for delay in delays]
    assert pool.submit([], []).result(0) == []


@pytest.mark.slow
def test_a_hanging_workers_replacement_starts_before_the_limit(tmp_path, monkeypatch):
  """So that it is ready when the limit is over, or nearly; and it is there for the next time."""
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "telling_grader.py").write_text(
    "import os, time\nfrom rlvr_jax.rewards import Grade, Outcome\n"
    "def grade(completion, reference):\n"
    "  time.sleep(float(completion))\n"
    "  ticks = int(open('/proc/self/stat').read().rpartition(')')[2].split()[19])\n"
    "  return Grade(Outcome.CORRECT, 1.0, str(ticks / os.sysconf('SC_CLK_TCK')))\n"
  )
  others = descendants(os.getpid())  # of other tests in this process
  with GraderPool("telling_grader:grade", timeout_s=4) as pool:
    began = time.clock_gettime(time.CLOCK_BOOTTIME)  # of which processes tell their start
    hung, after, slow = pool.grade(["60", "0", "2.5"], [{}] * 3)
    assert (hung.outcome, after.outcome, slow.outcome) == ("timeout", "correct", "correct")
    assert began + 1.9 <= float(after.detail) < began + 4
    assert slow.detail == after.detail  # half the limit alone costs no worker
    workers = pool.worker_pids()
    both = descendants(os.getpid()) - others
    assert len(both) == 2  # the replacement of the slow one stays
    os.killpg(*workers, signal.SIGKILL)
    wait_until(lambda: not running(set(workers)))
    (next_one,) = pool.grade(["0"], [{}])
    assert began + 5.9 < float(next_one.detail) and set(pool.worker_pids()) < both
  wait_until(lambda: not running(both))


def test_a_replacement_that_died_is_no_replacement():
  with _pool(timeout_s=3) as pool:
    before = descendants(os.getpid())
    assert _outcomes(pool.grade(["sleep 1.7"], [{}])) == ["correct"]
    (replacement,) = descendants(os.getpid()) - before
    os.killpg(replacement, signal.SIGKILL)
    wait_until(lambda: not running({replacement}))
    assert _outcomes(pool.grade(["exit 3", "ok"], [{}] * 2)) == ["crashed", "correct"]
    assert replacement not in pool.worker_pids()


def test_large_completions_do_not_block_on_a_stuck_worker():
  text = "ok " + "z" * 200_000
  with _pool(timeout_s=1) as pool:
    grades = pool.grade(["hang", text, text, text], [{}] * 4)
  assert _outcomes(grades) == ["timeout", "correct", "correct", "correct"]


@pytest.mark.parametrize(
  ("grader", "settings", "told"),
  [
    # More memory where it may be that; no word of modules where the module was found.
    ("gsm8k", dict(memory_mib=1), "MemoryError: .*raise memory_mib"),
    ("gsm8k", dict(startup_timeout_s=0.01), "startup_timeout_s = 0.01 s"),
    ("faulty_graders:dead_at_start", dict(memory_mib=2048), "(?s)status 7 last words .*2048 MiB"),
    (
      "code(reward=1)",
      dict(memory_mib=2048),
      r"code\(reward=1\)' did not start: reward is 1, allowed: \['all', 'fraction'\]$",
    ),
    ("faulty_graders:untestable", {}, r"no licence .*faulty_graders.py, line \d+\)$"),
  ],
)
def test_a_start_error_has_the_remedy_of_its_cause(grader, settings, told):
  with pytest.raises(GraderStartError, match=told):
    GraderPool(grader, **settings)


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"grader": "faulty_graders.faulty"}, "my_module:function"),
    ({"num_workers": 0}, "num_workers = 0"),
    ({"timeout_s": 0}, "timeout_s = 0"),
    ({"startup_timeout_s": float("inf")}, "startup_timeout_s = inf"),
    ({"memory_mib": 0}, "memory_mib = 0"),
    ({"preload": ["no path"]}, "grader = 'no path'"),
    ({"environment": {"A": 1}}, "environment has 'A': 1"),
    ({"environment": {"A=B": "1"}}, "environment has 'A=B'"),
  ],
)
def test_bad_arguments(kwargs, message):
  with pytest.raises(ValueError, match=message):
    GraderPool(**{"grader": FAULTY, **kwargs})


@pytest.mark.parametrize(("cores", "workers"), [({3}, 1), (range(64), 32)])
def test_by_default_there_is_a_worker_for_each_core_at_most_32(monkeypatch, cores, workers):
  monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
  assert default_workers() == workers


def test_bad_items(pool):
  with pytest.raises(ValueError, match="2 completions cannot be graded with 1 references; give"):
    pool.submit(["ok", "ok"], [{}])
  with pytest.raises(TypeError, match="JSON-serializable"):
    pool.submit(["ok"], [{"answer": {1, 2}}])
  assert _outcomes(pool.grade(["ok"], [{}])) == ["correct"]


def test_a_grader_that_can_no_longer_start_fails_the_future(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  module = tmp_path / "fragile_grader.py"
  module.write_text("import os\ndef grade(completion, reference):\n  os._exit(1)\n")
  with GraderPool("fragile_grader:grade") as pool:
    module.unlink()
    with pytest.raises(GraderStartError, match="fragile_grader"):
      pool.submit(["a", "b"], [{}] * 2).result(10)


def test_a_cheap_batch_takes_milliseconds(gsm8k):
  """256 items, a step of the quickstart: of this process's own time, whatever else is running.

  And no wait for each item, of which even the shortest would add up to seconds.
  """
  own, waited = [], []
  for _ in range(5):
    began = time.process_time(), time.perf_counter()
    gsm8k.grade(["1 + 1 = 2\n#### 2"] * 256, [{"answer": "2"}] * 256)
    own.append(time.process_time() - began[0])
    waited.append(time.perf_counter() - began[1])
  assert min(own) < 0.05 and min(waited) < 1.0, (own, waited)
