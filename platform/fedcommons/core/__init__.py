"""Code that federated methods and the round engine share, because methods and the engine do not import each other."""
