"""The pool of workers with a program that knows neither graders nor environments."""

import os
import pathlib
import queue
import signal
import subprocess
import threading
import time
from concurrent.futures import Future

import pytest
from codejudge.processes import running, wait_until

from rlvr_jax.workers import worker
from rlvr_jax.workers.pool import Failure, Pool, encode
from rlvr_jax.workers.process import Clock, Service, Session, StartError

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _programs_importable(monkeypatch):
  monkeypatch.syspath_prepend(pathlib.Path(__file__).parent)


def _pool(processes=1, *, program="toy_programs:Toy", limit_s=5.0, answer=None, **arguments):
  service = Service(
    "the toy", program, arguments, limit_s=limit_s, startup_timeout_s=60.0, memory_mib=None,
    variables={}, answer=answer,
  )  # fmt: skip
  return Pool(service, processes)


def _ask(pool, session, *request):
  return pool.submit(session, encode(request)).result(WAIT_S)


def _kill(pool):
  """Kills the first worker, and waits for its successor."""
  pid = pool.worker_pids()[0]
  os.killpg(pid, signal.SIGKILL)
  wait_until(lambda: not running({pid}) and pid not in pool.worker_pids())


def test_a_session_goes_on_in_another_process():
  with _pool() as pool:
    assert pool.ready == "toy"
    first, second = Session(), Session()
    assert [_ask(pool, first, "add", 1), _ask(pool, second, "add", 10)] == [1, 10]
    assert _ask(pool, first, "add", 2) == 3
    _kill(pool)
    assert [_ask(pool, first, "add", 4), _ask(pool, second, "add", 20)] == [7, 30]
    assert _ask(pool, Session(), "exit", 3) == Failure("failed", "its process ended: exit status 3")
    assert _ask(pool, first, "add", 8) == 15


def test_a_session_that_is_repeated_otherwise_has_failed():
  with _pool() as pool:
    session = Session()
    _ask(pool, session, "chance", 0)
    _kill(pool)
    kind, detail = _ask(pool, session, "add", 1)
    assert kind == "failed" and "not deterministic" in detail and "turn 0" in detail


def test_a_failure_ends_its_session():
  with _pool(limit_s=0.5) as pool:
    for request, failure in {
      ("enough", "of it"): Failure("enough", "of it"),
      ("hang", 0): Failure("timeout", "it took longer than 0.5 s"),
    }.items():
      session = Session()
      assert _ask(pool, session, *request) == failure
      with pytest.raises(ValueError, match="has ended"):
        _ask(pool, session, "add", 1)


def test_a_broken_protocol_costs_its_request():
  with _pool() as pool:
    other = Session()
    assert _ask(pool, other, "add", 1) == 1
    for number, line in enumerate(["junk", '{"event": "result", "session": 1000000}', "{}"], 2):
      assert _ask(pool, Session(), "forge", line).kind == "failed", line
      assert _ask(pool, other, "add", 1) == number, line


def test_a_broken_line_costs_its_request_however_late_it_is_read(tmp_path):
  """While the pool's thread is held up, all that the worker sends comes together."""
  log = tmp_path / "log"
  with _pool(log=str(log)) as pool:
    for request in range(2):
      slow = pool.submit(Session(), encode(("add", request)))
      slow.add_done_callback(lambda _: time.sleep(0.5))
    assert pool.submit(Session(), encode(("forge", "junk"))).result(WAIT_S).kind == "failed"
  assert log.read_text().split().count("forged") == 1


def test_sessions_are_closed_once(tmp_path):
  log = tmp_path / "log"
  with _pool(log=str(log)) as pool:
    ended, failed, closed, last = (Session() for _ in range(4))
    for number, session in enumerate((ended, failed, closed), 1):
      assert _ask(pool, session, "add", number) == number
    assert _ask(pool, ended, "end", 0) == 1
    assert _ask(pool, failed, "enough", "").kind == "enough"
    pool.close_session(closed)
    for session in (ended, failed, closed):
      pool.close_session(session)
    assert _ask(pool, last, "add", 0) == 0
    assert log.read_text().split() == ["1", "2", "3"]


