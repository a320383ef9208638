"""How losses of parts of a batch make up the loss of the whole."""
