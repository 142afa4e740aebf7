"""What travels between client and host: messages, the handshake, UCX."""
