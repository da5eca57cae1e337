"""What the gated delta rule costs on a TPU chip, as compiled, by the size of its chunks.

  python -m experiments.benchmarks.delta_rule --topology=v5e:1x1

Compiles the gradient of `ops.delta_rule.mix_rows`, recomputed in the backward pass: what a gated
DeltaNet does between its projections. Sizes are those of a layer of Qwen3.5-4B with bfloat16
channels, for a row of 9,216 tokens (a prompt of 1,024 and four responses of 2,048). Prints for each
size of a chunk the compiler's estimate of cycles, products of matrices, and bytes of HBM. Needs the
extra `tpu`, and no TPU.
"""

from __future__ import annotations

import os
from typing import NamedTuple

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import SingleDeviceSharding

from rlvr_jax.costs import hlo, programs
from rlvr_jax.evaluate.compare import markdown_table
from rlvr_jax.ops import delta_rule
from rlvr_jax.types import Array, Rows

_TOPOLOGY = flags.DEFINE_string("topology", "v5e:1x1", "Kind of the chip.")
_CHUNKS = flags.DEFINE_list("chunks", ["32", "64", "128"], "Tokens of a chunk.")
PROMPT, RESPONSES, RESPONSE = 1024, 4, 2048
HEADS, KEY_HEADS, WIDTH, TAPS = 32, 16, 128, 4


class Arguments(NamedTuple):
  """The arrays of `delta_rule.DeltaInputs`."""

  channels: tuple[Array, Array, Array]
  taps: tuple[Array, Array, Array]
  decay: Array
  strength: Array


def loss(arguments: Arguments, rows: Rows) -> Array:
  mix = lambda x: delta_rule.mix_rows(delta_rule.DeltaInputs(*x, WIDTH, WIDTH), rows)
  return jnp.sum(jax.checkpoint(mix)(arguments).astype(jnp.bfloat16).astype(jnp.float32) ** 2)


def rows() -> Rows:
  """One prompt, and its responses behind it."""
  index = jnp.arange(PROMPT + RESPONSES * RESPONSE)
  in_prompt, behind = index < PROMPT, index - PROMPT
  starts = jnp.where(in_prompt, PROMPT, index - behind % RESPONSE)
  positions = jnp.where(in_prompt, index, PROMPT + behind % RESPONSE)
  return Rows(*(x[None] for x in (0 * index, positions, starts, 0 * index + PROMPT)))


def costs(topology: str, chunk: int) -> list[str]:
  """Cells of a row: 10⁶ cycles, GFLOPs of products, GB of HBM."""
  on = SingleDeviceSharding(programs.topology_devices(topology)[0])
  length = PROMPT + RESPONSES * RESPONSE
  shape = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype, sharding=on)
  sizes = KEY_HEADS * WIDTH, KEY_HEADS * WIDTH, HEADS * WIDTH
  channels = tuple(shape(jnp.bfloat16, 1, length, size) for size in sizes)
  taps = tuple(shape(jnp.bfloat16, size, TAPS) for size in sizes)
  gate = shape(jnp.float32, 1, length, HEADS)
  arguments = Arguments(channels, taps, decay=gate, strength=gate)
  of_rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), rows())
  lower = lambda: jax.jit(jax.grad(loss)).lower(arguments, of_rows)
  delta_rule.CHUNK = chunk
  jax.clear_caches()  # a trace with another size would be taken again
  compiled = programs.compile_with_text(f"chunks of {chunk}", lower)
  items = hlo.walk(compiled.text, {})
  sums = (sum(getattr(item, name) for item in items) for name in ("cycles", "flops", "hbm_bytes"))
  cycles, flops, hbm_bytes = sums
  return [f"{cycles / 1e6:.1f}", f"{flops / 1e9:.0f}", f"{hbm_bytes / 1e9:.1f}"]


def main(argv: list[str]) -> None:
  del argv
  found = {chunk: costs(_TOPOLOGY.value, int(chunk)) for chunk in _CHUNKS.value}
  print(markdown_table(["cycles, 10⁶", "products, GFLOPs", "HBM, GB"], found, "tokens of a chunk"))


if __name__ == "__main__":
  app.run(main)
