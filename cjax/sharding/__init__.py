"""Where each tensor lives."""
