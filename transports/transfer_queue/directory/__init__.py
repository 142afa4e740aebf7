"""The plane's directory: the part of this transport that runs on TransferQueue's controller.

It is sent there by value, so nothing in this folder may import anything but the standard library, TransferQueue and the
ready index of the memory transport (which imports the standard library only).
"""
