"""Environments on an OpenEnv server: the policy's texts are actions, and observations are replies.

A dialogue is a session of the server, a WebSocket at URL/ws. Both sides send JSON:

    {"type": "reset", "data": {"seed": 7}}         {"type": "step", "data": ACTION}
    {"type": "observation", "data": {"observation": {…}, "reward": 0.5, "done": false}}
    {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "…"}}

Source: `openenv.core.env_server` of openenv 0.10. We do not use that package's client: it loads web
frameworks, so that each process would take seconds to start, and it continues a lost connection in
a new session without a reset.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import numbers
import re
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from rlvr_jax.environments.base import (
  ROLES,
  Environment,
  Message,
  Problem,
  Refused,
  TimedOut,
  Turn,
  check_score,
  clean,
)
from rlvr_jax.ops.checks import check_between, check_choice
from rlvr_jax.workers.worker import waiting

if TYPE_CHECKING:
  import aiohttp

TEXT = "{text}"  # stands for the policy's text in an action
SCORES = ("sum", "last")
MAX_MESSAGE = 16 * 2**20  # the most bytes of a message of the server
_MARGIN_S = 5.0  # seconds after the limit of a wait, before the pool ends the wait
_PAUSE_S = 0.2  # seconds between two tries to open a session
_MAX_SHOWN = 300  # the most characters of the server's text in a message
_FIELD = re.compile(r"\{(\w+(?:\.\w+)*)\}")  # a field of the observation in a reply's template

Result = TypeVar("Result")


class ServerError(Exception):
  """The server failed, or violated the protocol."""


class _NoSessionError(ServerError):
  """No session could be opened now; a later try may succeed."""


class _Options(NamedTuple):
  """Hyper-parameters of `openenv`."""

  url: str
  action: Mapping[str, Any]
  reply: str
  prompt: str
  reset: Sequence[str]
  pattern: str
  score: str
  role: str
  deadline_s: float


class _Answer(NamedTuple):
  """The server's answer to a reset or step."""

  observation: Mapping[str, Any]
  reward: float | None
  done: bool


# --- from and to the server's JSON ----------------------------------------------------------------


def make_action(template: Any, text: str) -> Any:
  """The template with the policy's text in place of every "{text}"."""
  if isinstance(template, str):
    return template.replace(TEXT, text)
  if isinstance(template, Mapping):
    return {key: make_action(value, text) for key, value in template.items()}
  if isinstance(template, list | tuple):
    return [make_action(value, text) for value in template]
  return template


def fill_in(template: str, observation: Mapping[str, Any]) -> str:
  """The template with an observation's values in place of "{field}" or "{field.0.inner}".

  Text is inserted unchanged, null as "", and any other value as JSON.

  Raises:
    ServerError: the observation has no such field.
  """
  return _FIELD.sub(lambda match: _as_text(_find(observation, match.group(1))), template)


def _find(observation: Mapping[str, Any], path: str) -> Any:
  value: Any = observation
  for key in path.split("."):
    try:
      value = value[int(key)] if isinstance(value, list) else value[key]
    except (KeyError, IndexError, TypeError, ValueError):
      where = f"the fields {sorted(value)}" if isinstance(value, dict) else _shorten(value)
      raise ServerError(f"the observation has no {path!r}: {key!r} is not in {where}") from None
  return value


def _as_text(value: Any) -> str:
  if value is None:
    return ""
  return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shorten(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def read_answer(text: str) -> _Answer:
  """Reads the server's answer to a reset or step.

  Raises:
    Refused: the server does not accept the policy's text as an action, or the reward is invalid.
    ServerError: the server reports an error, or has sent something other than an observation.
  """
  try:
    message = json.loads(text)
  except (ValueError, RecursionError):
    raise ServerError(f"the server's answer is not JSON: {_shorten(text)}") from None
  data = message.get("data") if isinstance(message, dict) else None
  if not isinstance(data, dict) or message.get("type") not in ("observation", "error"):
    raise ServerError(f"the server's answer is neither observation nor error: {_shorten(message)}")
  if message["type"] == "error":
    code, about = data.get("code"), {k: v for k, v in data.items() if k != "code"}
    if code == "VALIDATION_ERROR":
      raise Refused(f"the server refused the action: {_shorten(about)}")
    kind = _NoSessionError if code == "CAPACITY_REACHED" else ServerError
    raise kind(f"the server reports {code}: {_shorten(about.get('message', about))}")
  observation, reward, done = (data.get(key) for key in ("observation", "reward", "done"))
  if not isinstance(observation, dict):
    raise ServerError(f"observation = {_shorten(observation)}, expected an object")
  if not isinstance(done, bool | None):
    raise ServerError(f"done = {_shorten(done)}, expected true or false")
  if not isinstance(reward, numbers.Real | None):
    raise ServerError(f"reward = {_shorten(reward)}, expected a number or null")
  if reward is not None:
    reward = check_score("the server's reward", reward)
  return _Answer(observation, reward, bool(done))


# --- sessions -------------------------------------------------------------------------------------


class _Network(NamedTuple):
  """What all connections of this process share: an event loop with a thread, and a client."""

  loop: asyncio.AbstractEventLoop
  http: aiohttp.ClientSession


@functools.cache
def _network() -> _Network:
  import aiohttp

  loop = asyncio.new_event_loop()
  threading.Thread(target=loop.run_forever, name="openenv", daemon=True).start()

  async def refuse_redirect(_session: Any, _context: Any, params: Any) -> None:
    params.response.close()
    target = _shorten(params.response.headers.get("Location", "")).strip("'")
    raise ServerError(
      f"{params.url} redirects to {target}: give that address as url if you trust it"
    )

  async def open_http() -> aiohttp.ClientSession:
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse_redirect)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trace_configs=[trace])

  return _Network(loop, asyncio.run_coroutine_threadsafe(open_http(), loop).result(_MARGIN_S))


