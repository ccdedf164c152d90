"""Kernels run in Triton's interpreter here, on CPU tensors.

Triton decides by this variable when a kernel is defined, so it has to be set before the first import of one, which is
when pytest collects the modules below. Whoever compiles kernels does so in a process without it.
"""

import os
from importlib.util import find_spec

os.environ["TRITON_INTERPRET"] = "1"

# Where there is none, as on a Mac, nothing in triton/ can be imported; in CI that is an error.
if find_spec("triton") is None and not os.environ.get("CI"):
    collect_ignore_glob = ["triton/test_*.py"]
else:
    from tests.kernels.interpreter import improve

    improve()