def test_workers_have_as_many_sessions():
  with _pool(2) as pool:
    pids = [_ask(pool, Session(), "chance", 0) for _ in range(6)]
    assert sorted(map(pids.count, pool.worker_pids())) == [3, 3]


def test_a_wait_holds_no_other_session_up():
  with _pool(limit_s=0.5) as pool:
    waits = [pool.submit(Session(), encode(("wait", 1.0))) for _ in range(5)]
    assert _ask(pool, Session(), "add", 1) == 1
    assert not any(wait.done() for wait in waits)
    assert [wait.result(WAIT_S) for wait in waits] == [0] * 5  # which is longer than the limit


def test_a_question_is_asked_once():
  asked = []

  def answer(context, question):
    asked.append((context, question))
    future = Future()
    future.set_result(f"{context} {question}")
    return future

  with _pool(answer=answer) as pool:
    session = Session("c")
    assert _ask(pool, session, "ask", "q") == "c q"
    _kill(pool)
    assert _ask(pool, session, "ask", "q") == "c q"
  assert asked == [("c", "q")]
  with _pool() as pool:
    kind, detail = _ask(pool, Session(), "ask", "q")
    assert kind == "failed" and "nobody answers" in detail


def test_workers_that_end_again_and_again_end_the_pool():
  with _pool() as pool:
    for _ in range(2):
      _kill(pool)
      wait_until(lambda: pool._crew.workers[0].is_ready)
    os.killpg(pool.worker_pids()[0], signal.SIGKILL)
    wait_until(lambda: pool._failure is not None)
    with pytest.raises(StartError, match="SIGKILL; several workers in a row"):
      _ask(pool, Session(), "add", 1)


def test_a_program_that_cannot_be_made():
  with pytest.raises(StartError, match="the toy did not start: OSError: out of order"):
    _pool(program="toy_programs:broken")


def test_a_clock_counts_what_each_session_uses():
  clock = Clock(10.0)
  clock.update("running", 1, 0, 100.0)
  assert clock.next_limit() == (110.0, 1) and clock.slow_at() == 105.0
  clock.update("waiting", 1, 50.0, 104.0)
  assert clock.next_limit() == (154.0, 1) and clock.num_waiting == 1
  clock.update("running", 2, 0, 104.0)
  clock.update("waited", 1, 0, 106.0)
  clock.update("result", 2, 0, 107.0)
  assert clock.next_limit()[1] is None and clock.running is None  # it is ready, and has no limit
  clock.update("running", 1, 0, 120.0)
  assert clock.next_limit() == (126.0, 1) and clock.slow_at() == 121.0


def test_a_call_of_the_first_request_is_made_in_the_main_thread():
  """However soon it comes: a grader that sets a handler of signals fails in another thread."""
  main, found = worker._MainThread(), queue.SimpleQueue()
  call = lambda: found.put(main.call(threading.get_ident))

  def begin():
    requests = threading.Thread(target=call, daemon=True)
    requests.start()
    requests.join(timeout=0.2)  # it has called, and waits

  server = threading.Thread(target=main.serve, args=(begin,), daemon=True)
  server.start()
  assert found.get(timeout=20) == server.ident


# --- processes that belong to a worker ------------------------------------------------------------


def test_a_process_that_is_just_being_executed_is_known():
  """Its new memory has no variables yet; other processes without variables are not taken for it."""
  read = lambda pid: (
    pathlib.Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split(),
    pathlib.Path(f"/proc/{pid}/environ").read_bytes(),
  )
  stat, variables = read(os.getpid())
  assert variables and not worker.is_being_executed(stat, variables)
  assert worker.is_being_executed(stat, b"")  # executed between the two files
  assert worker.is_being_executed([*stat[:47], b"0", b"0", *stat[49:]], b"")
  with subprocess.Popen(["/bin/sleep", "60"], env={}) as bare:
    wait_until(lambda: not worker.is_being_executed(*read(bare.pid)))
    bare.kill()
  assert not worker.is_being_executed([*stat[:20], b"0", *stat[21:]], b"")  # a kernel's thread
