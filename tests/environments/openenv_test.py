"""Dialogues with servers of OpenEnv: its own, and ones that answer nonsense."""

import asyncio
import contextlib
import importlib.util
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from codejudge.processes import wait_until
from train import tiny
from train.dialogues_test import config

from rlvr_jax.commands.train import train
from rlvr_jax.environments import Refused, Turn
from rlvr_jax.environments.base import declared_roles
from rlvr_jax.environments.by_name import make_environment, parse_environment
from rlvr_jax.environments.dialogues import EnvironmentPool, EnvironmentStartError, Started
from rlvr_jax.environments.openenv import ServerError, fill_in, make_action
from rlvr_jax.train.setup.build import build
from rlvr_jax.workers.pool import Failure

web = pytest.importorskip("aiohttp.web", reason='needs aiohttp: pip install "rlvr_jax[openenv]"')
HERE = pathlib.Path(__file__).parent
WAIT_S = 60.0
has_server = pytest.mark.skipif(
  importlib.util.find_spec("openenv") is None,
  reason="the server of openenv is not installed: make test-openenv",
)


def needs_server(test):
  """Marks a test that starts the server of openenv, which takes seconds."""
  return pytest.mark.slow(has_server(test))


def name(url, **options):
  options = {"action": {"message": "{text}"}, "reply": "{said}", **options}
  return f"openenv(url={url!r}, {', '.join(f'{k}={v!r}' for k, v in options.items())})"


def start(pool, seed=0, **reference):
  problem = {"question": "q", "answer": "", "reference": reference}
  started = pool.reset(problem, seed).result(WAIT_S)
  assert isinstance(started, Started), started
  return started


def ask(pool, dialogue, text):
  return pool.step(dialogue, text).result(WAIT_S)


PROBLEM = {"question": "q", "answer": "", "reference": {}}


@contextlib.contextmanager
def opened(url, **options):
  """An environment in this process."""
  environment = make_environment("environment", name(url, **options), deadline_s=5.0)
  yield environment
  environment.close()


def free_port():
  with socket.socket() as sock:
    sock.bind(("127.0.0.1", 0))
    return sock.getsockname()[1]


# --- the server of openenv ------------------------------------------------------------------------


@contextlib.contextmanager
def serving(port, sessions=64, served="does"):
  """A process with the server; waits until it serves."""
  command = [sys.executable, str(HERE / "openenv_server.py"), served, str(port), str(sessions)]
  process = subprocess.Popen(
    command, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
  )

  def serves():
    assert process.poll() is None
    with contextlib.suppress(OSError):
      return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
    return False

  try:
    wait_until(serves)
    yield process
  finally:
    process.kill()
    process.wait()


@pytest.fixture(scope="module", name="url")
def _url():
  port = free_port()
  with serving(port):
    yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module", name="pool")
def _pool(url):
  options = dict(prompt="{said} {about.seed.0}", reset=("word",))
  with EnvironmentPool(name(url, **options), processes=2, deadline_s=3.0) as pool:
    yield pool


@needs_server
def test_a_dialogue_with_the_server_of_openenv(pool):
  first, second = start(pool, 2**32 - 1, word="hi"), start(pool, 8, word="ho")
  assert first.messages == [{"role": "user", "content": "say hi 4294967295"}]
  assert ask(pool, first.dialogue, "reward 0.25") == Turn("4294967295hi|reward 0.25")
  assert ask(pool, second.dialogue, "a\ud800") == Turn("8ho|a\ufffd")
  assert ask(pool, first.dialogue, "done 1").score == 1.25
  assert ask(pool, second.dialogue, "done") == Turn(done=True)  # without rewards the grader judges


@needs_server
@pytest.mark.parametrize(
  ("text", "kind", "detail"),
  [
    ("x" * 41, "refused", "at most 40 characters"),
    ("raise no", "failed", "EXECUTION_ERROR: \"'no'\""),
    ("long 9000000", "failed", "connection"),  # 18 MB
    ("sleep 5", "timeout", "did not answer the step within deadline_s = 3 s"),
  ],
)
def test_what_the_servers_faults_mean(pool, text, kind, detail):
  innocent = start(pool, 5, word="")
  pids = pool.worker_pids()
  failure = ask(pool, start(pool, word="").dialogue, text)
  assert isinstance(failure, Failure) and failure.kind == kind, failure
  assert detail in failure.detail
  assert ask(pool, innocent.dialogue, "b") == Turn("5|b")
  assert pool.worker_pids() == pids  # no process had to be killed


