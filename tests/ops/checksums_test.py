import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.ops.checksums import checksums


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8, jnp.bool_])
def test_checksum_sees_a_changed_bit_and_a_changed_order(dtype):
  x = (np.arange(24).reshape(2, 3, 4) % 2).astype(dtype)
  y, swapped = x.copy(), x.copy()
  y[1, 2, 3] = 0
  swapped[0, 0, [0, 1]] = swapped[0, 0, [1, 0]]
  assert len({*checksums([*map(jnp.asarray, (x, y, swapped))]).tolist()}) == 3


def test_checksum_by_hand(x64):
  leaves = [jnp.array([[5, 7], [11, 13]], jnp.int32), jnp.array([1.0, -2.0])]
  high, low = np.array([1.0, -2.0]).view(np.uint32).reshape(2, 2).T[::-1]
  words = [int(w) for pair in zip(low, high, strict=True) for w in pair]
  assert checksums(leaves).tolist() == [
    5 * 1 + 7 * 3 + 11 * 5 + 13 * 7,
    sum(w * (2 * i + 1) for i, w in enumerate(words)) % 2**32,
  ]
