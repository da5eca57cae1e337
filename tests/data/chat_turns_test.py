"""Dialogues in chat templates: appended tokens are the template's own, for published templates."""

import importlib.util
import json
import pathlib
import random

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from rlvr_jax.data import ByteTokenizer, HuggingFaceTokenizer
from rlvr_jax.data.byte_pairs import train_byte_pairs
from rlvr_jax.environments import python

COPIES = pathlib.Path(__file__).parent / "chat_templates"
PACKAGED = ("qwen3_training", "deepseek_r1_distill_training")
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML_TOOLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LLAMA = (
  "<|begin_of_text|>",
  "<|start_header_id|>",
  "<|end_header_id|>",
  "<|eom_id|>",
  "<|eot_id|>",
)
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
# template → special tokens, tokens that are not special, first token of every text, end of text
FAMILIES = {
  "qwen2_5": (CHATML, CHATML_TOOLS, None, "<|endoftext|>"),
  "qwen3": (CHATML, (*CHATML_TOOLS, "<think>", "</think>"), None, "<|endoftext|>"),
  "llama3": (LLAMA, (), LLAMA[0], "<|eom_id|>"),
  "llama3_2": (LLAMA, (), LLAMA[0], "<|eom_id|>"),
  "gemma": (GEMMA, (), GEMMA[0], "<eos>"),
  "gemma3": (GEMMA, (), GEMMA[0], "<eos>"),
  "deepseek_r1_distill": (DEEPSEEK, ("<think>", "</think>"), DEEPSEEK[0], DEEPSEEK[3]),
}
ACCEPTED = [
  ("qwen2_5", "", "user"),
  ("qwen2_5", "", "tool"),
  ("qwen3", "", "tool"),  # it keeps thoughts until the next user's message
  ("qwen3", "qwen3_training", "user"),
  ("qwen3", "qwen3_training", "tool"),
  ("llama3", "", "user"),
  ("llama3_2", "", "user"),
  ("llama3_2", "", "tool"),  # replies as JSON
  ("gemma", "", "user"),
  ("gemma3", "", "user"),
  ("deepseek_r1_distill", "deepseek_r1_distill_training", "user"),
]
MESSAGES = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
START = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CONTENT = MESSAGES + "{{ m.content }}<|im_end|>\n{% endfor %}" + START
PIECES = [
  "a",
  "user",
  " 12",
  "é",
  "漢",
  "👋🏽",
  "\n",
  " ",
  "\t",
  '"',
  "{x}",
  "<b>",
  "\u00a0",
  ".",
  "'s",
]


def source(name):
  """Text of a published template: of the TRL that is installed, else of the copy."""
  trl = importlib.util.find_spec("trl")
  folder = pathlib.Path(trl.origin).parent / "chat_templates" if trl and trl.origin else COPIES
  return (folder / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.fixture(name="base", scope="module")
def _base():
  return train_byte_pairs(["user and assistant show what work is of eggs. The answer "] * 9, 280)


@pytest.fixture(name="load", scope="module")
def _load(tmp_path_factory, base):
  def load(family, template="", text="", **settings):
    special, added, first, end = FAMILIES[family]
    folder = tmp_path_factory.mktemp(family)
    backend = Tokenizer.from_str(base.to_str())
    backend.add_special_tokens([*special])
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in added])
    if first:
      backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, backend.token_to_id(first))]
      )
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": end, "chat_template": text or source(family)}
    config |= {"bos_token": first} if first else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return HuggingFaceTokenizer(folder, prompt_format="chat", chat_template=template, **settings)

  return load


def dialogue_ids(tokenizer, messages):
  """The template's ids of a dialogue, by the library alone; spelled control tokens stay text."""
  library = tokenizer._tokenizer
  return library.apply_chat_template(messages, return_dict=False, sanitize_control_tokens=True)


def draw(rng, tokens):
  """A random text; it may be empty, begin and end with white space, and spell control tokens."""
  return "".join(rng.choices([*PIECES, *tokens], k=rng.choice([0, 1, 2, 5, 12])))


def thought_of(family):
  return family in ("qwen3", "deepseek_r1_distill")


