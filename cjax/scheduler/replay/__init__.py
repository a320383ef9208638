"""What a policy would have done: a workload's jobs, simulated round by round."""
