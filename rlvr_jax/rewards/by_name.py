"""Graders by name: "mathematics" or "code(reward='fraction')" in a configuration.

A grader is a plain function, run in the pool's workers:

    def grade(completion: str, reference: Mapping[str, Any], *, keyword=1) -> Grade | float: ...

It is called with the completion's text and the problem's JSON-serializable reference, by position,
and with the hyper-parameters from its string as keywords. If the prompt ends with "<think>", as in
some chat templates, the text begins with that tag. A number (or bool) returned instead of a Grade
is the score: correct at 1 or more, wrong below, where it counts only if
`config.grading.outcomes.wrong` is "score". An exception, a number that is not finite, or any
other return value is a crash of that item. Coroutines, generators and functions that cannot take
two arguments are refused at start-up.

If its module also has `<function>_self_test()`, each worker calls that once at start-up, with the
hyper-parameters that its signature names. It should raise if the grader cannot work here. Slow
imports belong there, since no item's time limit applies.

Write your own grader as "my_module:function(keyword=1)"; only the workers import it.
"""

from rlvr_jax.rewards.code import code
from rlvr_jax.rewards.combined import by_reference, weighted
from rlvr_jax.rewards.formats import boxed, pattern, think_answer
from rlvr_jax.rewards.graders import gsm8k, reasoning_gym
from rlvr_jax.rewards.mathematics import mathematics
from rlvr_jax.rewards.tour import tour

__all__ = [
  "boxed",
  "by_reference",
  "code",
  "gsm8k",
  "mathematics",
  "pattern",
  "reasoning_gym",
  "think_answer",
  "tour",
  "weighted",
]
