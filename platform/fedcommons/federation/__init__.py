"""The engine, which runs every federated method: client sampling, rounds, executors, evaluation and checkpoints."""
