"""What several files of tests of data use."""

import pytest


@pytest.fixture(scope="module")
def few_buckets():
  """tensorflow-datasets makes 1000 for each split, which data of less than a gigabyte never use."""
  from tensorflow_datasets.core import shuffle  # seconds, which only tests of published data need

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(shuffle, "BUCKETS_NUMBER", 2)
    yield
