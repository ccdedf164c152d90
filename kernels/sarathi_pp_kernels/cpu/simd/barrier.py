"""A barrier: threads that run the same kernel wait for each other inside it."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sarathi_pp_kernels.cpu.simd.registers import I32, I64, element_at, index

# A thread looks for the others this many times, as they do the same work on equal parts and come soon. Then it lets
# other programs use its core as many times, in case another thread waits for this core. Then it sleeps between looks:
# if it only let others go first, a busy program would get the core for a whole time slice at each look.
_LOOKS = 500
_YIELDS = 100
_SLEEP_US = 20
# A number of calls with which all threads go on. run_team explains when.
GIVEN_UP = -(1 << 62)


@intrinsic
def wait_for_all(typing, arrived, num_threads):  # type: ignore[no-untyped-def]
    """Wait until each of the threads has made this call as often as the calling one.

    What a thread has written before the call can be read by the others after it.

    Args:
        arrived: address of an int64, which counts the calls of all threads. It is 0 before the first one. If it is
            negative (GIVEN_UP), because a thread will not come, no thread waits any longer.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrived_, num_threads_ = arguments
        counter = element_at(builder, arrived_, I64, index(0))
        before = builder.atomic_rmw("add", counter, index(1), "seq_cst")
        wanted = builder.mul(builder.add(builder.udiv(before, num_threads_), index(1)), num_threads_)
        entry = builder.block
        look, again, rest, sleep, after = map(
            builder.append_basic_block, ("look", "again", "rest", "sleep", "all_are_there")
        )
        builder.branch(look)
        builder.position_at_end(look)
        looks = builder.phi(I64)
        found = builder.load_atomic(counter, "seq_cst", 8)
        there = builder.icmp_signed(">=", found, wanted)
        builder.cbranch(builder.or_(there, builder.icmp_signed("<", found, index(0))), after, again)
        builder.position_at_end(again)
        more = builder.add(looks, index(1))
        builder.cbranch(builder.icmp_signed("<", more, index(_LOOKS)), look, rest)
        builder.position_at_end(rest)
        _call_c(builder, "sched_yield", [])
        builder.cbranch(builder.icmp_signed("<", more, index(_LOOKS + _YIELDS)), look, sleep)
        builder.position_at_end(sleep)
        _call_c(builder, "usleep", [ir.Constant(I32, _SLEEP_US)])
        builder.branch(look)
        for value, block in ((index(0), entry), (more, again), (more, rest), (more, sleep)):
            looks.add_incoming(value, block)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _call_c(builder: Any, name: str, arguments: list[Any]) -> None:
    """Call a function of the C library that takes and returns ints."""
    kind = ir.FunctionType(I32, [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)
