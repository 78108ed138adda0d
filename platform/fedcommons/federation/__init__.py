"""The engine: rounds, participation, fixed blocks, executors, evaluation, checkpoints. Knows no algorithm by name."""