@needs_server
def test_a_server_that_stops_is_at_fault_and_not_the_text():
  port = free_port()
  with (
    serving(port) as server,
    EnvironmentPool(name(f"http://127.0.0.1:{port}"), deadline_s=4.0) as pool,
  ):
    dialogue = start(pool).dialogue
    server.send_signal(signal.SIGSTOP)
    failure = ask(pool, dialogue, "a")
    assert failure.kind == "failed" and "PONG" in failure.detail


@needs_server
def test_a_server_that_dies_and_is_started_again():
  port = free_port()
  with contextlib.ExitStack() as servers:
    servers.enter_context(serving(port))
    with EnvironmentPool(name(f"http://127.0.0.1:{port}"), deadline_s=WAIT_S) as pool:
      idle, guilty = start(pool).dialogue, start(pool).dialogue
      failure = ask(pool, guilty, "die")
      assert failure.kind == "failed" and "the server ended the connection" in failure.detail
      assert ask(pool, idle, "a").kind == "failed"
      # A dialogue that begins while the server starts waits for it.
      later = pool.reset({"question": "", "answer": "", "reference": {}}, 3)
      servers.enter_context(serving(port))
      assert ask(pool, later.result(WAIT_S).dialogue, "a") == Turn("3|a")


@needs_server
def test_a_dialogue_waits_for_a_session():
  port = free_port()
  with (
    serving(port, sessions=1),
    EnvironmentPool(name(f"http://127.0.0.1:{port}"), deadline_s=2.0) as pool,
  ):
    first = start(pool, 1).dialogue
    second = pool.reset({"question": "", "answer": "", "reference": {}}, 2)
    assert ask(pool, first, "a") == Turn("1|a")
    assert ask(pool, first, "done 1").done
    assert ask(pool, second.result(WAIT_S).dialogue, "a") == Turn("2|a")
    failure = pool.reset({"question": "", "answer": "", "reference": {}}, 2).result(WAIT_S)
    assert failure.kind == "failed" and "no session within 2 s" in failure.detail
    assert "CAPACITY_REACHED" in failure.detail


@needs_server
def test_a_run_with_a_served_environment_is_that_with_the_environment_itself(tmp_path):
  train(build(config(num_updates=2)), tmp_path / "itself")
  port = free_port()
  with serving(port, sessions=256, served="guess"):
    served = name(f"http://127.0.0.1:{port}")
    train(build(config(num_updates=2, environment__name=served)), tmp_path / "served")
  assert tiny.records(tmp_path / "served") == tiny.records(tmp_path / "itself")
  assert tiny.rollouts(tmp_path / "served") == tiny.rollouts(tmp_path / "itself")


@needs_server
def test_wrong_fields_are_told_at_the_start(url):
  with pytest.raises(
    EnvironmentStartError, match=r"lacks the fields \['message'\]; the fields of this server"
  ):
    EnvironmentPool(name(url, action={"mesage": "{text}"}), deadline_s=5.0)
  with pytest.raises(EnvironmentStartError, match=r"has unknown fields \['b'\]; the fields of"):
    EnvironmentPool(name(url, action={"message": "{text}", "b": 1}), deadline_s=5.0)
  with EnvironmentPool(name(url, reply="{sad}"), deadline_s=5.0) as pool:
    failure = ask(pool, start(pool).dialogue, "a")
    assert "the observation has no 'sad': 'sad' is not in the fields ['about'," in failure.detail
  with EnvironmentPool(name(url, reset=("word",)), deadline_s=5.0) as pool:
    failure = pool.reset({"question": "", "answer": "", "reference": {"x": 1}}, 0).result(WAIT_S)
    assert (
      "reset names the field 'word', but the problem has only ['answer', 'question', 'x']"
      in failure.detail
    )


# --- servers that answer nonsense -----------------------------------------------------------------


def observation(**data):
  return json.dumps({"type": "observation", "data": {"observation": {"said": "a"}, **data}})


NONSENSE = {
  "not json": "{",
  "nested": "[" * 100_000,
  "a list": "[]",
  "no data": '{"type": "observation"}',
  "another type": '{"type": "state", "data": {}}',
  "no observation": '{"type": "observation", "data": {"done": false}}',
  "done 1": observation(done=1),
  "reward text": observation(reward="1"),
  "reward nan": observation(reward=float("nan")),
  "reward infinite": observation(reward=-float("inf")),
  "no code": '{"type": "error", "data": {}}',
  "long": observation(done=False, more="x" * 17 * 2**20),
}
NULL = (
  '{"type": "observation", "data": {"observation": {"said": null, "n": [1, "é"]}, "done": null}}'
)


