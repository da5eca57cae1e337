"""The game of guessing a number, and its best play."""

import collections
import functools

import pytest

from rlvr_jax.data.guess import optimal_success, optimal_turns
from rlvr_jax.environments import Turn, guess

PROBLEM = {"question": "Guess.", "answer": "", "reference": {}}


def opened(seed, **options):
  environment = guess(**options)
  assert environment.reset(PROBLEM, seed) is None
  return environment


def number_of(seed, low=1, high=32):
  for number in range(low, high + 1):
    if opened(seed, low=low, high=high).step(str(number)).done:
      return number
  raise AssertionError("no number is right")


def test_replies():
  number = number_of(0)
  assert number == 26  # of seed 0 for ever: a run that is resumed has the same
  environment = opened(0, high=32)
  assert environment.step("25") == Turn(">")
  assert environment.step(" 027\n") == Turn("<")
  for text in ("", "0", "33", "-26", "26.0", "six", "2 6", "+26", "٢٦", "9" * 5000, "2_6"):
    assert environment.step(text) == Turn("?"), text
  assert environment.step(" 26 ") == Turn(done=True, score=1.0)


def test_the_range_and_words_are_hyper_parameters():
  environment = opened(3, low=-5, high=-5, higher="up", lower="down", invalid="what")
  assert environment.step("-6") == Turn("what")
  assert environment.step("-5").done
  number = number_of(1, -3, 9)
  words = [
    opened(1, low=-3, high=9, higher="up", lower="down").step(str(n)).reply for n in range(-3, 10)
  ]
  assert words == ["up"] * (number + 3) + [""] + ["down"] * (9 - number)


def test_numbers_are_of_the_seed_alone_and_uniform():
  other = guess(high=32)
  other.reset({**PROBLEM, "question": "another prompt"}, 0)
  assert other.step(str(number_of(0))).done
  counts = collections.Counter(number_of(seed, 1, 4) for seed in range(2000))
  assert all(abs(count - 500) < 80 for count in counts.values()) and len(counts) == 4


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"low": 3, "high": 2}, "low = 3 is above high = 2"),
    ({"high": 2.5}, "high = 2.5 is not an integer"),
    ({"high": 10**30}, "high ="),
    ({"higher": "<"}, "not three different texts"),
    ({"lower": 3}, "not three different texts"),
  ],
)
def test_wrong_hyper_parameters(options, message):
  with pytest.raises(ValueError, match=message):
    guess(**options)


@functools.cache
def most_found(size, turns):
  """Numbers of `size` that some strategy finds within `turns`, by trying all first guesses."""
  if not size or not turns:
    return 0
  return max(
    1 + most_found(first, turns - 1) + most_found(size - 1 - first, turns - 1)
    for first in range(size)
  )


@functools.cache
def fewest_guesses(size, turns):
  """Least sum over the numbers of the guesses made, at most `turns` for each."""
  if not size or not turns:
    return 0
  return size + min(
    fewest_guesses(first, turns - 1) + fewest_guesses(size - 1 - first, turns - 1)
    for first in range(size)
  )


@pytest.mark.parametrize("turns", range(7))
def test_optimal_play_by_brute_force(turns):
  for size in range(1, 40):
    assert optimal_success(3, 2 + size, turns) == pytest.approx(most_found(size, turns) / size)
    assert optimal_turns(3, 2 + size, turns) == pytest.approx(fewest_guesses(size, turns) / size)


def test_halving_is_optimal_in_the_game_itself():
  def play(seed, turns):
    environment = opened(seed, high=32)
    low = 1
    high = 32
    for _ in range(turns):
      middle = (low + high) // 2
      turn = environment.step(str(middle))
      if turn.done:
        return True
      low, high = (middle + 1, high) if turn.reply == ">" else (low, middle - 1)
    return False

  seeds = {number_of(seed): seed for seed in range(400)}
  assert len(seeds) == 32
  for turns in range(7):
    found = sum(play(seed, turns) for seed in seeds.values())
    assert found / 32 == optimal_success(1, 32, turns)
  with pytest.raises(ValueError, match="turns = -1"):
    optimal_success(1, 32, -1)
