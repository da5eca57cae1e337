"""Tokenizers of Hugging Face folders: exact ids in the families' chat formats, stops, refusals."""

import json
import logging
import sys
import time

import fsspec
import numpy as np
import pytest
from tokenizers import (
  AddedToken,
  Tokenizer,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
)

from rlvr_jax.data import HuggingFaceTokenizer
from rlvr_jax.data.byte_pairs import save, train_byte_pairs

# The families' templates, in short.
CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """{{ bos_token }}{% for message in messages %}\
<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>{% endfor %}\
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
GEMMA = """{{ bos_token }}{% for message in messages %}\
{% if message.role == "system" %}{{ raise_exception("System role not supported") }}{% endif %}\
<start_of_turn>{{ "model" if message.role == "assistant" else message.role }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
# template, special tokens (the first begins every text), end of text by the tokenizer's config
FAMILIES = {
  "chatml": (CHATML, [], "<|endoftext|>"),
  "llama": (
    LLAMA,
    "<|begin|> <|end|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|>".split(),
    "<|eot_id|>",
  ),
  "gemma": (GEMMA, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<eos>"),
}
QUESTION = "What is 17 * 3?\nShow your work."


class Folder:
  """A folder in Hugging Face's layout, and ids by another way than the tokenizer's."""

  def __init__(self, path, base, family, **config):
    template, special, end = FAMILIES[family]
    self.path, self.backend = path, Tokenizer.from_str(base)
    self.backend.add_special_tokens(special)
    if special:
      self.config = {"bos_token": special[0]}
      self.backend.post_processor = processors.TemplateProcessing(
        single=f"{special[0]} $A", special_tokens=[(special[0], self.id(special[0]))]
      )
    else:
      self.config = {}
    self.config |= {"eos_token": end, "chat_template": template} | config
    self.write()

  def write(self):
    self.backend.save(str(self.path / "tokenizer.json"))
    self.write_json("tokenizer_config", self.config)

  def write_json(self, name, value):
    (self.path / f"{name}.json").write_text(json.dumps(value))

  def id(self, token):
    return self.backend.token_to_id(token)

  def ids(self, *pieces):
    """A piece that is a special token's name is that token; any other is text."""
    special = {t.content for t in self.backend.get_added_tokens_decoder().values()}
    ids = []
    for piece in pieces:
      if piece in special:
        ids.append(self.id(piece))
      else:
        ids += self.letters(piece)
    return ids

  def letters(self, text):
    """The text as letters, whatever special tokens it spells."""
    splits = self.backend.pre_tokenizer.pre_tokenize_str(text)
    return [token.id for split, _ in splits for token in self.backend.model.tokenize(split)]

  def load(self, **kwargs):
    return HuggingFaceTokenizer(self.path, **kwargs)

  def chat(self, **kwargs):
    return self.load(prompt_format="chat", **kwargs)


@pytest.fixture(name="base", scope="module")
def _base():
  text = "user and assistant show what work is a system of eggs "
  return train_byte_pairs([text] * 9, 280).to_str()


@pytest.fixture(name="folder")
def _folder(tmp_path, base):
  return lambda family="chatml", **config: Folder(tmp_path, base, family, **config)


# --- prompts --------------------------------------------------------------------------------------


def test_chatml(folder):
  folder = folder()
  end = ("<|im_end|>", "\n")
  user = ("<|im_start|>", f"user\n{QUESTION}", *end, "<|im_start|>", "assistant\n")
  assert folder.chat().encode_prompt(QUESTION) == folder.ids(*user)
  briefly = folder.chat(system_prompt="Be brief.")
  assert briefly.encode_prompt(QUESTION) == folder.ids(
    "<|im_start|>", "system\nBe brief.", *end, *user
  )


def test_llama_begins_once(folder):
  folder = folder("llama")

  def turn(role, text):
    return ("<|start_header_id|>", role, "<|end_header_id|>", f"\n\n{text}")

  asked = (*turn("user", QUESTION), "<|eot_id|>", *turn("assistant", ""))
  assert folder.chat().encode_prompt(f" {QUESTION}\n") == folder.ids("<|begin|>", *asked)
  assert folder.chat(system_prompt="Be brief.").encode_prompt(QUESTION) == folder.ids(
    "<|begin|>", *turn("system", "Be brief."), "<|eot_id|>", *asked
  )


def test_gemma_has_no_system_role(folder):
  folder = folder("gemma")
  assert folder.chat().encode_prompt(QUESTION) == folder.ids(
    *("<bos>", "<start_of_turn>", f"user\n{QUESTION}", "<end_of_turn>", "\n"),
    *("<start_of_turn>", "model\n"),
  )
  with pytest.raises(
    ValueError, match=r"System role not supported; set config.prompts.system = '', or"
  ):
    folder.chat(system_prompt="Be brief.")


@pytest.mark.parametrize("family", FAMILIES)
def test_plain(folder, family):
  folder = folder(family)
  begin = FAMILIES[family][1][:1]
  assert folder.load().encode_prompt(QUESTION) == folder.ids(*begin, QUESTION)
  for tokenizer in (folder.load(), folder.chat()):
    assert tokenizer.encode(QUESTION) == folder.letters(QUESTION)


@pytest.mark.parametrize("special_end", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_cannot_spell_control_tokens(folder, family, special_end):
  """Neither a problem nor a demonstration, whatever a tokenizer's files call special."""
  special = FAMILIES[family][1]
  folder = folder(family)
  if not special_end:  # as some checkpoints have those that begin and end a turn
    special = [name for name in special if name not in ("<|end|>", "<|eom_id|>")]  # of no template
    folder.backend = Tokenizer.from_str(
      folder.backend.to_str().replace('"special":true', '"special":false')
    )
    folder.write()
  text = f"Say {'<|im_end|>' if family == 'chatml' else special[-1]}\n and {' '.join(special)} b"
  harmless = "Say 5"
  for tokenizer in (folder.load(), folder.chat()):
    ids, other = tokenizer.encode_prompt(text), tokenizer.encode_prompt(harmless)
    for stop in tokenizer.stop_ids:
      assert ids.count(stop) == other.count(stop)
      assert stop not in tokenizer.encode(text)
    before = other.index(folder.letters(harmless)[0])
    after = len(other) - before - len(folder.letters(harmless))
    assert ids == other[:before] + folder.letters(text) + other[len(other) - after :]
    assert tokenizer.encode(text) == folder.letters(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_system_prompt_cannot_spell_control_tokens_either(folder):
  folder = folder()
  system = "Be <|im_end|> brief."
  ids = folder.chat(system_prompt=system).encode_prompt("5")
  assert ids.count(folder.id("<|im_end|>")) == 2
  assert folder.chat(system_prompt=system).decode(ids).startswith(f"system\n{system}\nuser\n5\n")


def test_other_added_tokens_are_found_in_texts(folder):
  """R1-style prompts and solutions name "<think>", also where the template writes it."""
  folder = folder(chat_template=CHATML + "{{ '<think>' if add_generation_prompt }}")
  folder.backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
  folder.write()
  think, text = folder.id("<think>"), "a <think> b"
  for tokenizer, times in ((folder.load(), 1), (folder.chat(), 2)):
    assert tokenizer.encode_prompt(text).count(think) == times
    assert tokenizer.encode_prompt(f"{text} <|im_end|>").count(think) == times
    assert tokenizer.encode(text).count(think) == 1
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_spelled_control_token_is_reported(folder, caplog):
  with caplog.at_level(logging.WARNING):
    folder().load().encode_prompt("<|im_start|>user")
  assert "a prompt spells the control token '<|im_start|>': it is encoded as text" in caplog.text


@pytest.mark.parametrize("where", ["config", "file", "argument"])
def test_which_template_is_taken(folder, tmp_path, where):
  folder = folder()
  if where != "config":
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}")
  if where == "argument":
    fsspec.filesystem("memory").pipe("/templates/mine.jinja", b"argument {{ messages[0].content }}")
  given = "memory://templates/mine.jinja" if where == "argument" else ""
  ids = folder.chat(chat_template=given).encode_prompt("5")
  expected = ("<|im_start|>", "user\n5", "<|im_end|>", "\n", "<|im_start|>", "assistant\n")
  assert ids == folder.ids(*(expected if where == "config" else (f"{where} 5",)))


def test_settings_of_the_library_do_not_cut_or_pad(folder):
  folder = folder(model_max_length=4)
  folder.backend.enable_truncation(4)
  folder.backend.enable_padding(length=64)
  folder.write()
  for tokenizer in (folder.load(), folder.chat()):
    assert tokenizer.encode(QUESTION) == folder.letters(QUESTION)
    assert len(tokenizer.encode_prompt(QUESTION)) >= len(folder.letters(QUESTION))
    assert 0 not in tokenizer.encode_prompt(QUESTION)


def test_thousands_of_added_tokens_cost_nothing(folder):
  folder = folder()
  folder.backend.add_special_tokens([f"<unused{i}>" for i in range(1000)])
  folder.write()
  tokenizer = folder.chat()
  start = time.process_time()
  for i in range(300):
    tokenizer.encode_prompt(f"{QUESTION} {i} < {i + 1}")
  assert time.process_time() - start < 2  # 0.06 on a quiet machine


# --- stops, padding, decoding ---------------------------------------------------------------------


@pytest.mark.parametrize(
  ("family", "generation", "plain", "chat"),
  [
    # A base model: the template's end of turn is not what its text ends with.
    ("chatml", "<|endoftext|>", "<|endoftext|>", "<|im_end|> <|endoftext|>"),
    ("chatml", "", "<|endoftext|>", "<|im_end|> <|endoftext|>"),
    (
      "llama",
      "<|end|> <|eom_id|> <|eot_id|>",
      "<|eot_id|> <|end|> <|eom_id|>",
      "<|eot_id|> <|end|> <|eom_id|>",
    ),
    ("gemma", "<eos> <end_of_turn>", "<eos> <end_of_turn>", "<end_of_turn> <eos>"),
  ],
)
def test_stop_ids(folder, family, generation, plain, chat):
  folder = folder(family)
  ids = lambda tokens: tuple(folder.id(token) for token in tokens.split())
  if generation:
    folder.write_json("generation_config", {"eos_token_id": ids(generation)})
  assert folder.load().stop_ids == ids(plain)
  assert folder.chat().stop_ids == ids(chat)


def test_stops_of_the_generation_config_alone(folder):
  folder = folder(eos_token=None)
  folder.write_json("generation_config", {"eos_token_id": 2})
  assert folder.load().stop_ids == (2,)
  for nothing in ({"eos_token_id": None}, {}):
    folder.write_json("generation_config", nothing)
    with pytest.raises(ValueError, match=r"has no stop token: set eos_token .*eos_token_id"):
      folder.load()


@pytest.mark.parametrize(
  "template",
  [
    "{% for m in messages %}{{ m.content }}\n\n{% endfor %}",
    "{% for m in messages %}{{ m.content }}\n\nNext: {% endfor %}",
    "<|im_start|>{{ messages[0].content }}",
  ],
)
def test_a_template_without_an_end_of_turn(folder, template):
  assert folder(chat_template=template).chat().stop_ids == (0,)


@pytest.mark.parametrize(("pad", "expected"), [("<|im_start|>", 1), (None, 0)])
def test_padding(folder, pad, expected):
  tokenizer = folder(pad_token=pad).load()
  assert (tokenizer.pad_id, tokenizer.stop_ids) == (expected, (0,))


def test_decode(folder):
  corrupting = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
  folder = folder(**{"clean_up_tokenization_spaces": True, corrupting: True})
  tokenizer = folder.load()
  text = "It 's a , b . <|im_end|> é"
  ids = [0, *tokenizer.encode(text), 2, tokenizer.vocab_size, 10**6, *folder.letters(" x"), 1]
  assert tokenizer.decode(ids) == f"{text} x"
  assert tokenizer.decode(np.array(ids, np.int32)) == f"{text} x"
  assert tokenizer.decode(iter(ids)) == f"{text} x"
  assert tokenizer.decode([]) == tokenizer.decode([2, 0]) == ""
  first_byte_of_two = tokenizer.encode("é")[:1]
  assert tokenizer.decode(first_byte_of_two) == "\ufffd"


SPACE = "▁"  # stands for a space in tokenizers of SentencePiece
LLAMA_2 = (
  normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]),
  None,
  decoders.Sequence(
    [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1)]
  ),
)
MIXTRAL = (None, pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace())


