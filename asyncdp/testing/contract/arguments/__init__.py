"""Wrong and unusual arguments, the errors of calls, and observers of a client."""
