"""A checkpoint that one process finds damaged is damaged for all."""

import pytest

from rlvr_jax.train.checkpointing import checkpoint
from rlvr_jax.train.checkpointing.checkpoint_files import TornCheckpointError


@pytest.mark.parametrize("other", ["", "leaf 3 of process 1 differs"])
@pytest.mark.parametrize("own", ["", "leaf 2 differs"])
def test_damage_is_told_to_the_other_process_and_raised_in_both(monkeypatch, own, other):
  told = []
  monkeypatch.setattr(
    checkpoint.multihost, "exchange", lambda value: told.append(value) or [value, other]
  )

  def read():
    with checkpoint._damage_of_any():
      if own:
        raise TornCheckpointError(own)

  if own or other:
    with pytest.raises(TornCheckpointError, match=own or other):
      read()
  else:
    read()
  assert told == [own]
