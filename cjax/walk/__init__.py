"""Models larger than the devices: a step that walks over layers, whose state lives in host memory or on disk."""
