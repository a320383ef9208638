"""Ray under the same verbs."""
