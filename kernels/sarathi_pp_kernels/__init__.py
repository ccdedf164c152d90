"""Kernels, each next to its plain reference. They import nothing of sarathi_pp.

triton/   for GPUs. Imports torch and triton.
cpu/      for CPUs with AVX2 or AVX512-BF16. Imports numba, llvmlite, numpy and torch.
"""
