"""The program inside the sandbox: runs generated code and judges it, in separate processes.

Started by `sandbox.py`, in an interpreter with the standard library only: of rlvr_jax only this
folder is available, whose modules import each other and that library. `launcher` starts:

    launcher     one per sandbox. It enters namespaces with a small read-only root, drops its rights
    │            and waits for items.
    └ supervisor one per item, like all below: new user, process, mount and IPC namespaces, an
      │          empty /tmp; kills everything in them at the deadline or when the caller has gone
      └ judge    first process in there. It has the tests and the only way to report a verdict
        └ program  the generated code, forked before the judge reads a test and started after: it
                 never has tests, expected values or the verdict's socket in its memory or among
                 its descriptors, and can neither trace the judge nor read its memory

The judge evaluates tests itself. A name of the program that a test uses is a `Handle`; a call is
sent to the program, and the result is decoded as new plain data (`decode`). Other values stay in
the program and are represented by a `Handle`, which equals only itself. So a program can only
answer calls: an answer's type, its `__eq__`, a changed builtin or an early exit have no effect on
the judge's side. The program cannot learn from the calls whether its answers are right: all calls
are made before any comparison, and a failing assert does not end its test.
"""

__all__ = [
  "judge",
  "launcher",
  "messages",
  "system_calls",
]