def _run(coroutine: Coroutine[Any, Any, Result], limit_s: float) -> Result:
  """Runs a coroutine in the network's thread; raises TimeoutError after `limit_s` seconds."""

  async def limited() -> Result:
    return await asyncio.wait_for(coroutine, limit_s)

  return asyncio.run_coroutine_threadsafe(limited(), _network().loop).result(limit_s + _MARGIN_S)


class _Session:
  """A session of the server; its coroutines run in the network's thread."""

  def __init__(self, url: str, limit_s: float):
    self._url, self._limit_s = url, limit_s
    self._socket: aiohttp.ClientWebSocketResponse | None = None
    self._reader: asyncio.Task[None] | None = None
    self._received: asyncio.Queue[str | Exception] = asyncio.Queue()
    self.refusal = ""  # why the last try to open a session failed

  async def begin(self, data: Mapping[str, Any]) -> _Answer:
    """Opens the session and resets it; tries again while the server has no free session."""
    while True:
      try:
        await self._connect()
        return await self.ask("reset", data)
      except _NoSessionError as error:
        self.refusal = str(error)
        await self.close()
        await asyncio.sleep(_PAUSE_S)

  async def _connect(self) -> None:
    import aiohttp

    try:
      # A server whose program hangs still answers pings; without such answers it has failed.
      self._socket = await _network().http.ws_connect(
        f"{self._url}/ws", max_msg_size=MAX_MESSAGE, heartbeat=self._limit_s / 2
      )
    except (aiohttp.ClientError, OSError) as error:
      raise _NoSessionError(f"{type(error).__name__}: {error}") from error
    self._received = asyncio.Queue()
    self._reader = asyncio.create_task(self._read(self._socket, self._received))

  async def _read(
    self, socket: aiohttp.ClientWebSocketResponse, received: asyncio.Queue[str | Exception]
  ) -> None:
    """Receives messages until the connection ends, also between turns: this answers pings."""
    import aiohttp

    try:
      while (message := await socket.receive()).type is aiohttp.WSMsgType.TEXT:
        received.put_nowait(message.data)
      if socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
        received.put_nowait(TimedOut(f"the server's answer has more than {MAX_MESSAGE} bytes"))
      reason = f"the server ended the connection: {socket.exception() or socket.close_code}"
      if message.type is aiohttp.WSMsgType.BINARY:
        reason = "the server's answer is bytes, expected text"
    except Exception as error:  # otherwise `ask` would wait in vain
      reason = f"the connection was lost: {type(error).__name__}: {error}"
    received.put_nowait(ServerError(reason))

  async def ask(self, kind: str, data: Mapping[str, Any]) -> _Answer:
    """Sends a request, and waits for its answer."""
    assert self._socket is not None  # `begin` has opened it
    if not self._received.empty():
      unasked = self._received.get_nowait()
      raise (
        unasked
        if isinstance(unasked, Exception)
        else ServerError(f"the server has sent an answer without a request: {_shorten(unasked)}")
      )
    try:
      await self._socket.send_json({"type": kind, "data": data})
    except OSError as error:
      raise ServerError(f"the connection was lost: {type(error).__name__}: {error}") from error
    received = await self._received.get()
    if isinstance(received, Exception):
      raise received
    return read_answer(received)

  async def close(self) -> None:
    """Ends the session."""
    if self._socket is not None:
      await self._socket.close()


