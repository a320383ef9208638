"""What each result of a loss has to do with the examples of its batch, and whether their mean can be taken in parts."""
