"""Kernels run in Triton's interpreter here, on CPU tensors.

Triton reads this variable when a kernel is defined. It must be set before the first import of a kernel, which happens
when pytest collects the modules below. Tests that compile kernels use a process without it.
"""

import os
from importlib.util import find_spec

os.environ["TRITON_INTERPRET"] = "1"

# Without Triton, as on a Mac, nothing in triton/ can be imported; in CI that is an error.
if find_spec("triton") is None and not os.environ.get("CI"):
    collect_ignore_glob = ["triton/test_*.py"]
else:
    from tests.kernels.interpreter import improve

    improve()