def policy_turn(rng, tokenizer, family):
  """A turn's ids and its message's content, which begins and ends with letters."""
  answer = "The " + "".join(rng.choices([p for p in PIECES if p != "<b>"], k=6)) + " end."
  if not thought_of(family):
    return tokenizer.encode(answer), answer
  thought = f"Hm {rng.randrange(99)}\n</think>\n\n{answer}"
  opened = "" if family == "deepseek_r1_distill" else "<think>\n"
  return tokenizer.encode(opened + thought), f"<think>\n{thought}"


@pytest.mark.parametrize(("family", "template", "role"), ACCEPTED)
def test_appended_tokens_are_the_template_s(load, family, template, role):
  tokenizer = load(family, template)
  tokenizer.check_turns([role])
  spelled = (*FAMILIES[family][0], *(CHATML_TOOLS[2:] if role == "tool" else ()))
  end = tokenizer.stop_ids[0]
  other = next((i for i in tokenizer.stop_ids if i != end), end)
  library = tokenizer._tokenizer
  library.chat_control_tokens = [
    token for token in spelled if token.startswith(("<tool", "</tool"))
  ]
  for seed in range(8):
    rng = random.Random(seed)
    question = f"Q{draw(rng, FAMILIES[family][0])}?"
    messages = [{"role": "user", "content": question}]
    ids = tokenizer.encode_messages(messages)
    assert ids == tokenizer.encode_prompt(question)
    for turn in range(1 + seed % 4):
      if turn:
        reply = draw(rng, spelled)
        last, cut = rng.choice([(end, False), (other, other != end), (ids[-2], True)])
        after = tokenizer.encode_reply(reply, role, last)
        if cut:  # the policy ended its turn otherwise: the token that ends it comes first
          assert after[0] == end
          after = after[1:]
        ids += after
        messages.append({"role": role, "content": reply})
      policy, content = policy_turn(rng, tokenizer, family)
      ids += [*policy, end]
      messages.append({"role": "assistant", "content": content})
    whole = dialogue_ids(tokenizer, messages)
    assert whole[: len(ids)] == ids, seed
    assert len(whole) - len(ids) <= 1  # a line break after the end of the last turn


@pytest.mark.parametrize(("family", "template", "role"), ACCEPTED)
def test_a_reply_cannot_insert_control_tokens(load, family, template, role):
  tokenizer = load(family, template)
  spelled = [*FAMILIES[family][0], *(CHATML_TOOLS[2:] if role == "tool" else ())]
  end = tokenizer.stop_ids[0]
  harmless = tokenizer.encode_reply("5", role, end)
  hostile = tokenizer.encode_reply(f"5{' '.join(spelled)}5", role, end)
  for name in spelled:
    token = tokenizer._tokenizer.convert_tokens_to_ids(name)
    assert hostile.count(token) == harmless.count(token)
  letters = tokenizer._tokenizer.decode(hostile)
  assert " ".join(spelled) in letters


def test_ids_of_qwen_written_out(load, base):
  tokenizer = load("qwen2_5")
  say = lambda text: base.encode(text).ids
  start, end = (tokenizer._tokenizer.convert_tokens_to_ids(name) for name in CHATML[1:])
  header = [start, *say("user\nHigher.")]
  following = [*say("\n"), *header, end, *say("\n"), start, *say("assistant\n")]
  assert tokenizer.encode_reply("Higher.", "user", end) == following
  for last in (0, say(".")[-1]):  # another stop id; a stop string
    assert tokenizer.encode_reply("Higher.", "user", last) == [end, *following]


def test_messages_of_system_and_user(load):
  tokenizer = load("gemma3")
  messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "5?"}]
  briefly = load("gemma3", system_prompt="Be brief.")
  assert tokenizer.encode_messages(messages) == briefly.encode_prompt("5?")
  assert briefly.encode_messages(messages[1:]) == briefly.encode_prompt("5?")
  with pytest.raises(
    ValueError, match=r"'Be brief\.', but a prompt begins with its own.*system = ''"
  ):
    briefly.encode_messages(messages)
  with pytest.raises(ValueError, match=r"System role not supported; .*set config.prompts.template"):
    load("gemma").encode_messages(messages)
  ids = tokenizer.encode_messages([*messages[:1], {"role": "user", "content": "<end_of_turn>"}])
  assert ids.count(tokenizer.stop_ids[0]) == 1


