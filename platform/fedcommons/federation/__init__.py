"""The engine: rounds, participation, fixed blocks, executors, evaluation, checkpoints. It works for all algorithms."""
