"""Sample calls made of slot calls: reads, writes, waits, and what a mutation without an answer leaves open."""
