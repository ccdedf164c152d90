import threading

import pytest

from sarathi_pp.errors import ProtocolError
from sarathi_pp.wire.channel import NumberCheck, QueueChannel
from sarathi_pp.wire.codec import Goodbye, Heartbeat


def test_messages_come_out_in_order_with_their_payload():
    channel = QueueChannel(lambda: 5.0, num_buffers=2)
    for progress in range(2):
        channel.reserve()
        channel.send(Heartbeat(progress, False), payload=str(progress))
    first, second = channel.receive(), channel.receive()
    assert (first.frame, first.payload, second.frame) == (Heartbeat(0, False), "0", Heartbeat(1, False))
    assert first.arrived_s == 5.0 and channel.receive(timeout_s=0.01) is None


def test_reserve_waits_for_a_released_buffer():
    channel = QueueChannel(lambda: 0.0, num_buffers=1)
    channel.reserve()
    channel.send(Goodbye())
    reserved = threading.Event()
    thread = threading.Thread(target=lambda: (channel.reserve(), reserved.set()), daemon=True)
    thread.start()
    assert not reserved.wait(0.05)
    channel.receive().release()
    assert reserved.wait(5)


@pytest.mark.parametrize("number", [0, 2])
def test_repeated_and_lost_frames_are_refused(number):
    check = NumberCheck()
    check.check(0)
    with pytest.raises(ProtocolError, match="1 was due"):
        check.check(number)
