"""Environments that the package openenv serves: python openenv_server.py NAME PORT SESSIONS."""

import os
import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field

from rlvr_jax.environments import guess


class Said(Action):
  message: str = Field(max_length=40)


class Heard(Observation):
  said: str = ""
  about: dict = Field(default_factory=dict)


class Does(Environment):
  """Does what the message says."""

  SUPPORTS_CONCURRENT_SESSIONS = True

  def reset(self, seed=None, episode_id=None, word=""):
    self._past = [f"{seed}{word}"]
    return Heard(said=f"say {word}", about={"seed": [seed]})

  def step(self, action, timeout_s=None):
    kind, _, argument = action.message.partition(" ")
    self._past.append(action.message)
    if kind == "sleep":
      time.sleep(float(argument))
    if kind == "die":
      os._exit(3)
    if kind == "raise":
      raise KeyError(argument)
    reward = float(argument) if kind in ("reward", "done") and argument else None
    said = "é" * int(argument) if kind == "long" else "|".join(self._past)
    return Heard(said=said, done=kind == "done", reward=reward)

  @property
  def state(self):
    return State()


class Guess(Does):
  """The environment `guess(low=1, high=7)`."""

  def reset(self, seed=None, episode_id=None):
    self._guess = guess(low=1, high=7)
    self._guess.reset({}, seed)
    return Heard()

  def step(self, action, timeout_s=None):
    turn = self._guess.step(action.message)
    return Heard(said=turn.reply, done=turn.done, reward=turn.score)


if __name__ == "__main__":
  name, port, sessions = sys.argv[1:]
  served = {"does": Does, "guess": Guess}[name]
  app = create_fastapi_app(served, Said, Heard, max_concurrent_envs=int(sessions))
  uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
