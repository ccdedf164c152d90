"""A barrier: threads that run the same kernel wait for each other inside it."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sarathi_pp_kernels.cpu.simd.registers import I32, I64, element_at, index

# Times that a thread looks for the others before it lets another program run on its core. Threads of a team do the same
# work on equal parts, so the others come soon.
_LOOKS = 200


@intrinsic
def wait_for_all(typing, arrived, num_threads):  # type: ignore[no-untyped-def]
    """Wait until each of the threads has made this call as often as the calling one.

    What a thread has written before the call can be read by the others after it.

    Args:
        arrived: address of an int64, which counts the calls of all threads. It is 0 before the first one.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrived_, num_threads_ = arguments
        counter = element_at(builder, arrived_, I64, index(0))
        before = builder.atomic_rmw("add", counter, index(1), "seq_cst")
        round_ = builder.add(builder.udiv(before, num_threads_), index(1))
        wanted = builder.mul(round_, num_threads_)
        entry = builder.block
        look, rest, after = (builder.append_basic_block(name) for name in ("look", "rest", "arrived"))
        builder.branch(look)
        builder.position_at_end(look)
        looks = builder.phi(I64)
        looks.add_incoming(index(0), entry)
        found = builder.load_atomic(counter, "seq_cst", 8)
        more = builder.add(looks, index(1))
        there = builder.icmp_signed(">=", found, wanted)
        again = builder.append_basic_block("again")
        builder.cbranch(there, after, again)
        builder.position_at_end(again)
        looks.add_incoming(more, again)
        builder.cbranch(builder.icmp_signed("<", more, index(_LOOKS)), look, rest)
        builder.position_at_end(rest)
        # The C library's function of this name lets other threads run first.
        builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield"), [])
        looks.add_incoming(index(0), rest)
        builder.branch(look)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