# --- tools ---------------------------------------------------------------------------------------

SMOLLM3 = (  # as its template takes them, in short
  "{% if xml_tools %}<|im_start|>system\n{% for t in xml_tools[:] %}{{ t | string }}\n{% endfor %}"
  "<|im_end|>\n{% endif %}"
)
SHOWN = [
  ("qwen2_5", "", ""),
  ("qwen3", "", ""),
  ("qwen3", "qwen3_training", ""),
  ("llama3_2", "", ""),
  ("qwen2_5", "", "smollm3"),
]


@pytest.fixture(name="schemas")
def _schemas(tmp_path):
  """Two tools, as transformers makes them of functions."""
  from transformers.utils import get_json_schema  # seconds, which few tests need

  def weather(city: str) -> str:
    """Says how the weather is.

    Args:
      city: its "name", such as Zürich.
    """
    return city

  def add(a: int, b: int) -> int:
    """Adds.

    Args:
      a: a number.
      b: another.
    """
    return a + b

  schemas = [get_json_schema(weather), get_json_schema(add)]
  path = tmp_path / "tools.json"
  path.write_text(json.dumps(schemas))
  return schemas, str(path)


@pytest.mark.parametrize(("family", "template", "text"), SHOWN)
def test_the_template_shows_tools(load, schemas, family, template, text):
  tools, path = schemas
  tokenizer = load(family, template, SMOLLM3 + CONTENT if text else "", tools=path)
  library = load(family, template, SMOLLM3 + CONTENT if text else "")._tokenizer
  for content in ("6 times 7?", "What does <|im_start|> or <|eot_id|> mean?"):
    messages = [{"role": "user", "content": content}]
    expected = library.apply_chat_template(
      messages, return_dict=False, add_generation_prompt=True, sanitize_control_tokens=True,
      **{"xml_tools" if text else "tools": tools},
    )  # fmt: skip
    assert tokenizer.encode_prompt(content) == expected == tokenizer.encode_messages(messages)
  shown = library.decode(expected)
  assert "weather" in shown and "Zürich" in shown and "add" in shown
  assert not {"weather", "Zürich"} & set(library.decode(load(family).encode_prompt("a")).split('"'))


@pytest.mark.parametrize(("family", "template", "text"), SHOWN)
def test_dialogues_with_tools(load, schemas, family, template, text):
  """Their tokens are the template's own, and the policy's calls can be read."""
  tools, path = schemas
  tokenizer = load(family, template, SMOLLM3 + CONTENT if text else "", tools=path)
  tokenizer.check_turns(["tool"])
  call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
  thought = "<think>\nHm\n</think>\n\n" if thought_of(family) else ""
  ids, end = tokenizer.encode(thought + call), tokenizer.stop_ids[0]
  assert tokenizer.decode([*ids, end]) == thought + call
  dialogue = [*tokenizer.encode_prompt("1 + 2?"), *ids, end]
  dialogue += tokenizer.encode_reply('It is "3".\n\té', "tool", end)
  messages = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": thought + call},
    {"role": "tool", "content": 'It is "3".\n\té'},
  ]
  expected = tokenizer._tokenizer.apply_chat_template(
    messages, return_dict=False, add_generation_prompt=True, tools=tools, xml_tools=tools
  )
  assert dialogue == expected