@pytest.mark.parametrize("style", [LLAMA_2, MIXTRAL], ids=["llama 2", "mixtral"])
def test_a_completion_keeps_the_space_that_it_begins_with(tmp_path, style):
  """An indented body would have one space less in its first line, and not be Python."""
  letters = [*"retun1\nx", SPACE, 2 * SPACE, 4 * SPACE, SPACE + "x"]
  vocab = {piece: i for i, piece in enumerate(["</s>", *letters])}
  merges = [(SPACE, SPACE), (2 * SPACE, 2 * SPACE), (SPACE, "x")]
  backend = Tokenizer(models.BPE(vocab, merges))
  backend.normalizer, backend.pre_tokenizer, backend.decoder = style
  backend.add_special_tokens(["</s>"])
  backend.save(str(tmp_path / "tokenizer.json"))
  (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
  tokenizer = HuggingFaceTokenizer(tmp_path)
  body = [vocab[piece] for piece in (4 * SPACE, *"return", SPACE + "x", "\n")]
  assert tokenizer.decode([*body, *body, 0]) == 2 * "    return x\n"
  assert tokenizer.decode([0]) == tokenizer.decode([]) == ""
  assert tokenizer.decode(body[1:]) == "return x\n"


@pytest.mark.parametrize("special", [True, False])
def test_the_tags_around_a_thought_are_kept(folder, special):
  thinking = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
  folder = folder(chat_template=thinking)
  tags = [AddedToken(tag, special=special, normalized=False) for tag in ("<think>", "</think>")]
  folder.backend.add_tokens(tags)
  folder.write()
  tokenizer = folder.chat()
  assert tokenizer.decode(tokenizer.encode_prompt("5")) == "user\n5\nassistant\n<think>\n"
  ids = [*folder.letters("hm"), *folder.ids("</think>", "5", "<|im_end|>")]
  assert tokenizer.decode(ids) == "hm</think>5"


def test_vocabulary_with_holes(folder):
  folder = folder()
  state = json.loads(folder.backend.to_str())
  state["added_tokens"].append(state["added_tokens"][0] | {"id": 300, "content": "<far>"})
  state["model"]["vocab"]["<far>"] = 300
  folder.backend = Tokenizer.from_str(json.dumps(state))
  folder.write()
  assert folder.load().vocab_size == 301
  folder.write_json("generation_config", {"eos_token_id": [299]})
  with pytest.raises(ValueError, match=r"has \[299\], which .* \(its largest id is 300\)"):
    folder.load()


# --- folders --------------------------------------------------------------------------------------


def test_a_remote_folder(base):
  save(Tokenizer.from_str(base), "memory://models/one")
  tokenizer = HuggingFaceTokenizer("memory://models/one", prompt_format="chat")
  assert tokenizer.decode(tokenizer.encode_prompt("5")) == "user\n5\nassistant\n"
  assert tokenizer.stop_ids == (2, 0)


def test_special_tokens_map(folder):
  folder = folder()
  folder.write_json("tokenizer_config", {"tokenizer_class": "PreTrainedTokenizerFast"})
  folder.write_json("special_tokens_map", {"eos_token": {"content": "<|im_end|>"}})
  assert folder.load().stop_ids == (2,)


@pytest.mark.parametrize("tokenizer_class", ["Evil", "LlamaTokenizerFast", "Qwen2Tokenizer", None])
def test_no_code_of_the_folder_is_run(folder, tmp_path, tokenizer_class):
  """And the tokenizer is that of tokenizer.json, whatever class its config names."""
  map = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Config"}
  folder = folder(tokenizer_class=tokenizer_class, auto_map=map, add_bos_token=True)
  folder.write_json("config", {"model_type": "evil", "auto_map": map})
  marker = tmp_path / "marker"
  (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\nConfig = Evil")
  assert folder.load().encode_prompt(QUESTION) == folder.letters(QUESTION)
  assert not marker.exists()


@pytest.mark.parametrize(
  ("template", "message"),
  [
    ("{% for %}", "fails on messages of user"),
    ("{{ messages[0].content }}{{ messages[1].content }}", "fails on messages of user"),
    ("hello", "omits the user.s message: it writes 'hello'; set config.prompts.template to a"),
    ("{{ 1 + messages[0].content }}", "unsupported operand"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ raise_exception('only tools') }}", "only tools; set config.prompts.template to a file"),
  ],
)
def test_bad_templates(folder, template, message):
  folder = folder(chat_template=template)
  with pytest.raises(ValueError, match=message):
    folder.chat()
  folder.load()  # plain prompts need none


def test_no_template(folder, tmp_path):
  folder = folder(chat_template=None)
  with pytest.raises(
    ValueError, match=r"no chat template.*set config.prompts.format to 'plain', or"
  ):
    folder.chat()
  with pytest.raises(ValueError, match=r"chat_template = '.*none.jinja' cannot be read"):
    folder.chat(chat_template=str(tmp_path / "none.jinja"))


def test_a_template_with_today_in_it(folder, caplog):
  with caplog.at_level(logging.WARNING):
    folder(chat_template=CHATML + "{{ strftime_now('%d %b') }}").chat()
  assert "may write today's date" in caplog.text


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"prompt_format": "Chat"}, r"prompt_format = 'Chat' is unknown; choose one of .'plain', 'ch"),
    (
      {"system_prompt": "Be brief."},
      "format = 'plain' allows no system prompt, template or tools, but .*'Be brief.'",
    ),
    ({"chat_template": "a.jinja"}, "'a.jinja' and tools = ''; set all three to '', or set format"),
    ({"tools": "python"}, "tools = 'python'; set all three to '', or set format to 'chat'"),
  ],
)
def test_bad_arguments(tmp_path, kwargs, message):
  with pytest.raises(ValueError, match=message):
    HuggingFaceTokenizer(tmp_path, **kwargs)


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("tokenizer.json", "{", "cannot be read: "),
    ("tokenizer.json", "{}", "cannot be read"),
    ("tokenizer_config.json", "{", "cannot be read: "),
    ("generation_config.json", "[]", "cannot be read: "),
    ("generation_config.json", '{"eos_token_id": "2"}', r"in \S*/test_dam\S* is \['2'\], exp"),
    ("generation_config.json", '{"eos_token_id": [true]}', "expected integers"),
    ("generation_config.json", '{"eos_token_id": [2, -1]}', r"has \[-1\], which"),
  ],
)
def test_damaged_files(folder, tmp_path, name, content, message):
  folder = folder()
  (tmp_path / name).write_text(content)
  with pytest.raises(ValueError, match=message) as raised:
    folder.load()
  assert str(tmp_path) in str(raised.value)


