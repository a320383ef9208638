"""What stands behind `pipeline.py`: schedules simulated, compiled, timed, run in two processes; tables and pictures."""
