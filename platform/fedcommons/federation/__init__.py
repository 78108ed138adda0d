"""The engine: rounds, participation, fixed blocks, executors, evaluation, checkpoints. Independent of algorithms."""
