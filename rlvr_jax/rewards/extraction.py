r"""Finds the final answer in a completion: a box, "####", an answer tag, a stated answer."""

from __future__ import annotations

import re
from typing import NamedTuple

from rlvr_jax.rewards.answers import BOUNDS, parse_answer
from rlvr_jax.rewards.formulas import FUNCTIONS
from rlvr_jax.rewards.graders import ANSWER_MARK, DIGITS, NUMBER, find_answer_part
from rlvr_jax.rewards.units import SCALES

MAX_ANSWER = 1000  # characters; longer texts are not answers
_TAIL = 100_000  # characters at the end of a completion that are searched for a box or "####"
_PROSE = 10_000  # characters at the end that are searched for an answer in running text
_SHORT = 5  # words; a phrase or a tag's content of at most this length is an answer as it stands

_BOX_TOKEN = re.compile(
  rf"\\(?:boxed|fbox)\s*\{{|\\(?:boxed|fbox)\s*(?P<bare>[+-]?{NUMBER}(?:/{DIGITS})?)|\\.|[{{}}]",
  re.DOTALL,
)
_CUT_OFF = re.compile(r"\\(?:boxed|fbox)\s*\Z")
# `_FORMATTING` is removed from the text between two boxes; if `_JOINT` is left, they are one
# answer.
_FORMATTING = re.compile(
  r"\\(?:text\w*|mathrm|mathbf|mbox|hbox|q?quad|[,;:! ()\[\]\\])|[\s$*~{}]|(?<!\\)&"
)
_JOINT = re.compile(r"[,;]?(?:(and|\\&|\\land|\\wedge)|(or|\\lor|\\vee))?(?:[A-Za-z](?:_\d)?=)?")
_CONDITION = re.compile(r"[<>]|\\(?:[lgn]eq?|lt|gt)(?![A-Za-z])")
_MAX_BETWEEN = 80  # characters, white space at both ends apart
_TEXT = re.compile(r"\\(?:text\w*|mathrm|mathbf|mbox|operatorname)\s*\{[^{}]*\}")
_ANSWER_IS = re.compile(
  r"\b(?:answers?|(?:correct|right|best) (?:option|choice))\b[^\n.]{0,60}?"
  r"(?:\b(?:is|are)(?=\b|n['’]t)|[:=])[\s*:]*",
  re.IGNORECASE,
)
_NOT_THIS = re.compile(
  r"(?:\bnot|n['’]t|\bbetween)\b(?:(?!\b(?:but|is|are)\b|[.,;:]\s)[^\n])*\Z", re.IGNORECASE
)
_NOT_BEFORE = 60  # characters before a number that are searched for a "not"
_BOUND_BEFORE = re.compile(rf"\b(?:{BOUNDS})\s*\Z", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_MATH = re.compile(
  r"\$\$.{1,1000}?\$\$|\$[^$\n]{1,1000}\$|\\\(.{1,1000}?\\\)|\\\[.{1,1000}?\\\]", re.DOTALL
)
_NUMBER = re.compile(
  rf"{NUMBER}(?:\s?/\s?{DIGITS})?(?::{DIGITS})*(?:\s?(?:\\?%|[ap]\.?m\b))?", re.IGNORECASE
)
# Text next to a number that makes it part of a formula, a range or a calculation in words.
_CHANGED_BEFORE = re.compile(
  r"(?:[0-9)}] ?[-+*/×÷·^_]|[A-Za-z][\^_]|\\sqrt ?|√|\b(?:half|third|quarter|fifth|tenth) of"
  r"|\b(?:twice|thrice|double|triple|plus|times)|\\[dt]?frac\s?\{[^{}]*\}|[0-9]+ to|[0-9]+ )"
  r" ?[({]*\Z",
  re.IGNORECASE,
)
_CHANGED_AFTER = re.compile(
  r",? (?:or (?:more|less|fewer|greater|above|below|over)|and (?:above|up|over|below)"
  r"|at (?:most|least)|halves|thirds|fourths|fifths|tenths|hundredths|squared|cubed|quarters"
  r"|pairs|score|gross)\b|\}?[\^_]\w",
  re.IGNORECASE,
)
_NEGATED = re.compile(r"(?:(?<![\w)])-|\b(?:minus|negative) )\Z", re.IGNORECASE)
_UNIT_AFTER = re.compile(
  rf"(?: (?:{'|'.join(SCALES)})s?\b)?"
  r"(?: (?:dollars?|cents?|degrees?|radians?)\b|°|¢)?",
  re.IGNORECASE,
)
_WORD = re.compile(rf"(?<![\\A-Za-z])(?!(?:and|or|sqrt|pi|{'|'.join(FUNCTIONS)})\b)[A-Za-z]{{2,}}")


class Box(NamedTuple):
  r"""A \boxed{…} or \fbox{…} in a text."""

  start: int  # index of its first character
  end: int  # index after its last character
  content: str


def find_boxes(text: str) -> tuple[list[Box], list[int]]:
  r"""Finds the outermost boxes: \boxed{…}, \fbox{…} and \boxed 5.

  Returns:
    The boxes in order, and the positions where unclosed boxes begin.
  """
  closed: list[tuple[int, int, int, int]] = []  # start and end of each box, then of its content
  # Open braces: start of the brace or of its box; start of the box's content, None without a box.
  stack: list[tuple[int, int | None]] = []
  for token in _BOX_TOKEN.finditer(text):
    if token["bare"]:
      closed.append((*token.span(), *token.span("bare")))
    elif token[0] == "}" and stack:
      start, content = stack.pop()
      if content is not None:
        while closed and closed[-1][0] > start:
          closed.pop()
        closed.append((start, token.end(), content, token.start()))
    elif token[0] == "{":
      stack.append((token.start(), None))
    elif token[0].endswith("{") and token[0] != r"\{":
      stack.append((token.start(), token.end()))
  boxes = [Box(start, end, text[first:last]) for start, end, first, last in closed]
  return boxes, [start for start, content in stack if content is not None]


def find_stated_answer(text: str) -> str | None:
  r"""Finds the last \boxed{…}, or else the line after the last "####"; None if there is neither.

  Several boxes form one answer, a list, if only formatting, a comma, "and" or "or" separates them.
  If the last box is never closed, the answer is empty, since this box may have revoked earlier
  boxes.
  """
  boxes, unclosed = find_boxes(text)
  last_end = boxes[-1].end if boxes else 0
  if any(start >= last_end for start in unclosed) or (boxes and _CUT_OFF.search(text, last_end)):
    return ""
  if not boxes:
    _, mark, rest = text.rpartition(ANSWER_MARK)
    return rest.strip().partition("\n")[0] if mark else None
  answer, start = boxes[-1].content, boxes[-1].start
  for box in reversed(boxes[:-1]):
    between = text[box.end : start]
    joint = _JOINT.fullmatch(_FORMATTING.sub("", between))
    if joint is None or len(between.strip()) > _MAX_BETWEEN:
      break
    if joint[0] or box.content.strip() != answer.strip():  # else the answer is only repeated
      word = " and " if joint[1] else " or "
      is_condition = bool(joint[1] or joint[2]) and _CONDITION.search(box.content)
      answer = box.content + (word if is_condition else ", ") + answer
    start = box.start
  return answer


def _has_words(text: str) -> bool:
  """Whether a text has words outside of formulas."""
  return bool(_WORD.search(_TEXT.sub(" ", _MATH.sub(" ", text))))


def _find_last_expression(text: str) -> str | None:
  """Finds the number, or the formula in $…$, \\(…\\) or \\[…\\], that ends last.

  Words before the expression that make it a bound, such as "at most", are included.

  Returns:
    The expression; None if the text says that this is not the answer, or if it is an end of a
    range.
  """
  spans = [(m.end(), m.start()) for m in (*_NUMBER.finditer(text), *_MATH.finditer(text))]
  end, start = max(spans, default=(0, 0))
  before = text[:start][-_NOT_BEFORE:]
  if start == end or _NOT_THIS.search(before) or _CHANGED_AFTER.match(text, end):
    return None
  sign = _NEGATED.search(before)
  if sign:
    before = before[: sign.start()]
  if _CHANGED_BEFORE.search(before) or (sign and re.search(r"[0-9)}] ?\Z", before)):
    return None
  bound = _BOUND_BEFORE.search(before)
  unit = _UNIT_AFTER.match(text, end)
  assert unit  # the pattern also matches an empty text
  return (bound[0] if bound else "") + ("-" if sign else "") + text[start:end] + unit[0]


def _extract_from_phrase(phrase: str) -> str | None:
  """Extracts the answer from "x + 1", "5 apples", "therefore $5$" or "Tuesday".

  Returns:
    The answer; None if a longer phrase has no number or formula.
  """
  parsed = parse_answer(phrase[:MAX_ANSWER])
  if not _has_words(phrase) or parsed.number is not None or ":" in parsed.value:
    return phrase
  return _find_last_expression(phrase) or (phrase if len(phrase.split()) <= _SHORT else None)


def _extract_from_prose(text: str) -> str | None:
  """Extracts the answer from prose: the text after "the answer is", or else the last expression."""
  text = re.sub("[−–]", "-", text[-_PROSE:]).strip()
  announcements = list(_ANSWER_IS.finditer(text))
  if announcements:
    phrase = _SENTENCE_END.split(text[announcements[-1].end() :], maxsplit=1)[0]
    return _extract_from_phrase(phrase)
  if "\n" not in text and (not _has_words(text) or len(text.split()) == 1):
    return text
  return _find_last_expression(text)


def extract_answer(completion: str) -> str | None:
  r"""Extracts the text of a completion's final answer.

  Tries in this order: the last \boxed{…}; the line after the last "####"; the text after the last
  "answer is"; the full text if it is one formula or word; the formula or number that ends
  closest to the end of the text. Only the text after any "</think>" counts, and no text counts
  while a "<think>" is open. If the text that counts has an answer tag, only the tag's content
  counts.

  Returns:
    The answer; None if there is none.
  """
  text, is_tagged = find_answer_part(completion)
  if text is None:
    return None
  answer = find_stated_answer(text[-_TAIL:])
  if answer is None:
    is_short = is_tagged and len(text.split()) <= _SHORT and not _ANSWER_IS.search(text)
    answer = text if is_short else _extract_from_prose(text)
  return (answer or "").strip() or None
