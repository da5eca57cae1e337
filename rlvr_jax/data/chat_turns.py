"""The text of a chat template between the turns of a dialogue, learned and checked per role.

A dialogue's tokens are appended, never encoded again. That is the template's own format only if a
longer dialogue begins with the shorter one, token by token: the template is then append-only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

ANSWER = "The answer is 42."
# Its edges show whether the template trims replies; its quotes, whether it writes them as JSON.
_REPLY = ' \n 6 times "8"?\né \n'
_PLAIN_REPLY = "No."  # shows whether what stands around it belongs to the other's edges
# What a thought is written between: templates that name an ending may drop earlier thoughts.
_THOUGHTS = (
  ("<think>\n", "\n</think>\n\n"),
  ("<|channel>thought\n", "\n<channel|>"),
  ("[THINK]", "[/THINK]"),
)
_THOUGHT = "Six sevens."
_SHOWN = 40  # characters of a difference
_REMEDY = (
  "set config.prompts.template to a variant that keeps earlier turns: 'qwen3_training',"
  " 'deepseek_r1_distill_training', or a file of your own"
)


def _as_json(reply: str) -> str:
  """As Llama 3's templates write what a tool has said."""
  return json.dumps(reply, ensure_ascii=False)


_FORMS: tuple[Callable[[str], str], ...] = (str, _as_json, str.strip)


class _Frame(NamedTuple):
  """Texts around a reply: from the policy's end of turn on, and up to its next turn."""

  before: str
  after: str
  written: Callable[[str], str]  # a reply as the template writes it, one of `_FORMS`
  control: re.Pattern[str]  # tokens that a reply cannot insert


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
    """Learns nothing yet: `learn` does, for a role.

    Args:
      tokenizer: the tokenizer of transformers, with a chat template.
      apply_template: its `apply_chat_template`, with an error that names the folder.
      control_tokens: text that the template writes → pattern of all control tokens, the text's too.
      end_of_turn_id: what the template writes after an assistant's message; None if no token.
      name: the folder, for messages.
    """
    self._tokenizer = tokenizer
    self._apply_template = apply_template
    self._control_tokens = control_tokens
    self._end_id = end_of_turn_id
    self._name = name
    self._frames: dict[str, _Frame] = {}

  def learn(self, role: str, prompt: Sequence[Mapping[str, str]]) -> None:
    """Learns the texts around replies of a role, unless known, and checks dialogues with them.

    In the checked dialogues, the role comes before and after itself and each known role.

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
    """Token ids after a policy's turn whose last token is `last_id`; the role must be known."""
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
    """A message as the policy writes it: with a thought, if the template knows thoughts.

    A generation prompt that ends a thought, as Qwen's do if thinking is disabled, leaves none.

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
            f"the chat template of {self._name} drops thoughts: of {turn['content']!r} it writes"
            f" {written[-_SHOWN:]!r}; {_REMEDY}"
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
        f"replies of role {role!r}: {error}; or give replies another role"
      ) from error
    written = next((form for form in _FORMS if form(_REPLY) in text), str)
    rest, found, after = text.rpartition(written(_REPLY))
    _, found_turn, before = rest.rpartition(ANSWER)
    if not (found and found_turn):
      missing = "assistant's message" if found else "reply"
      raise ValueError(
        f"the chat template of {self._name} does not write the {missing} as it is, with replies of"
        f" role {role!r}: {text[-160:]!r}; give replies another role, such as 'user', or set"
        " config.prompts.template to a file with another template"
      )
    ids = self._tokenizer.encode(before, add_special_tokens=False)
    if self._end_id is None or ids[:1] != [self._end_id]:
      raise ValueError(
        f"the chat template of {self._name} writes {before[:_SHOWN]!r} after an assistant's"
        " message, which does not begin with a token that ends the turn; set"
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
    """Compares a dialogue of three policy turns with what the template writes of it."""
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
    """Raises ValueError unless the template's ids of a dialogue begin with the appended ones."""
    if whole[: len(appended)] == appended:
      return
    same = next(
      (i for i, ids in enumerate(zip(appended, whole, strict=False)) if ids[0] != ids[1]),
      len(whole),
    )
    shown = [self._tokenizer.decode(ids[same:])[:_SHOWN] for ids in (appended, whole)]
    raise ValueError(
      f"the chat template of {self._name} is not append-only with replies of role"
      f" {' and '.join(map(repr, dict.fromkeys(roles)))}: after {same} equal tokens a dialogue goes"
      f" on with {shown[0]!r}, but the template with {shown[1]!r}; {_REMEDY}"
    )
