"""The wire between a client and the engine: messages, their encoding, the sockets."""
