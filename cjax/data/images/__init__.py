"""Images and their classes: from arrays and folders to batches."""
