"""What NeMo-RL expects of a data plane where it differs from asyncdp; see docs/nemo_rl.md."""
