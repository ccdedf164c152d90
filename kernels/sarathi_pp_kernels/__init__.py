"""Compiled functions (kernels) for attention, linear layers and the steps between them. They import no sarathi_pp.

triton/   for GPUs, each with a reference in plain torch. Imports torch and triton.
cpu/      for CPUs with AVX2 or AVX512-BF16. Imports numba, llvmlite, numpy and torch.
"""
