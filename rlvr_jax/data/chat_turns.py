"""Learns and checks, per role, the text that a chat template writes between turns of a dialogue.

A dialogue grows by appended tokens; its earlier turns are never encoded again. The result has the
template's format only if the template is append-only: another turn leaves the tokens of the earlier
turns unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

ANSWER = "The answer is 42."
# White space at the ends of this reply shows whether the template trims replies. Its quotes show
# whether the template writes replies as JSON.
_REPLY = ' \n 6 times "8"?\né \n'
_PLAIN_REPLY = "No."  # shows whether the white space around `_REPLY` is the template's own
# Texts that begin and end a thought. A template that has such an ending may drop earlier thoughts.
_THOUGHTS = (
  ("<think>\n", "\n</think>\n\n"),
  ("<|channel>thought\n", "\n<channel|>"),
  ("[THINK]", "[/THINK]"),
)
_THOUGHT = "Six sevens."
_SHOWN = 40  # characters that messages show of a difference
_REMEDY = (
  "set config.prompts.template to a variant that keeps earlier turns: 'qwen3_training',"
  " 'deepseek_r1_distill_training', or a file of your own"
)


def _as_json(reply: str) -> str:
  """The reply as JSON, which is how Llama 3's templates write the reply of a tool."""
  return json.dumps(reply, ensure_ascii=False)


_FORMS: tuple[Callable[[str], str], ...] = (str, _as_json, str.strip)


class _Frame(NamedTuple):
  """The template's texts around a reply, between two turns of the policy."""

  before: str  # from the policy's end of turn to the reply
  after: str  # from the reply to the start of the policy's next turn
  written: Callable[[str], str]  # reply → its text in the template, one of `_FORMS`
  control: re.Pattern[str]  # control tokens, which are encoded as text in a reply


