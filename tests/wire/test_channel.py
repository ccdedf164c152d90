import threading

import pytest

from sarathi_pp.errors import ProtocolError
from sarathi_pp.trace.clock import ManualClock
from sarathi_pp.wire.channel import NumberCheck, QueueChannel
from sarathi_pp.wire.codec import Goodbye, Heartbeat
from sarathi_pp.wire.delay import DelayedReceiver
from tests.machine import patient


def test_messages_come_out_in_order_with_their_payload():
    channel = QueueChannel(ManualClock(5.0), num_buffers=2)
    for progress in range(2):
        channel.reserve()
        channel.send(Heartbeat(progress, False), payload=str(progress))
    first, second = channel.receive(), channel.receive()
    assert (first.frame, first.payload, second.frame) == (Heartbeat(0, False), "0", Heartbeat(1, False))
    assert first.arrived_s == 5.0 and channel.receive(timeout_s=0.01) is None


def test_reserve_waits_for_a_released_buffer():
    channel = QueueChannel(ManualClock(), num_buffers=1)
    channel.reserve()
    channel.send(Goodbye())
    reserved = threading.Event()
    thread = threading.Thread(target=lambda: (channel.reserve(), reserved.set()), daemon=True)
    thread.start()
    assert not reserved.wait(0.05)
    channel.receive().release()
    assert reserved.wait(patient(5))


@pytest.mark.parametrize("number", [0, 2])
def test_repeated_and_lost_frames_are_refused(number):
    check = NumberCheck()
    check.check(0)
    with pytest.raises(ProtocolError, match="came instead of 1"):
        check.check(number)


def test_a_slower_link_hands_messages_out_so_much_later_and_beside_each_other():
    clock = ManualClock(now_s=10.0)
    channel = QueueChannel(clock, num_buffers=3)
    receiver = DelayedReceiver(channel, 2.0, clock)
    for progress in range(2):
        channel.reserve()
        channel.send(Heartbeat(progress, False))
        clock.sleep(0.5)
    assert receiver.receive(timeout_s=0) is None and clock.now() == 11.0
    assert receiver.receive(timeout_s=0.25) is None and clock.now() == 11.25
    first = receiver.receive(timeout_s=5.0)
    assert (first.frame, first.arrived_s, clock.now()) == (Heartbeat(0, False), 12.0, 12.0)
    second = receiver.receive()
    assert (second.frame, second.arrived_s, clock.now()) == (Heartbeat(1, False), 12.5, 12.5)
    clock.sleep(7.0)
    channel.close()
    clock.sleep(3.0)
    assert receiver.receive(timeout_s=0).arrived_s == 21.5 and clock.now() == 22.5