class Nonsense:
  """A server in a thread: what it answers to a step is what the message names."""

  def __init__(self):
    self.port = free_port()
    self.open = 0
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
    self._thread.start()
    asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(WAIT_S)

  async def _serve(self):
    app = web.Application()
    app.add_routes([web.get("/schema", self._schema), web.get("/ws", self._session)])
    away = [web.get("/away/schema", self._away), web.get("/half/ws", self._away)]
    app.add_routes([*away, web.get("/half/schema", self._schema)])
    self._runner = web.AppRunner(app, shutdown_timeout=0.1)
    await self._runner.setup()
    await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

  async def _schema(self, request):
    return web.json_response({"action": {"properties": {"message": {}}}})

  async def _away(self, request):
    raise web.HTTPFound(f"http://127.0.0.1:{self.port}/{request.path.rpartition('/')[2]}")

  async def _session(self, request):
    ws = web.WebSocketResponse()
    await ws.prepare(request)
    self.open += 1
    async for message in ws:
      asked = json.loads(message.data)
      said = asked["data"].get("message", "null")
      if said == "twice":
        await ws.send_str(NULL)
      if said == "bytes":
        await ws.send_bytes(NULL.encode())
      elif said == "not UTF-8":
        await ws._writer.send_frame(b"\xff\xfe", web.WSMsgType.TEXT)
      elif said == "hang up":
        break
      elif said != "nothing":
        await ws.send_str(NONSENSE.get(said, NULL))
    self.open -= 1
    return ws

  def close(self):
    asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(WAIT_S)
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(WAIT_S)


@pytest.fixture(scope="module", name="nonsense")
def _nonsense():
  server = Nonsense()
  yield server
  server.close()


@pytest.fixture(scope="module", name="nonsense_pool")
def _nonsense_pool(nonsense):
  url = f"http://127.0.0.1:{nonsense.port}"
  with EnvironmentPool(name(url, reply="{said}-{n}"), deadline_s=20.0) as pool:
    yield pool


@pytest.mark.parametrize(
  ("text", "detail"),
  [
    ("not json", "the server's answer is not JSON: '{'"),
    ("nested", "the server's answer is not JSON: '[[[["),
    ("a list", "neither observation nor error: []"),
    ("no data", "neither observation nor error"),
    ("another type", "neither observation nor error"),
    ("no observation", "observation = None, expected an object"),
    ("done 1", "done = 1, expected true or false"),
    ("reward text", "reward = '1', expected a number or null"),
    ("no code", "the server reports None"),
    ("bytes", "the server's answer is bytes, expected text"),
    ("not UTF-8", "the server ended the connection: "),
    ("hang up", "the server ended the connection: "),
  ],
)
def test_nonsense_is_the_servers_fault(nonsense_pool, text, detail):
  pids = nonsense_pool.worker_pids()
  innocent = start(nonsense_pool).dialogue
  failure = ask(nonsense_pool, start(nonsense_pool).dialogue, text)
  assert failure.kind == "failed" and detail in failure.detail, failure
  assert len(failure.detail) < 1000
  assert ask(nonsense_pool, innocent, "a") == Turn('-[1, "é"]')
  assert nonsense_pool.worker_pids() == pids


@pytest.mark.parametrize(
  ("text", "kind", "detail"),
  [
    ("reward nan", "refused", "the server's reward = nan, expected a number within"),
    ("reward infinite", "refused", "the server's reward = -inf, expected"),
    ("long", "timeout", "the server's answer has more than 16777216 bytes"),
  ],
)
def test_what_a_text_can_make_the_server_say_is_an_outcome(nonsense_pool, text, kind, detail):
  """And not left out of the loss, as the server's own faults are."""
  innocent = start(nonsense_pool).dialogue
  failure = ask(nonsense_pool, start(nonsense_pool).dialogue, text)
  assert failure.kind == kind and detail in failure.detail, failure
  assert ask(nonsense_pool, innocent, "a") == Turn('-[1, "é"]')


def test_an_answer_to_nothing_is_not_taken_for_a_later_one(nonsense_pool):
  dialogue = start(nonsense_pool).dialogue
  assert ask(nonsense_pool, dialogue, "twice") == Turn('-[1, "é"]')
  time.sleep(0.2)
  failure = ask(nonsense_pool, dialogue, "a")
  assert failure.kind == "failed" and "an answer without a request" in failure.detail


