"""The wire protocol between client and host: messages, the handshake, and UCX."""