class _OpenEnv:
  """One dialogue, which is one session."""

  def __init__(self, options: _Options):
    self.roles = (options.role,)
    self._options = options
    self._session = _Session(options.url, options.deadline_s)
    self._rewards: list[float] = []

  def reset(self, problem: Problem, seed: int) -> Sequence[Message] | None:
    """Opens a session and resets it, with the seed and fields of the problem."""
    fields = {"question": problem["question"], "answer": problem["answer"], **problem["reference"]}
    data = {"seed": seed}
    for name in self._options.reset:
      try:
        data[name.rpartition(".")[2]] = _find(fields, name)
      except ServerError:
        raise ValueError(
          f"openenv: reset names the field {name!r}, but the problem has only {sorted(fields)}"
        ) from None
    try:
      answer = self._wait(self._session.begin(data))
    except TimeoutError:
      reason = self._session.refusal or "the server did not answer the reset"
      raise ServerError(
        f"{self._options.url}: no session within {self._options.deadline_s:g} s: {reason}"
      ) from None
    except (Refused, TimedOut) as error:  # a reset contains no text that could be at fault
      raise ServerError(str(error)) from None
    if answer.done:
      raise ServerError("the server answered the reset with done = true, before any action")
    if not self._options.prompt:
      return None
    return [{"role": "user", "content": fill_in(self._options.prompt, answer.observation)}]

  def step(self, text: str) -> Turn:
    """Sends the policy's text as an action."""
    options = self._options
    if options.pattern:
      *_, last = [None, *re.finditer(options.pattern, text, re.DOTALL)]
      if last is None:
        raise Refused(f"the text has no action: nothing matches {options.pattern!r}")
      text = last.group(min(1, last.re.groups)) or ""
    action = make_action(options.action, clean("step got a text", text))
    try:
      answer = self._wait(self._session.ask("step", action))
    except TimeoutError:
      limit = f"deadline_s = {options.deadline_s:g} s"
      raise TimedOut(f"the server did not answer the step within {limit}") from None
    if answer.reward is not None:
      self._rewards.append(answer.reward)
    if not answer.done:
      return Turn(fill_in(options.reply, answer.observation), role=options.role)
    if not self._rewards:
      return Turn(done=True)
    score = self._rewards[-1] if options.score == "last" else math.fsum(self._rewards)
    return Turn(done=True, score=score)

  def _wait(self, request: Coroutine[Any, Any, _Answer]) -> _Answer:
    """Runs a request within the limit, while other dialogues go on."""
    limit_s = self._options.deadline_s
    with waiting(limit_s + 2 * _MARGIN_S):
      return _run(request, limit_s)

  def close(self) -> None:
    """Ends the session; does not wait for the end."""
    asyncio.run_coroutine_threadsafe(self._session.close(), _network().loop)


# --- checks ---------------------------------------------------------------------------------------


@functools.cache
def _action_schema(url: str, limit_s: float) -> Mapping[str, Any]:
  """JSON schema of the server's actions.

  Raises:
    ValueError: the server does not give the schema.
  """

  async def fetch() -> Any:
    async with _network().http.get(f"{url}/schema") as response:
      if response.status != 200:
        raise ServerError(f"GET {url}/schema has the status {response.status}")
      return json.loads(await response.content.read(MAX_MESSAGE))

  rule = "start the server, or set url to the address that it prints, such as http://127.0.0.1:8000"
  try:
    schema = _run(fetch(), limit_s)
  except TimeoutError:
    raise ValueError(f"openenv: {url} did not answer within {limit_s:g} s; {rule}") from None
  except Exception as error:
    reason = " ".join(str(error).split())[:_MAX_SHOWN]
    raise ValueError(
      f"openenv: {url} is no OpenEnv server, {type(error).__name__}: {reason}; {rule}"
    ) from error
  action = schema.get("action") if isinstance(schema, dict) else None
  if not isinstance(action, dict):
    raise ValueError(
      f"openenv: {url} is no OpenEnv server: {url}/schema describes no object 'action'; {rule}"
    )
  return action