def test_sessions_outlive_many_pings_and_end_with_their_dialogues():
  with contextlib.closing(Nonsense()) as server:
    url = f"http://127.0.0.1:{server.port}"
    with EnvironmentPool(name(url, reply="{said}-{n}"), deadline_s=2.0) as pool:
      dialogues = [start(pool).dialogue for _ in range(40)]  # more than threads
      assert server.open == 40
      slow = pool.step(dialogues[0], "nothing")
      turns = [pool.step(dialogue, "a") for dialogue in dialogues[1:]]
      assert {turn.result(WAIT_S) for turn in turns} == {Turn('-[1, "é"]')}
      assert slow.result(WAIT_S).kind == "timeout"
      wait_until(lambda: server.open == 39)
      time.sleep(0.5)  # the others have been idle for over two seconds, and are pinged each second
      assert ask(pool, dialogues[1], "a") == Turn('-[1, "é"]')
      for dialogue in dialogues:
        pool.close_dialogue(dialogue)
      wait_until(lambda: server.open == 0)


def test_a_pattern_finds_the_action(nonsense):
  options = dict(reply="{n}", pattern=r"<a>(.*?)</a>", role="tool")
  with opened(f"http://127.0.0.1:{nonsense.port}", **options) as environment:
    assert declared_roles(environment) == ["tool"]
    environment.reset(PROBLEM, 0)
    turn = environment.step("<a>no code</a> or <a>b</a>")
    assert turn == Turn('[1, "é"]', role="tool")
    with pytest.raises(Refused, match=r"nothing matches '<a>\(\.\*\?\)</a>'"):
      environment.step("a")


# --- arguments ------------------------------------------------------------------------------------


def test_templates():
  action = {"a": ["{text}", {"b": "run {text}!"}], "c": 3, "{text}": None}
  assert make_action(action, "{x}") == {"a": ["{x}", {"b": "run {x}!"}], "c": 3, "{text}": None}
  seen = {"out": "{n}", "n": 1.5, "flag": True, "list": [{"x": "é"}], "none": None}
  assert fill_in("{out} {n} {flag} {list.0.x}{none} {list} { } {}", seen) == (
    '{n} 1.5 true é [{"x": "é"}] { } {}'
  )


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (
      dict(url="localhost:8000"),
      "url = 'localhost:8000' is no http or https address; give one such as http://127.0",
    ),
    (dict(action={"message": "text"}), "must be a dict with '{text}' where the policy's text"),
    (dict(action="{text}"), "must be a dict with '{text}' where the policy's text"),
    (dict(action={"message": "{text}", "x": {1, 2}}), "action cannot be written as JSON"),
    (dict(pattern=5), "pattern = 5 is no regular expression"),
    (dict(reset=5), "reset = 5 must be a sequence of names"),
    (dict(reply="said"), "reply = 'said' has no field of the observation in braces"),
    (dict(prompt="said"), "prompt = 'said' has no field of the observation"),
    (dict(reset="word"), "reset = 'word' must be a sequence of names"),
    (dict(pattern="("), "pattern = '(' is no regular expression"),
    (dict(score="mean"), "score = 'mean' is unknown; choose one of ['last', 'sum']"),
    (dict(role="system"), "role = 'system' is unknown"),
    (dict(), "did not answer"),
  ],
)
def test_wrong_arguments_are_told_in_one_line(options, message):
  with socket.socket() as listening:  # accepts and never answers
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with pytest.raises(ValueError, match=re.escape(message)) as error:
      make_environment("environment", name(**{"url": url, **options}), deadline_s=1.0)
  assert "\n" not in str(error.value)


def test_a_server_that_is_not_there(nonsense):
  with pytest.raises(ValueError, match=r"is no OpenEnv server, .*start the server"):
    make_environment("environment", name(f"http://127.0.0.1:{free_port()}"))
  with pytest.raises(ValueError, match=r"/schema has the status 404"):
    make_environment("environment", name(f"http://127.0.0.1:{nonsense.port}/no"))


def test_a_server_does_not_send_a_run_to_another_address(nonsense):
  url = f"http://127.0.0.1:{nonsense.port}"
  with pytest.raises(ValueError, match=f"redirects to {url}/schema.*give that address as url"):
    make_environment("environment", name(f"{url}/away"))
  with (
    opened(f"{url}/half", reply="{n}") as environment,
    pytest.raises(ServerError, match=f"/half/ws redirects to {url}/ws"),
  ):
    environment.reset(PROBLEM, 0)


def test_what_is_missing_or_comes_from_the_run_is_told_before_anything_starts():
  with pytest.raises(ValueError, match="openenv needs a value of url, action, reply"):
    parse_environment("config.environment.name", "openenv")
  with pytest.raises(ValueError, match="deadline_s of openenv comes from the run; leave it out"):
    parse_environment("config.environment.name", name("http://a", deadline_s=3.0))
