"""From a configuration to the components of a run; every error is found before compilation."""

__all__ = [
  "adapters",
  "behavior_sources",
  "build",
  "checks",
  "compiler_options",
  "config_file",
  "engines",
  "grading",
  "initial_params",
  "placement",
  "problem_filters",
  "programs",
  "tokenizers",
]
