"""What a model learns from text: hidden words, classes, pairs, missing spans."""