class ChatTurns:
  """Encodes the text that follows a policy's turn in a dialogue with a chat template."""

  def __init__(
    self,
    tokenizer: Any,
    apply_template: Callable[..., Any],
    control_tokens: Callable[[str], re.Pattern[str]],
    end_of_turn_id: int | None,
    name: str,
  ):
    """Initializes without known roles; `learn` adds roles.

    Args:
      tokenizer: the tokenizer of transformers, with a chat template.
      apply_template: the tokenizer's `apply_chat_template`, with errors that name the folder.
      control_tokens: a function of a text that the template writes; returns a pattern of all
        control tokens, including the control tokens in this text.
      end_of_turn_id: the token that the template writes after an assistant's message; None if it
        writes no token there.
      name: the folder's name, for messages.
    """
    self._tokenizer = tokenizer
    self._apply_template = apply_template
    self._control_tokens = control_tokens
    self._end_id = end_of_turn_id
    self._name = name
    self._frames: dict[str, _Frame] = {}

  def learn(self, role: str, prompt: Sequence[Mapping[str, str]]) -> None:
    """Learns the template's texts around replies of a role, and checks dialogues with the role.

    A checked dialogue has two replies: two of this role, or one of this role and one of a role that
    was learned before. Dialogues of two roles are checked in both orders. If the role was already
    learned, the method does nothing.

    Args:
      role: the role of the replies, such as "user" or "tool".
      prompt: messages before the first policy turn.
    Raises:
      ValueError: the template rejects the role, or is not append-only.
    """
    if role in self._frames:
      return
    turn = self._policy_message(prompt)
    frames = self._frames | {role: self._frame(role, prompt, turn)}
    for other in frames:
      for roles in dict.fromkeys([(role, other), (other, role)]):
        self._check(frames, roles, prompt, turn)
    self._frames = frames

  def encode(self, reply: str, role: str, last_id: int) -> list[int]:
    """The token ids between the policy's turn, which ends with `last_id`, and its next turn.

    `learn` must have been called for the role.
    """
    return self._encode(self._frames[role], reply, last_id)

  def _encode(self, frame: _Frame, reply: str, last_id: int | None) -> list[int]:
    from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

    reply = frame.written(reply)
    if frame.control.search(reply):
      marked = mark_control_tokens(reply, frame.control)
      ids = encode_marked_chat(self._tokenizer, frame.before + marked + frame.after)
    else:
      text = frame.before + reply + frame.after
      ids = self._tokenizer.encode(text, add_special_tokens=False)
    return ids[1:] if last_id == self._end_id else ids

  def _policy_message(self, prompt: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """An example of the policy's message, with a thought first if the template has thought tags.

    The example has no thought if the generation prompt already closes one, as Qwen's does when
    thinking is off.

    Raises:
      ValueError: the template drops the thought even from the last message.
    """
    started = self._apply_template(prompt, tokenize=False, add_generation_prompt=True)
    source = str(self._tokenizer.chat_template)
    for begin, end in _THOUGHTS:
      if end.strip() in source and end.strip() not in started:
        turn = {"role": "assistant", "content": f"{begin}{_THOUGHT}{end}{ANSWER}"}
        written = self._apply_template([*prompt, turn], tokenize=False)
        if _THOUGHT not in written:
          raise ValueError(
            f"the chat template of {self._name} drops thoughts: it writes"
            f" {turn['content']!r} as {written[-_SHOWN:]!r}; {_REMEDY}"
          )
        return turn
    return {"role": "assistant", "content": ANSWER}

  def _frame(
    self, role: str, prompt: Sequence[Mapping[str, str]], turn: Mapping[str, str]
  ) -> _Frame:
    try:
      text = self._apply_template(
        [*prompt, turn, {"role": role, "content": _REPLY}],
        tokenize=False,
        add_generation_prompt=True,
      )
    except ValueError as error:
      raise ValueError(
        f"replies of role {role!r}: {error}, or give replies another role"
      ) from error
    written = next((form for form in _FORMS if form(_REPLY) in text), str)
    rest, found, after = text.rpartition(written(_REPLY))
    _, found_turn, before = rest.rpartition(ANSWER)
    if not (found and found_turn):
      missing = "assistant's message" if found else "reply"
      raise ValueError(
        f"the chat template of {self._name} does not write the {missing} unchanged if replies have"
        f" the role {role!r}: it writes {text[-160:]!r}; give replies another role, such as"
        " 'user', or set config.prompts.template to a file with another template"
      )
    ids = self._tokenizer.encode(before, add_special_tokens=False)
    if self._end_id is None or ids[:1] != [self._end_id]:
      raise ValueError(
        f"after an assistant's message the chat template of {self._name} writes"
        f" {before[:_SHOWN]!r}, which does not begin with a token that ends the turn; set"
        " config.prompts.template to a file with another template"
      )
    return _Frame(before, after, written, self._control_tokens(before + after))

  def _check(
    self,
    frames: Mapping[str, _Frame],
    roles: tuple[str, str],
    prompt: Sequence[Mapping[str, str]],
    turn: Mapping[str, str],
  ) -> None:
    """Checks that appending the tokens of three policy turns gives the template's dialogue."""
    started = self._apply_template(prompt, add_generation_prompt=True)
    first = self._apply_template([*prompt, turn])
    self._compare(started, first, roles)
    turn_ids = first[len(started) :]
    if self._end_id in turn_ids:
      turn_ids = turn_ids[: turn_ids.index(self._end_id) + 1]
    appended = [*started, *turn_ids]
    messages = [*prompt, turn]
    for role, reply in zip(roles, (_REPLY, _PLAIN_REPLY), strict=True):
      appended += [*self._encode(frames[role], reply, turn_ids[-1]), *turn_ids]
      messages += [{"role": role, "content": reply}, turn]
    self._compare(appended, self._apply_template(messages), roles)

  def _compare(self, appended: list[int], whole: list[int], roles: Sequence[str]) -> None:
    """Raises ValueError unless the template's ids of the whole dialogue begin with `appended`."""
    if whole[: len(appended)] == appended:
      return
    same = next(
      (i for i, ids in enumerate(zip(appended, whole, strict=False)) if ids[0] != ids[1]),
      len(whole),
    )
    shown = [self._tokenizer.decode(ids[same:])[:_SHOWN] for ids in (appended, whole)]
    raise ValueError(
      f"the chat template of {self._name} is not append-only with replies of role"
      f" {' and '.join(map(repr, dict.fromkeys(roles)))}: after {same} equal tokens the appended"
      f" dialogue goes on with {shown[0]!r}, but the dialogue that the template writes goes on with"
      f" {shown[1]!r}; {_REMEDY}"
    )
