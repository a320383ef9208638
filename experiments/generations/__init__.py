"""Models larger than the devices, measured."""
