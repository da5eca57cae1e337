"""Runs and judges programs that nobody trusts. Standard library only; see README.md.

Within this folder imports are relative: it works wherever it lies.
"""
