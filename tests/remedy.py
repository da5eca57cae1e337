"""Failures that say what the author of a new component has to do."""

import functools

import pytest


def remedy(what_to_do):
  """Adds what to do to every failure of a test."""

  def decorate(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
      try:
        return test(*args, **kwargs)
      except (Exception, pytest.fail.Exception) as error:
        error.add_note(f"Remedy: {what_to_do}")
        raise

    return run

  return decorate
