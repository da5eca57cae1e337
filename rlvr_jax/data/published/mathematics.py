"""Published mathematics problems that have a final answer."""

from __future__ import annotations

import functools
import re

from rlvr_jax.data.published.dataset import Dataset, hub_file, split_files
from rlvr_jax.data.published.rows import Record, Row

_GRADER = "mathematics"
_PROMPT = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_ONLY_FILE = (*split_files("test"), *split_files("train"))  # for data sets with one split
_SUBJECTS = (  # folders of MATH
  "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory",
  "prealgebra", "precalculus",
)  # fmt: skip
_CALCULATOR_MARK = re.compile(r"<<[^>]*>>")
_MARKED_ANSWER = re.compile(r"#### (\S+)\s*$")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# `_FORMATTING` is removed from the text between two boxes; if `_JOINT` is left, they are one
# answer. The patterns are those of the grader, `rewards.extraction`.
_FORMATTING = re.compile(
  r"\\(?:text\w*|mathrm|mathbf|mbox|hbox|q?quad|[,;:! ()\[\]\\])|[\s$*~{}]|(?<!\\)&"
)
_JOINT = re.compile(r"[,;]?(?:(and|\\&|\\land|\\wedge)|(or|\\lor|\\vee))?(?:[A-Za-z](?:_\d)?=)?")
_CONDITION = re.compile(r"[<>]|\\(?:[lgn]eq?|lt|gt)(?![A-Za-z])")
_MAX_BETWEEN = 80  # characters, white space at both ends apart
_BARE_BOXED = re.compile(r"\\?[^\s$\\{}]+")  # \boxed 2
_AIME_ANSWER = re.compile(r"\$?0*(\d{1,3})(?:\^\\circ|\^\{\\circ\})?\$?")


def last_boxed(text: str) -> str | None:
  r"""Content of the last \boxed{…}, with balanced braces; None if there is no box or it is cut off.

  Like the grader, this function counts boxes as one answer if only formatting, a comma, "and" or
  "or" is between them: \boxed{3} \text{ or } \boxed{4} is "3, 4". Before an inequality, "and" or
  "or" stays: \boxed{x < 1} \text{ or } \boxed{x > 3} is "x < 1 or x > 3".
  """
  answer: str | None = None
  end = 0
  for box in _BOX.finditer(text):
    if box.start() < end:  # within another one
      continue
    content, next_end = _read_box(text, box.end())
    between = text[end : box.start()]
    joint = _JOINT.fullmatch(_FORMATTING.sub("", between))
    if answer is None or content is None or joint is None or len(between.strip()) > _MAX_BETWEEN:
      answer = content
    elif joint[0] or content != answer:  # else the answer is only repeated
      is_condition = bool(joint[1] or joint[2]) and _CONDITION.search(content)
      answer += (f" {'and' if joint[1] else 'or'} " if is_condition else ", ") + content
    end = next_end
  return answer


def _read_box(text: str, start: int) -> tuple[str | None, int]:
  """The content of a box, or None if the box is cut off, and the index after the box."""
  if text[start : start + 1] != "{":
    bare = _BARE_BOXED.match(text, start)
    return (bare.group(), bare.end()) if bare else (None, start)
  depth = 0
  for brace in _BRACE.finditer(text, start):  # \{ and \} do not nest
    depth += {"{": 1, "}": -1}.get(brace.group(), 0)
    if depth == 0:
      return text[start + 1 : brace.start()].strip(), brace.end()
  return None, start


def _read_gsm8k(row: Row) -> Record:
  solution = row.text("answer")
  match = _MARKED_ANSWER.search(solution)
  if not match:
    raise row.error(f"has an answer ending in {solution[-40:]!r}, expected '#### number'")
  return Record(
    id=row.text("id", default=row.name),
    question=row.text("question"),
    answer=match[1],
    solution=_CALCULATOR_MARK.sub("", solution).strip(),
    reference={"answer": match[1]},
  )


def _read_boxed(row: Row) -> Record:
  """Reads a problem whose answer is a separate field, or the last box of its solution."""
  solution = row.text("solution", default="")
  boxed = last_boxed(solution)
  answer = row.text("answer", "final_answer", default=boxed or "").strip()
  if not answer:
    raise row.error("has neither an answer nor a solution with \\boxed{answer}")
  if solution and boxed is None:
    solution += f"\n\nThe final answer is $\\boxed{{{answer}}}$."
  return Record(
    id=row.text("unique_id", "id", "problem_id", default=row.name),
    question=row.text("problem", "question"),
    answer=answer,
    solution=solution,
    reference={"answer": answer},
    difficulty=row.level("level", "difficulty"),
    subject=row.text("subject", "type", default=""),
  )


def _read_aime(row: Row, year: int) -> Record:
  """Reads a problem of AIME, whose answers are integers from 0 to 999."""
  record = _read_boxed(row)
  answer = _AIME_ANSWER.fullmatch(record.answer)
  if not answer:
    raise row.error(f"has answer = {record.answer!r}, expected an integer from 0 to 999")
  if row.text("year", default=str(year)) != str(year):
    raise row.error(f"is from {row.text('year')}, not {year}: keep only the rows of {year}")
  return Record(**{**vars(record), "answer": answer[1], "reference": {"answer": answer[1]}})


def _make_aime(year: int) -> Dataset:
  halves = (f"aime{year}-I", f"aime{year}-II")
  return Dataset(
    name=f"aime_{year}",
    description=f"American Invitational Mathematics Examination {year}, I and II.",
    files={"test": ((f"aime_{year}_problems",), halves, (f"aime{year % 100}",), *_ONLY_FILE)},
    read=functools.partial(_read_aime, year=year),
    grader=_GRADER,
    prompt=_PROMPT,
  )


GSM8K = Dataset(
  name="gsm8k",
  description="Grade-school word problems. Cobbe et al. 2021, arXiv 2110.14168.",
  files={split: split_files(split, "main") for split in ("train", "test")},
  read=_read_gsm8k,
  grader="gsm8k",
  prompt="{question}\n",
)
MATH = Dataset(
  name="math",
  description=(
    "Competition mathematics, levels 1 to 5. Hendrycks et al. 2021, arXiv 2103.03874. As folders "
    "of one file per problem by subject, or as rows."
  ),
  files={
    split: (
      (f"MATH/{split}/",),
      (f"{split}/",),
      *split_files(split),
      tuple(hub_file(split, subject) for subject in _SUBJECTS),
    )
    for split in ("train", "test")
  },
  read=_read_boxed,
  grader=_GRADER,
  prompt=_PROMPT,
)
MATH_500 = Dataset(
  name="math_500",
  description="500 test problems of MATH. Lightman et al. 2023, arXiv 2305.20050.",
  files={"test": split_files("test")},
  read=_read_boxed,
  grader=_GRADER,
  prompt=_PROMPT,
)
AIME_2024 = _make_aime(2024)
AIME_2025 = _make_aime(2025)
AMC = Dataset(
  name="amc",
  description="American Mathematics Competitions 10 and 12, with answers as numbers.",
  files={"test": _ONLY_FILE},
  read=_read_boxed,
  grader=_GRADER,
  prompt=_PROMPT,
)
DEEPSCALER = Dataset(
  name="deepscaler",
  description=(
    "Competition mathematics with answers, collected for training. Luo et al. 2025, DeepScaleR. "
    "Any JSON array or lines of {problem, answer, solution} can be used."
  ),
  files={"train": (("deepscaler",), *split_files("train"))},
  read=_read_boxed,
  grader=_GRADER,
  prompt=_PROMPT,
)
