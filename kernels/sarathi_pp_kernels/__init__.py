"""Triton kernels, each beside its plain-torch reference. Imports torch and triton only."""
