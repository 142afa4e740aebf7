"""The plane's directory: the part of this transport that runs on TransferQueue's controller.

It is sent there by value, with :mod:`asyncdp.transports.directory` and :mod:`asyncdp.rows.field_spec`: nothing in this
folder may import anything but these, the standard library and TransferQueue.
"""
