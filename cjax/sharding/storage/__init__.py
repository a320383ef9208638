"""The arrays that are kept: the user's tree and the stored tree, and optimizers on the latter."""
