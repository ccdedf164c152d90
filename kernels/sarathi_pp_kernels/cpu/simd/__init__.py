"""SIMD for numba: 512-bit registers of sixteen float32 (lanes), multiplied in pairs of bfloat16.

numba has neither bfloat16 nor an instruction that multiplies it. The functions of these modules are such instructions,
and the loads and stores around them. Kernels are written with them in plain numba. All addresses are integers, in
bytes, as from `Tensor.data_ptr()`: passing an array costs more than a small kernel takes.

A *pair* is two neighbouring bfloat16 in one 32-bit word. A *panel* is the factor of a row of pairs: sixteen outputs
wide, with one 64-byte line for each pair:

    panel   word[k][lane] = (w[lane][2k], w[lane][2k + 1])          one lane for each of 16 outputs

    compile     numba's compiler for functions that use them
    cache       files of compiled kernels
    call        calls of a kernel by its address
    registers   the parts that the instructions are built of
    memory      loads and stores
    products    dot_tile, rows of pairs times adjacent panels, for linear layers and chunks; products for decodes
    transpose   rows to columns, which products read together
    exp2        two to the power of each lane
    softmax     from scores to weights
    gate        SiLU times another row
    rotary      the rotary embedding
"""
