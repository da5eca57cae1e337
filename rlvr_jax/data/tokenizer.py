"""Tokenizers: text to token ids and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from rlvr_jax.data.problems import Problem

Message = Mapping[str, str]  # {"role": one of PROMPT_ROLES, "content": text}
PROMPT_ROLES = ("system", "developer", "user", "assistant", "tool")
REPLY_ROLES = ("user", "tool")
_PAD, _END = "<|pad|>", "<|end|>"  # special tokens of `ByteTokenizer`


class Tokenizer(Protocol):
  """Protocol of a tokenizer.

  A prompt is encoded once. The ids of a completion are decoded for graders and readers, and this
  text is never encoded again. In a dialogue the tokens of the environment's reply are
  appended to the policy's tokens.
  """

  vocab_size: int  # larger than every id; at most the model's V
  pad_id: int
  stop_ids: tuple[int, ...]  # generation ends at any of these; a demonstration ends with the first

  def encode(self, text: str) -> list[int]:
    """Encodes a text, such as a demonstration, without adding special tokens."""
    ...

  def encode_prompt(self, text: str) -> list[int]:
    """Encodes a text as a prompt, in the form that the policy expects."""
    ...

  def encode_messages(self, messages: Sequence[Message]) -> list[int]:
    """Encodes messages unchanged as a prompt, which ends where the policy's turn begins.

    Raises:
      ValueError: `check_messages` refuses them.
    """
    ...

  def encode_reply(self, reply: str, role: str, last_id: int) -> list[int]:
    """Encodes the text between a policy's turn and the start of its next turn.

    Args:
      reply: the environment's text.
      role: "user" or "tool", for chat templates.
      last_id: the last token id of the policy's turn. If `last_id` is not the token that ends a
        turn, the token that ends a turn is encoded first.
    Raises:
      ValueError: the role is unknown, or `check_turns` refuses it.
    """
    ...

  def check_turns(self, roles: Iterable[str], stop_strings: Sequence[str] = ()) -> None:
    """Checks that dialogues with these roles of replies and these stop strings are possible.

    Raises:
      ValueError: a role is unknown, the prompt format does not allow appending, or a stop string
        can never be found.
    """
    ...

  def vocabulary(self) -> Mapping[str, int]:
    """Spelling → id of every token; tokenizers that share a token spell it in the same way."""
    ...

  def decode(self, ids: Iterable[int], *, with_special: bool = False) -> str:
    """Decodes ids, without special tokens unless `with_special`."""
    ...


def join_messages(messages: Sequence[Message]) -> str:
  """The contents of messages, each on a line of its own: a prompt without roles."""
  check_messages(messages)
  return "\n".join(message["content"] for message in messages)


def check_messages(messages: Sequence[Message]) -> None:
  """Raises ValueError unless `messages` are a prompt for the assistant's next message.

  There must be at least one message. All messages must have a known role and a text, and the last
  message must not be the assistant's.
  """
  for message in messages:
    pairs = message.items() if isinstance(message, Mapping) else ()
    fields = {key: value for key, value in pairs if value is not None}
    known = fields.keys() == {"role", "content"} and fields["role"] in PROMPT_ROLES
    if not known or not isinstance(fields["content"], str):
      raise ValueError(
        f"a prompt's message is {str(message)[:120]}; a message must be"
        f' {{"role": one of {list(PROMPT_ROLES)}, "content": a text}}'
      )
  if not messages:
    raise ValueError("a prompt has no messages; give at least one")
  if messages[-1]["role"] == "assistant":
    raise ValueError(
      "a prompt ends with a message of the assistant, but the policy writes the assistant's next"
      " message; end the prompt with a message of another role"
    )


def check_reply_role(role: str) -> None:
  """Raises ValueError unless `role` is one of `REPLY_ROLES`."""
  if role not in REPLY_ROLES:
    raise ValueError(f"role = {role!r} of a reply is unknown; choose one of {list(REPLY_ROLES)}")


def check_stop_strings(stop_strings: Sequence[str]) -> None:
  """Raises ValueError unless `stop_strings` are texts that can be found: not empty, no U+FFFD."""
  if isinstance(stop_strings, str):
    raise ValueError(
      f"the stop strings are one text, {stop_strings!r}; give a sequence of texts:"
      f" ({stop_strings!r},)"
    )
  for stop in stop_strings:
    if not isinstance(stop, str) or not stop or "\ufffd" in stop:
      raise ValueError(
        f"the stop string {stop!r} must be a text that is not empty and has no U+FFFD, the"
        " character for invalid bytes; give a text such as '</tool_call>'"
      )


class ByteTokenizer:
  """UTF-8 bytes as ids 0..255, then padding (256) and end of text (257).

  The vocabulary is rounded up to a multiple of 8, so that it can be sharded; the ids beyond end of
  text are never produced by `encode`.
  """

  vocab_size = 264
  pad_id = 256
  stop_ids: tuple[int, ...] = (257,)

  def encode(self, text: str) -> list[int]:
    """Returns the bytes of the text; no special token is added."""
    return list(text.encode("utf-8"))

  def encode_prompt(self, text: str) -> list[int]:
    """Returns the bytes of the text, as `encode` does."""
    return self.encode(text)

  def encode_messages(self, messages: Sequence[Message]) -> list[int]:
    """The bytes of the messages' contents, one message a line, without roles."""
    return self.encode_prompt(join_messages(messages))

  def encode_reply(self, reply: str, role: str, last_id: int) -> list[int]:
    """Returns the bytes of the unchanged reply; the reply itself must contain any separators."""
    check_reply_role(role)
    return self.encode(reply)

  def check_turns(self, roles: Iterable[str], stop_strings: Sequence[str] = ()) -> None:
    """Checks the roles' names and the stop strings; there is no template."""
    for role in roles:
      check_reply_role(role)
    check_stop_strings(stop_strings)

  def vocabulary(self) -> dict[str, int]:
    """Returns the ids of bytes, spelled as in `huggingface_files`, and of special tokens."""
    return _byte_letters() | {_PAD: self.pad_id, _END: self.stop_ids[0]}

  def decode(self, ids: Iterable[int], *, with_special: bool = False) -> str:
    """Returns the text of the byte ids; other ids are dropped, invalid UTF-8 becomes U+FFFD."""
    del with_special  # they have no text
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

  def huggingface_files(self) -> dict[str, bytes]:
    """Name → content of files from which Hugging Face's libraries load this tokenizer.

    The libraries' tokenizer gives the same ids and texts, except if a text spells a special token,
    "<|pad|>" or "<|end|>". The libraries encode such a spelling as one id unless
    `split_special_tokens` is set; this class encodes it as bytes.
    """
    special = {_PAD: self.pad_id, _END: self.stop_ids[0]}
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer = {
      "version": "1.0",
      "added_tokens": [{"id": i, "content": text, **flags} for text, i in special.items()],
      "pre_tokenizer": byte_level,
      "decoder": byte_level,
      "model": {"type": "BPE", "vocab": self.vocabulary(), "merges": []},
    }
    settings: dict[str, Any] = {
      "tokenizer_class": "PreTrainedTokenizerFast",
      "pad_token": _PAD,
      "eos_token": _END,
      "clean_up_tokenization_spaces": False,
      "padding_side": "left",
    }
    ids = {"pad_token_id": self.pad_id, "eos_token_id": list(self.stop_ids)}
    files = {
      "tokenizer.json": tokenizer,
      "tokenizer_config.json": settings,
      "generation_config.json": ids,
    }
    return {name: json.dumps(content, indent=2).encode() for name, content in files.items()}


