"""The command ``asyncdp top``: what a plane does, live, in the terminal or as a page."""
