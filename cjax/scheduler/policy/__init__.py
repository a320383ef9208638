"""Which job gets which devices: pure functions of what is known of jobs and nodes."""
