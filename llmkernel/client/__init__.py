"""The kernel's end of the wire: engine processes and the clients that talk to them."""
