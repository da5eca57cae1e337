"""Tiny GGUF files of random Llama networks, and the networks' logits by the format's formulas."""

from __future__ import annotations

import gguf
import numpy as np
import tokenizers

WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 64, 4, 2, 16, 96, 2
THETA, EPSILON = 500.0, 1e-5
MERGES = ["h e", "l l", "he ll", "hell o", "1 2"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
  "{% for message in messages %}"
  "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIAL, *_BYTES, *(merge.replace(" ", "") for merge in MERGES)]
KINDS = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL))
METADATA = {
  "general.architecture": "llama",
  "llama.block_count": LAYERS,
  "llama.context_length": 512,
  "llama.embedding_length": WIDTH,
  "llama.feed_forward_length": MLP,
  "llama.attention.head_count": HEADS,
  "llama.attention.head_count_kv": KV_HEADS,
  "llama.attention.layer_norm_rms_epsilon": EPSILON,
  "llama.rope.freq_base": THETA,
  "llama.rope.dimension_count": HEAD_DIM,
  "tokenizer.ggml.model": "gpt2",
  "tokenizer.ggml.pre": "smollm",
  "tokenizer.ggml.tokens": TOKENS,
  "tokenizer.ggml.token_type": KINDS,
  "tokenizer.ggml.merges": MERGES,
  "tokenizer.ggml.bos_token_id": 1,
  "tokenizer.ggml.eos_token_id": 2,
  "tokenizer.ggml.padding_token_id": 0,
  "tokenizer.ggml.unknown_token_id": 0,
  "tokenizer.ggml.add_bos_token": False,
  "tokenizer.chat_template": TEMPLATE,
}


def random_tensors(seed, *, tokens=TOKENS, tied=True):
  """Name → float32 weights [out, in], such that each of them moves the logits."""
  rng = np.random.default_rng(seed)
  kernel = lambda *shape: (rng.normal(size=shape) * 1.5 * shape[1] ** -0.5).astype(np.float32)
  norm = lambda: rng.uniform(0.5, 1.5, WIDTH).astype(np.float32)
  tensors = {"token_embd.weight": kernel(len(tokens), WIDTH), "output_norm.weight": norm()}
  if not tied:
    tensors["output.weight"] = kernel(len(tokens), WIDTH)
  for i in range(LAYERS):
    tensors |= {
      f"blk.{i}.{name}.weight": value
      for name, value in dict(
        attn_norm=norm(),
        attn_q=kernel(HEADS * HEAD_DIM, WIDTH),
        attn_k=kernel(KV_HEADS * HEAD_DIM, WIDTH),
        attn_v=kernel(KV_HEADS * HEAD_DIM, WIDTH),
        attn_output=kernel(WIDTH, HEADS * HEAD_DIM),
        ffn_norm=norm(),
        ffn_gate=kernel(MLP, WIDTH),
        ffn_up=kernel(MLP, WIDTH),
        ffn_down=kernel(WIDTH, MLP),
      ).items()
    }
  return tensors


def write(path, tensors, *, quantization="F32", **changed):
  """Writes a file; `changed` replaces metadata, with __ for dots, and None leaves one out.

  Returns what the quantized kernels stand for, in float32.
  """
  metadata = METADATA | {name.replace("__", "."): value for name, value in changed.items()}
  writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"))
  add = {
    bool: writer.add_bool,
    int: writer.add_uint32,
    float: writer.add_float32,
    str: writer.add_string,
    list: writer.add_array,
  }
  for name, value in metadata.items():
    if value is not None:
      add[type(value)](name, value)
  kind = gguf.GGMLQuantizationType[quantization]
  meant = {}
  for name, value in tensors.items():
    data = gguf.quantize(value, kind) if value.ndim == 2 else value
    meant[name] = gguf.dequantize(data, kind) if value.ndim == 2 else value
    writer.add_tensor(name, data, raw_dtype=kind if data.dtype == np.uint8 else None)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return meant


def logits(tensors, ids):
  """[L, V] of tokens [L], in float64: each head rotates the neighbors 2i and 2i + 1 by angle i."""
  weights = {name.removesuffix(".weight"): np.float64(w) for name, w in tensors.items()}
  norm = lambda x, name: x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weights[name]
  places = np.arange(len(ids))

  def rotate(heads):  # [L, H, d]
    rotated = np.empty_like(heads)
    for i in range(HEAD_DIM // 2):
      angle = (places * THETA ** (-2 * i / HEAD_DIM))[:, None]
      even, odd = heads[..., 2 * i], heads[..., 2 * i + 1]
      rotated[..., 2 * i] = even * np.cos(angle) - odd * np.sin(angle)
      rotated[..., 2 * i + 1] = even * np.sin(angle) + odd * np.cos(angle)
    return rotated

  x = weights["token_embd"][ids]
  for layer in (f"blk.{i}." for i in range(LAYERS)):
    split = lambda y: y.reshape(len(ids), -1, HEAD_DIM)
    normed = norm(x, layer + "attn_norm")
    query, key, value = (split(normed @ weights[f"{layer}attn_{n}"].T) for n in "qkv")
    repeat = lambda y: np.repeat(y, HEADS // KV_HEADS, axis=1)
    scores = np.einsum("qhd,khd->hqk", rotate(query), repeat(rotate(key))) / HEAD_DIM**0.5
    scores = np.where(places[:, None] >= places, scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), repeat(value))
    x = x + mixed.reshape(len(ids), -1) @ weights[layer + "attn_output"].T
    normed = norm(x, layer + "ffn_norm")
    gate = normed @ weights[layer + "ffn_gate"].T
    gated = gate / (1 + np.exp(-gate)) * (normed @ weights[layer + "ffn_up"].T)
    x = x + gated @ weights[layer + "ffn_down"].T
  return norm(x, "output_norm") @ weights.get("output", weights["token_embd"]).T
