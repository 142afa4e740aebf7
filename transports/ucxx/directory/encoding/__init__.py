"""How requests and records are written on the server: msgpack, cells, rows, schemas and ids of mutations."""
