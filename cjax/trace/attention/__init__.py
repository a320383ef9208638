"""Attentions found in a trace: their products, softmax, masks and positions."""