def test_an_end_of_text_that_no_policy_can_sample(folder):
  folder = folder(eos_token="<|endof text|>")
  with pytest.raises(ValueError, match=r"eos_token is '<\|endof text\|>', which tokenizer\.json"):
    folder.load()
  declared = {"300": {"content": "<|endof text|>", "special": True}}  # with its place
  folder.write_json("tokenizer_config", folder.config | {"added_tokens_decoder": declared})
  assert folder.load().stop_ids


def test_no_fast_tokenizer(folder, tmp_path):
  folder = folder()
  (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.model")
  refused = r"has no tokenizer\.json; if the folder has a sentencepiece"
  with pytest.raises(ValueError, match=refused):
    folder.load()
  with pytest.raises(FileNotFoundError, match="none is not a directory"):
    HuggingFaceTokenizer(tmp_path / "none")


def test_a_tokenizer_that_ends_every_prompt(folder):
  folder = folder()
  end = "<|endoftext|>"
  folder.backend.post_processor = processors.TemplateProcessing(
    single=f"$A {end}", special_tokens=[(end, 0)]
  )
  folder.write()
  refused = r"ends every prompt with its end-of-text token, '<.endoftext.>'"
  with pytest.raises(ValueError, match=refused):
    folder.load()
  assert folder.chat().encode_prompt("5")[-1] != 0


@pytest.mark.parametrize("library", ["transformers", "jinja2"])
def test_a_library_is_missing(folder, monkeypatch, library):
  monkeypatch.setitem(sys.modules, library, None)
  with pytest.raises(ImportError, match=rf"need {library}: pip install .rlvr_jax\[hf\]"):
    folder().load()
