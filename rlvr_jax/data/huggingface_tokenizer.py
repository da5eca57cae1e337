"""Tokenizers of folders in Hugging Face's layout: tokenizer.json, chat template, stop tokens."""

from __future__ import annotations

import json
import os
import pathlib
import re
import tempfile
from collections.abc import Collection, Iterable
from types import ModuleType
from typing import Any

from absl import logging

from rlvr_jax.files import listing, located

PROMPT_FORMATS = ("plain", "chat")
# All that is read. No code of the folder, which a configuration may name, is there to be run.
_FILES = (
  "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
  "generation_config.json",
)  # fmt: skip
_THOUGHTS = ("<think>", "</think>")  # graders look for them, special tokens or not
_ANSWER = "The answer is 42."  # stands for an assistant's turn, to see what the template ends it by


class HuggingFaceTokenizer:
  """The tokenizer of a folder, as its tokenizer.json has it, whatever class its config names.

  Prompts are "plain", the text with the special tokens that the tokenizer adds of itself (such as a
  first <bos>), or "chat": a user's turn in the chat template, up to where the assistant begins.

  Control tokens, which are those marked special, the stop tokens and those that the template writes
  around what is said, come from the tokenizer and its template only. A text that spells one, such
  as "<|im_end|>", is encoded as letters: a problem cannot end its turn or begin another's.
  Other added tokens, such as the "<think>" of many models, are found in texts too.

  `stop_ids` are the tokenizer's end of text and those of generation_config.json. In the chat format
  the token that the template writes after an assistant's turn is one too, and the first, as it is
  what a worked solution is to end with; for a base model it often differs from the end of text.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    *,
    prompt_format: str = "plain",
    system_prompt: str = "",
    chat_template: str | os.PathLike[str] = "",
  ):
    """Reads the folder. Nothing is downloaded; of the folder only the template is run, sandboxed.

    Args:
      directory: local or a URL such as gs://bucket/folder; holds tokenizer.json, and what there is
        of tokenizer_config.json, special_tokens_map.json, chat_template.jinja and
        generation_config.json.
      prompt_format: "plain" or "chat".
      system_prompt: message before the user's, in the chat format; none if empty.
      chat_template: file with a Jinja template in place of the folder's, local or a URL. The place
        to set a template's variables too, as {% set enable_thinking = false %} in its first line.
    Raises:
      OSError: no such folder, or it cannot be reached.
      ValueError: no tokenizer.json, or files that are not what they should be; no stop token; no
        chat template, or one that refuses the messages.
      ImportError: transformers or jinja2 is not installed.
    """
    if prompt_format not in PROMPT_FORMATS:
      raise ValueError(
        f"prompt_format = {prompt_format!r} is unknown; choose one of {list(PROMPT_FORMATS)}"
      )
    self._chat = prompt_format == "chat"
    if not self._chat and (system_prompt or chat_template):
      raise ValueError(
        f"system_prompt = {system_prompt!r} and chat_template = {os.fspath(chat_template)!r} are of"
        f" the chat format, but prompt_format is {prompt_format!r}; leave them empty, or set"
        ' prompt_format to "chat"'
      )
    self._directory = os.fspath(directory)
    self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    self._tokenizer, stops = _read_folder(self._directory)
    ids = set(self._tokenizer.get_vocab().values())
    self.vocab_size = 1 + max(ids)
    if self._chat:
      self._choose_template(chat_template)
      stops = [self._end_of_turn(), *stops]
    self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in stops if i is not None))
    self._check_stops(ids)
    pad = self._tokenizer.pad_token_id
    self.pad_id: int = self.stop_ids[0] if pad is None else pad
    self._control = self._reserve_control_tokens()
    added = self._tokenizer.added_tokens_decoder.items()
    self._silent = {i for i, t in added if t.special and t.content not in _THOUGHTS}
    self._warned = False
    if self.encode_prompt("1")[-1:] == [self._tokenizer.eos_token_id]:
      raise ValueError(
        f"the tokenizer of {self._directory} ends every prompt with its end of text,"
        f" {self._tokenizer.eos_token!r}: take that out of the post_processor in its tokenizer.json"
      )

  def encode(self, text: str) -> list[int]:
    """The text alone, no special token added."""
    return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

  def encode_prompt(self, text: str) -> list[int]:
    """The text as a prompt, in `prompt_format`.

    Raises:
      ValueError: the chat template refuses it.
    """
    messages = self._messages(text)
    spelt = [self._control.search(message["content"]) for message in messages]
    if any(spelt) and not self._warned:
      self._warned = True
      logging.warning(
        "a prompt spells the control token %r: it is encoded as text. To write control tokens of"
        " your own around problems, use the chat format with a chat_template.",
        next(found.group() for found in spelt if found),
      )
    if not self._chat:
      return self._tokenizer.encode(text, split_special_tokens=True)
    # Sanitizing is slow with thousands of added tokens, and does nothing to other texts.
    return self._apply_template(
      messages, add_generation_prompt=True, sanitize_control_tokens=any(spelt)
    )

  def decode(self, ids: Iterable[int]) -> str:
    """The text, for graders and readers.

    Special tokens are dropped, apart from those around a thought, and so are ids of no token.
    """
    # A model may have more rows than there are tokens.
    kept = [int(i) for i in ids if i < self.vocab_size and i not in self._silent]
    return self._tokenizer.decode(kept, clean_up_tokenization_spaces=False)

  def _choose_template(self, chat_template: str | os.PathLike[str]) -> None:
    if chat_template:
      self._tokenizer.chat_template = _read_text(chat_template)
    if not self._tokenizer.chat_template:
      raise ValueError(
        f"{self._directory} has no chat template, neither chat_template.jinja nor chat_template in"
        ' tokenizer_config.json; set prompt_format to "plain", or chat_template to a file with one'
      )
    first, second = (
      self._apply_template(self._messages(text), add_generation_prompt=True, tokenize=False)
      for text in ("1", "2")
    )
    if first == second:
      raise ValueError(
        f"the chat template of {self._directory} leaves out what the user says: {first!r}; set"
        " chat_template to a file with another template"
      )
    if "strftime_now" in str(self._tokenizer.chat_template):
      logging.warning(
        "the chat template of %s may write today's date, and a run that goes on tomorrow would"
        " have other prompts: set the date in a chat_template file of your own.",
        self._directory,
      )

  def _messages(self, text: str) -> list[dict[str, str]]:
    return [*self._system, {"role": "user", "content": text}]

  def _apply_template(self, messages: list[dict[str, str]], **options: Any) -> Any:
    _, jinja2 = _libraries()
    try:
      return self._tokenizer.apply_chat_template(messages, return_dict=False, **options)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
      roles = " and ".join(message["role"] for message in messages)
      advice = "leave system_prompt empty, or " if self._system else ""
      raise ValueError(
        f"the chat template of {self._directory} fails on the messages of {roles}: {error};"
        f" {advice}set chat_template to a file with another template"
      ) from error

  def _end_of_turn(self) -> int | None:
    """The token that the template writes after what an assistant says; None if it writes none."""
    messages = [*self._messages("6 times 7?"), {"role": "assistant", "content": _ANSWER}]
    _, found, after = self._apply_template(messages, tokenize=False).rpartition(_ANSWER)
    ids = self._tokenizer.encode(after.lstrip(), add_special_tokens=False) if found else []
    return ids[0] if ids and ids[0] in self._tokenizer.added_tokens_decoder else None

  def _check_stops(self, ids: Collection[int]) -> None:
    if not self.stop_ids:
      raise ValueError(
        f"{self._directory} names no stop token: set eos_token in its tokenizer_config.json, or"
        " eos_token_id in its generation_config.json"
      )
    unknown = [i for i in self.stop_ids if i not in ids]
    if unknown:
      raise ValueError(
        f"{self._directory}: eos_token_id of generation_config.json has {unknown}, of which the"
        f" tokenizer, whose ids end at {self.vocab_size - 1}, has no token; correct either file"
      )

  def _of_template(self) -> list[str]:
    """Added tokens that the folder's chat template writes around what is said, as <|user|>."""
    if not self._tokenizer.chat_template:
      return []
    turns = [{"role": "assistant", "content": _ANSWER}, *self._messages("6 times 8?")[-1:]]
    try:
      text = self._apply_template([*self._messages("6 times 7?"), *turns], tokenize=False)
    except ValueError:  # it knows one turn only
      return []
    added = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
    # Some tokenizers have words and line breaks among them.
    return [name for name in added if name in text and name[0] == "<" and name[-1] == ">"]

  def _reserve_control_tokens(self) -> re.Pattern[str]:
    """Makes control tokens special, as far as they are not; the pattern of all special ones."""
    transformers, _ = _libraries()
    control = self._tokenizer.convert_ids_to_tokens(list(self.stop_ids)) + self._of_template()
    self._tokenizer.add_tokens(
      [transformers.AddedToken(name, special=True, normalized=False) for name in control],
      special_tokens=True,
    )
    self._tokenizer.chat_control_tokens = []  # none but the special ones
    added = self._tokenizer.added_tokens_decoder.values()
    special = {*control, *(token.content for token in added if token.special)}
    return re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))