def _check_action(action: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
  """Raises ValueError if `action` lacks a required field or has one that the server refuses."""
  fields = schema.get("properties", {}).keys() - {"metadata"}
  if not fields:  # a server of tools has several kinds of actions
    return
  unknown = action.keys() - fields - {"metadata"}
  missing = set(schema.get("required", ())) - action.keys()
  if missing or (unknown and schema.get("additionalProperties") is False):
    kind, names = ("lacks the fields", missing) if missing else ("has unknown fields", unknown)
    raise ValueError(
      f"openenv: action = {action} {kind} {sorted(names)}; the fields of this server's actions are"
      f" {sorted(fields)}"
    )


def openenv(
  *,
  url: str,
  action: Mapping[str, Any],
  reply: str,
  prompt: str = "",
  reset: Sequence[str] = (),
  pattern: str = "",
  score: str = "sum",
  role: str = "user",
  deadline_s: float,
) -> Environment:
  """Plays with an environment that an OpenEnv server serves.

  Each dialogue has its own session. The server's `max_concurrent_envs` must be at least the number
  of simultaneous dialogues; a dialogue that gets no session tries again until the deadline.

  A run repeats bit for bit if the server's replies depend only on the seed, the fields of `reset`
  and the actions. The server gets the seed at each reset. The server's answers have these meanings:

  * an observation is a reply or, with `done`, the end of the dialogue. The score comes from the
    rewards; if there were no rewards, the task's grader gives the score.
  * if the server answers VALIDATION_ERROR or a reward that is not within ±1e30, or if the policy's
    text has no match of `pattern`, the text is refused.
  * if the server answers pings, but does not answer a step in time, or if it answers a step with
    over 16 MiB, the policy's text counts as timed out.
  * any other error, a lost connection, or a violation of the protocol is the environment's fault.

  Args:
    url: the url of the server, "http://HOST:PORT" or https.
    action: the action as JSON, in which "{text}" stands for the policy's text, such as
      {"code": "{text}"}.
    reply: template of the reply, in which "{field}" stands for a field of the observation, such as
      "{stdout}{stderr}"; "{field.0.inner}" is within lists and objects.
    prompt: template of the first message, from the observation of the reset; "" for the problem's
      own prompt.
    reset: names of the problem's fields that the server gets at a reset besides the seed, such as
      ("index",). A field is "question", "answer", or a field of the reference; "extra.index" is a
      field within "extra".
    pattern: regular expression for the part of the policy's turn that the action gets: the last
      match's first capture group or, without capture groups, the whole last match. "": the complete
      turn.
    score: "sum" of the rewards, or the "last" reward.
    role: the role of replies, "user" or "tool".
    deadline_s: limit of a reset or step, seconds; set by the run.
  Raises:
    ValueError: a hyper-parameter is invalid, the server does not answer, or `action` does not have
      the fields of the server's actions.
    ImportError: aiohttp is not installed.
  """
  check_between("openenv", "deadline_s", deadline_s, low=0.0, open_low=True)
  check_choice("openenv", "score", score, SCORES)
  check_choice("openenv", "role", role, ROLES)
  options = _Options(
    str(url).rstrip("/"), action, reply, prompt, reset, pattern, score, role, deadline_s
  )
  _check_options(options)
  try:
    _network()
  except ImportError as error:
    raise ImportError(
      f'openenv needs aiohttp: pip install "rlvr_jax[openenv]" ({error})'
    ) from error
  _check_action(action, _action_schema(options.url, deadline_s))
  return _OpenEnv(options)


def _check_options(options: _Options) -> None:
  """Raises ValueError for invalid hyper-parameters."""
  parts = urlsplit(options.url)
  if parts.scheme not in ("http", "https") or not parts.hostname:
    raise ValueError(
      f"openenv: url = {options.url!r} is no http or https address; give one such as"
      " http://127.0.0.1:8000"
    )
  if not isinstance(options.action, Mapping) or TEXT not in repr(options.action):
    raise ValueError(
      f"openenv: action = {options.action!r} must be a dict with '{{text}}' where the policy's text"
      ' belongs; write, for example, {"code": "{text}"}, with the fields of the server\'s actions'
    )
  for name in ("reply", "prompt"):
    template = getattr(options, name)
    is_empty = name == "prompt" and template == ""
    if not isinstance(template, str) or not (_FIELD.search(template) or is_empty):
      raise ValueError(
        f"openenv: {name} = {template!r} has no field of the observation in braces; write, for"
        ' example, "{stdout}{stderr}"'
      )
  is_sequence = isinstance(options.reset, list | tuple)
  if not is_sequence or not all(isinstance(name, str) for name in options.reset):
    raise ValueError(
      f"openenv: reset = {options.reset!r} must be a sequence of names of fields, such as"
      " ('index',)"
    )
  try:
    json.dumps(options.action)
  except (TypeError, ValueError) as error:
    raise ValueError(f"openenv: action cannot be written as JSON: {error}") from error
  try:
    re.compile(options.pattern)
  except (TypeError, re.error) as error:
    raise ValueError(
      f"openenv: pattern = {options.pattern!r} is no regular expression: {error}"
    ) from error