def _byte_letters() -> dict[str, int]:
  """Letter → the byte that it stands for in a byte-level tokenizer.json.

  Printable Latin-1 characters stand for themselves; the other bytes, in order, get the letters from
  U+0100 on.
  Source: "Language Models are Unsupervised Multitask Learners" (Radford et al. 2019), code.
  """
  printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
  others = [byte for byte in range(256) if byte not in printable]
  letters = {chr(byte): byte for byte in sorted(printable)}
  return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


# --- prompts of problems -------------------------------------------------------------------------


class PromptError(ValueError):
  """A prompt is empty, or longer than `config.max_prompt_length`."""


def encode_prompt(problem: Problem, tokenizer: Tokenizer) -> list[int]:
  """The tokens of a problem's prompt, from its messages, or else from its question."""
  if problem.messages:
    return tokenizer.encode_messages(problem.messages)
  return tokenizer.encode_prompt(problem.question)


def encode_first_turn(
  problem: Problem,
  tokenizer: Tokenizer,
  max_prompt_length: int,
  first_messages: Sequence[Message] | None = None,
) -> list[int]:
  """The tokens of a policy's first prompt, at least one token.

  Args:
    problem: the problem, whose messages or question are the prompt.
    tokenizer: `encode_prompt` and `encode_messages` are used.
    max_prompt_length: S, in tokens.
    first_messages: the messages with which the environment replaces the question, if it does.
  Raises:
    PromptError: the prompt's text is empty, or its number of tokens is 0 or above S.
  """
  if first_messages:
    tokens = tokenizer.encode_messages(first_messages)
  else:
    tokens = encode_prompt(problem, tokenizer)
  begins = first_messages[0]["content"] if first_messages else ""
  check_prompt(problem, len(tokens), max_prompt_length, begins=begins)
  return tokens


def check_prompt(
  problem: Problem, length: int, max_prompt_length: int, where: str = "", begins: str = ""
) -> None:
  """Raises PromptError unless 0 < `length` ≤ `max_prompt_length`, in tokens.

  Args:
    problem: the problem whose question is the prompt.
    length: tokens in the prompt.
    max_prompt_length: S, the most tokens of a prompt.
    where: name of the problem for the message, used if `problem.where` is "".
    begins: text of the environment's first message, if the environment replaces the question.
  """
  owner = problem.where or where
  owner = owner and f"{owner}: "
  if not ((problem.question or begins) and length):
    raise PromptError(f"{owner}a prompt is empty: give the task a prompt template with some text")
  if length > max_prompt_length:
    leave_out = (
      "set config.prompts.too_long = 'drop' to leave out such training problems"
      " ('drop_everywhere' also leaves out such held-out problems)"
    )
    if begins:  # they depend on a seed, too
      leave_out = "shorten the first messages of the environment's reset"
    raise PromptError(
      f"{owner}a prompt has {length} tokens but config.max_prompt_length is {max_prompt_length}:"
      f" raise config.max_prompt_length, or {leave_out}. The prompt begins"
      f" {(begins or problem.question)[:80]!r}"
    )
