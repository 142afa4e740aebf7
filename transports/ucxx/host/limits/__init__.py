"""What bounds the work that peers can cause: memory, sockets, tokens, what a reply holds, time on the event loop."""
