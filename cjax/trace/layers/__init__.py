"""What repeats: stacks of layers in a trace, and leaves that are treated alike."""