@pytest.mark.parametrize("family", ["gemma3", "deepseek_r1_distill", "llama3"])
def test_a_template_without_tools_is_refused(load, schemas, family):
  refused = r"shows no tools, but .*tools\.json'.* set config.prompts.tools = '' and say"
  with pytest.raises(ValueError, match=refused):
    load(family, tools=schemas[1])


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("{", "is not JSON"),
    ("[]", r"contains \[\], but must be a JSON list of schemas"),
    ('{"name": "f"}', r'contains {"name": "f"}, but must be a JSON list of schemas'),
    ('[{"name": "f"}]', r'contains {"name": "f"}, but must be a JSON list'),
    ('[{"function": {"name": 5}}]', "but must be a JSON list"),
  ],
)
def test_tools_that_are_none(load, tmp_path, text, message):
  (tmp_path / "t.json").write_text(text)
  with pytest.raises(ValueError, match=message):
    load("qwen2_5", tools=str(tmp_path / "t.json"))
  with pytest.raises(ValueError, match=r"tools = '.*absent.json' cannot be read"):
    load("qwen2_5", tools=str(tmp_path / "absent.json"))


def test_the_python_environment_takes_what_its_schema_says(load):
  packaged = pathlib.Path(HuggingFaceTokenizer.__init__.__code__.co_filename).parent
  (schema,) = json.loads((packaged / "tools" / "python.json").read_text(encoding="utf-8"))
  shown = load("qwen2_5", tools="python")
  assert json.dumps(schema) in shown.decode(shown.encode_prompt("6 times 7?"))
  (argument,) = schema["function"]["parameters"]["properties"]
  call = {"name": schema["function"]["name"], "arguments": {argument: "print(6 * 7)"}}
  environment = python()
  environment.reset({}, 0)
  assert environment.step(f"<tool_call>{json.dumps(call)}</tool_call>").reply == "42"


# --- templates that are refused -------------------------------------------------------------------


@pytest.mark.parametrize(
  ("family", "text", "role", "message"),
  [
    (
      "qwen3",
      "",
      "user",
      r"qwen3\S* is not append-only with replies of role 'user': after \d+ equal tokens the"
      r" appended dialogue goes on with '<think>\\nSix .*, but the dialogue that the template"
      r" writes goes on with 'The answer is .*set config.prompts.template to a variant that keeps"
      r" earlier turns: 'qwen3_training'",
    ),
    ("deepseek_r1_distill", "", "user", "drops thoughts: .*'deepseek_r1_distill_training'"),
    ("gemma", "", "tool", r"replies of role 'tool': .* must alternate .*, or give replies another"),
    # no separator after earlier turns
    ("qwen2_5", CONTENT.replace("|>\n{% end", "|>{{ '\n' if loop.last }}{% end"), "user", None),
    # another generation prompt after a reply
    ("qwen2_5", CONTENT + "{% if messages|length == 1 %}Now: {% endif %}", "user", None),
    # a message that says how many there are
    ("qwen2_5", CONTENT.replace("m.role }}", "m.role }} {{ messages|length }}"), "user", None),
    # an assistant's message in capitals, in history
    (
      "qwen2_5",
      CONTENT.replace("{{ m.content", "{{ m.content if loop.last else 'Some ' + m.content"),
      "user",
      None,
    ),
    ("qwen2_5", CONTENT.replace("<|im_end|>", " ."), "user", "with a token that ends the turn"),
    ("qwen2_5", CONTENT.replace("<|im_end|>", " <|im_end|>"), "user", "with a token that ends the"),
    ("qwen2_5", CONTENT.replace("m.content }}", "m.content|upper }}"), "user", "does not write"),
    ("qwen2_5", CONTENT.replace("m.content }}", "m.content.lstrip() }}"), "user", None),
  ],
)
def test_what_is_refused(load, family, text, role, message):
  tokenizer = load(family, text=text)
  for attempt in (
    lambda: tokenizer.check_turns([role]),
    lambda: tokenizer.encode_reply("", role, 0),
  ):
    with pytest.raises(ValueError, match=message or "is not append-only") as raised:
      attempt()
    assert "\n" not in str(raised.value) and family in str(raised.value)


def test_roles_may_follow_one_another(load):
  load("qwen2_5").check_turns(["user", "tool"])
  with pytest.raises(ValueError, match="of role 'tool' and 'user': after"):
    load("deepseek_r1_distill", "deepseek_r1_distill_training").check_turns(["user", "tool"])


