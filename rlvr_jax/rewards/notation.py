r"""One notation for equal texts that differ in fonts, colors, spaces, Unicode and LaTeX.

Words are in \text{…}, whatever the font; "and" and "or" are \land and \lor; formulas have no fonts.
"""

from __future__ import annotations

import re

from rlvr_jax.rewards.formulas import FUNCTIONS

AND, OR = r"\land", r"\lor"
TEXT = r"\\text\s?\{([^{}]*)\}"

_FONTS = (
  "text textbf textit textrm textnormal textsf texttt textup emph mathrm mathbf mathit mathsf"
  " mathtt mathnormal boldsymbol bm pmb mbox hbox operatorname underline"
).split()
_UPRIGHT = ("text", "textrm", "textnormal", "mathrm", "mbox", "hbox", "operatorname")
_FONT = re.compile(
  rf"\\(?:({'|'.join(_FONTS)})\*?(?![A-Za-z])|(?:textcolor|colorbox)\s*\{{[^{{}}]*\}})\s*\{{"
)
_FONT_OF_LETTER = re.compile(rf"\\({'|'.join(_FONTS)})\s+(\w)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_FORMULA = re.compile(r"[\\0-9^_{}=<>|+*$°]")

_NTH = "(?:st|nd|rd|th)"
_NTH_TEXT = rf"\\text\s*\{{\s*{_NTH}\s*\}}"
_CIRCLE = r"(?:\\circ(?![a-zA-Z])|°)"
_SIZES = (
  "displaystyle textstyle scriptstyle limits bf it rm sf tt em bfseries itshape tiny small"
  " normalsize large Large LARGE huge Huge left right middle [bB]igg?[lrm]? "
).split()
# Fullwidth digits, signs and brackets, as in Chinese and Japanese texts → ASCII.
_CHARACTERS = {0xFF00 + code: chr(0x20 + code) for code in range(1, 0x5F)} | str.maketrans({
  "−": "-", "–": "-", "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
  "∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "≈": r"\approx ",
  "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ",
  "∈": r"\in ", "∀": r"\forall ", "±": r"\pm ", "∓": r"\mp ", "√": r"\sqrt ", "×": r"\times ",
  "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "⁄": "/", "²": "^2", "³": "^3", "º": "°",
  "˚": "°", "¼": r"\frac{1}{4}", "½": r"\frac{1}{2}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}",
  "⅔": r"\frac{2}{3}", "∧": rf"{AND} ", "∨": rf"{OR} ", "⟨": "(", "⟩": ")", "\u00a0": " ",
  "\u2009": " ", "\u202f": " ",
})  # fmt: skip

# In this order. A matrix's "\\" before a space is not a space command.
_RULES = [
  (re.compile(pattern, re.DOTALL), replacement)
  for pattern, replacement in (
    (rf"\\(?:{'|'.join(_SIZES)})(?![a-zA-Z])|\\color\s*\{{[^{{}}]*\}}", ""),
    (r"(?<!\\)[(\[]\s*\\begin\s*\{array\}\s*\{[lcr\s]*\}((?:(?!\\begin).)*)\\end\s*\{array\}\s*[)\]]",
     r"\\begin{pmatrix}\1\\end{pmatrix}"),
    # "n!=5" is an inequality, "5!=120" has a factorial.
    ("<=", r"\\leq "), (">=", r"\\geq "), (r"\\not\s?=|(?:(?<=[A-Za-z])|\s)!=", r"\\neq "),
    (r"(?<=[\w)}])\s?\*\*\s?(?=[\w({-])", "^"), (r"(?<=\d)\s?\+\s?-", "-"),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"), (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
    (r"\\le(?:qslant|qq)?(?![a-zA-Z])", r"\\leq"), (r"\\ge(?:qslant|qq)?(?![a-zA-Z])", r"\\geq"),
    (r"\\lt(?![a-zA-Z])", "<"), (r"\\gt(?![a-zA-Z])", ">"), (r"\\neq?(?![a-zA-Z])", r"\\neq"),
    (r"\\[lr]?vert(?![a-zA-Z])", "|"), (r"\\(?:vee|lor)(?![a-zA-Z])", rf"\{OR} "),
    (r"\\(?:wedge|land|&)(?![a-zA-Z])|\\&", rf"\{AND} "),
    (r"\\backslash(?![a-zA-Z])", r"\\setminus "),
    (r"\\langle(?![a-zA-Z])", "("), (r"\\rangle(?![a-zA-Z])", ")"),
    (r"\\[lr]brace(?![a-zA-Z])", lambda m: r"\{" if m[0][1] == "l" else r"\}"),
    (r"\\f?box(?:ed)?\s*(?=[{\d+-])", ""),
    # A comma within a number: "32,\!349", "1{,}\,000", "1,\ 000".
    (r"(?<=\d)(?:,\s*\\!|\{,\}\s*(?:\\[,!])?)\s*(?=\d{3}(?!\d))", ","),
    (r"(?<=\d),\s*\\?\s(?=0\d\d(?!\d))", ","),
    (r"(?<!\\)\\!", ""), (r"\{([,:])\}", r"\1"),
    (rf"(?<=\d){_NTH}(?![A-Za-z])", ""),
    (rf"(?<=\d)\s*\^?\s*(?:{_NTH_TEXT}|\{{\s*(?:{_NTH_TEXT}|{_NTH})\s*\}})", ""),
    (r"(?<=\d)\s*(?:\\[lc]?dots|\.\.\.)\s*\Z", ""),
    (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-zA-Z])", " "),
    (r"(?<!\\)\$\$?([^$]*)(?<!\\)\$\$?", r"\1"),  # around a formula; other dollars are money
    (r"(?<![\\\d}])(?<![\d}] )\\?\$(?!\s?[-+]?\s?(?:[\d.]|\\frac|\\sqrt))", ""),
    (r"\\?\$", r"\\$"),
    (r"(?<!\\)\\[()\[\]]", ""), (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
    (rf"\^\s*(?:{_CIRCLE}|\{{\s*{_CIRCLE}\s*\}})|\\degree(?![a-zA-Z])", "°"),
    (r"\\(?:reals|R)(?![a-zA-Z])", r"\\mathbb{R}"), (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
    (r"\\(frac|binom)\s*(\w)\s*(?=[\w{\\])", r"\\\1{\2}"),
    (r"\\(frac|binom)\s*(\{[^{}]*\})\s*(\w)", r"\\\1\2{\3}"),
    (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"), (r"([_^])\s*\{\s*(\w)\s*\}", r"\1\2"), (r"\s+", " "),
    # Groups of three digits, separated by spaces: "12 345", "3.141 592".
    (r"(?:(?<=(?<![\w.,/^])\d)|(?<=(?<![\w.,/^])\d\d)|(?<=(?<![\w.,/^])\d{3})) "
     r"(?=\d{3}(?!\d| ?/))", ""),
    (r"(?:(?<=\.\d{3})|(?<=\.\d{3} \d{3})) (?=\d{1,3}(?!\d| ?/))", ""),
  )
]  # fmt: skip

# Functions and symbols that plain text writes as words. "5 sec" is not a secant, and the base of
# log(2) is open.
_PLAIN = re.compile(
  rf"(?<![\\A-Za-z])(?!log)(?:(?P<function>sqrt|pi|theta|{'|'.join(FUNCTIONS)})(?![a-z])"
  r"(?:(?<!sec)|(?=\s?\())|(?P<infinity>infinity|inf|oo)(?![A-Za-z]))"
)
_CONNECTIVE = re.compile(
  rf"{TEXT}|\s*(?:,?\s*\\(?P<sign>land|lor)(?![A-Za-z])|(?:,\s*|\s)(?P<word>and|or)(?=\s))\s*,?\s*"
)


def normalize(text: str) -> str:
  r"""Removes notation that changes only the appearance: fonts, \left, \dfrac, $, thin spaces …"""
  text = _unwrap_fonts(text.translate(_CHARACTERS))
  for pattern, replacement in _RULES:
    text = pattern.sub(replacement, text)
  text = mark_connectives(_PLAIN.sub(lambda m: rf"\{m['function'] or 'infty'} ", text))
  return text.strip(' *`"').rstrip(' .,;:*`"\\').lstrip(" :")


def mark_connectives(text: str) -> str:
  r"""Writes "and" and "or" outside of \text{…}, also after a comma, as \land and \lor."""

  def mark(match: re.Match[str]) -> str:
    found = match["sign"] or match["word"]
    return f"{AND if found in ('and', 'land') else OR} " if found else match[0]

  return _CONNECTIVE.sub(mark, text)


def _unwrap_fonts(text: str) -> str:
  r"""Removes fonts and colors from formulas; words of any font become \text{…}."""
  position = 0
  text = _FONT_OF_LETTER.sub(r"\\\1{\2}", text)
  while match := _FONT.search(text, position):
    end = _closing_brace(text, match.end())
    if end < 0:
      break
    content = text[match.end() : end]
    word = content.strip(" ,").casefold()
    if word in ("and", "or"):
      new = f" {AND if word == 'and' else OR} "
    elif word in FUNCTIONS and (word != "sec" or match[1] == "operatorname"):
      new = rf"\{word} "
    elif (
      match[1] is None
      or _FORMULA.search(content)
      or not re.search("[A-Za-z]", content)
      or (match[1] not in _UPRIGHT and len(word) == 1)
    ):
      new = content
    else:
      new = rf"\text{{{content}}}"
      position = match.start() + len(new)
    text = text[: match.start()] + new + text[end + 1 :]
  return text


def _closing_brace(text: str, start: int) -> int:
  """The index of the brace that closes the brace before `start`; -1 if it is never closed."""
  depth = 1
  for brace in _BRACE.finditer(text, start):
    depth += (brace[0] == "{") - (brace[0] == "}")
    if depth == 0:
      return brace.start()
  return -1
