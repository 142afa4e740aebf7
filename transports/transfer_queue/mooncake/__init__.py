"""Mooncake as the storage of TransferQueue's rows: its master, the units that hold segments, and a client's store."""
