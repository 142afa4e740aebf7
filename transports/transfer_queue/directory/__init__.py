"""The plane's directory: the part of this transport that runs on TransferQueue's controller.

It is sent there by value, with :mod:`asyncdp.transports.directory`, so nothing in this folder may import anything but
the standard library, TransferQueue and that.
"""
