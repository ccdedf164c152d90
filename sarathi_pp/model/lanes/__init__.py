"""512-bit registers for numba: sixteen lanes of float32, multiplied in pairs of bfloat16.

numba knows neither bfloat16 nor an instruction that multiplies it. The functions here are such instructions and the
loads and stores around them; kernels are written with them in plain numba. All addresses are integers, in bytes, as
`Tensor.data_ptr()` gives them: passing an array costs more than what a small kernel takes.

A *pair* is two neighbouring bfloat16 in one 32-bit word. A *panel* is what a row of pairs is multiplied with, sixteen
outputs wide, one 64-byte line for each pair:

    panel   word[k][lane] = (w[lane][2k], w[lane][2k + 1])          one lane for each of 16 outputs

`dot_tile` is the one product: rows of pairs times panels that lie side by side, summed in float32 registers.
"""
