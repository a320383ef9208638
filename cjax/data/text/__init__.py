"""Text: where it comes from, its tokens, and rows of them."""
