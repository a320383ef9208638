"""Folders of weights as Hugging Face's transformers reads and writes them."""
