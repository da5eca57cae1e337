"""Makes a run's components from its configuration; finds every error before compilation."""

__all__ = [
  "behavior_sources",
  "build",
  "checks",
  "compiler_options",
  "component_checks",
  "config_file",
  "engines",
  "grading",
  "initial_params",
  "problem_filters",
  "programs",
  "teachers",
]