def _libraries() -> tuple[ModuleType, ModuleType]:
  # Else it tells at its import that models need torch; tokenizers do not.
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  try:
    import jinja2
    import transformers
  except ImportError as error:
    raise ImportError(
      f'tokenizers of Hugging Face folders need {error.name}: pip install -e ".[hf]"'
    ) from error
  return transformers, jinja2


def _read_folder(directory: str) -> tuple[Any, list[int | None]]:
  """The tokenizer, and its stops: end of text first, then those of generation_config.json."""
  transformers, _ = _libraries()
  filesystem, source = located(directory)
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary)
    for name in set(_FILES) & set(listing(directory)):
      filesystem.get_file(f"{source}/{name}", str(folder / name))
    if not (folder / "tokenizer.json").exists():
      raise ValueError(
        f"{directory} holds no tokenizer.json; where it has a sentencepiece model or a vocabulary"
        " in other files, load and save it with a fast tokenizer of transformers first"
      )
    try:
      # This class takes tokenizer.json as it is. AutoTokenizer's choice by the names in the configs
      # may build another tokenizer from its vocabulary, or ask for code of the folder.
      tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
      )
      generation = _read_eos_ids(folder / "generation_config.json")
    except Exception as error:  # the library's own, of no narrower class
      raise ValueError(
        f"the tokenizer of {directory} cannot be read: {str(error).replace(temporary, directory)}"
      ) from error
  return tokenizer, [tokenizer.eos_token_id, *generation]


def _read_eos_ids(path: pathlib.Path) -> list[int]:
  """`eos_token_id` of generation_config.json: a number, several, or none."""
  if not path.exists():
    return []
  ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
  ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
  if not all(type(i) is int for i in ids):
    raise ValueError(f"eos_token_id in {path} is {ids}, expected integers")
  return ids


def _read_text(path: str | os.PathLike[str]) -> str:
  filesystem, name = located(path)
  try:
    return filesystem.read_text(name, encoding="utf-8")
  except OSError as error:
    raise ValueError(f"chat_template = {os.fspath(path)!r} cannot be read: {error}") from error
