"""Makes the tokenizer that `config.tokenizer` names: "bytes", "checkpoint" or a folder."""

from __future__ import annotations

from collections.abc import Mapping

from rlvr_jax.data.huggingface_tokenizer import HuggingFaceTokenizer
from rlvr_jax.data.tokenizer import ByteTokenizer, Tokenizer
from rlvr_jax.ops.checks import check_choice


def make_tokenizer(name: str, prompts: Mapping[str, str], checkpoint: str) -> Tokenizer:
  """The tokenizer of a run.

  Args:
    name: `config.tokenizer`.
    prompts: `config.prompts`.
    checkpoint: `config.model.checkpoint`.
  Raises:
    ValueError: the tokenizer does not exist, or has no chat template although one is needed.
  """
  check_choice("config.prompts", "format", prompts["format"], ("plain", "chat"))
  if name == "bytes":
    for field, plain in (("format", "plain"), ("system", ""), ("template", ""), ("tools", "")):
      if prompts.get(field, plain) != plain:
        raise ValueError(
          f"config.prompts.{field} = {prompts[field]!r} needs a chat template, but"
          f" config.tokenizer = 'bytes' has none; set {field} to {plain!r}, or choose another"
          " tokenizer"
        )
    return ByteTokenizer()
  if name == "checkpoint" and not checkpoint:
    raise ValueError(
      "config.tokenizer = 'checkpoint', but config.model.checkpoint is empty; set it to a folder"
      " in Hugging Face's layout, or set config.tokenizer = 'bytes'"
    )
  try:
    return HuggingFaceTokenizer(
      checkpoint if name == "checkpoint" else name,
      prompt_format=prompts["format"],
      system_prompt=prompts["system"],
      chat_template=prompts["template"],
      tools=prompts.get("tools", ""),  # absent in runs of before
    )
  except (ImportError, OSError, ValueError) as error:
    raise ValueError(
      f"config.tokenizer = {name!r} and config.prompts = {dict(prompts)} give no tokenizer:"
      f" {error}; config.tokenizer must be 'bytes', 'checkpoint', or the folder of a tokenizer"
    ) from error
