"""What JAX and Flax do not promise to keep: each use of it is one function here, and there is none elsewhere.

A function says what it stands for and:

    Private: what of JAX or Flax it touches, and why that may change.
    Tried: on which versions, and how they differ.
    Public instead: what would make it unnecessary.

Each has a test of its own, so that a new JAX shows at once which of them it breaks. The room imports nothing of cjax.
`jax.extend.core` is used everywhere, by way of `core.py`, which adds the types: JAX keeps it for those who read traces,
and deprecates before it takes away.
"""
