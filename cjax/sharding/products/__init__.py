"""Products of split operands, in regions that are manual over axes of the mesh."""
