"""Promise 3: puts are whole or absent, and by a meta apply only to the lives that it names."""
