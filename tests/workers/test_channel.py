"""Messages arrive whole and in order, whatever the socket takes at a time."""

import socket
import threading

import pytest

from trl_a3po.workers.channel import Channel


def pair() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other)


def test_send_returns_at_once_and_everything_arrives_in_order():
    sender, receiver = pair()
    messages = [("message", number, b"x" * (number * 1000)) for number in range(100)]
    for message in messages:
        sender.send(message)  # about 5 MB, with nobody reading
    assert not sender.flush()
    received = []
    while len(received) < len(messages):
        received += receiver.receive()
        sender.flush()
    assert received == messages
    assert receiver.receive() == []


def test_drain_waits_until_the_other_side_has_read_everything():
    sender, receiver = pair()
    sender.send(b"x" * 5_000_000)
    received = []

    def read():
        while not received:
            receiver.poll(1.0)
            received.extend(receiver.receive())

    reader = threading.Thread(target=read)
    reader.start()
    sender.drain()
    reader.join(10)
    assert len(received[0]) == 5_000_000


def test_the_end_is_seen_after_the_last_whole_message():
    sender, receiver = pair()
    sender.send("last")
    sender.send(b"x" * 5_000_000)  # never arrives whole
    sender.close()
    assert receiver.receive() == ["last"]
    with pytest.raises(EOFError):
        receiver.receive()


def test_sending_to_a_dead_receiver_does_not_raise():
    sender, receiver = pair()
    receiver.close()
    sender.send("nobody")
    assert sender.flush()


def test_messages_that_arrive_together_are_received_one_by_one_and_none_is_lost():
    here, there = (Channel(end) for end in socket.socketpair())
    for number in range(4):
        here.send(number)
    assert [there.receive_one(), there.receive_one()] == [0, 1]
    assert there.poll(0.0) and there.receive() == [2, 3] and not there.poll(0.0)
    here.send("last")
    here.close()
    assert there.receive_one() == "last"
    with pytest.raises(EOFError):
        there.receive_one()
