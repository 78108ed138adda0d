"""Code that methods and the engine share; methods and the engine do not import each other."""
