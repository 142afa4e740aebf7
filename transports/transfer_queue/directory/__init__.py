"""The directory of the plane: the part of this transport that runs on TransferQueue's controller.

It is pickled by value, together with :mod:`asyncdp.transports.directory` and :mod:`asyncdp.rows.field_spec`. The
modules of this folder may import only these, each other, the standard library and TransferQueue.
"""
