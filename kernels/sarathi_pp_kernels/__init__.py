"""Compiled functions (kernels) for attention, linear layers and the steps between them. They import no sarathi_pp.

triton/   for GPUs, each with a reference in plain torch. Imports torch and triton.
cpu/      for CPUs with AVX2, AVX512 or AArch64. Imports numba, llvmlite, numpy and torch.
"""
