"""What the author wrote, as pure functions over his own trees: all that knows Flax."""
