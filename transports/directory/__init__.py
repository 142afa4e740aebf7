"""The directory in Python: it records which samples a plane has, where they are stored, and who claimed them.

The memory transport calls it directly. For TransferQueue it is pickled by value and runs on the controller, in a
process that need not have asyncdp installed. So the modules of this folder import only each other and the standard
library.
"""
