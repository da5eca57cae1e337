"""Graders by name: "mathematics" or "code(reward='fraction')" in a configuration.

A grader is a plain function, run in the pool's workers:

    def grade(completion: str, reference: Mapping[str, Any], *, keyword=1) -> Grade | float: ...

It is called with the completion's text and the problem's JSON-able reference, by position, and with
the hyper-parameters of its string. Where the prompt ends with "<think>", as some chat templates
have it, the text begins with that tag. A number (or bool) returned in place of a Grade is the
score: correct at 1 or more, wrong below. An exception, a number that is not finite, or anything
else returned is a crash of that item. Coroutines, generators and functions that cannot take two
arguments are refused at start-up.

If its module also has `<function>_self_test()`, each worker calls that once at start-up, with those
of the hyper-parameters that it names: it should raise when the grader cannot work here, and it pays
slow imports outside any item's time limit.

A user's own is named "my_module:function(keyword=1)"; only workers import it.
"""

from rlvr_jax.rewards.code import code
from rlvr_jax.rewards.combined import by_reference, weighted
from rlvr_jax.rewards.formats import boxed, pattern, think_answer
from rlvr_jax.rewards.graders import gsm8k, reasoning_gym
from rlvr_jax.rewards.mathematics import mathematics

__all__ = [
  "boxed",
  "by_reference",
  "code",
  "gsm8k",
  "mathematics",
  "pattern",
  "reasoning_gym",
  "think_answer",
  "weighted",
]