def test_without_thinking(load, tmp_path):
  """Qwen3 with an empty thought in the generation prompt."""
  path = tmp_path / "no_thought.jinja"
  packaged = pathlib.Path(HuggingFaceTokenizer.__init__.__code__.co_filename).parent
  variant = (packaged / "chat_templates" / "qwen3_training.jinja").read_text(encoding="utf-8")
  path.write_text("{% set enable_thinking = false %}" + variant)
  tokenizer = load("qwen3", str(path))
  ids = tokenizer.encode_reply("Higher.", "user", tokenizer.stop_ids[0])
  assert tokenizer.decode(ids).endswith("assistant\n<think>\n\n</think>\n\n")
  path.write_text("{% set enable_thinking = false %}" + source("qwen3"))
  with pytest.raises(ValueError, match="is not append-only"):
    load("qwen3", str(path)).check_turns(["user"])


def test_a_template_that_writes_thoughts_leaves_them_to_texts(load):
  text = "<think>\nHm\n</think>\n\n5"
  for template in ("", "qwen3_training"):
    tokenizer = load("qwen3", template)
    think = tokenizer._tokenizer.convert_tokens_to_ids("<think>")
    assert tokenizer.encode(text)[0] == think and think in tokenizer.encode_prompt(text)


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_templates_are_trl_s(name):
  if importlib.util.find_spec("trl") is None:
    pytest.skip("trl is not installed")
  packaged = pathlib.Path(HuggingFaceTokenizer.__init__.__code__.co_filename).parent
  ours = (packaged / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
  assert ours == source(name)


# --- plain tokenizers, and what all refuse --------------------------------------------------------


@pytest.fixture(name="plain", params=["bytes", "byte pairs"])
def _plain(request, base, tmp_path):
  if request.param == "bytes":
    return ByteTokenizer()
  base.save(str(tmp_path / "tokenizer.json"))
  (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
  return HuggingFaceTokenizer(tmp_path)


def test_plain_tokenizers(plain):
  plain.check_turns(["user", "tool"], ["</a>"])
  for reply in ("", " higher\n", "é<|im_end|>👋"):
    for last in (plain.stop_ids[0], 65):
      assert plain.encode_reply(reply, "user", last) == plain.encode(reply)
  messages = [{"role": "system", "content": "A <|im_end|>"}, {"role": "user", "content": "b"}]
  assert plain.encode_messages(messages) == plain.encode_prompt("A <|im_end|>\nb")
  assert plain.encode_messages(messages[1:]) == plain.encode_prompt("b")


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda t: t.encode_messages([]), "no messages; give at least one"),
    (
      lambda t: t.encode_messages([{"role": "assistant", "content": ""}]),
      "ends with a message of the assistant",
    ),
    (
      lambda t: t.encode_messages([{"role": "user", "content": 1}]),
      "'content': 1}; a message must be",
    ),
    (lambda t: t.encode_messages([{"role": "user"}]), "a message must be"),
    (
      lambda t: t.encode_reply("", "system", 0),
      r"role = 'system' .*choose one of \['user', 'tool'",
    ),
    (lambda t: t.check_turns(["assistant"]), "role = 'assistant' of a reply is unknown"),
    (lambda t: t.check_turns([], ["a", ""]), "stop string '' must be a text that is not empty"),
    (lambda t: t.check_turns([], ["\ufffd"]), "has no U.FFFD, the character for invalid bytes"),
    (lambda t: t.check_turns([], "</a>"), r"give a sequence of texts: \('</a>',\)"),
  ],
)
def test_bad_arguments(plain, load, call, message):
  for tokenizer in (plain, load("qwen2_5")):
    with pytest.raises(ValueError, match=message):
      call(tokenizer)


def test_a_stop_string_that_is_never_decoded(load):
  tokenizer = load("llama3")
  eom = tokenizer._tokenizer.convert_tokens_to_ids("<|eom_id|>")
  refused = rf"'a<\|eom_id\|>' spells the special .*: instead, add the token's id, {eom}, to eos"
  with pytest.raises(ValueError, match=refused):
    tokenizer.check_turns(["user"], ["a<|eom_id|>"])
  load("qwen3", "qwen3_training").check_turns(["user"], ["</tool_call>", "</think>"])
