"""The question of which commons to choose: every way of sharing something, under one protocol."""
