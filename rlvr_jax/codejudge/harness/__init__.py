"""The program inside the sandbox: runs generated code and judges it, in separate processes.

`sandbox.py` starts this program in an interpreter that has only the standard library and this
folder of rlvr_jax. The folder's modules import nothing else. `launcher` starts:

    launcher     one per sandbox. It enters namespaces with a small read-only root, drops its rights
    │            and waits for items.
    └ supervisor one per item, like the judge and the program. It makes new user, process and IPC
      │          namespaces, and kills everything in them at the deadline or when the caller has
      │          ended.
      └ judge    the first process in these namespaces. It makes a mount namespace with an empty
        │        /tmp. Only the judge has the tests and can report a verdict.
        └ program  the generated code. It is forked before the judge reads a test and started
                 afterwards, so neither its memory nor its descriptors ever have the tests, expected
                 values or the verdict's socket. It can neither trace the judge nor read its memory.

The judge evaluates tests itself. In a test, a function of the program is a `Handle`. A call is
sent to the program, and its result is decoded as new plain data (`decode`). Other values stay in
the program and are represented by a `Handle`, which equals only itself. So a program can only
answer calls: an answer's type, its `__eq__`, a changed builtin or an early exit have no effect in
the judge. The program cannot learn from the calls whether its answers are correct: all calls are
made before any comparison, and a failing assert does not end its test.
"""

__all__ = [
  "judge",
  "launcher",
  "messages",
  "system_calls",
]
