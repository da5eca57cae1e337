"""Problems, tokenizers, and batches of problems; the position in the batches can be restored."""

from rlvr_jax.data.batches import encode_demonstrations as encode_demonstrations
from rlvr_jax.data.batches import encode_prompts as encode_prompts
from rlvr_jax.data.batches import problem_batches as problem_batches
from rlvr_jax.data.huggingface_tokenizer import HuggingFaceTokenizer as HuggingFaceTokenizer
from rlvr_jax.data.problems import Problem as Problem
from rlvr_jax.data.problems import ProblemSource as ProblemSource
from rlvr_jax.data.problems import Task as Task
from rlvr_jax.data.stop_strings import find_stop as find_stop
from rlvr_jax.data.tokenizer import ByteTokenizer as ByteTokenizer
from rlvr_jax.data.tokenizer import Tokenizer as Tokenizer

__all__ = [
  "ByteTokenizer",
  "HuggingFaceTokenizer",
  "Problem",
  "ProblemSource",
  "Task",
  "Tokenizer",
  "encode_demonstrations",
  "encode_prompts",
  "find_stop",
  "problem_batches",
]
