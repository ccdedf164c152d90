"""SIMD for numba: lines of sixteen float32 (lanes), or of sixteen pairs of bfloat16 that are multiplied together.

numba has neither bfloat16 nor an instruction that multiplies it. These modules have functions for such instructions,
and for the loads and stores around them. Kernels in plain numba call them. All addresses are integers, in bytes, as
from `Tensor.data_ptr()`: passing an array costs more time than a small kernel takes. A *literal* is an argument that
must be a constant at compile time.

A *pair* is two neighbouring bfloat16 in one 32-bit word. A *line* is 64 bytes: sixteen words. It fills one register
with AVX512, two with AVX2 and four on AArch64. A *panel* is the matrix with which a row of pairs is multiplied. It is
sixteen outputs wide, with one line for each pair:

    panel   word[k][lane] = (w[lane][2k], w[lane][2k + 1])          one lane for each of 16 outputs

    target      the processor that kernels are compiled for
    compile     numba's compiler for functions that use them
    cache       files of compiled kernels
    call        calls of a kernel by its address
    registers   the parts of which the functions are built
    memory      loads and stores
    keys        scores of float32 keys that are read where they are
    products    rows times adjacent panels, for linear layers and chunks; products for decodes
    transpose   rows to columns, in the order in which products read
    exp2        two to the power of each lane
    softmax     from scores to weights
    gate        SiLU times another row
    rotary      the rotary embedding
"""
