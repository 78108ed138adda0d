"""What methods and the engine share; neither imports the other."""
