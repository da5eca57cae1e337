"""What a GPU launches, counted in a list of thunks."""

import pytest

from rlvr_jax.costs.hlo import LoopLength
from rlvr_jax.costs.launches import read_launches, summarize

THUNKS = """\
000: kCommandBuffer [source       | next=003 (1)]
    001: kCopy         [source       | next=002 (1)] kCopy
    002: kCustomKernel [source       | sink        ] fusion grid: [1, 1, 1]
003: kCublasLtMatmul [prev=000 (1) | next=004 (1)] kCublasLtMatmul
004: kWhile         [prev=003 (1) | next=014 (1)]
condition:
    005: kCustomKernel [source       | next=006 (1)] compare grid: [1, 1, 1]
    006: kCustomKernel [prev=005 (1) | sink        ] and grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | next=008 (1)]
        007: kCustomKernel [source | sink] fusion_1 grid: [1, 1, 1]
    008: kWhile         [prev=000 (1) | next=012 (1)]
condition:
        009: kCustomKernel [source | sink] compare grid: [1, 1, 1]
      body:
        010: kDynamicSliceFusion [source       | next=012 (1)] params=1, results=1
            011: kCopy [source | sink] kCopy
    012: kCustomKernel [prev=008 (1) | next=013 (1)] fusion_2 grid: [1, 1, 1]
    013: kDeviceToHostCopy [prev=012 (1) | sink] copy
014: kCustomKernel [prev=004 (1) | sink        ] fusion_3 grid: [1, 1, 1]
"""


def test_kernels_belong_to_the_innermost_loop():
  program, outer, inner = read_launches(THUNKS, [LoopLength(16, False), LoopLength(30, True)])
  assert (program.kernels, program.launches, program.command_buffers) == (4, 2, 1)
  # Outside of its command buffer: a kernel, the copy to the host, and two kernels of its condition.
  assert (outer.kernels, outer.launches, outer.command_buffers) == (3, 4, 1)
  assert (outer.copies_to_host, outer.waits, outer.runs) == (1, True, 16)
  assert (inner.depth, inner.kernels, inner.launches, inner.runs) == (2, 1, 2, 16 * 30)
  assert not inner.waits
  totals = summarize([program, outer, inner])
  assert totals["kernels"] == 4 + 16 * 3 + 16 * 30
  assert totals["launches"] == 3 + 16 * 5 + 16 * 30 * 2
  assert totals["loops_that_wait"] == 1 and totals["copies_to_host"] == 16


def test_a_loop_of_unknown_length_counts_as_one_iteration():
  loops = [LoopLength(None, False), LoopLength(30, True)]
  _, outer, inner = read_launches(THUNKS, loops)
  assert (outer.iterations, outer.runs, inner.runs) == (None, 1, 30)


def test_another_number_of_loops_is_refused():
  told = (
    "the program's text has 1 loops, but the dump of its thunks has 2; the two numbers must be"
    " equal"
  )
  with pytest.raises(ValueError, match=told):
    read_launches(THUNKS, [LoopLength(16, False)])
