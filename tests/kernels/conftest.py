"""Kernels run in Triton's interpreter here, on CPU tensors.

Triton decides by this variable when a kernel is defined, so it has to be set before the first import of one, which is
when pytest collects the modules beside this file. Whoever compiles kernels does so in a process without it.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
