"""Calls of a kernel's machine code from another kernel, by address.

A kernel that is called by name is optimised once more together with its caller. It may then sum in another order. A
kernel that is called by its address stays as it is, so it gives the same bits as when Python calls it.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic


def address_of(kernel: Any, signature: Any) -> int:
    """Compile a kernel for arguments of these types, and return the address of its machine code.

    The address is valid as long as the kernel exists.
    """
    kernel.compile(tuple(signature.args))
    found = kernel.overloads[tuple(signature.args)]
    address = int(found.library.get_pointer_to_function(found.fndesc.llvm_func_name))
    assert address, f"{found.fndesc.llvm_func_name} is not there"
    return address


def caller(signature: Any) -> Any:
    """Return a function call(address, arguments) for kernels, which calls the machine code at an address.

    Args:
        signature: types of the code's arguments, which `arguments` holds as a tuple. The code must return nothing.
    """

    def call(typing: Any, address: Any, arguments: Any) -> Any:
        if len(arguments) != len(signature.args):
            raise TypingError(f"{len(arguments)} arguments for {signature}")

        def generate(context: Any, builder: Any, own: Any, given: Any) -> Any:
            values = cgutils.unpack_tuple(builder, given[1], len(signature.args))
            cast = [
                context.cast(builder, value, found, wanted)
                for value, found, wanted in zip(values, own.args[1], signature.args, strict=True)
            ]
            kind = context.call_conv.get_function_type(types.none, signature.args).as_pointer()
            code = builder.inttoptr(given[0], kind)
            # Kernels raise nothing, so the returned status is ignored.
            context.call_conv.call_function(builder, code, types.none, signature.args, cast)
            return context.get_dummy_value()

        return types.void(types.int64, arguments), generate

    return intrinsic(call)
