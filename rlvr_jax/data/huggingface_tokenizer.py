"""Tokenizers from folders in Hugging Face's layout: tokenizer.json, chat template, stop tokens."""

from __future__ import annotations

import json
import os
import pathlib
import re
import tempfile
from collections.abc import Collection, Iterable, Sequence
from types import ModuleType
from typing import Any

from absl import logging

from rlvr_jax.data.chat_turns import ANSWER, ChatTurns
from rlvr_jax.data.tokenizer import (
  Message,
  check_messages,
  check_reply_role,
  check_stop_strings,
  join_messages,
)
from rlvr_jax.storage.folders import list_files, locate

PROMPT_FORMATS = ("plain", "chat")
# Only these files are read. Code in the folder is never run, even if a configuration names it.
_FILES = (
  "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
  "generation_config.json",
)  # fmt: skip
_THOUGHTS = ("<think>", "</think>")  # decoded even if special, because graders look for them
# Templates for dialogues, by name: README.md there says where they are from.
_TEMPLATES = pathlib.Path(__file__).parent / "chat_templates"
_TOOLS = pathlib.Path(__file__).parent / "tools"  # tools, by environment


class HuggingFaceTokenizer:
  """The tokenizer of a folder's tokenizer.json; ignores the class that the folder's config names.

  A "plain" prompt is the text with the special tokens that the tokenizer adds (such as a leading
  <bos>). A "chat" prompt is a user's turn in the chat template, up to the start of the assistant's
  turn.

  Control tokens are tokens marked special, the stop tokens, and tokens that the template writes
  around messages. Only the tokenizer and its template insert them. A text that spells a control
  token, such as "<|im_end|>", is encoded as plain text, so that a problem cannot end its turn or
  begin another turn. All other added tokens are encoded as single tokens in every text. The
  added tokens "<think>" and "</think>" of many models are control tokens only if they are marked
  special, even if the template writes them around messages.

  `stop_ids` are the id of the tokenizer's end-of-text token and the ids in generation_config.json.
  In the chat format the template's end-of-turn token comes first, since a turn of a demonstration
  ends with the first of `stop_ids`. In base models the end-of-turn token is often not the
  end-of-text token.

  Dialogues need an append-only template: another turn leaves the tokens of the earlier turns
  unchanged. `check_turns` checks this. Without a call of `check_turns`, the first `encode_reply`
  with a role checks the template for the role. If the template trims messages, replies are trimmed;
  the policy's tokens stay unchanged.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    *,
    prompt_format: str = "plain",
    system_prompt: str = "",
    chat_template: str | os.PathLike[str] = "",
    tools: str | os.PathLike[str] = "",
  ):
    """Reads the folder. Of its contents only the chat template is executed, in a sandbox.

    Nothing is downloaded from a hub.

    Args:
      directory: local folder or URL such as gs://bucket/folder, with tokenizer.json and optionally
        tokenizer_config.json, special_tokens_map.json, chat_template.jinja and
        generation_config.json.
      prompt_format: "plain" or "chat".
      system_prompt: the system message in the chat format; "" for none.
      chat_template: file, local or a URL, with a Jinja template that replaces the folder's. It can
        set variables, such as {% set enable_thinking = false %} in its first line. Also allowed is
        the name of a template for dialogues: "qwen3_training" or "deepseek_r1_distill_training".
      tools: file, local or a URL, with a JSON list of the tools' schemas, as transformers'
        `apply_chat_template(tools=…)` takes them: the template shows them in every prompt. Also
        allowed is the name of an environment that has a tool, "python".
    Raises:
      OSError: the folder does not exist, or cannot be reached.
      ValueError: tokenizer.json, a stop token or the chat template is missing, a file is invalid,
        the template rejects the messages, or the template does not show the given tools.
      ImportError: transformers or jinja2 is not installed.
    """
    if prompt_format not in PROMPT_FORMATS:
      raise ValueError(
        f"prompt_format = {prompt_format!r} is unknown; choose one of {list(PROMPT_FORMATS)}"
      )
    self._chat = prompt_format == "chat"
    if not self._chat and (system_prompt or chat_template or tools):
      raise ValueError(
        f"config.prompts.format = {prompt_format!r} allows no system prompt, template or tools, but"
        f" config.prompts.system = {system_prompt!r}, template = {os.fspath(chat_template)!r} and"
        f" tools = {os.fspath(tools)!r}; set all three to '', or set format to 'chat'"
      )
    self._directory = os.fspath(directory)
    self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    self._tokenizer, stop_ids = _read_folder(self._directory)
    ids = set(self._tokenizer.get_vocab().values())
    self.vocab_size = 1 + max(ids)
    self._tools: dict[str, Any] = {}  # arguments of the template besides messages
    if self._chat:
      self._choose_template(chat_template)
      self._show_tools(tools)
      stop_ids = [self._end_of_turn_id(), *stop_ids]
    self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in stop_ids if i is not None))
    self._check_stop_ids(ids)
    pad = self._tokenizer.pad_token_id
    self.pad_id: int = self.stop_ids[0] if pad is None else pad
    self._control = self._reserve_control_tokens()
    added = self._tokenizer.added_tokens_decoder.items()
    self._silent = {i for i, t in added if t.special and t.content not in _THOUGHTS}
    self._lead = self._leading_ids()
    self._warned = False
    self._turns: ChatTurns | None = None
    if self.encode_prompt("1")[-1:] == [self._tokenizer.eos_token_id]:
      raise ValueError(
        f"the tokenizer of {self._directory} ends every prompt with its end-of-text token,"
        f" {self._tokenizer.eos_token!r}: remove this token from the post_processor in"
        " tokenizer.json"
      )

  def encode(self, text: str) -> list[int]:
    """Encodes the text without adding special tokens."""
    return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

  def encode_prompt(self, text: str) -> list[int]:
    """Encodes the text as a prompt in `prompt_format`; "chat" strips white space at the text's end.

    Raises:
      ValueError: the chat template rejects the text.
    """
    return self._encode_prompt(text, self._messages(text.rstrip()))

  def encode_messages(self, messages: Sequence[Message]) -> list[int]:
    """Encodes messages as a prompt; the template gets the messages unchanged.

    `system_prompt` comes first. A "plain" prompt is the contents, each on a line of its own.

    Raises:
      ValueError: the messages are invalid, they begin with a system message although there is a
        `system_prompt`, or the chat template rejects them.
    """
    check_messages(messages)
    if self._system and messages[0]["role"] == "system":
      raise ValueError(
        f"config.prompts.system = {self._system[0]['content']!r}, but a prompt begins with its own"
        f" system message, {messages[0]['content']!r}; set config.prompts.system = ''"
      )
    texts = [{"role": m["role"], "content": m["content"]} for m in messages]
    return self._encode_prompt(join_messages(messages), [*self._system, *texts])

  def encode_reply(self, reply: str, role: str, last_id: int) -> list[int]:
    """Encodes the text between a policy's turn and the start of its next turn.

    In the chat format this text is the end-of-turn token, the separator, the role's header, the
    reply, its end, and the next turn's start. The end-of-turn token is omitted if it is `last_id`.
    A control token that the reply spells stays text. In the plain format the text is the unchanged
    reply, without special tokens.

    Args:
      reply: the environment's text.
      role: "user" or "tool".
      last_id: the last token id of the policy's turn.
    Raises:
      ValueError: the role is unknown, or the template is not append-only with this role.
    """
    check_reply_role(role)
    if not self._chat:
      return self.encode(reply)
    return self._learned_turns(role).encode(reply, role, last_id)

  def check_turns(self, roles: Iterable[str], stop_strings: Sequence[str] = ()) -> None:
    """Checks dialogues of three policy turns, token by token, against the chat template.

    Args:
      roles: all roles of a run's replies, "user" or "tool"; they may follow each other in any
        order.
      stop_strings: the stop strings that end a policy's turn.
    Raises:
      ValueError: a role is unknown, the template is not append-only, or a stop string is invalid.
        A stop string that spells a special token other than "<think>" and "</think>" is invalid:
        decoded texts lack the token, so the string never matches.
    """
    for role in roles:
      check_reply_role(role)
      if self._chat:
        self._learned_turns(role)
    check_stop_strings(stop_strings)
    for stop in stop_strings:
      for match in self._control.finditer(stop):
        if match.group() not in _THOUGHTS:
          raise ValueError(
            f"the stop string {stop!r} spells the special token {match.group()!r}, which decoded"
            " texts do not contain: instead, add the token's id,"
            f" {self._tokenizer.convert_tokens_to_ids(match.group())}, to eos_token_id in"
            f" generation_config.json of {self._directory}"
          )

  def _encode_prompt(self, text: str, messages: list[dict[str, str]]) -> list[int]:
    """Encodes the text in the plain format, the messages in the chat format."""
    matches = [self._control.search(message["content"]) for message in messages]
    if any(matches) and not self._warned:
      self._warned = True
      logging.warning(
        "a prompt spells the control token %r: it is encoded as text. To put your own control"
        " tokens around problems, use the chat format with a chat_template.",
        next(match.group() for match in matches if match),
      )
    if not self._chat:
      return self._tokenizer.encode(text, split_special_tokens=True)
    # Sanitizing is slow with thousands of added tokens, and leaves other texts unchanged.
    return self._apply_template(
      messages, add_generation_prompt=True, sanitize_control_tokens=any(matches)
    )

  def vocabulary(self) -> dict[str, int]:
    """Returns a mapping from each token, as tokenizer.json spells it, to its id."""
    return self._tokenizer.get_vocab()

  def decode(self, ids: Iterable[int], *, with_special: bool = False) -> str:
    """Decodes ids, for graders and readers; a leading space is kept.

    Ids without a token are dropped. Unless `with_special`, special tokens are dropped too, except
    the tokens around a thought.
    """
    # A model's vocabulary may be larger than the tokenizer's.
    silent = () if with_special else self._silent
    visible_ids = [int(i) for i in ids if i < self.vocab_size and i not in silent]
    return self._decode([*self._lead, *visible_ids])[len(self._decode(self._lead)) :]

  def _decode(self, ids: list[int]) -> str:
    return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)

  def _leading_ids(self) -> list[int]:
    """Ids that `decode` puts before the ids if the decoder drops a text's first space; else []."""
    ids = self.encode("x")
    return ids if self._decode(ids + ids) == f"{self._decode(ids)} {self._decode(ids)}" else []

  def _learned_turns(self, role: str) -> ChatTurns:
    if self._turns is None:
      self._turns = ChatTurns(
        self._tokenizer,
        self._apply_template,
        self._control_tokens,
        self._end_of_turn_id(),
        self._directory,
      )
    self._turns.learn(role, self._messages("6 times 7?"))
    return self._turns

  def _control_tokens(self, text: str) -> re.Pattern[str]:
    """A pattern that matches any control token, and any added token in the template's text."""
    names = sorted({*self._added_in(text)} - {*_THOUGHTS}, key=len, reverse=True)
    return re.compile("|".join([*map(re.escape, names), self._control.pattern]))

  def _added_in(self, text: str) -> list[str]:
    """The added tokens of the form <…> in a text that the template wrote."""
    added = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
    # Added tokens of some tokenizers include words and line breaks.
    return [name for name in added if name in text and name[0] == "<" and name[-1] == ">"]

  def _choose_template(self, chat_template: str | os.PathLike[str]) -> None:
    if chat_template:
      self._tokenizer.chat_template = _read_text(chat_template)
    if not self._tokenizer.chat_template:
      raise ValueError(
        f"{self._directory} has no chat template, neither chat_template.jinja nor chat_template in"
        " tokenizer_config.json; set config.prompts.format to 'plain', or"
        " config.prompts.template to a file"
      )
    first, second = (
      self._apply_template(self._messages(text), add_generation_prompt=True, tokenize=False)
      for text in ("1", "2")
    )
    if first == second:
      raise ValueError(
        f"the chat template of {self._directory} omits the user's message: it writes {first!r}; set"
        " config.prompts.template to a file with another template"
      )
    if "strftime_now" in str(self._tokenizer.chat_template):
      logging.warning(
        "the chat template of %s may write today's date, so that a run resumed tomorrow would have"
        " other prompts: set the date in a file of your own, config.prompts.template.",
        self._directory,
      )

  def _show_tools(self, path: str | os.PathLike[str]) -> None:
    if not path:
      return
    tools = _read_tools(path)
    without = self._apply_template(self._messages("1"), tokenize=False)
    self._tools = {"tools": tools, "xml_tools": tools}  # SmolLM3's template says xml_tools
    if self._apply_template(self._messages("1"), tokenize=False) == without:
      raise ValueError(
        f"the chat template of {self._directory} shows no tools, but config.prompts.tools ="
        f" {os.fspath(path)!r}: set config.prompts.tools = '' and say in config.prompts.system how"
        " to call the tools, or set config.prompts.template to a file with another template"
      )

  def _messages(self, text: str) -> list[dict[str, str]]:
    return [*self._system, {"role": "user", "content": text}]

  def _apply_template(self, messages: list[dict[str, str]], **options: Any) -> Any:
    _, jinja2 = _import_libraries()
    options = {**self._tools, **options}
    try:
      return self._tokenizer.apply_chat_template(messages, return_dict=False, **options)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
      roles = " and ".join(message["role"] for message in messages)
      advice = "set config.prompts.system = '', or " if self._system else ""
      raise ValueError(
        f"the chat template of {self._directory} fails on messages of {roles}: {error};"
        f" {advice}set config.prompts.template to a file with another template"
      ) from error

  def _end_of_turn_id(self) -> int | None:
    """Id of the token that the template writes after an assistant's message; None without one."""
    messages = [*self._messages("6 times 7?"), {"role": "assistant", "content": ANSWER}]
    _, answer, suffix = self._apply_template(messages, tokenize=False).rpartition(ANSWER)
    ids = self._tokenizer.encode(suffix.lstrip(), add_special_tokens=False) if answer else []
    return ids[0] if ids and ids[0] in self._tokenizer.added_tokens_decoder else None

  def _check_stop_ids(self, ids: Collection[int]) -> None:
    if not self.stop_ids:
      raise ValueError(
        f"{self._directory} has no stop token: set eos_token in its tokenizer_config.json, or"
        " eos_token_id in its generation_config.json"
      )
    unknown = [i for i in self.stop_ids if i not in ids]
    if unknown:
      raise ValueError(
        f"{self._directory}: eos_token_id of generation_config.json has {unknown}, which the"
        f" tokenizer lacks (its largest id is {self.vocab_size - 1}); correct"
        " generation_config.json or tokenizer.json"
      )

  def _template_tokens(self) -> list[str]:
    """Added tokens that the chat template writes around messages, such as <|user|>."""
    if not self._tokenizer.chat_template:
      return []
    turns = [{"role": "assistant", "content": ANSWER}, *self._messages("6 times 8?")[-1:]]
    try:
      # Rendered without tools, since <tool_call> is no control token: the policy writes it.
      no_tools = dict.fromkeys(self._tools)
      messages = [*self._messages("6 times 7?"), *turns]
      text = self._apply_template(messages, tokenize=False, **no_tools)
    except ValueError:  # the template supports only one turn
      return []
    return [name for name in self._added_in(text) if name not in _THOUGHTS]

  def _reserve_control_tokens(self) -> re.Pattern[str]:
    """Makes all control tokens special; returns the pattern of all special tokens."""
    transformers, _ = _import_libraries()
    control = self._tokenizer.convert_ids_to_tokens(list(self.stop_ids)) + self._template_tokens()
    self._tokenizer.add_tokens(
      [transformers.AddedToken(name, special=True, normalized=False) for name in control],
      special_tokens=True,
    )
    self._tokenizer.chat_control_tokens = []  # only special tokens are control tokens
    added = self._tokenizer.added_tokens_decoder.values()
    special = {*control, *(token.content for token in added if token.special)}
    return re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))


