"""A barrier: threads that run the same kernel wait for each other inside it."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sarathi_pp_kernels.cpu.simd.registers import I32, I64, element_at, index

# A thread looks for the others this many times, as they do the same work on equal parts and come soon. Then it lets
# other threads use its core between two looks, and at last it sleeps between them. If others keep the core long, all
# threads of the team sleep at once from then on. Otherwise each wait could cost a time slice of the scheduler.
_LOOKS = 500
_YIELDS = 2000
_LONG_NS = 200_000
_SLEEP_US = 20
_MONOTONIC = 1  # Linux's number of the clock
# A number of calls with which all threads go on. run_team explains when.
GIVEN_UP = -(1 << 62)


@intrinsic
def wait_for_all(typing, arrived, num_threads):  # type: ignore[no-untyped-def]
    """Wait until each of the threads has made this call as often as the calling one.

    After the call, each thread sees what the others wrote before it.

    Args:
        arrived: address of two int64, which are 0 before the first call. The first one counts the calls of all threads.
            If it is negative (GIVEN_UP), because a thread will not come, no thread waits any longer. The second one is
            1 once other programs have kept a core for long.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrived_, num_threads_ = arguments
        counter, crowded = (element_at(builder, arrived_, I64, index(at)) for at in (0, 1))
        before = builder.atomic_rmw("add", counter, index(1), "seq_cst")
        wanted = builder.mul(builder.add(builder.udiv(before, num_threads_), index(1)), num_threads_)
        entry = builder.block
        look, again, rest, yield_, sleep, after = map(
            builder.append_basic_block, ("look", "again", "rest", "yield", "sleep", "all_are_there")
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
        is_crowded = builder.icmp_signed("!=", builder.load_atomic(crowded, "monotonic", 8), index(0))
        waits_long = builder.icmp_signed(">=", more, index(_LOOKS + _YIELDS))
        builder.cbranch(builder.or_(is_crowded, waits_long), sleep, yield_)
        builder.position_at_end(yield_)
        began = _now_ns(builder)
        _call_c(builder, "sched_yield", [])
        passed = builder.sub(_now_ns(builder), began)
        with builder.if_then(builder.icmp_signed(">", passed, index(_LONG_NS)), likely=False):
            builder.store_atomic(index(1), crowded, "monotonic", 8)
        yielded = builder.block
        builder.branch(look)
        builder.position_at_end(sleep)
        _call_c(builder, "usleep", [ir.Constant(I32, _SLEEP_US)])
        builder.branch(look)
        for value, block in ((index(0), entry), (more, again), (more, yielded), (more, sleep)):
            looks.add_incoming(value, block)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _now_ns(builder: Any) -> Any:
    """Return the nanoseconds of a clock."""
    time = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))  # seconds and nanoseconds
    _call_c(builder, "clock_gettime", [ir.Constant(I32, _MONOTONIC), builder.bitcast(time, I64.as_pointer())])
    seconds, nanoseconds = (builder.load(cgutils.gep_inbounds(builder, time, 0, at)) for at in (0, 1))
    return builder.add(builder.mul(seconds, index(1_000_000_000)), nanoseconds)


def _call_c(builder: Any, name: str, arguments: list[Any]) -> None:
    """Call a function of the C library that returns an int."""
    kind = ir.FunctionType(I32, [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)
