"""Published data sets from their files, as one tensorflow-datasets builder without TensorFlow."""

from rlvr_jax.data.published.builder import DATASETS as DATASETS
from rlvr_jax.data.published.builder import Prepared as Prepared
from rlvr_jax.data.published.builder import Published as Published
from rlvr_jax.data.published.builder import Records as Records
from rlvr_jax.data.published.builder import prepare as prepare
from rlvr_jax.data.published.dataset import Dataset as Dataset
from rlvr_jax.data.published.programs import interface as interface
from rlvr_jax.data.published.rows import Record as Record
