"""From a trace to numbers: what a step has to do, and what the tensor and sequence words of a plan make of it."""
