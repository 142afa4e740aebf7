"""Commands that start something: slot hosts and planes, the demo, benchmarks."""