def _import_libraries() -> tuple[ModuleType, ModuleType]:
  # Suppresses a warning that models need torch; tokenizers do not.
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  try:
    import jinja2
    import transformers
  except ImportError as error:
    raise ImportError(
      f'tokenizers of Hugging Face folders need {error.name}: pip install "rlvr_jax[hf]"'
    ) from error
  return transformers, jinja2


def _read_folder(directory: str) -> tuple[Any, list[int | None]]:
  """The tokenizer, and its stop ids: the end of text, then the ids in generation_config.json."""
  transformers, _ = _import_libraries()
  filesystem, source = locate(directory)
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary)
    for name in set(_FILES) & set(list_files(directory)):
      filesystem.get_file(f"{source}/{name}", str(folder / name))
    if not (folder / "tokenizer.json").exists():
      raise ValueError(
        f"{directory} has no tokenizer.json; if the folder has a sentencepiece model or a"
        " vocabulary in other files, first load the folder with a fast tokenizer of transformers"
        " and save that tokenizer"
      )
    try:
      # This class uses tokenizer.json unchanged. AutoTokenizer chooses a class by name, which
      # may build another tokenizer from the vocabulary, or need the folder's code.
      tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
      )
      generation = _read_eos_ids(folder / "generation_config.json")
      _check_eos_token(tokenizer.eos_token, folder)
    except Exception as error:  # the library's errors have no common class
      raise ValueError(
        f"the tokenizer of {directory} cannot be read: {str(error).replace(temporary, directory)}"
      ) from error
  return tokenizer, [tokenizer.eos_token_id, *generation]


