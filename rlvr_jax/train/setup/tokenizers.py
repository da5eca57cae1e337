"""The tokenizer of a run."""

from __future__ import annotations

import ml_collections

from rlvr_jax.data import ByteTokenizer, Tokenizer
from rlvr_jax.data.huggingface_tokenizer import HuggingFaceTokenizer
from rlvr_jax.ops.checks import check_choice


def make_tokenizer(config: ml_collections.ConfigDict) -> Tokenizer:
  """The tokenizer of `config.tokenizer`.

  Raises:
    ValueError: it does not exist, or has no chat template although one is needed.
  """
  settings, name = config.prompts, config.tokenizer
  check_choice("config.prompts", "format", settings.format, ("plain", "chat"))
  if name == "bytes":
    for field, plain in (("format", "plain"), ("system", ""), ("template", "")):
      if settings[field] != plain:
        raise ValueError(
          f"config.prompts.{field} = {settings[field]!r} needs a chat template, but"
          f" config.tokenizer = 'bytes' has none; set it to {plain!r}, or choose another tokenizer"
        )
    return ByteTokenizer()
  if name == "checkpoint" and not config.model.checkpoint:
    raise ValueError(
      "config.tokenizer = 'checkpoint', but config.model.checkpoint is empty; set it to a folder"
      " in Hugging Face's layout, or set config.tokenizer = 'bytes'"
    )
  try:
    return HuggingFaceTokenizer(
      config.model.checkpoint if name == "checkpoint" else name,
      prompt_format=settings.format,
      system_prompt=settings.system,
      chat_template=settings.template,
    )
  except (ImportError, OSError, ValueError) as error:
    raise ValueError(
      f"config.tokenizer = {name!r} is not 'bytes', 'checkpoint' or the folder of a tokenizer that"
      f" can be used with config.prompts = {settings.to_dict()}: {error}"
    ) from error
