"""GSM8K with Python as a tool: demonstrations are dialogues of a program, its output, the answer.

A demonstration's program prints the calculations that the published solution marks, "<<48/2=24>>".
"""

import json
import re
from pathlib import Path

from rlvr_jax.data.problems import Problem, Task
from rlvr_jax.data.sources import Chosen

_CALCULATION = re.compile(r"<<([0-9+*/(). -]+)=[^<>]*>>")


def programs(*, data_dir, size=4, held_out_size=2, max_characters=100):
  """The first `size` short questions, demonstrated and trained on; others are held out."""
  demonstrations = _short(Path(data_dir) / "train.jsonl", size, max_characters)
  held_out = _short(Path(data_dir) / "test.jsonl", held_out_size, max_characters)
  return Task(
    name="gsm8k_programs",
    train=Chosen.of(demonstrations),
    warm_start=Chosen.of(demonstrations),
    held_out=Chosen.of(held_out),
    grader="gsm8k",
  )


def _short(path, size, max_characters):
  """Problems with short questions, whose solutions mark at least one calculation."""
  found = []
  for line in path.read_text(encoding="utf-8").splitlines():
    row = json.loads(line)
    calculations = _CALCULATION.findall(row["answer"])
    if calculations and len(row["question"].encode()) <= max_characters:
      found.append(_problem(row, calculations))
    if len(found) == size:
      return tuple(found)
  raise ValueError(f"{path} has {len(found)} of {size} such problems")


def _problem(row, calculations):
  answer = row["answer"].rpartition("#### ")[2]
  program = "\n".join(f"print({calculation})" for calculation in calculations)
  output = "\n".join(str(eval(calculation)) for calculation in calculations)  # digits and + - * /
  return Problem(
    question=row["question"] + "\n",
    answer=answer,
    solution=f"\n#### {answer}",
    reference={"answer": answer},
    history=(f"```python\n{program}\n```", output),
  )
