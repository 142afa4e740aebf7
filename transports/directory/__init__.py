"""The directory in Python: which samples a plane has, where they lie, who claimed them.

The memory transport calls it; TransferQueue's controller gets it by value, in a process that need not have asyncdp. So
nothing in this folder imports anything but the standard library and this folder itself.
"""