def _check_eos_token(eos: str | None, folder: pathlib.Path) -> None:
  """Raises ValueError if the end-of-text token has no id; transformers would add one."""
  import tokenizers

  path = folder / "tokenizer_config.json"
  config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
  declared = [token["content"] for token in config.get("added_tokens_decoder", {}).values()]
  known = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
  if eos is not None and eos not in {*declared, *known}:
    raise ValueError(
      f"eos_token is {eos!r}, which tokenizer.json lacks, so no policy samples it; correct"
      " tokenizer_config.json or special_tokens_map.json"
    )


def _read_eos_ids(path: pathlib.Path) -> list[int]:
  """Reads `eos_token_id` of generation_config.json: none, one or several ids."""
  if not path.exists():
    return []
  ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
  ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
  if not all(type(i) is int for i in ids):
    raise ValueError(f"eos_token_id in {path} is {ids}, expected integers")
  return ids


def _read_tools(path: str | os.PathLike[str]) -> list[Any]:
  """Reads the schemas of tools: a JSON list of objects with a name."""
  named = _TOOLS / f"{os.fspath(path)}.json"
  text = _read_text(named if named.parent == _TOOLS and named.exists() else path, "tools")
  try:
    tools = json.loads(text)
  except ValueError as error:
    raise ValueError(f"tools = {os.fspath(path)!r} is not JSON: {error}") from error
  is_list = isinstance(tools, list) and len(tools) > 0
  for tool in tools if is_list else [tools]:
    function = tool.get("function") if is_list and isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
      raise ValueError(
        f"tools = {os.fspath(path)!r}: the file contains {json.dumps(tool)[:100]}, but must be a"
        ' JSON list of schemas, [{"type": "function", "function": {"name": …, "description": …,'
        ' "parameters": {…}}}]'
      )
  return tools


def _read_text(path: str | os.PathLike[str], argument: str = "chat_template") -> str:
  named = _TEMPLATES / f"{os.fspath(path)}.jinja"
  if named.parent == _TEMPLATES and named.exists():
    return named.read_text(encoding="utf-8")
  filesystem, name = locate(path)
  try:
    return filesystem.read_text(name, encoding="utf-8")
  except OSError as error:
    raise ValueError(f"{argument} = {os.fspath(path)!r} cannot be read: {error}") from error
