"""The simulated fabric: a plane, the network to its clients, and the schedule of faults."""
