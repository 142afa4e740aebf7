"""The decisions of the layers, without I/O: when to retry, which port to use, which hosts to wait for."""
