"""CurveKey: what protects the sockets of a run where they are ports of this machine, open to all its users (D17)."""

from dataclasses import dataclass, field
from typing import Any

import zmq

__all__ = ["CurveKey"]

_LENGTH = 40


@dataclass(frozen=True)
class CurveKey:
    """A key pair of CURVE, in Z85. One per run, shared by its owner, its engine and their guests, and by nobody else.

    Whoever does not know it cannot connect to a socket that is bound with it (that takes the public half, which is not
    made public), and cannot pose as one (that takes the secret half).
    """

    public: bytes
    secret: bytes = field(repr=False)

    SIZE = 2 * _LENGTH

    @classmethod
    def generate(cls) -> "CurveKey":
        return cls(*zmq.curve_keypair())

    @classmethod
    def parse(cls, text: bytes) -> "CurveKey":
        """From what `bytes(key)` is. ValueError for anything else."""
        if len(text) != cls.SIZE:
            raise ValueError(f"A key has {cls.SIZE} characters, not {len(text)}.")
        key = cls(text[:_LENGTH], text[_LENGTH:])
        if zmq.curve_public(key.secret) != key.public:
            raise ValueError("The halves of the key do not belong together.")
        return key

    def __bytes__(self) -> bytes:
        return self.public + self.secret

    def protect(self, socket: "zmq.Socket[Any]", *, bind: bool) -> None:
        """Encrypt what `socket` will say, and let it talk to holders of this key only. Before it binds or connects."""
        if bind:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
            return
        public, secret = zmq.curve_keypair()
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
