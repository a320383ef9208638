"""A trace evaluated again, with stacks rolled into loops, other precision, and derivatives taken apart."""
